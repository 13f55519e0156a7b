"""The function `fit`: the training loop, its checks, progress and signals, and the end and the resumption of a run."""

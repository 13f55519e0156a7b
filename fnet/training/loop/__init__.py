"""The training loop `fit`, with checks of its arguments, display of progress, handling of signals,
and resumption."""

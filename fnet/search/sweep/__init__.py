"""`fnet sweep`: searches for the hyperparameters of an experiment script, with several workers."""

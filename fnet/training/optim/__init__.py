"""Optimizers, SVRG and averages of weights."""

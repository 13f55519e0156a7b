"""Proposals of naming rules for a model of PyTorch: which of its layers is which of fnet's, and the
proof that they compute the same."""

"""Checkpoints of training runs in folders and in object stores: locks, files, manifests and their
readers."""

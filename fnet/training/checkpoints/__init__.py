"""Checkpoints: locks, files, manifests and their readers, in folders and in object stores."""

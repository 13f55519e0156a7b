"""Data: readers of files, batches, augmentations, and the conversion of iterables to batches."""

"""Data: readers, batches, augmentation and adapters of iterables."""

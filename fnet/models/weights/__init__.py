"""Pretrained weights: names of arrays, files, config.json and caches. The public functions for pretrained weights are
in `models.pretrained`."""

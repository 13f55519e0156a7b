"""Pretrained weights: names and rules, files, config.json, caches. The public functions are in `models.pretrained`."""

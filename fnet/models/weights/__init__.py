"""Reads and writes pretrained weights. The modules of this package find or download files of
weights, read and write these files and config.json, and convert the names of arrays. The public
functions for pretrained weights are in `models.pretrained`."""

"""Tokenizers and text generation. The public names of this package are in `fnet.models`."""

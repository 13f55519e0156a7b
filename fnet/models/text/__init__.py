"""Tokenizers and text generation. The public names are in `fnet.models`."""

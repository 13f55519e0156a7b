"""Tokenizers and text generation. The public names are those of `fnet.models`."""

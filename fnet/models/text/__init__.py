"""Tokenizers and text generation. The public names of `fnet.models.text` are in `fnet.models`."""

"""What every tokenizer does."""

from __future__ import annotations

from typing import Any

import numpy as np

from fnet._util import _missing


def library(what: object) -> Any:
    """Imports Hugging Face's library tokenizers for `what`, which the error message names.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise ModuleNotFoundError(_missing.message(f"{what} needs", "tokenizers")) from None
    return tokenizers


def in_range(tokens, count) -> np.ndarray:
    """Returns tokens as an array of integers, after checking that each token is in 0 .. count - 1."""
    tokens = np.asarray(tokens if hasattr(tokens, "__len__") else list(tokens))
    if not tokens.size:
        return np.zeros(0, np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"decode: expected integer tokens [time]; got {tokens.dtype}{list(tokens.shape)}"
        )
    if tokens.min() < 0 or tokens.max() >= count:
        wrong = tokens[(tokens < 0) | (tokens >= count)][0]
        raise ValueError(f"decode: expected tokens from 0 to {count - 1}; got {wrong}")
    return tokens


def clean_up(text: str) -> str:
    """Removes spaces before punctuation, for the option clean_up_tokenization_spaces of
    tokenizer_config.json."""
    for before in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(before, before.strip())
    return text

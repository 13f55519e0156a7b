"""Windows of an array of tokens: batch i is a pure function of (seed, i)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from fnet.training.data._arrays import INT32, digest
from fnet.training.data._cache import local

# Pairs of 16-bit numbers from which their width is told, and the fewest that tell it.
_PAIRS, _FEW = (4096, 8)
_BLOCK = 1 << 16  # pairs that are read at a time


class Windows:
    """Batches of windows: consecutive tokens at random positions of an array. `windows(i)` is the
    batch of step i.

    Of a memory-mapped array, only the windows of a batch are read.

    Args:
      tokens: the token array, integers [tokens].
      length: the number of predicted tokens in a window. A window has `length + 1` tokens, because
        the first is not predicted.
      batch_size: the number of windows in a batch.
      seed: the seed of the random positions. Default 0.
      vocab_size: the size of the vocabulary. `windows(i)` then checks that the tokens are in [0,
        vocab_size). Default None: no check.

    Raises:
      ValueError: `tokens` is not an integer array, it has at most `length` elements, or `length` or
        `batch_size` is less than 1. `windows(i)` raises it for a token that does not fit into int32
        or is outside the vocabulary.

    Example:
      >>> windows = Windows(np.arange(100), length=4, batch_size=2, seed=0)
      >>> batch = windows(0)["tokens"]
      >>> batch.shape, (batch[:, 1:] - batch[:, :-1] == 1).all().item()
      ((2, 5), True)
    """

    def __init__(
        self,
        tokens: np.ndarray,
        *,
        length: int,
        batch_size: int,
        seed: int = 0,
        vocab_size: int | None = None,
    ):
        _check(tokens, length)
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch needs at least one window")
        self.tokens, self.length, self.batch_size = tokens, length, batch_size
        self.seed, self.vocab_size = seed, vocab_size

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Returns the batch of a step, the first of which is 0: {"tokens": int32 array [batch,
        length + 1]}."""
        starts = self.starts(step)
        tokens = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
        return {"tokens": int32_tokens(tokens, step, self.vocab_size)}

    def identity(self) -> dict[str, Any]:
        """Returns what identifies the data, as `Batches.identity` does."""
        return {
            "tokens": len(self.tokens),
            "length": self.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def digest(self) -> str:
        """Returns a digest of the tokens, as `Batches.digest` does."""
        return digest(np.asarray(self.tokens))

    def starts(self, step: int) -> np.ndarray:
        """Returns where each window of a step begins, an integer array [batch_size]."""
        generator = np.random.Generator(np.random.PCG64([self.seed, step]))
        return generator.integers(0, len(self.tokens) - self.length, self.batch_size)


def int32_tokens(tokens: np.ndarray, step: int, vocab_size: int | None) -> np.ndarray:
    """Returns tokens of the batch `step` as int32.

    Raises:
      ValueError: a token does not fit into int32, or is not in [0, vocab_size).
    """
    if not INT32.min <= tokens.min() <= tokens.max() <= INT32.max:
        raise ValueError(
            f"batch {step} holds tokens from {tokens.min()} to {tokens.max()}: expected "
            "numbers that fit into int32. Was the file written with another dtype?"
        )
    tokens = tokens.astype(np.int32)
    if vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(
            f"batch {step} holds the token {wrong}, outside a vocabulary of {vocab_size}"
        )
    return tokens


def stretches(tokens: np.ndarray, length: int) -> np.ndarray:
    """Divides an array of tokens into windows that overlap by one token, for evaluation.

    A model predicts each token of a window from those before it. Because of the overlap, each token
    except the first is predicted exactly once.

    Args:
      tokens: the token array, integers [tokens].
      length: the number of predicted tokens in a window. A window has `length + 1` tokens.

    Returns:
      The windows, an array [windows, length + 1], a view of `tokens`. Tokens at the end that do not
      fill a window are omitted.

    Raises:
      ValueError: `tokens` is not longer than `length`, or is not an integer array.

    Example:
      >>> stretches(np.arange(8), 3).tolist()
      [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    _check(tokens, length)
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]


def read_tokens(path: str | os.PathLike, dtype: Any = None) -> np.ndarray:
    """Memory-maps a file of tokens without a header, such as nanoGPT's data scripts write.

    Args:
      path: the path of the file, or the URL of an object in an object store (s3://, gs://, az://).
        An object is copied to the folder of the environment variable FNET_DATA, or to
        ~/.cache/fnet, and the copy's checksum is verified at each later call.
      dtype: the integer dtype of the tokens in the file, such as "uint32" for a vocabulary of more
        than 65,536 tokens. Little-endian, unless it says otherwise (">u2"). Default None: uint16,
        after a check that the file does not look like one of 32-bit or 64-bit tokens.

    Returns:
      The tokens, an array [tokens] of `dtype`, memory-mapped.

    Raises:
      ValueError: the file is empty, its size is not a multiple of the size of a token, it is a .npy
        file, or `dtype` is None and the file looks like one of 32-bit or 64-bit tokens.
      TypeError: `dtype` is not an integer dtype.

    Source: Karpathy's nanoGPT, data/*/prepare.py.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "train.bin"
    ...     np.array([5, 6, 7], np.uint16).tofile(path)
    ...     tr.read_tokens(path).tolist()
    [5, 6, 7]
    """
    kind = np.dtype("<u2" if dtype is None else dtype)
    if kind.kind not in "iu":
        raise TypeError(
            f"read_tokens: dtype={dtype!r}: expected an integer dtype, such as 'uint16' or 'uint32'"
        )
    file = local(path)
    size = file.stat().st_size
    if not size or size % kind.itemsize:
        raise ValueError(
            f"{path} has {size} bytes: a file of {8 * kind.itemsize}-bit tokens has a multiple of "
            f"{kind.itemsize} bytes"
        )
    with file.open("rb") as start:
        if start.read(6) == b"\x93NUMPY":
            raise ValueError(
                f"{path} is a .npy file, which has a header: read it with np.load(path, "
                f"mmap_mode='r')"
            )
    tokens = np.memmap(file, kind if kind.byteorder == ">" else kind.newbyteorder("<"), "r")
    if dtype is None and _looks_wider(tokens):
        raise ValueError(
            f"{path}: every second 16-bit number is 0 or small, so these are tokens of 32 or 64 "
            "bits: pass dtype='uint32' (or the dtype with which the file was written), or "
            "dtype='uint16' if the tokens are what they seem"
        )
    return tokens


def _looks_wider(tokens: np.ndarray) -> bool:
    """Whether 16-bit numbers are the halves of tokens of 32 or 64 bits.

    In a file of 16-bit tokens, both numbers of a pair are alike. In one of wider tokens, the second
    number is 0, small, or the sign of a negative token such as -1. Pairs of zeros tell nothing, and
    a file may begin with many of them.
    """
    if len(tokens) % 2:
        return False
    pairs, found = tokens.reshape(-1, 2), np.zeros((0, 2), tokens.dtype)
    for start in range(0, len(pairs), _BLOCK):
        block = pairs[start : start + _BLOCK]
        found = np.concatenate([found, block[block.any(1)]])[:_PAIRS]
        if len(found) == _PAIRS:
            break
    if len(found) < _FEW:
        return False
    low, high = found[:, 0], found[:, 1]
    negative = (high == 0xFFFF) & (low >= 0x8000)
    if ((high == 0) | negative).all():
        return True
    return bool(((high < 16) | negative).mean() > 0.95 and (low >= 16).mean() > 0.5)


def _check(tokens, length):
    if np.ndim(tokens) != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens are one row of integers; got {tokens.dtype}{list(tokens.shape)}")
    if length < 1:
        raise ValueError(f"length={length}: a window predicts at least one token")
    if len(tokens) <= length:
        raise ValueError(f"{len(tokens)} tokens are too few for windows of {length} + 1")

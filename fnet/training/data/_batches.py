"""Batches of arrays in memory: batch i is a pure function of (seed, i)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fnet.training.data._arrays import as_arrays, digest, rows_of


class Batches:
    """Shuffled batches of arrays in memory, as a function: `batches(i)` is the batch of step i.

    Each epoch is a random permutation of the examples. The epochs follow one another, and batch i
    takes the positions i * batch_size to (i + 1) * batch_size - 1 of this sequence. So every
    example occurs once in each epoch, all batches have the same size, and a resumed run continues
    with the same batches without a saved iterator.

    Args:
      data: arrays with one row for each example, in a dict such as {"image": [n, ...], "label":
        [n]}, a tuple, nested dicts and tuples, or a pandas DataFrame, which counts as a dict of its
        columns. A batch has the same structure.
      batch_size: the number of examples in a batch.
      seed: the seed of the permutations. Default 0.
      shuffle: False takes the examples in the order of the arrays, in every epoch. Default True.

    Raises:
      ValueError: `data` contains no arrays, its arrays have different lengths, or `batch_size` is
          less than 1.
      TypeError: `data` contains missing values, or values that are not numbers (text, dates,
          categories).

    Example:
      >>> batches = Batches({"x": np.arange(10)}, batch_size=4, seed=0)
      >>> sorted(np.concatenate([batches(0)["x"], batches(1)["x"], batches(2)["x"][:2]]).tolist())
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
      >>> Batches((np.ones((10, 3)), np.arange(10)), 4, shuffle=False)(1)[1]
      array([4, 5, 6, 7])
    """

    def __init__(self, data: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True):
        self.data, self.length = as_arrays(data, "Batches")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch needs at least one example")
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._order: tuple[int, np.ndarray] = (-1, np.arange(self.length))

    def __call__(self, step: int) -> Any:
        """Returns the batch of a step, the first of which is 0."""
        return rows_of(self.data, self.index(step), f"batch {step}")

    def index(self, step: int) -> np.ndarray:
        """Returns the indices of the examples in batch `step`, an integer array [batch_size]."""
        first = step * self.batch_size
        parts, missing = [], self.batch_size
        while missing:
            epoch, offset = divmod(first, self.length)
            part = self._permutation(epoch)[offset : offset + missing]
            parts.append(part)
            first += len(part)
            missing -= len(part)
        return np.concatenate(parts)

    def identity(self) -> dict[str, Any]:
        """Returns what identifies the data. `fit` stores it in each checkpoint, and resumes a run
        only if this, a digest of one batch and `digest` are unchanged."""
        return {
            "examples": self.length,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def digest(self) -> str:
        """Returns a digest of the data: of all values, or of values throughout the data if an array
        is larger than 1 GiB, or a memory-mapped file larger than 16 MiB."""
        return digest(self.data)

    def steps(self, epochs: float) -> int:
        """Returns the number of batches in `epochs` epochs, rounded up."""
        return -int(-epochs * self.length // self.batch_size)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self.shuffle and self._order[0] != epoch:  # a cache: the value depends on epoch alone
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._order = (epoch, generator.permutation(self.length))
        return self._order[1]

"""Batches of arrays in memory: batch i is a pure function of (seed, i)."""

from __future__ import annotations

from typing import Any

import numpy as np

from fnet.training.data._arrays import as_arrays, digest, rows_of


class Batches:
    """Shuffled batches of arrays in memory. If `batches` is an instance of `Batches`, `batches(i)`
    is the batch of step i.

    Each epoch is a random permutation of the examples. The permutations of all epochs are
    concatenated to one sequence of examples. Batch i contains the examples at positions i *
    batch_size to (i + 1) * batch_size - 1 of the sequence of examples from all epochs. Every
    example occurs once in each epoch, and all batches have the same size. A resumed run continues
    with the same batches, without a saved iterator.

    Args:
      data: arrays with one row for each example. The arrays are in a dict such as {"image": [n,
        ...], "label": [n]}, in a tuple, or in nested dicts and tuples. A pandas DataFrame is
        treated as a dict of its columns. A batch has the same structure as `data`.
      batch_size: the number of examples in a batch.
      seed: the seed of the permutations. Default 0.
      shuffle: whether to permute the examples. If `shuffle` is False, every epoch contains the
        examples in the order of the arrays. Default True.

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
        """Returns the batch of step `step`. The first step has the number 0."""
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
        """Returns a dict of values that identify the data.

        `fit` stores the result of `identity` in each checkpoint. `fit` resumes a run only if the
        result of `identity`, a digest of one batch and `digest` have not changed.
        """
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

"""Spaces of hyperparameters, and random points and Sobol points in such spaces."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

# The degree, the coefficients and the initial direction numbers of the primitive polynomials of
# dimensions 2 to 21: Joe and Kuo (2008), Constructing Sobol Sequences with Better Two-Dimensional
# Projections, new-joe-kuo-6.
_POLYNOMIALS = (
    (1, 0, (1,)),
    (2, 1, (1, 3)),
    (3, 1, (1, 3, 1)),
    (3, 2, (1, 1, 1)),
    (4, 1, (1, 1, 3, 3)),
    (4, 4, (1, 3, 5, 13)),
    (5, 2, (1, 1, 5, 5, 17)),
    (5, 4, (1, 1, 5, 5, 5)),
    (5, 7, (1, 1, 7, 11, 19)),
    (5, 11, (1, 1, 5, 1, 1)),
    (5, 13, (1, 1, 1, 3, 11)),
    (5, 14, (1, 3, 5, 5, 31)),
    (6, 1, (1, 3, 3, 9, 7, 49)),
    (6, 13, (1, 1, 1, 15, 21, 21)),
    (6, 16, (1, 3, 1, 13, 27, 49)),
    (6, 19, (1, 1, 1, 15, 7, 5)),
    (6, 22, (1, 3, 1, 15, 13, 25)),
    (6, 25, (1, 1, 5, 5, 19, 61)),
    (7, 1, (1, 3, 7, 11, 23, 15, 103)),
    (7, 4, (1, 3, 7, 13, 13, 15, 69)),
)
_BITS = 30


def sobol(n: int, dimensions: int, *, seed: int | None = None, start: int = 0) -> np.ndarray:
    """Returns points of the Sobol sequence, which cover the unit cube more evenly than random
    points.

    Args:
      n: the number of points. A power of 2 covers the cube most evenly.
      dimensions: the number of dimensions, from 1 to 21.
      seed: the seed of a random digital shift, which XORs the binary digits of the coordinates with
        random ones and keeps the points even. Default None: no shift.
      start: the index of the first point. Default 0.

    Returns:
      The points, float64 [n, dimensions], in [0, 1).

    Raises:
      ValueError: the number of dimensions is outside 1 to 21, or n or start is negative.

    Source: Joe and Kuo (2008); the order of points is that of Antonov and Saleev (1979).

    >>> search.sobol(4, 2).tolist()
    [[0.0, 0.0], [0.5, 0.5], [0.75, 0.25], [0.25, 0.75]]
    """
    if not 1 <= dimensions <= len(_POLYNOMIALS) + 1:
        raise ValueError(f"sobol(dimensions={dimensions}): expected 1 to {len(_POLYNOMIALS) + 1}")
    if n < 0 or start < 0 or start + n > 1 << _BITS:
        raise ValueError(f"sobol(n={n}, start={start}): expected points of the first 2^{_BITS}")
    directions = np.zeros((dimensions, _BITS), np.int64)
    for i in range(dimensions):
        if i == 0:
            numbers = [1] * _BITS
        else:
            degree, coefficients, first = _POLYNOMIALS[i - 1]
            numbers = list(first)
            for k in range(degree, _BITS):
                new = numbers[k - degree] ^ (numbers[k - degree] << degree)
                for j in range(1, degree):
                    if coefficients >> (degree - 1 - j) & 1:
                        new ^= numbers[k - j] << j
                numbers.append(new)
        directions[i] = [m << (_BITS - 1 - k) for k, m in enumerate(numbers[:_BITS])]
    index = np.arange(start, start + n)
    gray = index ^ (index >> 1)
    points = np.zeros((n, dimensions), np.int64)
    for bit in range(_BITS):
        points ^= np.where((gray >> bit & 1)[:, None] > 0, directions[:, bit], 0)
    if seed is not None:
        points ^= np.random.default_rng(seed).integers(0, 1 << _BITS, dimensions)
    return points / float(1 << _BITS)


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A hyperparameter that is uniformly distributed in [low, high].

    >>> search.Uniform(0, 10).at(0.25)
    2.5
    """

    low: float
    high: float

    def at(self, u: float) -> float:
        """Maps u in [0, 1] to a value: 0 to the lowest, 1 to the highest."""
        return float(self.low + u * (self.high - self.low))

    def where(self, value: float) -> float:
        """Maps a value to [0, 1], as the inverse of `at`."""
        return (value - self.low) / ((self.high - self.low) or 1)


@dataclasses.dataclass(frozen=True)
class LogUniform(Uniform):
    """A hyperparameter in [low, high] with a uniform logarithm, such as a learning rate.

    >>> round(search.LogUniform(0.01, 100).at(0.5), 6)
    1.0
    """

    def at(self, u: float) -> float:
        return float(math.exp(math.log(self.low) + u * math.log(self.high / self.low)))

    def where(self, value: float) -> float:
        return math.log(value / self.low) / (math.log(self.high / self.low) or 1)


@dataclasses.dataclass(frozen=True)
class Integer(Uniform):
    """A uniformly distributed integer from low to high, inclusive, such as a depth.

    >>> [search.Integer(1, 3).at(u) for u in (0.0, 0.5, 0.99)]
    [1, 2, 3]
    """

    def at(self, u: float) -> int:
        return min(int(self.low + math.floor(u * (self.high - self.low + 1))), int(self.high))


@dataclasses.dataclass(frozen=True)
class Choice:
    """A hyperparameter that has one of several values, with equal probability.

    >>> search.Choice(("adam", "sgd")).at(0.7)
    'sgd'
    """

    values: tuple

    def at(self, u: float) -> Any:
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def where(self, value: Any) -> float:
        same = lambda each: type(each) is type(value) and each == value  # 1 == True == 1.0
        return ([same(each) for each in self.values].index(True) + 0.5) / len(self.values)


KINDS = {"uniform": Uniform, "log_uniform": LogUniform, "integer": Integer, "choice": Choice}


class Space(dict):
    """A space of hyperparameters: {name: `Uniform`, `LogUniform`, `Integer` or `Choice`}.

    A space can be stored in a JSON file: {"learning_rate": {"log_uniform": [0.001, 1]}, "width":
    {"integer": [8, 64]}, "optimizer": {"choice": ["adam", "nesterov"]}, "weight_decay": {"uniform":
    [0, 0.1]}}.

    >>> space = search.Space(rate=search.LogUniform(0.01, 1), depth=search.Integer(1, 3))
    >>> sorted(space.random(2, seed=0)[0])
    ['depth', 'rate']
    """

    def random(self, n: int, *, seed: int) -> list[dict[str, Any]]:
        """Returns n independent random points, each a dict of hyperparameters.

        Point i depends only on `seed` and i, so a larger `n` adds points and leaves the others as
        they are.
        """
        points = [np.random.default_rng([seed, i]).random(len(self)) for i in range(n)]
        return [self.at(point) for point in points]

    def sobol(self, n: int, *, seed: int | None = None) -> list[dict[str, Any]]:
        """Returns the hyperparameters at the first n points of a Sobol sequence."""
        return [self.at(point) for point in sobol(n, len(self), seed=seed)]

    def at(self, point: Any) -> dict[str, Any]:
        """Returns the hyperparameters at a point of the unit cube, which has a coordinate in [0, 1]
        for each."""
        return {name: kind.at(float(u)) for (name, kind), u in zip(self.items(), point)}

    def arrays(self, points: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Converts n points to the hyperparameters of a population: a dict of arrays [n], float32
        or int32.

        Raises:
          TypeError: a value is not a number, so each of its values needs a program of its own.
        """
        for name in self:
            if any(isinstance(point[name], bool | str) or point[name] is None for point in points):
                raise TypeError(
                    f"Space.arrays: '{name}' is not a number; train separate programs for its "
                    f"values"
                )
        kind = lambda values: (
            np.int32 if all(isinstance(value, int) for value in values) else np.float32
        )
        return {
            name: np.array(values := [point[name] for point in points], kind(values))
            for name in self
        }

    def json(self) -> dict[str, Any]:
        """Returns the space as a dict of JSON types, which `read` accepts."""
        names = {kind: name for name, kind in KINDS.items()}
        return {
            name: {
                names[type(kind)]: list(kind.values)
                if isinstance(kind, Choice)
                else [kind.low, kind.high]
            }
            for name, kind in self.items()
        }

    @classmethod
    def read(cls, source: str | os.PathLike | Mapping[str, Any]) -> Space:
        """Reads a space from a JSON file, or from a dict with its content.

        Raises:
          ValueError: this is not a space; the message names the invalid hyperparameter.
          OSError: the file cannot be read.
        """
        if isinstance(source, Mapping):
            content, where = source, "space"
        else:
            where = os.fspath(source)
            try:
                with open(source, encoding="utf-8") as file:
                    content = json.load(file)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON: {error}") from None
        if not isinstance(content, Mapping) or not content:
            raise ValueError(
                f'{where}: expected an object such as {{"learning_rate": {{"log_uniform": '
                "[0.001, 1]}}"
            )
        return cls({name: _kind(where, name, value) for name, value in content.items()})


def _kind(where, name, value):
    form = f'expected one of {", ".join(KINDS)} with its values, such as {{"uniform": [0, 1]}}'
    if (
        not isinstance(value, Mapping)
        or len(value) != 1
        or (kind := next(iter(value))) not in KINDS
    ):
        raise ValueError(f"{where}: '{name}' is {json.dumps(value)[:60]}; {form}")
    values = value[kind]
    if kind == "choice":
        if (
            not isinstance(values, list)
            or not values
            or any(isinstance(each, list | dict) for each in values)
        ):
            raise ValueError(
                f"{where}: '{name}' needs a list of values, got {json.dumps(values)[:60]}"
            )
        return Choice(tuple(values))
    numbers = (
        isinstance(values, list)
        and len(values) == 2
        and all(type(each) in (int, float) for each in values)
    )
    if not numbers or not all(map(math.isfinite, values)) or values[0] > values[1]:
        raise ValueError(f"{where}: '{name}' needs [low, high], got {json.dumps(values)[:60]}")
    if kind == "log_uniform" and values[0] <= 0:
        raise ValueError(
            f"{where}: '{name}' has the logarithm of {values[0]}; log_uniform needs low > 0"
        )
    if kind == "integer" and any(type(each) is not int for each in values):
        raise ValueError(f"{where}: '{name}' needs integers, got {json.dumps(values)}")
    return KINDS[kind](*values)

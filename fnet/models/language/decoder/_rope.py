"""Rotary positions for texts longer than those of the original training."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides the rotation rates of a rotary embedding by a factor, for texts longer than those of
    the training.

    Args:
        factor: the divisor, > 0.

    Source: Chen et al. (2023), Extending Context Window of Large Language Models via Positional
    Interpolation.

    >>> import numpy as np
    >>> from fnet import models
    >>> models.LinearScaling(4.0)(np.array([1.0, 0.5])).tolist()
    [0.25, 0.125]
    """

    factor: float

    def __post_init__(self):
        if not self.factor > 0:
            raise ValueError(f"LinearScaling: expected a factor above 0, got {self.factor}")

    def __call__(self, rates: np.ndarray) -> np.ndarray:
        return rates / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling of a rotary embedding, for texts longer than those of the original
    training.

    What happens to the rotation rate r of a pair of features depends on how many rotations the pair
    completes within the original context: below `low_freq_factor` it becomes r / `factor`, above
    `high_freq_factor` it stays, and between the two it is an interpolation of r and r / `factor`.

    Args:
        factor: the divisor of the rotation rates, > 0.
        low_freq_factor, high_freq_factor: the two thresholds, in rotations.
        original_context: maximum length in tokens of the texts in the original training.

    Source: Grattafiori et al. (2024), The Llama 3 Herd of Models; llama-models, apply_scaling.

    >>> import numpy as np
    >>> from fnet import models
    >>> models.Llama3Scaling(8.0, 1.0, 4.0, original_context=8192)(np.array([1.0, 1e-5])).tolist()
    [1.0, 1.25e-06]
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self):
        if not (
            self.factor > 0
            and 0 < self.low_freq_factor < self.high_freq_factor
            and self.original_context > 0
        ):
            raise ValueError(
                "Llama3Scaling: expected factor > 0, 0 < low_freq_factor < high_freq_factor and "
                f"original_context > 0, got {self}"
            )

    def __call__(self, rates: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_context * rates.astype(np.float64) / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (rates * (kept + (1 - kept) / self.factor)).astype(rates.dtype)


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN's scaling of a rotary embedding, for texts longer than those of the original training.

    What happens to the rotation rate r of a pair of features depends on how many rotations the pair
    completes within the original context: below `beta_slow` it becomes r / `factor`, above
    `beta_fast` it stays, and between the two it is an interpolation of r and r / `factor`, linear
    in the index of the pair. The rotated features are multiplied by an amplitude.

    Args:
        factor: the divisor of the rotation rates, > 0.
        original_context: maximum length in tokens of the texts in the original training.
        beta_fast, beta_slow: the upper and the lower threshold, in rotations.
        amplitude: factor of the rotated queries and keys. Default: 0.1 ln(factor) + 1, or 1 if
            `factor` is at most 1.
        truncate: whether to round the bounds of the interpolation, which are indices of pairs, to
            integers: the lower one down, the upper one up. Default: True.

    Source: Peng et al. (2023), YaRN: Efficient Context Window Extension of Large Language Models,
    section 3.

    >>> import numpy as np
    >>> from fnet import models
    >>> models.YarnScaling(4.0, original_context=2048)(np.array([1.0, 0.1, 0.01, 1e-3])).round(5).tolist()
    [1.0, 0.1, 0.00625, 0.00025]
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float | None = None  # type: ignore[assignment]
    truncate: bool = True

    def __post_init__(self):
        if not (
            self.factor > 0
            and self.original_context > 0
            and self.beta_fast > 0
            and self.beta_slow > 0
        ):
            raise ValueError(f"YarnScaling: expected numbers above 0, got {self}")
        if self.amplitude is None:
            object.__setattr__(self, "amplitude", growth(self.factor))

    def __call__(self, rates: np.ndarray) -> np.ndarray:
        if len(rates) < 2:
            raise ValueError("YarnScaling: expected at least 4 rotated features, got 2")
        step = -math.log(rates[-1]) / (len(rates) - 1)  # rates[i] = exp(-i step)
        low, high = (
            math.log(self.original_context / (turns * 2 * math.pi)) / step
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(rates) - 1)
        slow = np.clip((np.arange(len(rates)) - low) / (high - low or 0.001), 0, 1)
        return (rates * (1 - slow + slow / self.factor)).astype(rates.dtype)


def growth(factor: float, strength: float = 1.0) -> float:
    """Returns YaRN's amplitude: the number by which the rotated queries and keys are multiplied.
    The argument `factor` is the divisor of the rotation rates (see `YarnScaling`)."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """Dynamic scaling of a rotary embedding: its base grows with the length of the text.

    It grows only for texts longer than the original context, and for each example by its own
    length, so that the examples of a batch are independent.

    Args:
        factor: a number > 0; the larger it is, the faster the base grows.
        original_context: maximum length in tokens of the texts in the original training.

    Source: bloc97 and emozilla (2023), NTK-aware and dynamically scaled RoPE.

    >>> import numpy as np
    >>> from fnet import models
    >>> rates = models.DynamicScaling(2.0, original_context=8)(np.float32([1.0, 0.5]), jnp.array([8, 16]))
    >>> np.round(np.asarray(rates, float), 4).tolist()
    [[1.0, 0.5], [1.0, 0.1667]]
    """

    factor: float
    original_context: int
    by_length: ClassVar[bool] = True

    def __post_init__(self):
        if not (self.factor > 0 and self.original_context > 0):
            raise ValueError(
                f"DynamicScaling: expected factor > 0 and original_context > 0, got {self}"
            )

    def __call__(self, rates: np.ndarray, lengths: jax.Array) -> jax.Array:
        if len(rates) < 2:
            raise ValueError("DynamicScaling: expected at least 4 rotated features, got 2")
        longer = jnp.maximum(lengths.astype(jnp.float32) / self.original_context, 1)
        base = (self.factor * longer - (self.factor - 1))[:, None]
        powers = -np.arange(len(rates), dtype=np.float32) / (len(rates) - 1)
        return rates[None] * base ** powers[None]


@dataclasses.dataclass(frozen=True)
class LongScaling:
    """LongRoPE's scaling of a rotary embedding, as in Phi-3.

    The rotation rate of each pair of features has a divisor of its own, from one of two lists:
    `short` for texts within the original context, `long` beyond. The length of each example alone
    decides. The rotated features are multiplied by an amplitude.

    Args:
        short: the divisor for each pair of features, for texts of at most `original_context`
            tokens.
        long: the same, for longer texts.
        original_context: maximum length in tokens of the texts in the original training.
        amplitude: factor of the rotated queries and keys.

    Source: Ding et al. (2024), LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens.

    >>> import numpy as np
    >>> from fnet import models
    >>> scaling = models.LongScaling((1.0, 1.0), (1.0, 4.0), original_context=8)
    >>> scaling(np.float32([1.0, 0.5]), jnp.array([8, 9])).tolist()
    [[1.0, 0.5], [1.0, 0.125]]
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    amplitude: float = 1.0
    by_length: ClassVar[bool] = True

    def __post_init__(self):
        if not (self.original_context > 0 and all(each > 0 for each in (*self.short, *self.long))):
            raise ValueError(f"LongScaling: expected numbers above 0, got {self}")

    def __call__(self, rates: np.ndarray, lengths: jax.Array) -> jax.Array:
        if not len(self.short) == len(self.long) == len(rates):
            raise ValueError(
                f"LongScaling: expected {len(rates)} divisors, one for each pair of rotated "
                f"features, got {len(self.short)} and {len(self.long)}"
            )
        short, long = (rates / np.float32(divisors) for divisors in (self.short, self.long))
        return jnp.where((lengths > self.original_context)[:, None], long[None], short[None])

"""Rotary positions for texts longer than those of the original training: scalings, and their fields in config.json."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from fnet.models.weights._config import SKIP, Fields, Must, Use


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Divides the rotary positions by a factor.

    Args:
        factor: the factor, > 0.

    Source: Chen et al. (2023), Extending Context Window of Large Language Models via Positional Interpolation.

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
    """Llama 3.1's scaling of rotary positions.

    Slow pairs of features are divided by the factor, fast ones do not change, and those in between are interpolated. A
    pair is slow if it completes less than `low_freq_factor` rotations within the original context, and fast if it
    completes more than `high_freq_factor`.

    Args:
        factor: the factor, > 0.
        low_freq_factor, high_freq_factor: numbers of rotations within the original context.
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
        if not (self.factor > 0 and 0 < self.low_freq_factor < self.high_freq_factor and self.original_context > 0):
            raise ValueError("Llama3Scaling: expected factor > 0, 0 < low_freq_factor < high_freq_factor and "
                             f"original_context > 0, got {self}")

    def __call__(self, rates: np.ndarray) -> np.ndarray:
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_context * rates.astype(np.float64) / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return (rates * (kept + (1 - kept) / self.factor)).astype(rates.dtype)


KINDS = {
    "default": (lambda: None, ()),
    "linear": (LinearScaling, ("factor",)),
    "llama3": (Llama3Scaling, ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
}


def _scaling(value):
    """Returns the scaling that a `rope_scaling` or `rope_parameters` of config.json describes.

    Raises:
        ValueError: fnet does not support it.
    """
    kind, other = (value.get(name) for name in ("rope_type", "type"))
    kind = kind if kind is not None else "default" if other is None else other
    if str(kind) not in KINDS or other not in (None, kind):
        raise ValueError(f"expected the rope_type {' or '.join(map(repr, KINDS))}")
    make, wanted = KINDS[kind]
    if set(value) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"} != set(wanted):
        raise ValueError(f"expected the fields {', '.join(wanted) or 'rope_theta and rope_type'} for the rope_type "
                         f"{kind!r}")
    numbers = [value[name] for name in wanted]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ValueError("expected numbers")
    if value.get("partial_rotary_factor") not in (None, 1):
        raise ValueError("expected a partial_rotary_factor of 1")
    return make(*numbers)


def _fields(value, config):
    if value is not None and not isinstance(value, dict):
        raise ValueError("expected an object or null")
    if not value:
        return {} if config.get("rope_parameters") else {"rope_scaling": None}
    base = {"rotary_base": value["rope_theta"]} if "rope_theta" in value else {}
    return {"rope_scaling": _scaling(value), **base}


def _written(model):
    """The `rope_scaling` of config.json for a model: the inverse of `_scaling`."""
    scaling = model.rope_scaling
    if scaling is None:
        return SKIP
    for kind, (make, wanted) in KINDS.items():
        if type(scaling) is make:
            return {"rope_type": kind, **dict(zip(wanted, dataclasses.astuple(scaling)))}
    raise ValueError(f"expected a scaling of fnet.models, got {scaling!r}")


def _base(config):
    """The default rope_theta, if config.json has none."""
    inner = [config.get(name) for name in ("rope_parameters", "rope_scaling")]
    return SKIP if any(isinstance(each, dict) and "rope_theta" in each for each in inner) else 10000.0


# rope_theta and rope_scaling. transformers 5 and later has both in rope_parameters.
ROPE = {
    "rope_theta": Use("rotary_base", _base),
    "rope_scaling": Fields(_fields, lambda config: SKIP if config.get("rope_parameters") else None, _written),
    "rope_parameters": Fields(lambda value, config: _fields(value, config) if value else {}),
    "rope_interleaved": Must((False,)),
    "partial_rotary_factor": Must((1.0, None)),
}

"""The base class of parameter wrappers. A wrapper of a parameter records how a program uses the
parameter."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from fnet.jaxpr import ImplicitArray


@dataclasses.dataclass(frozen=True)
class Wrapped(ImplicitArray):
    """Represents the array `array`.

    Subclasses of `Wrapped` are registered pytrees with `array` as a data field.

    Attributes:
        array: the parameter.
    """

    array: Any
    only_observes = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(jnp.shape(self.array))

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def has_leading_axis(self) -> bool:
        return bool(self.shape)

    def materialize(self) -> Any:
        return self.array

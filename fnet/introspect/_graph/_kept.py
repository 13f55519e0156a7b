"""The activations that a function keeps for its backward pass, with their paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet import jaxpr
from fnet.introspect._graph._producers import producers
from fnet.jaxpr import Scope


class Kept(NamedTuple):
    """A value that the forward pass stores: the path where it is computed, and its type."""

    path: str
    shape: tuple
    dtype: Any

    @property
    def nbytes(self) -> int:
        return jaxpr.nbytes(jax.ShapeDtypeStruct(self.shape, self.dtype))


def kept_activations(f: Callable, params: Any, *inputs: Any) -> list[Kept]:
    """Returns the values that `f` computes and stores for its derivative with respect to `params`.

    The returned values are those that `jax.ad_checkpoint.print_saved_residuals` lists as outputs of
    operations.
    """

    def linear(params, *inputs):
        def inexact(params):
            return [
                x
                for x in jax.tree.leaves(f(params, *inputs))
                if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)
            ]

        return jax.vjp(inexact, params)[1]

    program = jaxpr.Traced(
        lambda params, *inputs: jax.tree.leaves(linear(params, *inputs)), (params, *inputs), {}
    ).closed.jaxpr
    makers = producers(program, Scope())
    found = {}
    for v in program.outvars:
        made = makers(v)
        if made is not None:
            found[made.source] = Kept(made.at.path, tuple(v.aval.shape), v.aval.dtype)
    return list(found.values())

"""How XLA may divide a convolution or pooling over a mesh, also where `jax.vmap` has made another
convolution of it.

`vmap` over the kernels and the inputs of a convolution together makes a grouped convolution of it,
and `vmap` over the inputs alone moves the mapped axis into the batch. Which axes must not be split
is therefore known only after all `vmap`s, also those around a `jax.jit` that contains the layer.
The primitive `divided` waits for them: it is the identity, each `vmap` notes in it what it does,
and what remains is lowered to a sharding constraint. Its named scope, such as
"conv/avoid_split_image_convolution", is that of the transfers to which it leads, which
`parallel.ledger` lists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet._jax import Primitive
from fnet.jaxpr import Description, Traits, describe, misdivided

ROWS, SPACE, OTHER = "r", "s", "o"

divided_p = Primitive("divided")


def divided(
    value: jax.Array, axes: str, row: misdivided.Row, mesh: Any, *mapped: jax.Array
) -> jax.Array:
    """Constrains an array of a layer, and its cotangent, to a division that XLA computes rightly.

    Args:
        value: the input, the kernel or the output of the layer.
        axes: a letter for each axis of `value`: ROWS, SPACE (image, time or window) or OTHER.
        row: what is avoided. For `GROUPED`, all devices share one axis of rows, or nothing is
            split. For others, space is not split.
        mesh: the mesh.
        *mapped: the input and the kernel of a convolution, of which only is read whether a `vmap`
            maps them.
    """
    # Of no elements, because the backward pass keeps them.
    empty = [lax.slice_in_dim(lax.stop_gradient(array), 0, 0) for array in mapped]
    return divided_p.bind(value, *empty, axes=axes, row=row, mesh=mesh)


def unsplit(
    f: Callable,
    x: jax.Array,
    *others: jax.Array,
    space: Sequence[int],
    rows: Sequence[misdivided.Row],
) -> jax.Array:
    """Returns `f(x, *others)`. If the type of `x` on a mesh with explicit axes splits an axis in
    `space`, and one of the rows applies, the axes are gathered for `f`, and the result gets the
    type that it has without this."""
    if not misdivided.splits_wrongly(jax.typeof(x), space, rows):
        return f(x, *others)
    result, place = jax.eval_shape(f, x, *others), jax.typeof(x).sharding
    parts = [None if i in space else part for i, part in enumerate(place.spec.partitions)]
    with jax.named_scope(f"avoid_{rows[0].name}"):
        x = jax.sharding.reshard(x, NamedSharding(place.mesh, P(*parts)))
    return jax.sharding.reshard(f(x, *others), result.sharding)


def _spec(shape: tuple[int, ...], axes: str, row: misdivided.Row, mesh: Any) -> P:
    if row != misdivided.GROUPED:
        return P(*(None if axis == SPACE else P.UNCONSTRAINED for axis in axes))
    names = misdivided.automatic_axes(mesh)
    devices = math.prod(mesh.shape[name] for name in names)
    shared = next(
        (i for i, axis in enumerate(axes) if axis == ROWS and shape[i] % devices == 0), None
    )
    return P(*(names if i == shared else None for i in range(len(axes))))


def _constrained(
    value: jax.Array, *mapped: jax.Array, axes: str, row: misdivided.Row, mesh: Any
) -> jax.Array:
    with jax.named_scope(f"avoid_{row.name}"):
        # jaxlib 0.12 names a transfer after the operation whose result it moves. This one leaves no
        # other trace.
        value = lax.with_sharding_constraint(
            value, NamedSharding(mesh, P(*[P.UNCONSTRAINED] * value.ndim))
        )
        return lax.with_sharding_constraint(
            value, NamedSharding(mesh, _spec(value.shape, axes, row, mesh))
        )


def _batch(args: tuple, places: tuple, *, axes: str, row: misdivided.Row, mesh: Any) -> tuple:
    at, x, kernel = places if len(places) == 3 else (*places, None, None)
    if at is not None:
        # JAX makes the axis a part of the batch if `vmap` maps the input alone, and of the channels
        # otherwise.
        axes = (ROWS if x is not None and kernel is None else OTHER) + axes
    if x is not None and kernel is not None:
        row = misdivided.GROUPED
    arrays = [
        array if place is None else jnp.moveaxis(array, place, 0)
        for array, place in zip(args, places)
    ]
    return divided_p.bind(*arrays, axes=axes, row=row, mesh=mesh), None if at is None else 0


def _jvp(primals: tuple, tangents: tuple, **params: Any) -> tuple:
    tangent = tangents[0]
    y = divided_p.bind(*primals, **params)
    return y, tangent if isinstance(tangent, ad.Zero) else divided_p.bind(
        tangent, *primals[1:], **params
    )


def _transpose(cotangent: Any, value: jax.Array, *mapped: jax.Array, **params: Any) -> list:
    passed = (
        cotangent
        if isinstance(cotangent, ad.Zero)
        else divided_p.bind(cotangent, *mapped, **params)
    )
    return [passed, *(None for _ in mapped)]


# In eager mode, a sharding constraint needs a jitted function, which knows the devices of the mesh.
@functools.partial(jax.jit, static_argnames=("axes", "row", "mesh"))
def _eager(*args: Any, **params: Any) -> Any:
    return divided_p.bind(*args, **params)


@divided_p.def_impl
def _impl(*args: Any, **params: Any) -> Any:
    with jax.disable_jit(False):
        return _eager(*args, **params)


divided_p.def_abstract_eval(lambda value, *_, **__: value)
ad.primitive_jvps[divided_p] = _jvp
ad.primitive_transposes[divided_p] = _transpose
batching.primitive_batchers[divided_p] = _batch
mlir.register_lowering(divided_p, mlir.lower_fun(_constrained, multiple_results=False))
describe(divided_p, Description(Traits("alias", "exact", "free")))

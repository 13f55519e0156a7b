"""The attention of a whole step, as equations of `nn.dot_product_attention` state it, mapped over
the parts of time that the devices of a mesh axis hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from fnet import jaxpr
from fnet.layers._attend import attention_p, backward_p
from fnet.layers._attend_xla import Form, Products, widened
from fnet.parallel._context import _ring as ring
from fnet.parallel._context import _ulysses as ulysses
from fnet.parallel._context._layout import Layout

AXIS = "context"
NAMES = frozenset((attention_p.name, backward_p.name))


class Attention(NamedTuple):
    """An attention equation of a step, or its transpose.

    Attributes:
        form: its options.
        compute: the dtype of the operands of products.
        outs: the dtypes of its first results.
        backward: whether it is that of the backward pass.
        shape: (b, t, h, d) of the queries, and g key/value heads.
    """

    form: Form
    compute: Any
    outs: tuple
    backward: bool
    shape: tuple[int, int, int, int]
    groups: int

    @classmethod
    def of(cls, eqn: Any) -> Attention | None:
        """Reads an equation. Returns None if it is no attention of a text on itself."""
        if eqn.primitive not in (attention_p, backward_p):
            return None
        q, k = (v.aval.shape for v in eqn.invars[:2])
        if q[1] != k[1]:
            return None
        backward = eqn.primitive is backward_p
        return _read(backward=backward, shape=tuple(q), groups=k[2], **eqn.params)


def _read(*, form, compute, outs, backward, shape, groups, **_: Any) -> Attention:
    return Attention(form, jnp.dtype(compute), outs, backward, shape, groups)


def by_ring(
    attention: Attention,
    layout: Layout,
    mesh: Mesh | AbstractMesh,
    rows: Sequence[str],
    eqn: Any,
    *arrays: Any,
) -> list:
    """Computes the results of an attention equation by `ring`. `rows` are the mesh axes over which
    the batch is split."""
    products = Products(
        attention.compute, _operand(attention.compute, mesh), attention.form.precision
    )
    over, time = _over(attention, mesh, rows), layout.axis
    where = {
        "mask": (over, None, time, None),
        "lengths": (over,),
        "starts": (over,),
        "segments": (over, None),
    }
    big, rows_of_logits = P(over, time), P(over, None, time)
    run = ring.backward if attention.backward else ring.forward

    def local(*parts: jax.Array) -> tuple:
        return tuple(run(attention.form, products, layout, attention.outs, *parts))

    results = (big,) * 3 if attention.backward else (big, rows_of_logits, rows_of_logits)
    return _mapped(attention, layout, mesh, rows, local, where, rows_of_logits, results, arrays)[
        : len(eqn.outvars)
    ]


def by_ulysses(
    attention: Attention,
    layout: Layout,
    mesh: Mesh | AbstractMesh,
    rows: Sequence[str],
    eqn: Any,
    *arrays: Any,
) -> list:
    """Computes the results of an attention equation by `ulysses`."""
    over, time = _over(attention, mesh, rows), layout.axis
    where = {
        "mask": (over, time, None, None),
        "lengths": (over,),
        "starts": (over,),
        "segments": (over, None),
    }
    big, rows_of_logits = P(over, time), P(over, time)
    run = ulysses.backward if attention.backward else ulysses.forward
    bind = lambda *parts: [value.x for value in jaxpr.bind(eqn, list(parts))]

    def local(*parts: jax.Array) -> tuple:
        return tuple(run(bind, layout, *parts))

    results = (big,) * 3 if attention.backward else (big, rows_of_logits, rows_of_logits)
    return _mapped(
        attention,
        layout,
        mesh,
        rows,
        local,
        where,
        rows_of_logits,
        results[: len(eqn.outvars)],
        arrays,
        whole=True,
    )


def _mapped(
    attention: Attention,
    layout: Layout,
    mesh: Any,
    rows: Sequence[str],
    local: Callable,
    where: dict,
    rows_of_logits: Any,
    results: tuple,
    arrays: tuple,
    *,
    whole: bool = False,
) -> list:
    """Pads time, maps `local` over the parts, and removes the padding. `whole` states whether
    `local` gets the optional arrays without padding."""
    big = P(results[0][0], layout.axis)
    given = attention.form.given
    specs: list[Any] = [big] * 3
    padded = [_pad(layout, x, 1) for x in arrays[:3]]
    for name, x in zip(given, arrays[3:]):
        spec = [part if n > 1 else None for part, n in zip(where[name], x.shape)]
        specs.append(P(*spec))
        if name == "segments" and not whole:
            x = _pad(layout, x, 1)
        if name == "mask" and not whole:
            x = _pad(layout, _pad(layout, x, 2), 3)
        padded.append(x)
    for x in arrays[3 + len(given) :]:  # out, peak, total and the cotangent of out
        if x.ndim == 4:
            specs.append(big)
            padded.append(_pad(layout, x, 1))
        else:
            specs.append(rows_of_logits)
            padded.append(_pad(layout, x, 2, 1))
    own = {*rows, layout.axis}
    others = [name for name, n in mesh.shape.items() if name not in own and n > 1]
    names = {*mesh.axis_names} - {*others}
    outputs = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=results,
        axis_names=names,
        check_vma=False,
    )(*padded)
    time = lambda x: lax.slice_in_dim(x, 0, layout.time, axis=1 if x.ndim == 4 else 2)
    return list(map(time, outputs))


def _over(attention: Attention, mesh: Any, rows: Sequence[str]) -> tuple[str, ...] | None:
    """The mesh axes over which the rows are split, or None if their number is not a multiple."""
    devices = math.prod(mesh.shape[name] for name in rows)
    return tuple(rows) or None if attention.shape[0] % devices == 0 else None


def _pad(layout: Layout, x: jax.Array, axis: int, value: float = 0) -> jax.Array:
    """Pads the time axis, if it has one."""
    behind = layout.padded - layout.time
    if not behind or x.shape[axis] == 1:
        return x
    widths = [(0, behind if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def _operand(compute: Any, mesh: Any) -> Any:
    """XLA:CPU does not support all 16-bit products."""
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return widened(compute) if on_cpu else compute


FORMS = {"ring": by_ring, "ulysses": by_ulysses}

"""Matrix products for a mixture of experts, as two primitives that are each other's transposes.

The rows of each expert (one row for each of its tokens) are divided into tiles. The primitive
`tile_dot` multiplies each tile by the kernel of its expert. `tile_dot` is a scan over the tiles,
and each iteration reads the kernel of the tile's expert without copying it. If JAX transposed the
scan of `tile_dot`, each iteration would add an array of the size of all kernels to the gradient.
Therefore, the gradient of the kernels is computed by a second primitive, `tile_outer`, the
transpose of `tile_dot` with respect to the kernels. Each iteration of `tile_outer` adds a matrix
product to the gradient of a single kernel. `lax.ragged_dot` computes the same results as
`tile_dot`, but on CPUs it multiplies each row by the kernels of all experts, not only by the kernel
of the row's expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir

from fnet import _jax, jaxpr
from fnet._jax import Primitive


def tile_dot(x: jax.Array, kernel: jax.Array, expert: jax.Array) -> jax.Array:
    """Multiplies each tile by the kernel of its expert: `y[t] = x[t] @ kernel[expert[t]]`.

    Derivatives of any order, forward or reverse, are supported.

    Args:
        x: [tiles, rows, in].
        kernel: [experts, in, out], in x's dtype.
        expert: integers [tiles], the index of each tile's expert.

    Returns:
        [tiles, rows, out], in x's dtype.
    """
    return dot_p.bind(*_jax.vary_alike(x, kernel, expert), axis=1, out=x.dtype)


def _dot(x: jax.Array, kernel: jax.Array, expert: jax.Array, *, axis: int, out: Any) -> jax.Array:
    """Computes `tile_dot`. If `axis` is 1, the tiles are multiplied by the kernels of their
    experts. If `axis` is 2, the tiles are multiplied by the transposed kernels."""
    dtype = max(x.dtype, kernel.dtype, key=_bits)

    def one(_: Any, operands: Any) -> tuple:
        rows, which = operands
        own = lax.dynamic_index_in_dim(kernel, which, keepdims=False).astype(dtype)
        return None, lax.dot_general(
            rows.astype(dtype), own, (((1,), (axis - 1,)), ((), ())), preferred_element_type=out
        )

    return lax.scan(one, None, (x, expert))[1]


def _outer(x: jax.Array, y: jax.Array, expert: jax.Array, *, experts: int, out: Any) -> jax.Array:
    """Sums `x[t].T @ y[t]` over the tiles t of each expert, in float32 or wider.

    The shape of x is [tiles, rows, a], that of y is [tiles, rows, b], and that of the result is
    [experts, a, b].
    """
    dtype = max(x.dtype, y.dtype, key=_bits)
    total = jnp.zeros(
        (experts, x.shape[-1], y.shape[-1]), max(dtype, jnp.dtype("float32"), key=_bits)
    )

    def one(total: Any, operands: Any) -> tuple:
        a, b, which = operands
        product = lax.dot_general(
            a.astype(dtype),
            b.astype(dtype),
            (((0,), (0,)), ((), ())),
            preferred_element_type=total.dtype,
        )
        return total.at[which].add(product), None

    total, *slices = _jax.vary_alike(total, x, y, expert)
    return lax.scan(one, total, tuple(slices))[0].astype(out)


def _bits(dtype: Any) -> Any:
    return jnp.finfo(dtype).bits


@functools.lru_cache(1024)
def _type(f: Callable, types: Any, params: Any) -> Any:
    """Returns the type of the result of `f`, including its sharding and its varying mesh axes."""
    return _jax.make_jaxpr(functools.partial(f, **dict(params)))(*types).out_avals[0]


def _jvp(primitive: Any, primals: tuple, tangents: tuple, **params: Any) -> tuple:
    (a, b, expert), (da, db, _) = primals, tangents
    total = [
        primitive.bind(*operands, expert, **params)
        for operands, tangent in (((da, b), da), ((a, db), db))
        if not isinstance(tangent, ad.Zero)
    ]
    y = primitive.bind(a, b, expert, **params)
    return y, functools.reduce(jnp.add, total) if total else ad.Zero.from_primal_value(y)


def _dot_transpose(
    cotangent: Any, x: jax.Array, kernel: jax.Array, expert: jax.Array, *, axis: int, out: Any
) -> tuple:
    if isinstance(cotangent, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(x):
        return dot_p.bind(cotangent, kernel, expert, axis=3 - axis, out=x.aval.dtype), None, None
    pair = (x, cotangent) if axis == 1 else (cotangent, x)
    return (
        None,
        outer_p.bind(*pair, expert, experts=kernel.aval.shape[0], out=kernel.aval.dtype),
        None,
    )


def _outer_transpose(
    cotangent: Any, x: jax.Array, y: jax.Array, expert: jax.Array, *, experts: int, out: Any
) -> tuple:
    if isinstance(cotangent, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(x):
        return dot_p.bind(y, cotangent, expert, axis=2, out=x.aval.dtype), None, None
    return None, dot_p.bind(x, cotangent, expert, axis=1, out=y.aval.dtype), None


def _batch(primitive: Any, f: Callable, args: Any, axes: Any, **params: Any) -> tuple:
    """The batching rule of `tile_dot` and `tile_outer`. For `tile_dot` with kernels that have no
    batch axis, the tiles of all examples are concatenated. For `tile_dot` with batched kernels, and
    for `tile_outer`, the rule applies `jax.vmap` to `f`, the implementation of the primitive in JAX
    operations."""
    x, kernel, expert = args
    if primitive is not dot_p or axes[1] is not None:
        return jax.vmap(functools.partial(f, **params), axes)(*args), 0
    size = next(each.shape[axis] for each, axis in zip(args, axes) if axis is not None)
    x, expert = (
        jnp.broadcast_to(each[None], (size, *each.shape))
        if axis is None
        else jnp.moveaxis(each, axis, 0)
        for each, axis in ((x, axes[0]), (expert, axes[2]))
    )
    y = dot_p.bind(x.reshape(-1, *x.shape[2:]), kernel, expert.reshape(-1), **params)
    return y.reshape(*x.shape[:2], *y.shape[1:]), 0


def _define(name: str, f: Callable, transpose: Any) -> Any:
    primitive = Primitive(name)
    run = jax.jit(
        lambda *args, params: primitive.bind(*args, **dict(params)), static_argnames="params"
    )
    primitive.def_impl(lambda *args, **params: run(*args, params=tuple(params.items())))
    primitive.def_abstract_eval(lambda *types, **params: _type(f, types, tuple(params.items())))
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive, f)
    mlir.register_lowering(primitive, mlir.lower_fun(f, multiple_results=False))
    jaxpr.describe(
        primitive,
        jaxpr.Description(
            jaxpr.Traits("product", memory="heavy"),
            lower=lambda params, compute, out: {"out": out},
            explain=lambda *types, **params: (
                "a scan over tiles of rows, each with the kernel of one expert"
            ),
            plain=lambda eqn: (
                _jax.make_jaxpr(functools.partial(f, **eqn.params))(
                    *(v.aval for v in eqn.invars)
                ).jaxpr
            ),
        ),
    )
    return primitive


dot_p = _define("tile_dot", _dot, _dot_transpose)
outer_p = _define("tile_outer", _outer, _outer_transpose)

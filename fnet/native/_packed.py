"""Products of a few rows and a matrix of codes of 4 or 8 bits, as a primitive with a kernel in C++.

XLA decodes such a matrix to an array of floating-point numbers and reads that. For one row, as in
the generation of a text, reading is all that takes time. The kernel decodes in registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir

from fnet import _jax, jaxpr
from fnet._jax import Primitive
from fnet.native._library import library

ROWS = 8  # maximum rows; for more, XLA's product of matrices is faster
CODES = 1 << 16  # minimum codes

packed_product_p = Primitive("packed_product")


def packed_product(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    *,
    wide: bool,
    table: tuple[float, ...],
    portable: Callable,
) -> jax.Array:
    """Computes `portable(x, codes, scale)`, the product of x [..., k] and the matrix that the codes
    stand for, with the dtype of x.

    Args:
        x: float32 or bfloat16.
        codes: two codes of 4 bits in each uint8, the first in the lower half, neighbors along k; or
            an int8.
        scale: float32, with one element for each group of adjacent k and each output.
        wide: whether `codes` and `scale` are [k, outputs], or [outputs, k].
        table: the values of the 16 codes of 4 bits, or ().
        portable: a function of JAX's operations that computes the same. It must be hashable.
    """
    return packed_product_p.bind(x, codes, scale, wide=wide, table=table, portable=portable)


def suits(x: Any, codes: Any) -> bool:
    """Whether the kernel is likely to be faster than XLA, and reads these dtypes."""
    rows = x.shape[:-1]
    known = all(isinstance(n, int) for n in (*x.shape, *codes.shape))
    return (
        known
        and codes.ndim == 2
        and 0 < np.prod(rows, dtype=int) <= ROWS
        and codes.size * (8 // codes.dtype.itemsize) >= CODES
        and x.dtype in (jnp.float32, jnp.bfloat16)
        and codes.dtype in (jnp.uint8, jnp.int8)
    )


def _portable(x: Any, codes: Any, scale: Any, *, portable: Callable, **_: Any) -> Any:
    return portable(x, codes, scale).astype(x.dtype)


def _by_kernel(x: Any, codes: Any, scale: Any, *, wide: bool, table: tuple, portable: Any) -> Any:
    rows, outputs = x.shape[:-1], codes.shape[1 if wide else 0]
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    call = jax.ffi.ffi_call(
        library().target("fnet_packed"),
        jax.ShapeDtypeStruct((flat.shape[0], outputs), jnp.float32),
    )
    values = jnp.array(table or [0] * 16, jnp.float32)
    y = call(flat, codes, scale, values, bits=np.int64(4 if table else 8), wide=np.int64(wide))
    return y.reshape(*rows, outputs).astype(x.dtype)


def _lower_on_cpu(ctx: Any, *values: Any, **params: Any) -> Any:
    whole = _jax.kernels.partitioning(ctx) == "whole" and library()
    run = functools.partial(_by_kernel if whole else _portable, **params)
    return mlir.lower_fun(run, multiple_results=False)(ctx, *values)


@functools.partial(jax.jit, static_argnames=("wide", "table", "portable"))
def _eager(*arrays: Any, **params: Any) -> Any:
    return packed_product_p.bind(*arrays, **params)


@packed_product_p.def_impl
def _impl(*arrays: Any, **params: Any) -> Any:
    with jax.disable_jit(False):
        return _eager(*arrays, **params)


@packed_product_p.def_abstract_eval
def _abstract(*types: Any, **params: Any) -> Any:
    return _traced(types, **params).out_avals[0]


@functools.lru_cache(1024)
def _traced(types: tuple, **params: Any) -> Any:
    """Returns the portable program for operands of these types."""
    return _jax.make_jaxpr(functools.partial(_portable, **params))(*types)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    f = functools.partial(_portable, **params)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of(*moved: Any) -> Any:
        arrays = list(primals)
        for i, x in zip(moving, moved):
            arrays[i] = x
        return f(*arrays)

    return jax.jvp(of, [primals[i] for i in moving], [tangents[i] for i in moving])


def _batch(arrays: Any, axes: Any, **params: Any) -> Any:
    return jax.vmap(functools.partial(_portable, **params), in_axes=tuple(axes))(*arrays), 0


def _plain(eqn: Any) -> Any:
    return _traced(tuple(v.aval for v in eqn.invars), **eqn.params).jaxpr


def _explain(*avals: Any, **params: Any) -> str:
    kernels = library()
    return "codes are decoded in registers" if kernels else f"XLA: {kernels.reason}"


ad.primitive_jvps[packed_product_p] = _jvp
batching.primitive_batchers[packed_product_p] = _batch
mlir.register_lowering(packed_product_p, mlir.lower_fun(_portable, multiple_results=False))
mlir.register_lowering(packed_product_p, _lower_on_cpu, platform="cpu")
jaxpr.describe(
    packed_product_p,
    jaxpr.Description(jaxpr.Traits("product", memory="heavy"), plain=_plain, explain=_explain),
)

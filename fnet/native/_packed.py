"""Products of a few rows and a matrix of codes of 4 or 8 bits, as a primitive with a kernel in C++.

XLA decodes such a matrix to an array of floating-point numbers and reads that. For one row, as in
the generation of a text, reading is all that takes time. The kernel decodes in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.native._library import library
from fnet.native._primitive import define

ROWS = 8  # maximum rows; for more, XLA's product of matrices is faster
CODES = 1 << 16  # minimum codes


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
    return packed_product_p.bind(x, codes, scale, wide=wide, table=table, portable=portable)[0]


def suits(x: Any, codes: Any) -> bool:
    """Whether the kernel is likely to be faster than XLA, and reads these dtypes."""
    rows = x.shape[:-1]
    known = all(isinstance(n, int) for n in (*x.shape, *codes.shape))
    per_element = {"uint8": 2, "int8": 1}.get(codes.dtype.name, 0)
    return (
        known
        and codes.ndim == 2
        and 0 < np.prod(rows, dtype=int) <= ROWS
        and codes.size * per_element >= CODES
        and x.dtype in (jnp.float32, jnp.bfloat16)
    )


def _portable(x: Any, codes: Any, scale: Any, *, portable: Callable, **_: Any) -> list:
    return [portable(x, codes, scale).astype(x.dtype)]


def _by_kernel(
    _: list, x: Any, codes: Any, scale: Any, *, wide: bool, table: tuple, portable: Callable
) -> list:
    rows, outputs = x.shape[:-1], codes.shape[1 if wide else 0]
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    call = jax.ffi.ffi_call(
        library().target("fnet_packed"),
        jax.ShapeDtypeStruct((flat.shape[0], outputs), jnp.float32),
    )
    values = jnp.array(table or [0] * 16, jnp.float32)
    y = call(flat, codes, scale, values, bits=np.int64(4 if table else 8), wide=np.int64(wide))
    return [y.reshape(*rows, outputs).astype(x.dtype)]


packed_product_p = define("packed_product", _portable, _by_kernel)

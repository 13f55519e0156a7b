"""Products of a few rows and a large matrix, as a primitive with a kernel in C++.

XLA copies the matrix into another order before it multiplies. For the few rows with which a text is
generated, the copy takes longer than the product; the kernel reads the matrix once, in place.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet.native._library import library
from fnet.native._primitive import define

FEW, MANY = 2, 32  # rows; for more, copying the matrix pays
ELEMENTS = 1 << 16  # minimum elements of the matrix


def skinny_product(x: jax.Array, w: jax.Array, *, wide: bool, out: Any) -> jax.Array:
    """Returns the product of x [..., k] and a matrix, with sums in float32.

    Args:
        x: float32 or bfloat16.
        w: float32 or bfloat16.
        wide: whether `w` is [k, outputs], or [outputs, k].
        out: the dtype of the result.
    """
    return skinny_product_p.bind(x, w, wide=wide, out=jnp.dtype(out))[0]


def is_skinny(x: Any, w: Any) -> bool:
    """Whether the kernel is likely to be faster than XLA, and reads these dtypes."""
    if w.ndim != 2 or not all(isinstance(n, int) for n in (*x.shape, *w.shape)):
        return False
    rows, dtypes = math.prod(x.shape[:-1]), {jnp.dtype(x.dtype), jnp.dtype(w.dtype)}
    large = math.prod(w.shape) >= ELEMENTS
    return FEW <= rows <= MANY and large and dtypes <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}


def _portable(x: Any, w: Any, *, wide: bool, out: Any) -> list:
    sides = ((x.ndim - 1,), (0 if wide else 1,)), ((), ())
    return [lax.dot_general(x, w, sides, preferred_element_type=jnp.float32).astype(out)]


def _by_kernel(_: list, x: Any, w: Any, *, wide: bool, out: Any) -> list:
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    outputs = w.shape[1 if wide else 0]
    result = jax.ShapeDtypeStruct((flat.shape[0], outputs), jnp.float32)
    y = jax.ffi.ffi_call(library().target("fnet_skinny"), result)(flat, w, wide=np.int64(wide))
    return [y.reshape(*x.shape[:-1], outputs).astype(out)]


skinny_product_p = define("skinny_product", _portable, _by_kernel)

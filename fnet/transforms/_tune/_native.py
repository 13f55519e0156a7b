"""Rules of tune for CPUs that call the kernels of `fnet.native`."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import jaxpr, native
from fnet.hardware._cpu import read_cpu
from fnet.hardware._onednn import onednn
from fnet.jaxpr import Value

F32, BF16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
WORK = 1 << 20  # minimum multiplications of a convolution for a call of a kernel
CHANNELS = 8  # minimum channels of a group
PIXELS = 64  # minimum pixels of all examples for a window of several elements
# Minimum rows, batch times time, and minimum time, with which a kernel multiplies a recurrent
# layer's weights: it first copies the weights in its own order.
ROWS, TIME = 64, 2
UNITS = 8  # maximum units for each row
# Minimum batch for each core, because a kernel divides the batch. With up to NARROW units, XLA's
# products run on one core, too.
BATCH, NARROW = 2, 128


def native_convolution(eqn, inputs):
    """Computes a convolution, or one of its gradients, by a kernel in C++."""
    product = jaxpr.product(eqn)
    if product.op is not jaxpr.CONVOLUTION or product.dtype not in (F32, BF16):
        return None
    x, w = (value.x for value in inputs)
    result = eqn.outvars[0].aval
    if result.size * product.summed < WORK or result.dtype not in (F32, BF16):
        return None
    if product.dtype == BF16 and onednn():
        return None
    how = native.form(product.options, x.shape, w.shape, result.shape)
    if how is None or not _pays(product, how, x, w, result) or not native.library():
        return None
    space = frozenset(product.dimensions.rhs_spec[2:])
    # JAX reverses the kernel for the gradient of the input. XLA removes a reversal of a reversal.
    flipped = inputs[1].note == space
    return [
        native.convolution(
            x,
            lax.rev(w, tuple(space)) if flipped else w,
            options=product.options,
            compute=product.dtype,
            out=result.dtype,
            flipped=flipped,
        )
    ]


def native_recurrence(eqn, inputs):
    """Computes a recurrent layer, or its gradient, by a kernel in C++."""
    if not native.supported(eqn):
        return None
    form = native.recurrence_form(eqn)
    given = form.named([value.x for value in inputs])
    batch, time, _ = given["x"].shape
    units = given["recurrent_kernel"].shape[0]
    if batch * time < max(ROWS, units // UNITS) or time < TIME:
        return None
    if units > NARROW and batch < BATCH * _cores():
        return None
    if not native.library():
        return None
    return native.recurrence(eqn, [value.x for value in inputs])


class Flipped(Value):
    """A transposed view of the matrix `source`, which can be read without a computation."""

    __slots__ = ("source",)

    def __init__(self, x, source):
        super().__init__(x, True)
        self.source = source


def view(eqn, value, x):
    """Returns x, a view of `value` that the equation makes."""
    flips = eqn.primitive.name == "transpose" and np.ndim(value.x) == 2
    if flips and jaxpr.options(eqn).permutation == (1, 0):
        return Flipped(x, value.x)
    return Value(x, True)


def native_product(eqn, inputs):
    """Computes the product of a few rows and a matrix of parameters by a kernel in C++."""
    (left, right), batch = jaxpr.product(eqn).dimensions
    x, matrix, out = inputs[0].x, inputs[1], eqn.outvars[0].aval.dtype
    if any(batch) or left != (x.ndim - 1,) or matrix.note is not True or out not in (F32, BF16):
        return None
    if np.ndim(matrix.x) != 2 or not native.is_skinny(x, matrix.x) or not native.library():
        return None
    wide = right == (0,)
    if isinstance(matrix, Flipped):
        return [native.skinny_product(x, matrix.source, wide=not wide, out=out)]
    return [native.skinny_product(x, matrix.x, wide=wide, out=out)]


def _cores() -> float:
    return read_cpu().cores or 1


def _pays(product, how, x, w, result) -> bool:
    """Whether the kernel is as fast as XLA (`python -m benchmarks.native`): each group has enough
    channels for its vectors, and a window is used for enough pixels to be worth packing."""
    groups, (lhs, rhs, out) = max(product.groups), product.dimensions
    inputs, outputs = x.shape[lhs[0] if how.gradient else lhs[1]], w.shape[rhs[0]]
    if outputs // groups < CHANNELS:
        return False
    if how.gradient:  # of the first layer of a network, too
        return groups == 1 or inputs // groups >= CHANNELS
    window = math.prod(w.shape[i] for i in rhs[2:])
    pixels = math.prod(result.shape[i] for i in (out[0], *out[2:]))
    return inputs // groups >= CHANNELS and (window == 1 or pixels >= PIXELS)

"""Rules of tune for CPUs, which rewrite equations into forms for which XLA:CPU generates fast code,
with equal results up to rounding.

A rewrite rule receives an equation of a jaxpr and its inputs. A rewrite rule returns the outputs of
the equation, or None if the rule does not apply. The attribute `note` of an input is True if the
input can be read without a computation, because it is an argument of the function, a view of an
argument, or a broadcast scalar. For other values of `note`, see `_tune_layout`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet import jaxpr
from fnet.hardware._onednn import ONEDNN
from fnet.transforms._autocast._lowered import as_matrices
from fnet.transforms._tune import _library as library
from fnet.transforms._tune._accumulated import summed_products
from fnet.transforms._tune._convolutions import (
    depthwise_convolution,
    dilated_input,
    grouped_convolution,
    kernel_layout,
    small_input,
)
from fnet.transforms._tune._layout import transposed
from fnet.transforms._tune._native import native_convolution, native_product, native_recurrence

F32 = jnp.dtype("float32")
LARGE = 1 << 19  # minimum elements of a product's operand; for smaller ones, XLA is equally fast
# Minimum multiplications of a bfloat16 product; for smaller ones, XLA is equally fast (AMX)
LARGE_LOW = 1 << 20
# Minimum sizes for a weight gradient in another layout (`convolution_gradient`)
EXAMPLES, CHANNELS = (32, 32)
VIEWS = frozenset(("transpose", "reshape", "broadcast_in_dim", "squeeze"))


class Rule(NamedTuple):
    """A rewrite rule of tune. The rule applies to equations whose primitive is in `primitives`. If
    `below` is not None, the rule is enabled by default only for jaxlib versions before `below`.

    The function `apply` of a rule returns the outputs of an equation. The function `prepare`
    returns another equation and its inputs. The new equation is evaluated instead of the original
    equation, and `finish(equation, outputs)` converts the outputs of the new equation to the final
    outputs. `apply` and `prepare` return None if the rule does not apply to an equation. If a rule
    only sets compiler options, its fields `apply` and `prepare` are None. `options` are the
    compiler options. The function `when` receives the equations of a program, and returns whether
    the rule is used for this program. If the field `when` is None, the rule is used for every
    program. The function `evaluate(tuner, equation, scope, inputs)` of a rule is for equations with
    a body: it returns the outputs of the equation, evaluated by the tuner, or None.
    """

    name: str
    primitives: tuple[str, ...]
    apply: Callable | None
    reason: str
    below: str | None = None
    options: Mapping[str, str | bool] = {}
    when: Callable[[Sequence], bool] | None = None
    prepare: Callable | None = None
    finish: Callable | None = None
    evaluate: Callable | None = None


def apart(x):
    """Returns x after an optimization barrier. Without an optimization barrier, XLA may fuse the
    elementwise operations that compute x with a later strided copy of x.
    """
    return lax.optimization_barrier(x)


def products(eqn, inputs):
    """Rewrites a matrix product. Optimization barriers before the matrix product prevent XLA from
    fusing a strided copy of an operand with other operations. A matrix product of a matrix and an
    array with more axes is rewritten so that the array is the first operand and its last axis is
    contracted. In a matrix product x^T y, the smaller operand becomes the first operand.

    Under vmap, the matrix product of a dense layer has a result whose first axis is the axis of the
    features. XLA computes the inputs of an addition twice, once for each order of axes, if the
    features are the first axis of one input and the last axis of the other input. If vmap maps only
    the weights of a dense layer, the matrix product is not rewritten, because the rule would have
    to transpose the weights. Matrix products with batch axes, as in attention, are not rewritten,
    because the rule would not make them faster.
    """
    x, y = (value.x for value in inputs)
    if max(x.size, y.size) < LARGE or x.dtype != F32 or y.dtype != F32:
        return None
    product = jaxpr.product(eqn)
    (left, right), batch = product.dimensions
    if any(batch):
        return None
    rest = product.without("dimension_numbers")
    if len(left) == 1 and (x.ndim == 2) != (y.ndim == 2):
        first = x.ndim == 2
        (array, matrix), (i, j) = (
            (inputs[::-1], (right[0], left[0])) if first else (inputs, (left[0], right[0]))
        )
        if first and 0 < i == array.x.ndim - 2:
            return None
        z = lax.dot_general(
            _ready(array, jnp.moveaxis(array.x, i, -1)),
            _ready(matrix, matrix.x),
            (((array.x.ndim - 1,), (j,)), ((), ())),
            **rest,
        )
        return [transposed(z, (z.ndim - 1, *range(z.ndim - 1))) if first else z]
    if len(left) > 1 and x.ndim == y.ndim == len(left) + 1:  # a weight gradient
        left, right = zip(*sorted(zip(left, right)))
        x, y = (jnp.moveaxis(a, axes, range(len(axes))) for a, axes in ((x, left), (y, right)))
        left = right = tuple(range(len(left)))
    x, y = map(_ready, inputs, (x, y))
    if not left == right == tuple(range(len(left))) or x.ndim == len(left) or y.ndim == len(right):
        return [lax.dot_general(x, y, ((left, right), batch), **rest)]
    shape = x.shape[len(left) :] + y.shape[len(right) :]
    rows = math.prod(x.shape[: len(left)])
    x, y = x.reshape(rows, -1), y.reshape(rows, -1)
    dot = functools.partial(lax.dot_general, dimension_numbers=(((0,), (0,)), ((), ())), **rest)
    narrow = x.shape[1] <= y.shape[1]
    # Otherwise XLA swaps them again if z is transposed.
    z = apart(dot(x, y) if narrow else dot(y, x))
    return [(z if narrow else z.T).reshape(shape)]


def _ready(value, x):
    """Returns the array x of an input `value` after a barrier, unless it is read without computing."""
    return x if value.note is True else apart(x)


def bfloat16_products(eqn, inputs):
    """Reshapes the operands of a bfloat16 matrix product to matrices, and accumulates in float32.

    If the operands are matrices and the sums are in float32, XLA:CPU computes a bfloat16 matrix
    product up to ten times as fast as otherwise.
    """
    x, y = (value.x for value in inputs)
    product = jaxpr.product(eqn)
    work = eqn.outvars[0].aval.size * product.summed
    if (
        x.dtype != library.BF16
        or y.dtype != library.BF16
        or work < LARGE_LOW
        or not library.bfloat16_pays()
    ):
        return None
    (left, right), batch = product.dimensions
    dot = functools.partial(as_matrices, out=eqn.outvars[0].aval.dtype)
    if x.ndim == 2 < y.ndim and len(left) == 1 and not any(batch):  # vmap's w a, see `products`
        z = dot(y, x, ((right, left), batch))
        return [transposed(z, (z.ndim - 1, *range(z.ndim - 1)))]
    return [dot(x, y, ((left, right), batch))]


def _windows(eqn, x):
    """Returns the window size along each axis of a pooling whose windows cover x without overlap,
    or None for other poolings."""
    window = jaxpr.pooling_window(eqn)
    if window is None or any(size % k for size, k in zip(x.shape, window)):
        return None
    return window if 1 < math.prod(window) <= 16 else None  # with 64, compilation took a minute


def _split(shape, window):
    """Returns a shape in which every pooled axis is split into two: the windows, and the positions
    in a window."""
    return [
        part for size, k in zip(shape, window) for part in ((size // k, k) if k > 1 else (size,))
    ]


def _tiles(x, window):
    """Returns a list of arrays with the output's shape. Each array contains the elements of x at
    one position of the window; the positions are in row-major order."""
    x = x.reshape(_split(x.shape, window))
    places = itertools.product(*(range(k) if k > 1 else (None,) for k in window))
    return [
        x[
            tuple(
                part for i in place for part in ((slice(None),) if i is None else (slice(None), i))
            )
        ]
        for place in places
    ]


def max_pool(eqn, inputs):
    """Computes a max pooling by elementwise maxima, if the windows cover the array without overlap.

    The derivative is that of the original pooling: the derivative of an elementwise maximum would
    share the cotangent among equal elements, where the pooling selects one of them.
    """
    window = _windows(eqn, inputs[0].x)
    if window is None:
        return None

    @jax.custom_jvp
    def pooled(x):
        return functools.reduce(lax.max, _tiles(x, window))

    @pooled.defjvp
    def derivative(primals, tangents):
        _, tangent = jax.jvp(lambda x: jaxpr.bind(eqn, [x])[0].x, primals, tangents)
        return pooled(*primals), tangent

    return [pooled(inputs[0].x)]


def max_pool_gradient(eqn, inputs):
    """Computes the gradient of a pooling whose windows tile the array. The cotangent goes to the
    first largest element of each window, as in select_and_scatter, also for NaN and ties."""
    g, x = inputs[0].x, inputs[1].x
    window = _windows(eqn, x)
    if window is None or not jaxpr.selects_largest(eqn):
        return None
    first, *rest = _tiles(x, window)
    place = jnp.zeros(first.shape, jnp.int8)
    for i, tile in enumerate(rest, 1):
        stays = first >= tile
        first, place = (
            lax.select(stays, first, tile),
            lax.select(stays, place, jnp.full_like(place, i)),
        )
    place, g = lax.optimization_barrier((place, g))
    where = jnp.arange(math.prod(window), dtype=jnp.int8).reshape(_split(window, window))
    wide = lambda t: t.reshape(
        [part for size, k in zip(t.shape, window) for part in ((size, 1) if k > 1 else (size,))]
    )
    return [jnp.where(wide(place) == where, wide(g), jnp.zeros((), g.dtype)).reshape(x.shape)]


def _ends_swapped(x):
    """Transposes an array [a, b, c] to [c, b, a] by three transposes that use the CPU's cache well.
    A single transpose from [a, b, c] to [c, b, a] would take four to ten times as long.

    The first two of the three transposes run in a loop over the two halves of x (over the whole
    array x if a is odd). Without this loop, XLA would fuse the transposes with the operations that
    compute x. The fused operation would be a strided copy.
    """
    a, b, c = x.shape
    halves = 1 if a % 2 else 2
    # [halves, b, c, a / halves]
    turned = lax.map(
        lambda part: apart(apart(part.transpose(1, 0, 2)).transpose(0, 2, 1)),
        x.reshape(halves, a // halves, b, c),
    )
    return apart(turned.transpose(2, 1, 0, 3)).reshape(c, b, a)


def convolution_gradient(eqn, inputs):
    """Transposes the operands of a convolution's weight gradient to NHWC and HWIO, as in forward
    convolutions.

    Bfloat16 operands are cast to float32, because XLA:CPU without oneDNN computes bfloat16
    convolutions in float32. The weight gradients of convolutions with strides, few examples or few
    channels are not rewritten, because XLA computes them equally fast without this rule.
    """
    product = jaxpr.product(eqn)
    dtype = product.dtype
    if product.op is not jaxpr.CONVOLUTION or dtype not in (F32, library.BF16):
        return None
    if dtype == library.BF16 and library.onednn():
        return None
    (x, w), (lhs, rhs, out) = (value.x for value in inputs), product.dimensions
    if x.ndim != 4 or lhs != (3, 0, 1, 2) or rhs != (3, 0, 1, 2) or product.groups != (1, 1):
        return None
    if x.shape[0] < EXAMPLES or x.shape[3] < CHANNELS or product.window[3] != (1, 1):
        return None
    x, w = (a.astype(dtype).astype(F32) for a in (x, w))
    n, h, width, c = x.shape
    x = _ends_swapped(x.reshape(n, h * width, c)).reshape(c, h, width, n)
    w = apart(apart(w).transpose(1, 2, 0, 3))
    rest = product.without("dimension_numbers", "preferred_element_type")
    # [c, height, width, out]
    z = lax.conv_general_dilated_p.bind(
        x,
        w,
        dimension_numbers=lax.conv_dimension_numbers(x.shape, w.shape, ("NHWC", "HWIO", "NHWC")),
        preferred_element_type=F32,
        **rest,
    )
    inverse = [0] * 4
    for axis, place in enumerate((0, 3, 1, 2)):
        inverse[out[axis]] = place
    return [z.transpose(inverse)]


RULES = (
    Rule(
        "summed_products",
        ("scan",),
        None,
        "a product that a loop adds up is computed once, after the loop",
        evaluate=summed_products,
    ),
    Rule(
        "native_product",
        ("dot_general",),
        native_product,
        "fnet's own kernel, which reads the matrix once",
    ),
    Rule("products", ("dot_general",), products, "its operands are computed before it reads them"),
    Rule(
        "bfloat16_products",
        ("dot_general",),
        bfloat16_products,
        "products of matrices with float32 sums",
    ),
    Rule(
        "max_pool", ("reduce_window_max",), max_pool, "elementwise maxima", when=library.pools_apart
    ),
    Rule(
        "max_pool_gradient",
        ("select_and_scatter_add",),
        max_pool_gradient,
        "the largest element's place is found elementwise",
    ),
    Rule(
        "native_convolution",
        ("conv_general_dilated", "lowered"),
        native_convolution,
        "fnet's own kernel",
    ),
    Rule(
        "native_recurrence",
        ("recurrence", "recurrence_gradient"),
        native_recurrence,
        "fnet's own kernel, with one call for all time steps",
    ),
    Rule(
        "depthwise_convolution",
        ("conv_general_dilated", "lowered"),
        depthwise_convolution,
        "a sum of products with shifted arrays",
    ),
    Rule(
        "grouped_convolution",
        ("conv_general_dilated", "lowered"),
        grouped_convolution,
        "a convolution for each group",
    ),
    Rule(
        "small_input",
        ("conv_general_dilated", "lowered"),
        small_input,
        "a matrix product, because its window is larger than its input",
    ),
    Rule(
        "dilated_input",
        ("conv_general_dilated", "lowered"),
        dilated_input,
        "zeros between the elements of its input",
    ),
    Rule(
        "convolution_gradient",
        ("conv_general_dilated", "lowered"),
        convolution_gradient,
        "a forward convolution's layout",
        below="0.12",
    ),  # from there on XLA's own takes as long
    Rule(
        "kernel_layout",
        ("conv_general_dilated", "lowered"),
        kernel_layout,
        "the layout for which XLA calls oneDNN",
        when=library.onednn_pays,
    ),
    Rule(
        "convolution_kernels",
        (),
        None,
        "XLA's own kernels for convolutions, where YNNPACK's are slower, and "
        "YNNPACK's for products and sums alone",
        options=library.YNNPACK,
        when=library.eigen_pays,
    ),
    Rule(
        "convolution_library",
        (),
        None,
        "oneDNN's kernels for convolutions of bfloat16",
        options=ONEDNN,
        when=library.onednn_pays,
    ),
)

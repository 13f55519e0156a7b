"""Every convolution and gradient that JAX writes is one of the kernel's two operations."""

import itertools

import jax
import numpy as np
import pytest
from jax import lax

from fnet.native import _convolution


def kernel(how, x, w):
    """The kernel's two operations, one product for each position of the window."""
    operands = [x, w][::-1] if how.exchanged else [x, w]
    x, w = (np.asarray(a, np.float64).transpose(o) for a, o in zip(operands, how.orders))
    axes = len(how.strides)

    def spread(x):
        shape = [max(0, (n - 1) * d + 1) for n, d in zip(x.shape[1:-1], how.x_dilation)]
        wide = np.zeros((x.shape[0], *shape, x.shape[-1]))
        wide[(slice(None), *(slice(None, None, d) for d in how.x_dilation))] = x
        return wide

    x = spread(x)

    def reads(k, places):
        """(elements of x, elements of the outputs) for a position k of the window."""
        kept = []
        for axis in range(axes):
            at = (
                np.arange(places[axis]) * how.strides[axis]
                + k[axis] * how.w_dilation[axis]
                - how.low[axis]
            )
            inside = (at >= 0) & (at < x.shape[1 + axis])
            kept.append((at[inside], np.arange(places[axis])[inside]))
        return [np.ix_(*(pair[i] for pair in kept)) for i in range(2)]

    return x, w, reads


def by_kernel(options, x, w, shape, flipped):
    how = _convolution.form(options, x.shape, w.shape, shape)
    if how is None:
        return None
    axes, groups = len(how.strides), how.groups
    if flipped and how.gradient:
        w, flipped = np.flip(w, options["dimension_numbers"].rhs_spec[2:]), False
    x, w, reads = kernel(how, x, w)
    result = np.zeros([shape[i] for i in how.orders[2]])
    if how.gradient:
        for k in itertools.product(*map(range, result.shape[:axes])):
            i, o = reads(k, w.shape[1:-1])
            a, b = x[(slice(None), *i)], w[(slice(None), *o)]
            for g in range(groups):
                c, f = x.shape[-1] // groups, w.shape[-1] // groups
                pair = a[..., g * c : (g + 1) * c], b[..., g * f : (g + 1) * f]
                space = list(range(axes + 1))
                result[k][:, g * f : (g + 1) * f] = np.tensordot(*pair, (space, space))
        if how.flipped:
            result = np.flip(result, tuple(range(axes)))
    else:
        if how.transposed:
            w = w.swapaxes(-1, -2)
        if flipped:
            w = np.flip(w, tuple(range(axes)))
        c, f = x.shape[-1] // groups, result.shape[-1] // groups
        for k in itertools.product(*map(range, w.shape[:axes])):
            i, o = reads(k, result.shape[1:-1])
            for g in range(groups):
                part = x[(slice(None), *i)][..., g * c : (g + 1) * c]
                place = (slice(None), *o, slice(g * f, (g + 1) * f))
                result[place] += part @ w[k][:, g * f : (g + 1) * f]
    return result.transpose(np.argsort(how.orders[2]))


SPECS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}
CASES = [
    ((2, 9, 8, 6), (3, 3, 6, 4), dict()),
    ((2, 9, 8, 6), (3, 2, 6, 4), dict(window_strides=(2, 3))),
    ((2, 9, 8, 6), (3, 3, 6, 4), dict(rhs_dilation=(2, 1), padding="VALID")),
    ((2, 9, 8, 6), (3, 3, 2, 12), dict(feature_group_count=3, window_strides=(2, 1))),
    ((2, 5, 4, 6), (3, 3, 6, 4), dict(lhs_dilation=(2, 3), padding=((2, 1), (0, 3)))),
    ((2, 5, 4, 6), (3, 3, 6, 4), dict(padding=((-1, 2), (3, -2)))),
    ((1, 2, 2, 3), (5, 5, 3, 2), dict(padding="SAME")),
    ((2, 11, 3), (4, 3, 5), dict(window_strides=(2,))),
    ((2, 5, 4, 6, 3), (2, 3, 3, 3, 5), dict(window_strides=(1, 2, 1))),
    ((2, 5, 6), (3, 6, 4), dict(lhs_dilation=(2,), padding=((1, 2),))),
]


@pytest.mark.parametrize("x_shape, w_shape, options", CASES)
def test_forward_and_gradients(x_shape, w_shape, options):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (x_shape, w_shape))
    options = {"window_strides": (1,) * (x.ndim - 2), "padding": "SAME", **options}
    f = lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=SPECS[x.ndim - 2], **options)
    y, pull = jax.vjp(f, x, w)
    closed = jax.make_jaxpr(lambda g: pull(g))(y)
    kinds = []

    def check(x, w, y, options):
        mine = by_kernel(options, np.asarray(x), np.asarray(w), y.shape, False)
        np.testing.assert_allclose(mine, y, rtol=1e-4, atol=1e-4)
        kinds.append(_convolution.form(options, x.shape, w.shape, y.shape).gradient)

    for program, inputs in ((jax.make_jaxpr(f)(x, w), (x, w)), (closed, (y,))):
        evaluate(program, inputs, check)
    window_is_larger = x_shape[1] < w_shape[0]
    assert sorted(kinds) == [False, window_is_larger, True]


def evaluate(closed, inputs, check):
    """Evaluates a program, with a call `check(x, w, result, options)` for each convolution."""
    values = dict(zip((*closed.jaxpr.invars, *closed.jaxpr.constvars), (*inputs, *closed.consts)))
    for eqn in closed.jaxpr.eqns:
        arrays = [atom.val if hasattr(atom, "val") else values[atom] for atom in eqn.invars]
        results = eqn.primitive.bind(*arrays, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results))
        if eqn.primitive.name == "conv_general_dilated":
            check(*arrays, *results, eqn.params)

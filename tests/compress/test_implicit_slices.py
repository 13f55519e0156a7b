"""Slices, scans and lookups of implicit arrays whose sizes coincide: rank == inputs, one input, one
layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import compress
from fnet import transforms as ft


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def materialized(y):
    """A slice that the program returns as it is may be an implicit array."""
    return y.materialize() if isinstance(y, compress.ImplicitArray) else y


def low_rank(w, rank):
    found = compress.lora(jax.random.key(0), {"w": w}, {"w": rank})["w"]
    return dataclasses.replace(found, b=normal(*found.b.shape))


def int8(*shape, **options):
    return compress.quantize({"w": normal(*shape)}, {"w": compress.Int8(**options)})["w"]


ARRAYS = {
    "rank == inputs": lambda: (low_rank(normal(4, 4), 4), False),
    "rank == inputs, more outputs": lambda: (low_rank(normal(4, 6), 4), False),
    "rank == inputs of int8": lambda: (low_rank(int8(4, 6), 4), False),
    "stack of rank == inputs == depth": lambda: (low_rank(normal(4, 4, 4), 4), True),
    "stack of int8": lambda: (low_rank(int8(4, 4, 4), 4), True),
    "one input": lambda: (int8(1, 4), False),
    "one input in a stack": lambda: (int8(4, 1, 4), True),
    "stack of one layer": lambda: (int8(1, 4, 4), True),
    "scales of rows": lambda: (int8(4, 4, axes=-1), True),
    "scales of elements": lambda: (int8(4, 4, group=1), False),
    "one scale": lambda: (int8(4, 4, axes=(-2, -1)), False),
    "trained rounding": lambda: (
        compress.fake_quantize({"w": normal(1, 4)}, {"w": compress.Int8()})["w"],
        False,
    ),
    "stack of trained rounding": lambda: (
        compress.fake_quantize({"w": normal(1, 4, 4)}, {"w": compress.Int8()})["w"],
        True,
    ),
}


@functools.cache
def made(name):
    """(the array, whether its leading axis is one of layers); made for the first test that asks."""
    return ARRAYS[name]()


STARTS = (-9, -4, -2, -1, 0, 3, 9)


def dynamic(w):
    """Slices with starts before the first and behind the last row: JAX adds the length once, then
    clamps."""
    own = [
        lax.dynamic_slice(
            w,
            [jnp.int32(i), *[jnp.int32(-2)] * (w.ndim - 1)],
            (1, *w.shape[1:]),
            allow_negative_indices=False,
        )
        for i in STARTS
    ]
    return own, [lax.dynamic_index_in_dim(w, jnp.int32(i), 0) for i in STARTS]


PROGRAMS = {
    "dynamic": dynamic,
    "slice": lambda w: (w[1:3] + 0, w[0:1] * 1, w[::2] * 2),
    "scan": lambda w: lax.scan(lambda c, row: (0.5 * c + row.sum(), 2 * row), 0.0, w, reverse=True),
    "vmap": lambda w: jax.vmap(lambda row: jnp.sin(row).sum())(w),
    "batched product": lambda w: jnp.einsum("ni...,n...->i...", jnp.moveaxis(w, 0, 0)[:, None], w),
    "one row": lambda w: jnp.einsum("ni,i->n", w[0:1].reshape(1, -1), jnp.ones(w[0].size)),
    "lookups": lambda w: [
        w.at[jnp.array([0, -1, 9, -9])].get(mode=mode) for mode in ("clip", "fill")
    ],
}


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("array", ARRAYS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_slices(array, program):
    (w, _), f = made(array), PROGRAMS[program]
    got, expected = jax.jit(ft.use_implicit_arrays(f))(w), jax.jit(f)(w.materialize())
    got = jax.tree.map(materialized, got, is_leaf=lambda y: isinstance(y, compress.ImplicitArray))
    for y, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert y.shape == other.shape
        np.testing.assert_allclose(y, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("array", ARRAYS)
def test_leading_axis(array):
    w, leads = made(array)
    assert w.has_leading_axis is leads
    if leads:  # slices of the leaves are the slice of the array
        row = jax.tree.map(lambda leaf: leaf[0], w)
        np.testing.assert_allclose(row.materialize(), w.materialize()[0], rtol=1e-6)


def test_only_the_class_knows_its_leading_axis():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Outer(compress.ImplicitArray):
        left: jax.Array
        right: jax.Array
        shape = property(lambda self: (*self.left.shape, *self.right.shape))
        dtype = property(lambda self: self.left.dtype)

        def materialize(self):
            return jnp.outer(self.left, self.right)

    w = Outer(normal(4), normal(4))  # both leaves have the size of axis 0
    assert not w.has_leading_axis
    np.testing.assert_allclose(
        ft.use_implicit_arrays(lambda w: w[1:3] * 2)(w), 2 * w.materialize()[1:3], rtol=1e-6
    )


def test_a_vmap_over_an_input_axis_is_an_error():
    w = made("rank == inputs")[0]
    text = (
        r"(?s)LowRank: expected a base with 2 or more axes, got shape \(4,\). A scan or vmap over "
        r"this parameter "
        r"slices axis 0 .* Call ft.use_implicit_arrays\(f\) outside"
    )
    with pytest.raises(ValueError, match=text):
        jax.vmap(ft.use_implicit_arrays(lambda row: row.sum()))(w)
    np.testing.assert_allclose(
        ft.use_implicit_arrays(jax.vmap(jnp.sum))(w), w.materialize().sum(1), rtol=1e-5
    )

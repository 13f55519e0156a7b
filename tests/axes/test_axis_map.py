"""axis_map: the axes of each primitive, as text and by their effect on the values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet.axes._axis_map import AxisMap
from fnet.axes._resize import indices
from fnet.axes._table import axis_map, resized
from fnet.jaxpr._values import bind

F = np.float32


def rand(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(F)


def conv(x, w, **options):
    numbers = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, **options)


def batched_gather(x, at):
    numbers = lax.GatherDimensionNumbers((1,), (1,), (1,), (0,), (0,))
    return lax.gather(x, at, numbers, (1, 1, x.shape[2]))


AT = np.array([[0], [2]])
# Upper case: the size cannot change. A letter that is only on the left is summed over.
CASES = {
    "a b, a b -> a b": (jnp.add, rand(4, 6), rand(4, 6)),
    "a b, c b -> a b": (jnp.add, rand(4, 6), rand(1, 6)),
    "a b, () -> a b": (lambda x: x * 2.0, rand(4, 6)),
    "a b -> b a": (jnp.transpose, rand(4, 6)),
    "a b -> a": (lambda x: x.sum(1), rand(4, 6)),
    "a B -> a": (lambda x: x.max(1), rand(4, 6)),
    "A b -> b": (lambda x: x.argmax(0), rand(4, 6)),
    "A b -> A b": (lambda x: lax.cumsum(x, 0), rand(4, 6)),
    "a B, a B -> a B, a B": (lambda x, y: lax.sort((x, y), dimension=1), rand(4, 6), rand(4, 6)),
    "a B -> a B": (lambda x: lax.rev(x, (1,)), rand(4, 6)),
    "a -> b a": (lambda x: lax.broadcast_in_dim(x, (3, 4), (1,)), rand(4)),
    "a b -> a c b": (lambda x: lax.expand_dims(x, (1,)), rand(4, 6)),
    "a b c -> a c": (lambda x: lax.squeeze(x, (1,)), rand(4, 1, 6)),
    "a b -> (a b)": (lambda x: x.reshape(24), rand(4, 6)),
    "a (b c) -> (a b) c": (lambda x: x.reshape(12, 2), rand(4, 6)),
    "(a b) -> a b": (lambda x: x.reshape(3, 4), rand(12)),
    "a B C -> a D E": (lambda x: x.reshape(5, 3, 8), rand(5, 4, 6)),
    "a B C -> (a D) E": (lambda x: x.reshape(8, 45), rand(4, 9, 10)),
    "a B -> a C": (lambda x: lax.slice(x, (0, 1), (4, 6)), rand(4, 6)),
    "a (B c) -> a c": (lambda x: lax.slice(x, (0, 3), (4, 6)), rand(4, 6)),
    "a (B c) -> a c, a c": (lambda x: tuple(lax.split(x, (3, 3), axis=1)), rand(4, 6)),
    "a B -> a C, a D": (lambda x: tuple(lax.split(x, (2, 4), axis=1)), rand(4, 6)),
    "a b, a b -> (C a) b": (lambda x, y: lax.concatenate((x, y), 0), rand(4, 6), rand(4, 6)),
    "A b, C b -> D b": (lambda x, y: lax.concatenate((x, y), 0), rand(4, 6), rand(3, 6)),
    "a B, () -> a C": (lambda x: lax.pad(x, F(0), ((0, 0, 0), (1, 2, 0))), rand(4, 6)),
    "a b c, a c d -> a b d": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        rand(2, 4, 6),
        rand(2, 6, 3),
    ),
    "a B c, D c e -> a F e": (conv, rand(2, 5, 4), rand(3, 4, 6)),
    "a B (c d), E d (c f) -> a G (c f)": (
        lambda x, w: conv(x, w, feature_group_count=2),
        rand(2, 5, 4),
        rand(3, 2, 6),
    ),
    "a B c -> a D c": (
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        rand(2, 6, 3),
    ),
    "A b, c D -> c b": (
        lambda x, at: lax.gather(
            x, at, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, x.shape[1])
        ),
        rand(5, 6),
        AT,
    ),
    "a B c, a D -> a c": (batched_gather, rand(2, 5, 6), AT),
    "A b, c D, c b -> A b": (
        lambda x, at, y: lax.scatter_add(x, at, y, lax.ScatterDimensionNumbers((1,), (0,), (0,))),
        rand(5, 6),
        AT,
        rand(2, 6),
    ),
    "a B, a C, (), () -> a B": (
        lambda x, y: lax.dynamic_update_slice(x, y, (np.int32(0), np.int32(2))),
        rand(4, 6),
        rand(4, 2),
    ),
    "a B, (), () -> a C": (
        lambda x: lax.dynamic_slice(x, (np.int32(0), np.int32(2)), (x.shape[0], 2)),
        rand(4, 6),
    ),
}


def the_equation(f, args):
    (eqn,) = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return eqn


@pytest.mark.parametrize("text", CASES)
def test_the_axes_are_written_as_in_einops(text):
    f, *args = CASES[text]
    assert str(axis_map(the_equation(f, args))) == text


def cut(x, array, letter, kept, sizes):
    for i, axis in enumerate(array):
        if letter in axis:
            chosen = [kept if each == letter else None for each in axis]
            x = np.take(x, indices([sizes[each] for each in axis], chosen), axis=i)
    return x


def zeroed(x, array, letter, kept, sizes):
    for i, axis in enumerate(array):
        if letter in axis:
            chosen = [kept if each == letter else None for each in axis]
            mask = np.zeros(x.shape[i], bool)
            mask[indices([sizes[each] for each in axis], chosen)] = True
            x = np.where(np.expand_dims(mask, [j for j in range(x.ndim) if j != i]), x, 0)
    return x


@pytest.mark.parametrize("text", CASES)
def test_indices_of_a_letter_can_be_left_out(text):
    """Left out of the operands, they are left out of the results; the rest does not change."""
    f, *args = CASES[text]
    eqn, tried = the_equation(f, args), 0
    axes = axis_map(eqn)
    given = dict(zip(jax.make_jaxpr(f)(*args).jaxpr.invars, args))
    values = iter(given.values())
    arrays = [v.val if hasattr(v, "val") else next(values) for v in eqn.invars]
    for letter, size in axes.sizes.items():
        if letter in axes.fixed or size == 1:
            continue
        if not any(letter in axis for array in axes.operands for axis in array):
            continue
        kept = np.arange(size)[::2]
        smaller = [cut(x, each, letter, kept, axes.sizes) for x, each in zip(arrays, axes.operands)]
        summed = not any(letter in axis for array in axes.results for axis in array)
        whole = [
            zeroed(x, each, letter, kept, axes.sizes) if summed else x
            for x, each in zip(arrays, axes.operands)
        ]
        new: AxisMap = axes._replace(sizes={**axes.sizes, letter: len(kept)})
        found = bind(eqn, smaller, **(resized(eqn, new) or {}))
        wanted = bind(eqn, whole)
        for y, want, each in zip(found, wanted, axes.results):
            np.testing.assert_allclose(
                y.x, cut(np.asarray(want.x), each, letter, kept, axes.sizes), rtol=1e-5, atol=1e-6
            )
        tried += 1
    assert tried or not set(text) & set("abc")


@pytest.mark.parametrize(
    ("before", "after", "axis", "pieces", "want"),
    [
        ((12, 5), (3, 4, 5), 0, 3, 0),
        ((12, 5), (3, 4, 5), 0, 2, None),  # 6 of 12 rows are one and a half of 3 parts
        ((12, 5), (60,), 0, 4, 0),
        ((12, 5), (60,), 1, 5, None),
        ((1, 12), (3, 4), 1, 1, 0),
        ((6, 10), (4, 15), 0, 1, None),
        ((6, 10), (2, 3, 10), 1, 5, 2),
    ],
)
def test_an_axis_is_followed_through_a_reshape(before, after, axis, pieces, want):
    axes = axis_map(the_equation(lambda x: x.reshape(after), [rand(*before)]))
    assert axes.follow(0, axis, pieces) == [want]


def test_calls_and_unknown_primitives_have_no_map():
    assert axis_map(the_equation(jax.jit(jnp.sin), [rand(3)])) is None
    assert axis_map(the_equation(lambda x: lax.linalg.qr(x), [rand(3, 3)])) is None

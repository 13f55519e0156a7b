"""axis_map: the axes of each primitive, as text and by their effect on the values."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import layers as nn
from fnet.axes._axis_map import AxisMap
from fnet.axes._resize import indices
from fnet.axes._table import _RULES, axis_map, resized
from fnet.jaxpr._calls import bodies
from fnet.jaxpr._values import bind

F = np.float32


SEEDS = itertools.count()


def rand(*shape):
    return np.random.default_rng(next(SEEDS)).normal(size=shape).astype(F)


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
    "a b, a b -> a C b": (lambda x, y: jnp.stack([x, y], 1), rand(4, 6), rand(4, 6)),
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
    "A b, C D, C b -> A b": (
        lambda x, at, y: lax.scatter_add(x, at, y, lax.ScatterDimensionNumbers((1,), (0,), (0,))),
        rand(5, 6),
        AT,
        rand(2, 6),
    ),
    "a b -> (C a) (D b)": (lambda x: lax.tile(x, (2, 3)), rand(4, 6)),
    "a B -> a, a": (lambda x: tuple(jnp.unstack(x, axis=1)), rand(4, 2)),
    "A b, C D, C b -> A b (set)": (
        lambda x, at, y: lax.scatter(x, at, y, lax.ScatterDimensionNumbers((1,), (0,), (0,))),
        rand(5, 6),
        AT,
        rand(2, 6),
    ),
    "a B, a C, a -> a B": (
        lambda x, at, y: lax.scatter_add(
            x, at, y, lax.ScatterDimensionNumbers((), (1,), (1,), (0,), (0,))
        ),
        rand(2, 5),
        AT,
        rand(2),
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


def equations(program):
    """The equations of a jaxpr, those of calls instead of the calls."""
    for eqn in program.eqns:
        inside = bodies(eqn)
        yield from equations(inside[0].jaxpr) if inside else (eqn,)


def the_equation(f, args, name=""):
    found = equations(jax.make_jaxpr(f)(*args).jaxpr)
    (eqn,) = (eqn for eqn in found if eqn.primitive.name.startswith(name))
    return eqn


@pytest.mark.parametrize("text", CASES)
def test_the_axes_are_written_as_in_einops(text):
    f, *args = CASES[text]
    assert str(axis_map(the_equation(f, args))) == text.removesuffix(" (set)")


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
    values = iter(args)
    arrays = [v.val if hasattr(v, "val") else next(values) for v in eqn.invars]
    for letter, size in axes.sizes.items():
        if letter in axes.fixed or size == 1:
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


# Rules that give every array the same axes, or create or look at arrays without numbers.
WITHOUT_CASES = {
    *("name", "optimization_barrier", "pvary", "pbroadcast", "device_put", "copy_p", "site"),
    *("iota", "empty", "bitcast_convert_type", "expand_dims", "squeeze"),
    *(f"random_{name}" for name in ("bits", "seed", "wrap", "unwrap", "fold_in")),
}
# Other names of a rule that has a case.
LIKE_OTHERS = {
    *(f"reduce_{name}" for name in ("min", "prod", "and", "or", "xor")),
    *(f"cum{name}" for name in ("prod", "max", "min", "logsumexp")),
    *("argmin", "reduce_window_sum", "reduce_window_min"),
    *(f"scatter{name}" for name in ("-sub", "-mul", "-min", "-max")),
}


def test_each_rule_has_a_case():
    tried = {the_equation(f, args).primitive.name for f, *args in CASES.values()}
    assert set(_RULES) - WITHOUT_CASES - LIKE_OTHERS <= tried
    assert not tried & LIKE_OTHERS


def test_keys_keep_their_axes():
    keys = jax.random.split(jax.random.key(0), 4)
    for f in (
        jax.vmap(jax.random.bits),
        jax.vmap(lambda key: jax.random.bits(key, (3,))),
        jax.vmap(lambda key: jax.random.fold_in(key, 1)),
    ):
        assert axis_map(the_equation(f, [keys], "random_")).follow(0, 0) == [0]


def test_the_heads_of_attention_are_split_over_more_devices_than_groups():
    attend = functools.partial(nn.dot_product_attention, causal=True)
    q, k = rand(2, 4, 8, 16), rand(2, 4, 2, 16)
    axes = axis_map(the_equation(attend, [q, k, k], "attention"))
    found = {pieces: axes.follow(0, 2, pieces) for pieces in (1, 2, 3, 4, 8)}
    assert found == {1: [2], 2: [2], 3: [None], 4: [2], 8: [2]}


def test_calls_and_unknown_primitives_have_no_map():
    (call,) = jax.make_jaxpr(jax.jit(jnp.sin))(rand(3)).jaxpr.eqns
    assert axis_map(call) is None
    assert axis_map(the_equation(lambda x: lax.linalg.qr(x), [rand(3, 3)])) is None

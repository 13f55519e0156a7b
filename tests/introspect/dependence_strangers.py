"""Programs that state which positions of an axis depend on which, written without looking at any
analysis of it, and `observed`, which finds out by running them.

For each axis, a program states three truths, for arbitrary inputs:

- `independent`: the bits of output position i never change, whatever is in the other input
  positions, NaN and infinities included.
- `causal`, for ordered axes: the same for input positions after i.
- `finite`: the causal claim where the axis has one, and otherwise the independent claim, if all
  numbers that the program computes are finite and below 1e30. Values count then, and not bits, so
  both zeros are equal.

A product with zero passes on NaN (0 * NaN), so a mask that multiplies has independent=False and
finite=True. Shared arguments (axis None) are arbitrary, too: a table may contain NaN.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import layers as fn
from fnet import models
from fnet import transforms as ft

B, T, D, HEADS, VOCABULARY = 3, 5, 8, 2, 7


class Program(NamedTuple):
    """A pure function, its arguments and what is true of it.

    Attributes:
        f: the function.
        args: concrete arrays, or trees of them.
        axes: axis name -> (in_axes, out_axes) as in `jax.vmap`, or one number for all arrays.
        independent, causal, finite: axis name -> the truth, see the docstring of the module.
    """

    f: Callable
    args: tuple
    axes: dict[str, Any]
    independent: dict[str, bool]
    causal: dict[str, bool]
    finite: dict[str, bool]


class Claim(NamedTuple):
    """What is true of one axis. `causal` is None for an axis without order."""

    axes: Any
    independent: bool
    causal: bool | None
    finite: bool


def _claim(independent: bool, causal: bool | None, finite: bool) -> Callable[..., Claim]:
    return lambda *axes: Claim(axes[0] if len(axes) == 1 else axes, independent, causal, finite)


independent = _claim(True, True, True)
causal = _claim(False, True, True)
mixes = _claim(False, None, False)  # no order; depends on other positions
foresees = _claim(False, False, False)  # ordered; depends on later positions
mixes_nan = _claim(False, None, True)  # finite: about independence; only NaN, Inf or signs of zero
foresees_nan = _claim(False, False, True)  # finite: about causality


class Programs(Mapping):
    """name -> Program, built when it is asked for: nobody pays for models that no test uses. Skips
    the test that asks for a package that is not installed."""

    def __init__(self):
        self._makers: dict[str, Callable[[], Program]] = {}

    def __getitem__(self, name: str) -> Program:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def add(self, name: str, make: Callable[[], tuple], claims: dict[str, Claim]) -> None:
        assert name not in self._makers, name

        @functools.cache
        def made() -> Program:
            f, args = relaxed(make)()
            return Program(
                relaxed(f),
                args,
                {axis: claim.axes for axis, claim in claims.items()},
                {axis: claim.independent for axis, claim in claims.items()},
                {a: claim.causal for a, claim in claims.items() if claim.causal is not None},
                {axis: claim.finite for axis, claim in claims.items()},
            )

        self._makers[name] = made


PROGRAMS = Programs()


def program(*args: Any, **claims: Claim) -> Callable:
    """Adds the decorated function to `PROGRAMS`, with these arguments and truths."""

    def add(f: Callable) -> Callable:
        PROGRAMS.add(f.__name__, lambda: (f, args), claims)
        return f

    return add


def built(**claims: Claim) -> Callable:
    """Adds what the decorated function makes: (f, args)."""

    def add(make: Callable) -> Callable:
        PROGRAMS.add(make.__name__, make, claims)
        return make

    return add


def relaxed(f: Callable) -> Callable:
    """The function under JAX's default promotion, as strangers write theirs."""

    @functools.wraps(f)
    def run(*args):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return f(*args)

    return run


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    draws = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return draws.astype(dtype)


def integers(high: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).integers(0, high, shape, np.int32)


def filled(shapes: Any) -> Any:
    """Arrays for a tree of shapes, drawn from their paths. Variances and scales are positive."""

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(leaf.shape)
        values = 0.5 + values**2 if "var" in name or "scale" in name else 0.5 * values
        return values.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


# What happens, by running.

LARGE = {"all": 1e30, "finite": 1e12}  # its square is finite, and below 1e30
VALUES = {
    "all": ("draw", np.nan, np.inf, -np.inf, LARGE["all"], -0.0, "swap"),
    "finite": ("draw", LARGE["finite"], -0.0, "swap"),
}


def observed(program: Program, axis: str, values: str = "all") -> np.ndarray:
    """Returns which output positions of an axis change with which input positions, a boolean matrix
    [output positions, input positions], by running the program.

    Each input position in turn is replaced in all arrays that have the axis: by other random
    numbers, NaN, infinities, 1e30 and -0.0, integers and booleans by values from other positions,
    and the position is exchanged with the next one. Outputs are compared bit by bit; NaN equals
    NaN. Where an exchange changes a third output that neither of the two positions changed alone,
    it counts as a change by the earlier of the two.

    Args:
        program: the program.
        axis: the name of the axis.
        values: "finite" replaces only by finite numbers, after replacing NaN and infinities in the
            arguments, and 0.0 equals -0.0.
    """
    axes = program.axes[axis]
    in_axes, out_axes = (axes, axes) if isinstance(axes, int) else axes
    leaves, structure = jax.tree.flatten(program.args)
    at = _spread(in_axes, program.args)
    if values == "finite":
        leaves = [np.nan_to_num(leaf) if _inexact(leaf) else leaf for leaf in leaves]
    [count] = {np.shape(leaf)[place] for leaf, place in zip(leaves, at) if place is not None}
    run = jax.jit(program.f)

    def outputs(leaves):
        results = run(*jax.tree.unflatten(structure, leaves))
        places = _spread(out_axes, results)
        return [
            _bits(np.moveaxis(_array(leaf), place, 0), values == "finite")
            for leaf, place in zip(jax.tree.leaves(results), places)
            if place is not None
        ]

    before = outputs(leaves)
    assert {len(leaf) for leaf in before} == {count}, "as many output as input positions"
    draw = np.random.default_rng(0)
    seen, exchanged = np.zeros((count, count), bool), []
    for j in range(count):
        for value in VALUES[values]:
            other = (j + 1) % count
            after = outputs(
                [
                    leaf if place is None else _replaced(leaf, place, j, other, value, draw)
                    for leaf, place in zip(leaves, at)
                ]
            )
            changed = np.zeros(count, bool)
            for a, b in zip(before, after):
                changed |= (a != b).reshape(count, -1).any(1)
            if value == "swap":
                exchanged.append((j, other, changed))
            else:
                seen[:, j] |= changed
    for j, other, changed in exchanged:
        changed[[j, other]] = False
        seen[:, min(j, other)] |= changed & ~seen[:, j] & ~seen[:, other]
    return seen


def _spread(axes: Any, tree: Any) -> list:
    """The axis of each leaf, for axes that are a prefix of the tree as in `jax.vmap`."""
    none = object()  # None is a leaf here
    axes = jax.tree.map(lambda a: none if a is None else a, axes, is_leaf=lambda a: a is None)
    if isinstance(axes, list):
        axes = tuple(axes)
    spread = jax.tree.broadcast(axes, tree)
    return [None if a is none else a for a in jax.tree.leaves(spread)]


def _inexact(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _array(leaf: Any) -> np.ndarray:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def _replaced(leaf, place, j, other, value, draw):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # any bits are a key
        data = _replaced(jax.random.key_data(leaf), place, j, other, value, draw)
        return jax.random.wrap_key_data(data)
    leaf = np.array(leaf)
    rows = np.moveaxis(leaf, place, 0)
    if value == "swap":
        rows[[j, other]] = rows[[other, j]]
    elif not _inexact(leaf):
        rows[j] = draw.choice(leaf.ravel(), rows[j].shape)
    else:
        value = draw.standard_normal(rows[j].shape) if value == "draw" else value
        rows[j] = np.asarray(value).astype(leaf.dtype)
    return leaf


def _bits(x: np.ndarray, zeros_equal: bool) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = np.stack([x.real, x.imag], -1)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = np.where(np.isnan(x), np.array(np.nan, x.dtype), x)
    if zeros_equal:
        x = np.where(x == 0, np.array(0, x.dtype), x)
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


# The arguments of most programs: x [b, t, d], rows [b, d], tokens [b, t], weights.

X, ROWS = normal(B, T, D), normal(B, D, seed=1)
X6 = normal(B, 6, D, seed=2)  # for strides of 2 and 3
TOKENS = integers(VOCABULARY, B, T)
LENGTHS = np.array([5, 2, 4], np.int32)
SQUARE = normal(D, D, seed=3) / 3
UP, DOWN = normal(D, 6, seed=4), normal(6, D, seed=5)
MIX = normal(T, T, seed=6)
KERNEL = normal(3, D, D, seed=7)  # of a convolution over time
QUERY, KEY, VALUE = (normal(D, D, seed=seed) / 3 for seed in (8, 9, 10))
TRIL = np.tril(np.ones((T, T), bool))
TBD = np.swapaxes(X, 0, 1)  # time first


def random_key(seed: int = 0) -> jax.Array:
    return jax.random.wrap_key_data(np.array([0, seed], np.uint32))


# Plain functions: positions apart, or products over an axis.


@program(X, b=independent(0), t=independent(1), d=independent(2))
def elementwise(x):
    return jnp.tanh(x) * 2 + 1 / (1 + jnp.exp(-x))


@program(X, b=independent(0), t=independent(1))
def softmax_over_features(x):
    return jax.nn.softmax(x, -1)


@program(X, b=mixes(0), t=independent(1))
def softmax_over_the_batch(x):
    return jax.nn.softmax(x, 0)


@program(
    SQUARE,
    X,
    b=independent((None, 0), 0),
    t=independent((None, 1), 1),
    e=independent((1, None), 2),  # columns of the weights
)
def dense(w, x):
    return jnp.einsum("btd,de->bte", x, w)


@program(X, b=independent(0), t=independent(1))
def mlp_of_constants(x):
    return jax.nn.gelu(x @ UP) @ DOWN + x


@program(MIX, X, b=independent((None, 0), 0), t=foresees((None, 1), 1))
def einsum_over_time(w, x):
    return jnp.einsum("ts,bsd->btd", w, x)


# finite: about causality. The weights of later positions are 0.
@program(MIX, X, b=independent((None, 0), 0), t=foresees_nan((None, 1), 1))
def einsum_over_time_with_a_triangle(w, x):
    return jnp.einsum("ts,bsd->btd", jnp.tril(w), x)


@program(ROWS, b=mixes(0))
def einsum_of_all_pairs_of_rows(x):
    return jnp.einsum("id,jd->ij", x, x)


@program(normal(B, D, seed=11), ROWS, b=independent(0))
def einsum_of_own_pairs(x, y):
    return jnp.einsum("bd,bd->b", x, y)


# Element [i, i] of a product is computed from row i alone.
@program(ROWS, b=independent(0))
def diagonal_of_all_pairs(x):
    return jnp.diagonal(x @ x.T)


@program(normal(B, B, D), b=independent(0))
def einsum_with_a_repeated_index(x):
    return jnp.einsum("iid->id", x)


@program(SQUARE, ROWS, b=independent((None, 0), 0))
def vmap_of_a_function_of_one_row(w, x):
    return jax.vmap(lambda row: jnp.tanh(w @ row) / jnp.linalg.norm(row))(x)


@program(X, b=independent(0), t=independent(1))
def vmaps_over_other_axes(x):
    return jax.vmap(jax.vmap(jax.nn.log_softmax, 1, 1), 0, 0)(x.swapaxes(1, 2)).swapaxes(1, 2)


@program(X, b=independent(0, 2), t=independent(1, 1), d=independent(2, 0))
def transpose_to_other_axes(x):
    return x.transpose(2, 1, 0) ** 2


@program(
    {"x": X, "y": normal(T, B)},
    np.float32(3),
    b=independent(({"x": 0, "y": 1}, None), (0, -1)),
    t=independent(({"x": -2, "y": 0}, None), (1, -2)),
)
def trees_with_their_own_axes(tree, scale):
    x, y = tree["x"], tree["y"]
    return x * scale + y.T[..., None], y - x.sum(-1).T


@program(X.astype(jnp.bfloat16), b=independent(0), t=independent(1))
def bfloat16_in_float32(x):
    return (x.astype(jnp.float32).mean(-1, keepdims=True) * x).astype(jnp.bfloat16)


@program(X.astype(jnp.complex64), b=independent(0), t=independent(1))
def complex_numbers(x):
    return jnp.exp(1j * x.real) * x.conj()


@program(X, b=independent(0), t=independent(1))
def bits_of_pairs_of_features(x):
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16).reshape(B, T, D // 2, 2), jnp.uint32)
    return bits ^ (bits >> 1)


@program(X, b=independent(0), t=foresees(1))
def mean_over_time(x):
    return x - x.mean(1, keepdims=True)


@program(X, b=mixes(0), t=independent(1))
def subtracts_the_batch_mean(x):
    return x - x.mean(0)


@program(ROWS, b=mixes(0))
def mean_of_the_other_rows(x):
    return (x.sum(0) - x) / (B - 1)


@program(ROWS, b=mixes(0))
def divides_by_the_largest_of_all(x):
    return x / jnp.abs(x).max()


@program(ROWS, b=mixes(0))
def quantized_with_one_scale(x):
    scale = jnp.abs(x).max() / 127
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8)


@program(X, b=independent(0), t=independent(1))
def quantized_with_a_scale_per_token(x):
    scale = jnp.abs(x).max(-1, keepdims=True) / 127
    return jnp.clip(jnp.round(x / scale), -127, 127).astype(jnp.int8), scale


@program(ROWS, b=mixes(0))
def median_of_the_batch(x):
    return x > jnp.median(x, 0)


@program(ROWS, b=mixes(0))
def first_row_subtracted(x):
    return x - x[:1]


@program(ROWS, b=mixes(0))
def weights_from_the_first_row(x):
    return jnp.tanh(x @ jnp.outer(x[0], x[0]))


# Loops.


@program(X, b=independent(0), t=causal(1))
def scan_over_time(x):
    def step(carry, row):
        carry = 0.9 * carry + jnp.tanh(row)
        return carry, carry

    return lax.scan(step, jnp.zeros((B, D)), x.swapaxes(0, 1))[1].swapaxes(0, 1)


@program(TBD, b=independent(1), t=foresees(0))
def scan_in_reverse(x):
    step = lambda carry, row: (0.9 * carry + row, carry)
    return lax.scan(step, jnp.zeros((B, D)), x, reverse=True, unroll=2)[1]


@program(TBD, b=independent(1), t=causal(0))
def scan_in_reverse_over_reversed_time(x):
    def step(carry, row):
        carry = 0.9 * carry + row
        return carry, carry

    return lax.scan(step, jnp.zeros((B, D)), x[::-1], reverse=True)[1][::-1]


@program(TBD, b=independent(1), t=foresees(0))
def scan_over_inputs_shifted_to_the_left(x):
    step = lambda carry, row: (carry + row, carry + row)
    return lax.scan(step, jnp.zeros((B, D)), jnp.concatenate([x[1:], x[:1]]))[1]


@program(X, b=mixes(0), t=independent(1))
def scan_over_the_batch_with_a_sum(x):
    return lax.scan(lambda carry, row: (carry + row, carry * row), jnp.ones((T, D)), x)[1]


@program(X, b=independent(0), t=independent(1))
def scan_over_the_batch_with_a_counter(x):
    step = lambda i, row: (i + 1, row * (i.astype(jnp.float32) + 1))
    return lax.scan(step, jnp.int32(0), x)[1]


@program(X, b=independent(0), t=foresees(1))
def map_over_rows(x):
    return lax.map(lambda row: jnp.tanh(row) @ row.T, x)


@program(X, b=independent(0), t=independent(1))
def map_in_batches(x):
    return lax.map(lambda row: jax.nn.softmax(row), x, batch_size=2)


@program(X, b=independent(0), t=independent(1))
def scan_over_layers(x):
    step = lambda x, w: (x + jnp.tanh(x @ w), None)
    return lax.scan(step, x, normal(3, D, D) / 3)[0]


@program(X, b=independent(0), t=causal(1))
def scan_with_a_history(x):
    def step(history, at):
        i, row = at
        history = lax.dynamic_update_index_in_dim(history, row, i, 1)
        return history, history.sum(1)

    times = jnp.arange(T), x.swapaxes(0, 1)
    return lax.scan(step, jnp.zeros_like(x), times)[1].swapaxes(0, 1)


@program(X, b=independent(0), t=foresees(1))
def scan_with_a_history_of_all_inputs(x):
    def step(history, i):  # the history begins as x, not as zeros
        history = lax.dynamic_update_index_in_dim(history, history[:, i] * 2, i, 1)
        return history, history.sum(1)

    return lax.scan(step, x, jnp.arange(T))[1].swapaxes(0, 1)


@program(np.abs(ROWS), b=independent(0))
def while_with_its_own_trip_count_in_each_row(x):
    def halve(row):
        go = lambda state: (state[0] < 20) & (state[1].max() > 0.1)
        return lax.while_loop(go, lambda state: (state[0] + 1, state[1] / 2), (0, row))

    return jax.vmap(halve)(x)


@program(np.abs(ROWS), b=mixes(0))
def while_until_all_rows_are_small(x):
    go = lambda state: (state[0] < 20) & (state[1].max() > 0.1)
    return lax.while_loop(go, lambda state: (state[0] + 1, state[1] / 2), (0, x))[1]


# A row that has ended stays as it is, however long the others take.
@program(np.abs(ROWS), b=independent(0))
def while_with_frozen_rows(x):
    active = lambda x: x.max(1, keepdims=True) > 0.1

    def halve(state):
        i, x = state
        return i + 1, jnp.where(active(x), x / 2, x)

    return lax.while_loop(lambda state: (state[0] < 20) & active(state[1]).any(), halve, (0, x))[1]


@program(X, b=independent(0), t=causal(1))
def fori_over_time(x):
    def body(i, out):
        before = lax.dynamic_index_in_dim(out, jnp.maximum(i - 1, 0), 1, keepdims=False)
        return out.at[:, i].set(jnp.tanh(before + x[:, i]))

    return lax.fori_loop(0, T, body, jnp.zeros_like(x))


@program(X, b=independent(0), t=foresees(1))
def fori_over_time_in_place(x):
    body = lambda i, x: x.at[:, i].add(x[:, (i + 1) % T])  # x[:, T] is x[:, 0], which is a sum
    return lax.fori_loop(0, T, body, x)


@program(ROWS, np.array([4, 1, 2], np.int32), b=independent(0))
def fori_with_a_count_in_each_row(x, counts):
    return jax.vmap(lambda row, n: lax.fori_loop(0, n, lambda i, y: jnp.sin(y) + i, row))(x, counts)


@program(ROWS, np.array([4, 1, 2], np.int32), b=mixes(0))
def fori_with_the_count_of_the_first_row(x, counts):
    return lax.fori_loop(0, counts[0], lambda i, y: jnp.sin(y) + i, x)


@program(ROWS - ROWS.mean() - 0.1, b=mixes(0))
def cond_on_the_sum_of_all(x):
    return lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)


# x + x and x * 2 have the same bits.
@program(ROWS - ROWS.mean() - 0.1, b=independent(0))
def cond_on_the_sum_of_all_with_equal_branches(x):
    return lax.cond(x.sum() > 0, lambda x: x + x, lambda x: x * 2, x)


@program(ROWS, b=independent(0))
def vmapped_cond(x):
    return jax.vmap(lambda row: lax.cond(row.sum() > 0, jnp.sin, jnp.cos, row))(x)


@program(ROWS, np.array([2, 0, 1], np.int32), b=independent(0))
def vmapped_switch(x, which):
    branches = jnp.sin, lambda row: row[::-1], lambda row: jnp.full_like(row, row.max())
    return jax.vmap(lambda i, row: lax.switch(i, branches, row))(which, x)


@program(ROWS, b=mixes(0))
def switch_on_the_largest_row(x):
    return lax.switch(x.sum(1).argmax(), [jnp.sin, jnp.cos, jnp.tanh], x)


@program(TBD, b=independent(1), t=causal(0))
def switch_on_time_in_a_scan(x):
    def step(carry, at):
        i, row = at
        carry = lax.switch(i % 3, [jnp.add, jnp.subtract, lambda a, b: a], carry, row)
        return carry, carry

    return lax.scan(step, jnp.zeros((B, D)), (jnp.arange(T), x))[1]


# Cumulative operations, sorting, Fourier transforms.


@program(X, b=independent(0), t=causal(1))
def cumulative_sum_product_and_maximum(x):
    return jnp.cumsum(x, 1), jnp.cumprod(x, 1), lax.cummax(x, 1), lax.cumlogsumexp(x, 1)


@program(X, b=independent(0), t=foresees(1))
def cumulative_sum_in_reverse(x):
    return lax.cumsum(x, 1, reverse=True)


@program(X, b=independent(0), t=causal(1))
def reverse_cumulative_sum_between_flips(x):
    return jnp.flip(lax.cumsum(jnp.flip(x, 1), 1, reverse=True), 1)


@program(X, b=independent(0), t=foresees(1))
def cumulative_sum_between_flips(x):
    return x[:, ::-1].cumsum(1)[:, ::-1]


@program(X, b=independent(0), t=foresees(1))
def total_minus_the_cumulative_sum(x):
    return x.sum(1, keepdims=True) - jnp.cumsum(x, 1)


# The total cancels up to rounding: not even finite.
@program(X, b=independent(0), t=foresees(1))
def cumulative_sum_from_the_end(x):
    rest = x.sum(1, keepdims=True) - jnp.cumsum(x, 1)
    return x.sum(1, keepdims=True) - rest


@program(ROWS, b=mixes(0))
def cumulative_sum_then_differences(x):
    return jnp.diff(jnp.cumsum(x, 0), axis=0, prepend=0)  # x, up to rounding


@program(X, X / 3, b=independent(0), t=causal(1))
def associative_scan_of_a_recurrence(a, x):
    combine = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    return lax.associative_scan(combine, (jnp.tanh(a), x), axis=1)[1]


@program(X, X / 3, b=independent(0), t=foresees(1))
def associative_scan_in_reverse(a, x):
    combine = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    return lax.associative_scan(combine, (jnp.tanh(a), x), axis=1, reverse=True)[1]


@program(X, b=independent(0), t=independent(1))
def sort_features(x):
    return jnp.sort(x, -1), jnp.argsort(x, -1)


@program(X, b=independent(0), t=foresees(1))
def sort_over_time(x):
    return jnp.sort(x, 1)


@program(ROWS, b=mixes(0))
def sort_the_batch_by_its_first_feature(x):
    return x[jnp.argsort(x[:, 0])]


# Moved and moved back: the identity, also for NaN and zeros, because the order is stable.
@program(ROWS, b=independent(0))
def sort_then_unsort(x):
    order = jnp.argsort(x, 0)
    return jnp.take_along_axis(jnp.sort(x, 0), jnp.argsort(order, 0), 0)


@program(ROWS, b=mixes(0))
def sort_then_subtract_neighbors_then_unsort(x):
    order = jnp.argsort(x, 0)
    values = jnp.sort(x, 0)
    return jnp.take_along_axis(values - jnp.roll(values, 1, 0), jnp.argsort(order, 0), 0)


@program(X, normal(B, T), b=independent(0), t=foresees(1))
def sort_over_time_by_keys(x, keys):
    return jax.vmap(lambda key, row: lax.sort((key, *row.T), num_keys=1)[1])(keys, x)


@program(X, b=independent(0), t=independent(1))
def top_k_of_the_features(x):
    values, places = lax.top_k(x, 3)
    return (
        jnp.zeros_like(x)
        .at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], places]
        .set(values)
    )


@program(X, b=independent(0), t=foresees(1))
def top_k_over_time(x):
    threshold = lax.top_k(x.swapaxes(1, 2), 2)[0][..., -1]
    return jnp.where(x >= threshold[:, None], x, 0)


@program(normal(B, D), ROWS, b=independent(0))
def search_in_the_own_row(grid, x):
    return jax.vmap(jnp.searchsorted)(jnp.sort(grid), x)


@program(normal(B, seed=12), b=mixes(0))
def rank_in_the_batch(x):
    return jnp.searchsorted(jnp.sort(x), x)


@program(X, b=independent(0), t=independent(1))
def fourier_transform_of_features(x):
    return jnp.fft.rfft(x, axis=-1)


@program(X, b=independent(0), t=foresees(1))
def fourier_transform_over_time(x):
    return jnp.fft.fft(x, axis=1)


# Causal on paper, but rounding depends on all positions: not even finite.
@program(X, b=independent(0), t=foresees(1))
def causal_convolution_by_fourier_transforms(x):
    spectrum = jnp.fft.rfft(x, 2 * T, 1) * jnp.fft.rfft(normal(T, D), 2 * T, 0)
    return jnp.fft.irfft(spectrum, 2 * T, 1)[:, :T]


@program(ROWS, b=mixes(0))
def fourier_transform_of_the_batch_and_back(x):
    return jnp.fft.ifft(jnp.fft.fft(x, axis=0), axis=0).real


# Convolutions and pooling.

CONV = "NTC", "TIO", "NTC"


def conv(x, kernel=KERNEL, strides=1, padding="SAME", dims=CONV, **options):
    return lax.conv_general_dilated(
        x, kernel, (strides,), padding, dimension_numbers=dims, **options
    )


@program(X, b=independent(0), t=foresees(1))
def convolution(x):
    return conv(x)


@program(KERNEL, X, b=independent((None, 0), 0), t=causal((None, 1), 1))
def causal_convolution(kernel, x):
    return conv(x, kernel, padding=[(2, 0)])


@program(X, b=independent(0), t=causal(1))
def causal_convolution_by_padding_first(x):
    return conv(jnp.pad(x, ((0, 0), (4, 0), (0, 0))), padding="VALID", rhs_dilation=(2,))


@program(X, b=independent(0), t=foresees(1))
def dilated_convolution_with_the_padding_of_an_undilated_one(x):
    return conv(x, padding=[(2, 2)], rhs_dilation=(2,))


@program(X, b=independent(0), t=causal(1))
def grouped_causal_convolution(x):
    return conv(x, normal(2, 2, D), padding=[(1, 0)], feature_group_count=4)


@program(X, b=independent(0), t=independent(1))
def convolution_of_size_one(x):
    return conv(x, KERNEL[:1])


# The kernel covers three positions, but its last element is cut off.
@program(X, b=independent(0), t=causal(1))
def convolution_without_the_last_element_of_its_kernel(x):
    return conv(x, KERNEL[:2], padding=[(1, 0)])


# finite: about causality. The last element of the kernel is 0.
@program(X, b=independent(0), t=foresees_nan(1))
def convolution_with_zeros_in_its_kernel(x):
    return conv(x, KERNEL * np.array([1, 1, 0], np.float32)[:, None, None])


@program(X6, b=independent(0), t=causal(1))
def strided_causal_convolution_then_repeat(x):
    return jnp.repeat(conv(x, strides=2, padding=[(2, 0)]), 2, 1)


@program(X6, b=independent(0), t=foresees(1))
def strided_convolution_then_repeat(x):
    return jnp.repeat(conv(x, strides=2, padding=[(1, 0)]), 2, 1)


@program(X6, b=independent(0), t=causal(1))
def transposed_convolution_of_every_third_position(x):
    return conv(x[:, ::3], padding=[(2, 2)], lhs_dilation=(3,))


@program(normal(4, T, D), b=mixes(0), t=foresees(1))
def convolution_with_batch_groups(x):
    kernel = normal(3, D, 4, seed=13)
    y = conv(x, kernel, batch_group_count=2)  # [2, t, 4]
    return jnp.concatenate([y, y])


@program(X, b=mixes(0), t=independent(1))
def convolution_along_the_batch(x):
    return conv(x, dims=("TNC", "TIO", "TNC"))


@program(X, b=independent(0), t=causal(1))
def convolve_of_numpy(x):
    return jax.vmap(jax.vmap(lambda x: jnp.convolve(x, normal(3))[:T], 1, 1))(x)


@program(X, b=independent(0), t=foresees(1))
def maximum_of_neighbors(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), "SAME")


@program(X, b=independent(0), t=causal(1))
def maximum_of_the_last_three(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), ((0, 0), (2, 0), (0, 0)))


@program(X, b=mixes(0), t=independent(1))
def moving_average_over_rows(x):
    return lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME") / 2


# A pair of positions sees its own mean.
@program(X6, b=independent(0), t=foresees(1))
def down_and_up(x):
    pairs = x.reshape(B, 3, 2, D).mean(2)
    return x + jnp.repeat(pairs, 2, 1)


# A pair of positions sees the mean of the pair before.
@program(X6, b=independent(0), t=causal(1))
def down_and_up_shifted_by_a_pair(x):
    pairs = x.reshape(B, 3, 2, D).mean(2)
    pairs = jnp.pad(pairs, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    return x + jnp.repeat(pairs, 2, 1)


# Movement: rolls, flips, gathers, scatters, slices, merged and split axes.


@program(X, b=independent(0), t=foresees(1))
def roll_over_time(x):
    return jnp.roll(x, 1, 1)  # the last comes first


@program(X, b=independent(0), t=causal(1))
def shift_to_the_right(x):
    return jnp.concatenate([jnp.zeros((B, 1, D)), x[:, :-1]], 1)


@program(X, b=independent(0), t=causal(1))
def roll_with_the_first_replaced(x):
    return jnp.roll(x, 1, 1).at[:, 0].set(0)


@program(X, b=independent(0), t=causal(1))
def pad_with_a_negative_number(x):
    return lax.pad(x, 0.0, ((0, 0, 0), (1, -1, 0), (0, 0, 0)))


@program(X, b=independent(0), t=foresees(1))
def shift_to_the_left(x):
    return x * jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))


@program(X, b=mixes(0), t=independent(1))
def roll_over_the_batch(x):
    return x + jnp.roll(x, 1, 0)


@program(X, b=independent(0), t=independent(1))
def roll_there_and_back(x):
    return jnp.roll(jnp.tanh(jnp.roll(x, (1, 2), (0, 1))), (-1, -2), (0, 1))


@program(X, b=independent(0), t=independent(1))
def roll_by_the_whole_length(x):
    return jnp.roll(x, (B, -T), (0, 1))


@program(ROWS, np.array([3, 1, 5], np.int32), b=mixes(0))
def roll_by_a_number_in_the_data(x, shift):
    return jnp.roll(x, shift[0], 0)


@program(X, b=mixes(0), t=foresees(1))
def flip(x):
    return jnp.flip(x, (0, 1))


@program(X, b=independent(0), t=independent(1))
def flips_that_cancel(x):
    y = jnp.tanh(x[::-1, ::-1] + 1)
    return y[jnp.arange(B - 1, -1, -1)][:, np.arange(T)[::-1]]


@program(X, b=mixes(0), t=independent(1))
def constant_permutation_of_rows(x):
    return x[np.array([2, 0, 1])]


@program(X, b=independent(0), t=independent(1))
def constant_permutation_and_its_inverse(x):
    order = np.array([2, 0, 1])
    return (x[order] * 2)[np.argsort(order)]


@program(random_key(), ROWS, b=independent((None, 0), 0))
def random_permutation_and_its_inverse(key, x):
    order = jax.random.permutation(key, B)
    return jnp.sin(x[order])[jnp.argsort(order)]


@program(random_key(1), ROWS, b=mixes((None, 0), 0))
def mixup_with_permuted_rows(key, x):
    return 0.7 * x + 0.3 * jax.random.permutation(key, x)


@program(X, b=independent(0), t=causal(1))
def gather_the_position_before(x):
    return x[:, jnp.maximum(jnp.arange(T) - 1, 0)]


@program(X, b=independent(0), t=foresees(1))
def gather_the_position_after(x):
    return x[:, jnp.minimum(jnp.arange(T) + 1, T - 1)]


@program(ROWS, integers(D, B, 3), b=independent(0))
def gather_from_the_own_row(x, places):
    return jnp.take_along_axis(x, places, 1), jax.vmap(lambda row, i: row[i])(x, places)


@program(ROWS, np.array([1, 1, 0], np.int32), b=mixes(0))
def gather_other_rows(x, places):
    return x[places]


@program(X, integers(T, B, T), b=independent(0), t=foresees(1))
def gather_over_time_by_pointers(x, places):
    return jnp.take_along_axis(x, places[..., None], 1)


@program(X, integers(T, B, T), b=independent(0), t=causal(1))
def gather_over_time_by_pointers_to_the_past(x, places):
    return jnp.take_along_axis(x, jnp.minimum(places, jnp.arange(T))[..., None], 1)


@program(X, b=independent(0), t=foresees(1))
def gather_with_an_index_from_all_positions(x):
    last = (x.sum(-1) > 0).sum(1)  # how many positions are positive
    return x + jnp.take_along_axis(x, (last % T)[:, None, None], 1)


@program(ROWS, b=mixes(0))
def index_from_another_row(x):
    place = jnp.roll(x, 1, 0).argmax(1)
    return jnp.take_along_axis(x, place[:, None], 1)


@program(X, b=independent(0), t=independent(1))
def index_from_the_own_position(x):
    return jnp.take_along_axis(x, x.argmax(-1)[..., None], -1)


@program(ROWS, b=mixes(0))
def constant_scatter_of_rows(x):
    return jnp.zeros_like(x).at[np.array([1, 2, 0])].set(x)


@program(ROWS, b=independent(0))
def scatter_of_rows_to_themselves(x):
    return jnp.zeros_like(x).at[jnp.arange(B)].set(x * 2)


@program(ROWS, np.array([1, 1, 0], np.int32), b=mixes(0))
def scatter_to_rows_of_the_data(x, places):
    return jnp.zeros_like(x).at[places].add(x)


@program(ROWS, integers(D, B), b=independent(0))
def scatter_within_the_own_row(x, places):
    return x.at[jnp.arange(B), places].set(0)


@program(X, integers(T, B), b=independent(0), t=foresees((1, None), 1))
def scatter_over_time_within_the_own_row(x, places):
    return jax.vmap(lambda row, i: row.at[i].add(row[-1]))(x, places)


@program(ROWS, b=mixes(0))
def segment_sum_of_rows(x):
    segments = np.array([0, 1, 0])
    return jax.ops.segment_sum(x, segments, 2)[segments]


@program(ROWS, b=independent(0))
def segment_sum_with_a_segment_for_each_row(x):
    return jax.ops.segment_sum(x, jnp.arange(B), B)


# A graph in the data: rows are nodes, edges are shared.
@program(ROWS, np.array([[0, 1], [1, 2]], np.int32), b=mixes((0, None), 0))
def message_passing(x, edges):
    sender, receiver = edges.T
    return x + jax.ops.segment_sum(jnp.tanh(x[sender]), receiver, B)


@program(X, b=independent(0), t=foresees(1))
def valid_positions_moved_to_the_front(x):
    def pack(row):
        (places,) = jnp.nonzero(row.sum(-1) > 0, size=T, fill_value=T)
        return row.at[places].get(mode="fill", fill_value=0)

    return jax.vmap(pack)(x)


@program(ROWS, np.array([1, 2, 0], np.int32), b=mixes(0))
def dynamic_slice_at_a_place_in_the_data(x, places):
    return lax.dynamic_slice_in_dim(jnp.concatenate([x, x]), places[0], B)


@program(X, np.int32(1), b=independent((0, None), 0), t=foresees((1, None), 1))
def dynamic_slice_at_a_shared_place(x, start):
    padded = jnp.pad(x, ((0, 0), (0, 2), (0, 0)))
    return lax.dynamic_slice_in_dim(padded, start, T, 1)


@program(X, b=independent(0), t=causal(1))
def windows_of_the_past_by_dynamic_slices(x):
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    window = lambda i: lax.dynamic_slice_in_dim(padded, i, 3, 1).max(1)
    return jax.vmap(window, out_axes=1)(jnp.arange(T))


@program(X, b=independent(0), t=foresees(1))
def windows_of_the_past_that_are_clamped(x):
    # dynamic_slice moves the last windows to the left, and the first begin at their own position
    window = lambda i: lax.dynamic_slice_in_dim(x, i, 3, 1).max(1)
    return jax.vmap(window, out_axes=1)(jnp.arange(T))


@program(
    normal(B, 6, D),
    normal(B, 1, D),
    np.int32(3),
    b=independent((0, 0, None), 0),
)
def key_value_cache(cache, x, position):
    cache = lax.dynamic_update_slice(cache, x, (0, position, 0))
    scores = jnp.einsum("bqd,bsd->bqs", x, cache)
    scores = jnp.where(jnp.arange(6) <= position, scores, -jnp.inf)
    return jax.nn.softmax(scores) @ cache, cache


@program(X, b=independent(0), t=foresees(1))
def cache_that_is_rolled(cache):
    return jnp.roll(cache, -1, 1).at[:, -1].set(0)


@program(TBD, b=independent(1), t=causal(0))
def cache_that_is_rolled_in_a_scan(x):
    def step(cache, row):
        cache = jnp.roll(cache, -1, 0).at[-1].set(row)
        return cache, jnp.tanh(cache).sum(0)

    return lax.scan(step, jnp.zeros((3, B, D)), x)[1]


@program(ROWS, np.array([1, 0, 0], np.int32), b=mixes(0))
def cache_of_chosen_beams(cache, beams):
    return jnp.take(cache, beams, 0)


@program(X, b=independent(0), t=independent(1))
def batch_and_time_merged(x):
    y = x.reshape(B * T, D)
    return jax.nn.softmax(y @ SQUARE).reshape(B, T, D)


@program(X, b=mixes(0), t=foresees(1))
def reshape_in_place_of_a_transpose(x):
    return jnp.cumsum(x.reshape(T, B, D), 0).reshape(B, T, D)


@program(X, b=independent(0), t=causal(1))
def transpose_before_the_same_sum(x):
    return jnp.cumsum(x.transpose(1, 0, 2), 0).transpose(1, 0, 2)


@program(X, b=independent(0), t=foresees(1))
def batch_merged_with_heads(x):
    y = x.reshape(B, T, HEADS, 4).transpose(0, 2, 1, 3).reshape(B * HEADS, T, 4)
    y = jax.nn.softmax(y @ y.swapaxes(1, 2)) @ y
    return y.reshape(B, HEADS, T, 4).transpose(0, 2, 1, 3).reshape(B, T, D)


@program(X, b=mixes(0), t=foresees(1))
def heads_merged_with_batch_and_split_in_the_other_order(x):
    y = x.reshape(B, T, HEADS, 4).transpose(0, 2, 1, 3).reshape(B * HEADS, T, 4)
    y = jax.nn.softmax(y @ y.swapaxes(1, 2)) @ y
    return y.reshape(HEADS, B, T, 4).transpose(1, 2, 0, 3).reshape(B, T, D)


@program(X, b=independent(0), t=foresees(1))
def time_merged_with_features(x):
    return jnp.cumsum(x.reshape(B, T * D)[:, ::-1], 1).reshape(B, T, D)


@program(X, b=independent(0), t=causal(1))
def cumulative_sum_over_time_merged_with_features(x):
    return jnp.cumsum(x.reshape(B, T * D), 1).reshape(B, T, D)


@program(X, b=mixes(0), t=independent(1))
def rows_and_features_merged_then_normalized(x):
    y = x.transpose(1, 0, 2).reshape(T, B * D)
    return jax.nn.softmax(y).reshape(T, B, D).transpose(1, 0, 2)


@program(ROWS, normal(B, D, seed=14), b=independent(0))
def two_views_concatenated_and_split(x, y):
    z = jnp.tanh(jnp.concatenate([x, y]) @ SQUARE)
    return jnp.split(z, 2)


@program(ROWS, normal(B, D, seed=14), b=independent(0))
def two_views_interleaved_and_split(x, y):
    z = jnp.stack([x, y], 1).reshape(2 * B, D) @ SQUARE
    return z[::2] - z[1::2]


@program(ROWS, normal(B, D, seed=14), b=mixes(0))
def two_views_concatenated_and_split_in_pairs(x, y):
    z = jnp.concatenate([x, y]).reshape(B, 2, D)
    return z[:, 0] * z[:, 1]


@program(ROWS, b=independent(0))
def padded_to_eight_rows(x):
    y = jnp.tanh(jnp.pad(x, ((0, 5), (0, 0))) @ SQUARE)
    return y[:B]


@program(ROWS, b=independent(0))
def concatenated_with_a_row_that_is_cut_off(x):
    return jnp.concatenate([x[:1], x, x[-1:]])[1:-1]


@program(ROWS, b=mixes(0))
def concatenated_with_a_row_and_cut_at_the_other_end(x):
    return jnp.concatenate([x[:1], x])[:-1]


# finite: about independence. Every row of the matrix is one-hot.
@program(ROWS, b=mixes_nan(0))
def product_with_the_identity(x):
    return jnp.eye(B) @ x


@program(ROWS, b=independent(0))
def selection_with_the_identity(x):
    return jnp.where(jnp.eye(B, dtype=bool)[..., None], x[None], 0).sum(1)


@program(ROWS, b=mixes(0))
def permutation_by_a_one_hot_product(x):
    return jax.nn.one_hot(jnp.array([1, 2, 0]), B) @ x


@program(np.array([1, 0, 3], np.int32), normal(4, D), b=independent((0, None), 0))
def lookup(tokens, table):
    return table[tokens]


# A product with a row of one-hot numbers: NaN anywhere in the shared table reaches all rows alike.
@program(np.array([1, 0, 3], np.int32), normal(4, D), b=independent((0, None), 0))
def lookup_by_a_one_hot_product(tokens, table):
    return jax.nn.one_hot(tokens, 4) @ table


# Random numbers.


@program(random_key(), ROWS, b=independent((None, 0), 0))
def dropout_with_one_key(key, x):
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)


@built(b=independent(0))
def dropout_with_a_key_in_each_row():
    def f(keys, x):
        drop = lambda key, row: jnp.where(jax.random.bernoulli(key, 0.7, row.shape), row / 0.7, 0)
        return jax.vmap(drop)(keys, x)

    keys = jax.random.wrap_key_data(np.arange(2 * B, dtype=np.uint32).reshape(B, 2))
    return f, (keys, ROWS)


@program(random_key(), ROWS, b=mixes((None, 0), 0))
def dropout_with_a_key_from_the_data(key, x):
    seed = lax.bitcast_convert_type(x.sum(), jnp.int32)
    keep = jax.random.bernoulli(jax.random.fold_in(key, seed), 0.5, x.shape)
    return jnp.where(keep, x, 0)


@program(random_key(), X, b=independent((None, 0), 0), t=independent((None, 1), 1))
def whole_rows_dropped(key, x):
    return x + jnp.where(jax.random.bernoulli(key, 0.5, (B, 1, 1)), jnp.tanh(x), 0)


@program(random_key(), np.abs(normal(B)) + 0.5, b=independent((None, 0), 0))
def rejection_sampling_in_each_row(key, shape):
    return jax.random.gamma(key, shape)


# Linear algebra.

MATRICES = normal(B, 4, 4) + 3 * np.eye(4, dtype=np.float32)


@program(MATRICES, normal(B, 4), b=independent(0))
def solve_in_each_row(a, y):
    return jnp.linalg.solve(a, y[..., None])[..., 0]


@program(MATRICES, b=independent(0))
def factors_of_each_matrix(a):
    s = a @ a.mT
    return jnp.linalg.cholesky(s), jnp.linalg.qr(a), jnp.linalg.eigvalsh(s), jnp.linalg.slogdet(a)


@program(ROWS, b=mixes(0))
def whitened_batch(x):
    y = x[:, :2]
    return jnp.linalg.solve(y.T @ y + jnp.eye(2), y.T).T


@program(normal(B, B), b=mixes(0))
def inverse_of_the_batch(x):
    return jnp.linalg.inv(x)


@program(ROWS, b=mixes(0))
def rows_divided_by_the_norm_of_all(x):
    return x * jnp.minimum(1, 1 / jnp.linalg.norm(x))


@program(MATRICES, normal(B, 4), b=independent(0))
def conjugate_gradients_in_each_row(a, y):
    solve = lambda a, y: jax.scipy.sparse.linalg.cg(lambda v: a @ (a.T @ v), y, maxiter=3)[0]
    return jax.vmap(solve)(a, y)


@program(normal(B, 4), b=mixes(0))
def conjugate_gradients_on_the_whole_batch(y):
    a = MATRICES[0] @ MATRICES[0].T
    return jax.scipy.sparse.linalg.cg(lambda v: v @ a, y, maxiter=3)[0]


# Derivatives and transformations.


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defjvps(lambda tangent, answer, x: tangent * 0.5)


@jax.custom_vjp
def averaged_gradient(x):
    return x * 2


averaged_gradient.defvjp(
    lambda x: (x * 2, None), lambda _, g: (jnp.broadcast_to(g.mean(0), g.shape),)
)


@program(ROWS, b=independent(0))
def custom_jvp(x):
    return clipped(x), jax.jvp(clipped, (x,), (jnp.sin(x),))[1]


@program(ROWS, b=independent(0))
def custom_vjp_whose_gradient_mixes_rows(x):
    return averaged_gradient(x)


@program(ROWS, b=mixes(0))
def gradient_that_mixes_rows(x):
    return jax.grad(lambda x: jnp.sin(averaged_gradient(x)).sum())(x)


@program(X, b=independent(0), t=independent(1))
def jit_and_checkpoint(x):
    block = jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w))
    return jax.jit(lambda x: block(SQUARE, jax.named_call(block, name="first")(SQUARE, x)))(x)


@program(ROWS, b=independent(0))
def gradient_of_a_sum_over_rows(x):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ SQUARE).sum())(x))(x)


@program(ROWS, b=independent(0))
def gradient_of_a_mean_over_rows(x):
    return jax.grad(lambda x: optax.squared_error(jnp.tanh(x @ SQUARE)).mean())(x)


@program(ROWS, b=mixes(0))
def gradient_of_a_squared_sum(x):
    return jax.grad(lambda x: x.sum() ** 2)(x)


@program(SQUARE, ROWS, b=independent((None, 0), 0))
def gradients_of_each_example(w, x):
    return jax.vmap(jax.grad(lambda w, row: jnp.tanh(w @ row).sum()), (None, 0))(w, x)


@program(SQUARE, ROWS, b=independent((None, 0), 0))
def clipped_gradients_of_each_example(w, x):
    def one(row):
        g = jax.grad(lambda w: jnp.tanh(w @ row).sum())(w)
        return g / jnp.maximum(1, jnp.linalg.norm(g))

    return jax.vmap(one)(x)


@program(SQUARE, ROWS, b=mixes((None, 0), 0))
def gradients_of_each_example_clipped_together(w, x):
    g = jax.vmap(jax.grad(lambda w, row: jnp.tanh(w @ row).sum()), (None, 0))(w, x)
    return optax.projections.projection_l2_ball(g, 0.1)


@program(ROWS, b=independent(0))
def hessian_of_each_row(x):
    return jax.vmap(jax.hessian(lambda row: jnp.sin(row).prod()))(x)


# The gradient of an earlier position comes from the outputs of later ones.
@program(X, b=independent(0), t=foresees(1))
def gradient_of_a_causal_function(x):
    return jax.grad(lambda x: jnp.sin(jnp.cumsum(x, 1)).sum())(x)


@program(X, normal(B, T, D, seed=15), b=independent(0), t=causal(1))
def tangent_of_a_causal_function(x, v):
    return jax.jvp(lambda x: jnp.sin(jnp.cumsum(x, 1)), (x,), (v,))[1]


@program(X6, b=independent(0), t=foresees(1))
def gradient_of_max_pooling(x):
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")
    return jax.grad(lambda x: pool(x).sum())(x)


@program(ROWS, b=mixes(0))
def collective_over_a_named_axis(x):
    return jax.vmap(lambda row: row - lax.pmean(row, "rows"), axis_name="rows")(x)


@program(ROWS, b=independent(0))
def index_of_a_named_axis(x):
    return jax.vmap(lambda row: row * (lax.axis_index("rows") + 1), axis_name="rows")(x)


@program(ROWS, b=mixes(0))
def permutation_over_a_named_axis(x):
    ring = [(i, (i + 1) % B) for i in range(B)]
    return jax.vmap(lambda row: lax.ppermute(row, "rows", ring), axis_name="rows")(x)


@program(ROWS, b=independent(0))
def shard_map_on_one_device(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    f = lambda x: jnp.tanh(x @ SQUARE)
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@program(ROWS, b=mixes(0))
def shard_map_with_a_sum_over_rows(x):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    f = lambda x: x / lax.psum(x.sum(0, keepdims=True), "data")
    return jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


@program(ROWS, b=mixes(0))
def callback_that_sorts_the_batch(x):
    return jax.pure_callback(lambda x: np.sort(x, 0), jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@program(ROWS, b=independent(0))
def callback_in_each_row(x):
    def row(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.sort(x), shape, x, vmap_method="sequential")

    return jax.vmap(row)(x)


@program(X, b=independent(0), t=independent(1))
def optax_losses(x):
    return optax.safe_softmax_cross_entropy(x, jax.nn.softmax(x)), optax.huber_loss(x)


@program(normal(B, T, VOCABULARY), LENGTHS, integers(VOCABULARY, B, 2), b=independent(0))
def ctc_loss(logits, lengths, labels):
    padding = (jnp.arange(T) >= lengths[:, None]).astype(jnp.float32)
    return optax.ctc_loss(logits, padding, labels, jnp.zeros(labels.shape))


@program(ROWS, normal(B, D, seed=16), b=mixes(0))
def contrastive_loss_of_each_row(x, y):
    x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (x, y))
    return optax.softmax_cross_entropy_with_integer_labels(x @ y.T, jnp.arange(B))


@program(X, LENGTHS, b=independent(0))
def mean_over_valid_positions(x, lengths):
    valid = (jnp.arange(T) < lengths[:, None])[..., None]
    return jnp.where(valid, x, 0).sum(1) / lengths[:, None]


@program(X, LENGTHS, b=mixes(0))
def mean_up_to_the_longest_row(x, lengths):
    valid = (jnp.arange(T) < lengths.max())[:, None]
    return jnp.where(valid, x, 0).mean(1)


@program(normal(B, T), LENGTHS, b=mixes(0))
def losses_divided_by_the_number_of_all_tokens(losses, lengths):
    valid = jnp.arange(T) < lengths[:, None]
    return jnp.where(valid, losses, 0).sum(1) / valid.sum()


@program(X, b=mixes(0))
def microbatches_that_are_summed(x):
    return x[:, 0] + ft.microbatch(lambda x: (x**2).sum(), 3, argnums=0)(x)


# Greedy decoding: rows end at a token of their own, and the loop when all have ended.


def _decode(logits, first, frozen):
    def step(state):
        i, token, ended, out = state
        new = logits[token].argmax(-1).astype(jnp.int32)
        if frozen:
            new = jnp.where(ended, 0, new)
        return i + 1, new, ended | (new == 0), out.at[:, i].set(new)

    go = lambda state: (state[0] < 8) & ~state[2].all()
    return lax.while_loop(go, step, (0, first, first == 0, jnp.zeros((B, 8), jnp.int32)))[3]


CHAIN = np.eye(VOCABULARY, dtype=np.float32)[np.array([3, 0, 1, 2, 5, 6, 4])]


@program(CHAIN, np.array([2, 1, 3], np.int32), b=independent((None, 0), 0))
def decoding_that_freezes_rows_that_have_ended(logits, first):
    return _decode(logits, first, True)


@program(CHAIN, np.array([2, 1, 3], np.int32), b=mixes((None, 0), 0))
def decoding_that_goes_on_in_rows_that_have_ended(logits, first):
    return _decode(logits, first, False)


# Sequence models, as strangers write them.


def attend(x, masked=lambda scores: scores, weigh=jax.nn.softmax):
    """Attention with one head: the scores [b, t, s] pass through `masked`."""
    q, k, v = (x @ w for w in (QUERY, KEY, VALUE))
    scores = jnp.einsum("btd,bsd->bts", q, k) / math.sqrt(D)
    return jnp.einsum("bts,bsd->btd", weigh(masked(scores)), v)


def hidden_where(mask, lowest=-jnp.inf):
    return lambda scores: jnp.where(mask, scores, lowest)


@program(X, b=independent(0), t=foresees(1))
def attention(x):
    return attend(x)


# finite: about causality. Later positions have weight 0, and 0 * NaN is NaN.
@program(X, b=independent(0), t=foresees_nan(1))
def causal_attention(x):
    return attend(x, hidden_where(jnp.tril(jnp.ones((T, T), bool))))


# The masked products are selected, not only their weights: no NaN comes through.
@program(X, b=independent(0), t=causal(1))
def causal_attention_that_selects_the_products(x):
    q, k, v = (x @ w for w in (QUERY, KEY, VALUE))
    scores = jnp.where(TRIL, jnp.einsum("btd,bsd->bts", q, k), -jnp.inf)
    products = jax.nn.softmax(scores)[..., None] * v[:, None]
    return jnp.where(TRIL[..., None], products, 0).sum(2)


@program(X, b=independent(0), t=causal(1))
def causal_attention_of_a_query_at_a_time(x):
    rows = [attend(x[:, : i + 1])[:, -1:] for i in range(T)]
    return jnp.concatenate(rows, 1)


@program(X.reshape(B, T, HEADS, 4), b=independent(0), t=foresees_nan(1))
def attention_of_jax(x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True)


@program(X.reshape(B, T, HEADS, 4), LENGTHS, b=independent(0), t=foresees((1, None), 1))
def attention_of_jax_with_lengths(x, lengths):
    return jax.nn.dot_product_attention(x, x, x, key_value_seq_lengths=lengths)


@program(X.reshape(B, T, HEADS, 4), b=independent(0), t=foresees_nan(1))
def attention_of_jax_with_a_window(x):
    return jax.nn.dot_product_attention(x, x, x, is_causal=True, local_window_size=(2, 0))


# A window of two positions to each side.
@program(X, b=independent(0), t=foresees(1))
def window_to_both_sides(x):
    i = jnp.arange(T)
    return attend(x, hidden_where(jnp.abs(i[:, None] - i) < 2))


@program(X, b=independent(0), t=foresees_nan(1))
def window_of_the_past(x):
    i = jnp.arange(T)
    return attend(x, hidden_where((i[:, None] >= i) & (i[:, None] - i < 2)))


@program(X, b=independent(0), t=foresees(1))
def prefix_that_sees_itself(x):
    i = jnp.arange(T)
    return attend(x, hidden_where((i[:, None] >= i) | (i < 3)))


# finite: about causality. Each token sees the earlier ones of its own document.
@program(X, np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 1, 1, 2, 2]], np.int32),
         b=independent(0), t=foresees_nan(1))  # fmt: skip
def packed_documents(x, documents):
    same = documents[:, :, None] == documents[:, None]
    return attend(x, hidden_where(same & TRIL))


@program(X, np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [0, 1, 1, 2, 2]], np.int32),
         b=independent(0), t=foresees(1))  # fmt: skip
def packed_documents_without_order(x, documents):
    return attend(x, hidden_where(documents[:, :, None] == documents[:, None]))


@program(X, b=independent(0), t=foresees_nan(1))
def distances_as_bias(x):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    bias = jnp.where(distance >= 0, -0.5 * distance, -jnp.inf)
    return attend(x, lambda scores: scores + bias)


@program(normal(9), X, b=independent((None, 0), 0), t=foresees_nan((None, 1), 1))
def learned_bias_of_distances(table, x):
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    return attend(x, lambda scores: jnp.where(TRIL, scores + table[distance + T - 1], -jnp.inf))


@program(X, b=independent(0), t=independent(1))
def rotary_positions(x):
    angle = jnp.arange(T)[:, None] * 100.0 ** (-jnp.arange(D // 2) / 4)
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


# finite: about causality.
@program(X, b=independent(0), t=foresees_nan(1))
def rotary_positions_then_causal_attention(x):
    return attend(rotary_positions(x), hidden_where(TRIL))


@program(X, b=independent(0), t=causal(1))
def linear_attention(x):
    q, k, v = (jax.nn.sigmoid(x @ w) for w in (QUERY, KEY, VALUE))
    state = jnp.cumsum(k[..., None] * v[..., None, :], 1)
    return jnp.einsum("btd,btde->bte", q, state) / (q * jnp.cumsum(k, 1)).sum(-1, keepdims=True)


# finite: about causality.
@program(X, b=independent(0), t=foresees_nan(1))
def linear_attention_by_a_mask(x):
    q, k, v = (jax.nn.sigmoid(x @ w) for w in (QUERY, KEY, VALUE))
    return (q @ k.mT * TRIL) @ v


@program(X6, b=independent(0), t=foresees(1))
def attention_within_blocks(x):
    y = x.reshape(B * 2, 3, D)
    return attend(y).reshape(B, 6, D)


# Each block sees the mean of the block before.
@program(X6, b=independent(0), t=causal(1))
def attention_to_the_block_before(x):
    blocks = x.reshape(B, 2, 3, D)
    before = jnp.roll(blocks, 1, 1).at[:, 0].set(0)
    weights = jax.nn.softmax(jnp.einsum("bntd,bnsd->bnts", blocks, before))
    return (weights @ before).reshape(B, 6, D)


@program(X, b=independent(0), t=foresees(1))
def mixer(x):
    y = x + (jax.nn.gelu(x.mT @ normal(T, 6)) @ normal(6, T)).mT
    return y + jax.nn.gelu(y @ UP) @ DOWN


@program(X, b=independent(0), t=causal(1))
def state_space_model(x):
    decay = jax.nn.sigmoid(normal(D))
    step = lambda s, row: (decay * s + row, jnp.tanh(s) * row)
    return jax.vmap(lambda row: lax.scan(step, jnp.zeros(D), row)[1])(x)


@program(X, b=independent(0), t=causal(1))
def teacher_forcing(x):
    inputs = jnp.concatenate([jnp.ones((B, 1, D)), x[:, :-1]], 1)
    return scan_over_time(inputs)


@program(X, b=independent(0), t=foresees(1))
def teacher_forcing_with_the_targets(x):
    inputs = jnp.concatenate([x[:, 1:], jnp.ones((B, 1, D))], 1)
    return scan_over_time(inputs)


@program(TOKENS, b=independent(0), t=causal(1))
def counts_of_earlier_tokens(tokens):
    return jnp.cumsum(jax.nn.one_hot(tokens, VOCABULARY, dtype=jnp.int32), 1)


@program(TOKENS, b=independent(0), t=foresees(1))
def counts_of_tokens(tokens):
    counts = jax.vmap(lambda row: jnp.bincount(row, length=VOCABULARY))(tokens)
    return jnp.take_along_axis(counts, tokens, 1)


@program(np.array([[1, 2], [2, 2], [0, 1]], np.int32), b=mixes(0))
def counts_in_the_whole_batch(tokens):
    return jnp.bincount(tokens.ravel(), length=3)[tokens]


# Masks that do not mask.


# exp(0) is 1.
@program(X, b=independent(0), t=foresees(1))
def mask_that_multiplies_scores(x):
    return attend(x, lambda scores: scores * TRIL)


# The sum below the fraction includes later positions.
@program(X, b=independent(0), t=foresees(1))
def mask_that_multiplies_weights(x):
    return attend(x, weigh=lambda scores: jax.nn.softmax(scores) * TRIL)


@program(X, b=independent(0), t=foresees(1))
def mask_that_selects_weights(x):
    return attend(x, weigh=lambda scores: jnp.where(TRIL, jax.nn.softmax(scores), 0))


# finite: about causality. Bounded scores, so that exp does not overflow.
@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_multiplies_exponentials(x):
    def weigh(scores):
        weights = jnp.exp(jnp.tanh(scores)) * TRIL
        return weights / weights.sum(-1, keepdims=True)

    return attend(x, weigh=weigh)


# The maximum that is subtracted is one of all positions, and all of the sum may underflow.
@program(X, b=independent(0), t=foresees(1))
def maximum_before_the_mask(x):
    def weigh(scores):
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights = jnp.where(TRIL, weights, 0)
        return weights / weights.sum(-1, keepdims=True)

    return attend(x, weigh=weigh)


# A score above 1e9 is not hidden: finite is False.
@program(X, b=independent(0), t=foresees(1))
def mask_that_subtracts_a_billion(x):
    return attend(x, lambda scores: scores - 1e9 * ~TRIL)


# finite: about causality. The sum rounds to finfo.min for every score below 1e30.
@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_adds_the_lowest_number(x):
    return attend(x, lambda scores: scores + jnp.where(TRIL, 0, jnp.finfo(jnp.float32).min))


# finite: about causality.
@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_selects_the_lowest_number(x):
    return attend(x, hidden_where(TRIL, jnp.finfo(jnp.float32).min))


# Scores of the past below -1e9, such as those of the first row here, lose against the masked ones:
# finite is False.
@program(
    X * np.array([1e6, 1, 1], np.float32)[:, None, None],
    b=independent(0),
    t=foresees(1),
)
def mask_that_selects_minus_a_billion(x):
    scores = -jnp.einsum("btd,btd->bt", x, x)[:, :, None] + jnp.zeros((T, T))
    scores = jnp.where(TRIL, scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), jnp.tanh(x))


@program(X, b=independent(0), t=foresees(1))
def mask_that_is_off_by_one(x):
    return attend(x, hidden_where(jnp.tril(jnp.ones((T, T), bool), 1)))


# finite: about causality. The first query sees nothing, and is NaN whatever the inputs.
@program(X, b=independent(0), t=foresees_nan(1))
def mask_of_the_past_alone(x):
    return attend(x, hidden_where(np.tril(TRIL, -1)))


# The first query sees nothing, so all positions have the same weight.
@program(X, b=independent(0), t=foresees(1))
def mask_of_the_past_alone_with_the_lowest_number(x):
    return attend(x, hidden_where(np.tril(TRIL, -1), jnp.finfo(jnp.float32).min))


@program(X, b=independent(0), t=foresees(1))
def mask_that_is_transposed(x):
    return attend(x, hidden_where(TRIL.T))


@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_is_transposed_and_flipped(x):
    return attend(x, hidden_where(jnp.asarray(TRIL).T[::-1, ::-1]))


@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_is_inverted_twice(x):
    mask = jnp.logical_not(~jnp.triu(jnp.ones((T, T), bool), 1))
    return attend(x, lambda scores: jnp.where(mask, -jnp.inf, scores))


@program(X, b=independent(0), t=foresees(1))
def mask_that_is_inverted(x):
    return attend(x, hidden_where(jnp.triu(jnp.ones((T, T), bool), 1) | jnp.eye(T, dtype=bool)))


# ~1 is -2 and ~0 is -1: both are true.
@program(X, b=independent(0), t=foresees(1))
def mask_of_integers_that_is_inverted(x):
    hidden = jnp.triu(jnp.ones((T, T), jnp.int32), 1)
    return attend(x, hidden_where((~hidden).astype(bool)))


# finite: about causality. Differences of unsigned numbers wrap around.
@program(X, b=independent(0), t=foresees_nan(1))
def mask_of_unsigned_numbers(x):
    i = jnp.arange(T, dtype=jnp.uint8)
    return attend(x, hidden_where(i[:, None] - i < 128))


# An unsigned number is never below 0.
@program(X, b=independent(0), t=foresees(1))
def mask_of_unsigned_numbers_that_is_always_true(x):
    i = jnp.arange(T, dtype=jnp.uint8)
    return attend(x, hidden_where(i[:, None] - i >= 0))


@program(X, b=independent(0), t=foresees_nan(1))
def mask_of_floats(x):
    i = jnp.cumsum(jnp.ones(T))
    return attend(x, hidden_where(jnp.sign(i[:, None] - i + 0.5) > 0))


# bfloat16 has no numbers between 1000 and 1004.
@program(X, b=independent(0), t=foresees(1))
def mask_of_rounded_positions(x):
    i = (1000 + jnp.arange(T)).astype(jnp.bfloat16)
    return attend(x, hidden_where(i[:, None] >= i))


@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_is_cut_from_a_larger_one(x):
    mask = jnp.tril(jnp.ones((8, 8), bool))
    return attend(x, hidden_where(lax.dynamic_slice(mask, (2, 2), (T, T))))


@program(X, b=independent(0), t=foresees(1))
def mask_that_is_cut_beside_the_diagonal(x):
    mask = jnp.tril(jnp.ones((8, 8), bool))
    return attend(x, hidden_where(lax.dynamic_slice(mask, (3, 2), (T, T))))


@program(X, b=independent(0), t=foresees_nan(1))
def mask_that_is_gathered(x):
    i = jnp.arange(T)
    return attend(x, hidden_where(jnp.asarray(TRIL)[i[:, None], i]))


@program(X, b=independent(0), t=foresees(1))
def mask_with_permuted_rows(x):
    return attend(x, hidden_where(jnp.asarray(TRIL)[jnp.array([4, 3, 2, 1, 0])]))


# The mask is an argument, so it may be anything.
@program(np.ones((T, T), bool), X, b=independent((None, 0), 0), t=foresees((None, 1), 1))
def mask_from_outside(mask, x):
    return attend(x, hidden_where(mask))


# finite: about causality. The mask from outside hides more, and never less.
@program(np.ones((T, T), bool), X, b=independent((None, 0), 0), t=foresees_nan((None, 1), 1))
def mask_from_outside_and_a_causal_one(mask, x):
    return attend(x, hidden_where(mask & TRIL))


@program(X, LENGTHS, b=independent(0), t=foresees((1, None), 1))
def mask_of_lengths_over_keys(x, lengths):
    return attend(x, hidden_where((jnp.arange(T) < lengths[:, None])[:, None]))


# Along the axis of queries, the mask hides whole rows or nothing.
@program(X, b=independent(0), t=foresees(1))
def mask_broadcast_over_the_wrong_axis(x):
    first = jnp.arange(T) < 3
    return attend(x, hidden_where(first[:, None], jnp.finfo(jnp.float32).min))


# The lengths [b] of a batch as large as the number of heads, read as those of heads.
@program(normal(HEADS, T, HEADS, 4), np.array([5, 2], np.int32), b=mixes(0))
def mask_of_lengths_read_as_those_of_heads(x, lengths):
    scores = jnp.einsum("bthd,bshd->bhts", x, x)
    scores = jnp.where((jnp.arange(T) < lengths[:, None])[:, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), x)


# The weights of each key sum to 1 over the queries.
@program(X, b=independent(0), t=foresees(1))
def softmax_over_the_queries(x):
    return attend(x, hidden_where(TRIL), lambda scores: jax.nn.softmax(scores, 1))


@program(X, b=mixes(0), t=independent(1))
def attention_with_batch_and_time_exchanged(x):
    return attend(x.swapaxes(0, 1)).swapaxes(0, 1)


@program(X, b=independent(0), t=foresees(1))
def causal_attention_to_the_maximum_of_neighbors(x):
    return causal_attention(maximum_of_neighbors(x))


@program(X, b=independent(0), t=foresees(1))
def causal_attention_to_normalized_time(x):
    return causal_attention((x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 1e-5))


# Zeros, and what is zero only on paper.


# finite: about independence, here and below.
@program(ROWS, b=mixes_nan(0))
def zero_times_another_row(x):
    return jnp.exp(x) + 0.0 * jnp.roll(x, 1, 0)


@program(ROWS, b=mixes_nan(0))
def another_row_minus_itself(x):
    y = jnp.roll(x, 1, 0)
    return x + (y - y)


@program(ROWS, b=mixes_nan(0))
def another_row_divided_by_itself(x):
    y = jnp.abs(jnp.roll(x, 1, 0)) + 1
    return x * (y / y)


# A mask of floats: XLA compiles a product with a converted boolean as a selection, without NaN.
@program(ROWS, b=mixes_nan(0))
def product_with_a_mask_that_is_zero_at_run_time(x):
    mask = jnp.floor(jax.nn.sigmoid(x) / 2)
    return jnp.exp(x) + mask * x.sum(0)


@program(ROWS, b=independent(0))
def selection_by_a_mask_that_is_false_at_run_time(x):
    return jnp.where(x > x, x.sum(0), x)


# x != x is how strangers ask for NaN.
@program(ROWS, b=mixes_nan(0))
def selection_by_nan_in_another_row(x):
    y = jnp.roll(x, 1, 0)
    return jnp.where(y != y, 0, x)


@program(ROWS, b=mixes_nan(0))
def zero_if_any_number_is_not_finite(x):
    return jnp.where(jnp.isfinite(x).all(), x, 0)


@program(ROWS, b=mixes_nan(0))
def another_row_clipped_to_zero(x):
    return jnp.exp(x) + jnp.clip(jnp.roll(x, 1, 0), 0, 0)


# exp(x) is never -0.0, the only number to which the sign of a zero matters.
@program(ROWS, b=independent(0))
def zero_times_another_row_without_nan(x):
    return jnp.exp(x) + jnp.nan_to_num(0.0 * jnp.roll(x, 1, 0))


# finite: about independence, and -0.0 + 0.0 is 0.0, but -0.0 + -0.0 is -0.0.
@program(np.where(ROWS < 0, np.float32(-0.0), ROWS), b=mixes_nan(0))
def sign_of_a_zero_from_another_row(x):
    return x + jnp.nan_to_num(0.0 * jnp.roll(x, 1, 0))


# NaN ** 0 is 1.
@program(ROWS, b=independent(0))
def another_row_to_the_power_zero(x):
    return x * jnp.roll(x, 1, 0) ** 0 + jnp.power(jnp.roll(x, 1, 0), jnp.zeros((B, D)))


@program(ROWS, np.array([4, 1, 2], np.int32), b=independent(0))
def zero_times_an_integer_of_another_row(x, n):
    n = jnp.roll(n, 1)
    return x + ((n * 0) + (n - n) + (n ^ n) + n % 1)[:, None]


@program(ROWS, b=independent(0))
def selection_by_a_constant(x):
    mask = jnp.ones_like(x) > 0
    return jnp.where(mask, x, x.sum(0))


@program(ROWS, b=independent(0))
def selection_by_a_disjunction_with_true(x):
    return jnp.where((x.sum(0) > 0) | True, x, -x)


@program(ROWS, b=mixes(0))
def selection_by_a_conjunction_with_true(x):
    return jnp.where((x.sum(0) > 0) & True, x, -x)


@program(ROWS, b=independent(0))
def selection_between_equals_by_another_row(x):
    return jnp.where(jnp.roll(x, 1, 0) > 0, x, x)


@program(ROWS, b=mixes(0))
def selection_by_the_sign_of_another_row(x):
    return jnp.where(jnp.roll(x, 1, 0) > 0, x, -x)


# Softmax does not change with a number that is added to all, except by rounding: not even finite.
@program(ROWS, b=mixes(0))
def softmax_of_shifted_rows(x):
    return jax.nn.softmax(x + x.sum())


@program(ROWS, b=mixes(0))
def multiplied_and_divided_by_the_same(x):
    scale = 1 + jnp.square(x).sum()
    return x * scale / scale


@program(ROWS, b=mixes(0))
def sum_minus_the_other_rows(x):
    return x.sum(0) - (x.sum(0) - x)


# No gradient, but a value.
@program(ROWS, b=mixes(0))
def mean_without_its_gradient(x):
    return x - lax.stop_gradient(x.mean(0))


@program(ROWS, b=mixes_nan(0))
def minimum_and_maximum_with_nothing(x):
    others = jnp.abs(jnp.roll(x, 1, 0)) + 1
    return x + jnp.minimum(others, 0.0)


# Layers and models of fnet.


def _layer(layer, *inputs, **options):
    """(f, args) of a layer and its inputs. Numbers of its parameters are drawn."""
    return lambda params, *inputs: layer(params, *inputs, **options), (
        filled(layer.spec(*inputs).params),
        *inputs,
    )


SHARED, SHARED_T = ((None, 0), 0), ((None, 1), 1)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def fnet_dense_and_norms():
    return _layer(
        fn.Sequential(fn.Dense(6), jax.nn.gelu, fn.LayerNorm(), fn.Dense(D), fn.RMSNorm()), X
    )


@built(b=independent((None, 0), 1), t=foresees((None, 1), 2))
def fnet_layer_norm_over_time():
    norm = fn.LayerNorm()
    f = lambda params, x: norm(params, x.transpose(2, 0, 1))
    return f, (filled(norm.spec(X.transpose(2, 0, 1)).params), X)


@built(b=mixes((None, 0), -1), t=independent((None, 1), 0))
def fnet_layer_norm_over_the_batch():
    norm = fn.LayerNorm()
    f = lambda params, x: norm(params, x.transpose(1, 2, 0))
    return f, (filled(norm.spec(X.transpose(1, 2, 0)).params), X)


@built(b=independent(*SHARED), t=foresees(*SHARED_T))
def fnet_group_norm():
    return _layer(fn.GroupNorm(2), X)


@built(b=independent((None, None, 0), 0), t=independent((None, None, 1), 1))
def fnet_batch_norm_in_evaluation():
    norm = fn.BatchNorm()
    params, state = filled(tuple(norm.spec(X)))
    return lambda params, state, x: norm(params, x, state=state)[0], (params, state, X)


@built(b=mixes((None, None, 0), 0), t=foresees((None, None, 1), 1))
def fnet_batch_norm_in_training():
    norm = fn.BatchNorm()
    params, state = filled(tuple(norm.spec(X, train=True)))
    run = lambda params, state, x: norm(params, x, state=state, train=True)[0]
    return run, (params, state, X)


@built(b=independent(*SHARED), t=foresees(*SHARED_T))
def fnet_convolutions():
    return _layer(fn.Sequential(fn.Conv(6, 3), jax.nn.relu, fn.DepthwiseConv(3)), X)


@built(b=independent(*SHARED), t=causal(*SHARED_T))
def fnet_causal_convolutions():
    block = fn.Residual(fn.Conv(D, 3, padding="CAUSAL", dilation=2), jax.nn.relu)
    return _layer(fn.Sequential(block, fn.Conv(6, 2, padding="CAUSAL")), X)


@built(b=independent(0), t=foresees(1))
def fnet_max_pool():
    return lambda x: fn.MaxPool(3, 1, padding="SAME")({}, x), (X,)


@built(b=independent(0))
def fnet_pools_and_flatten():
    return lambda x: (fn.GlobalAvgPool()({}, x), fn.Flatten()({}, fn.AvgPool(2)({}, x))), (X,)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def fnet_stack_of_remats():
    block = fn.Remat(fn.Residual(fn.LayerNorm(), fn.Dense(D), jnp.tanh))
    return _layer(fn.Stack(block, 3), X)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def fnet_parallel_and_maxout():
    return _layer(fn.Parallel(fn.Maxout(D, 2), fn.Dense(D), combine=jnp.multiply), X)


@built(b=independent((None, None, 0), 0))
def fnet_dropout():
    drop = fn.Dropout(0.5)
    return lambda _, key, x: drop({}, x, key=key, train=True), ({}, random_key(), ROWS)


@built(b=independent((None, 0), 0), t=independent((None, 1), 1))
def fnet_embed_and_attend():
    embed = fn.Embed(VOCABULARY, D)
    f = lambda params, tokens: embed.attend(params, embed(params, tokens))
    return f, (filled(embed.spec(TOKENS).params), TOKENS)


@built(b=independent((None, 0, 0), 0), t=independent((None, 1, 1), 1))
def fnet_cross_entropy():
    f = lambda kernel, x, labels: fn.linear_cross_entropy(x, kernel, labels, chunk_size=2)
    return f, (normal(D, VOCABULARY), X, TOKENS)


# finite: about causality.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def fnet_causal_attention():
    attention = fn.Attention(HEADS, causal=True, rotary=fn.Rotary(), qk_norm=fn.RMSNorm())
    return _layer(attention, X)


# finite: about causality.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def fnet_attention_with_a_window():
    return _layer(fn.Attention(HEADS, kv_heads=1, causal=True, window=2, softcap=5.0), X)


@built(b=independent((None, 0, 0), 0), t=foresees((None, 1, None), 1))
def fnet_attention_with_lengths():
    attention = fn.Attention(HEADS)
    f = lambda params, x, lengths: attention(params, x, lengths=lengths)
    return f, (filled(attention.spec(X).params), X, LENGTHS)


@built(b=independent((None, 0, 0), 0), t=independent((None, 1, None), 1))
def fnet_cross_attention():
    return _layer(fn.Attention(HEADS), X, normal(B, 4, D))


@built(b=independent((None, 0, 0), 0))
def fnet_attention_with_a_cache():
    attention, x = fn.Attention(HEADS, causal=True), normal(B, 1, D)
    cache = jax.eval_shape(lambda: attention.cache(jax.ShapeDtypeStruct((B, 6, D), jnp.float32)))
    cache = filled(cache)
    cache["index"] = np.array([2, 0, 5], np.int32)
    f = lambda params, cache, x: attention(params, x, state=cache)
    return f, (filled(attention.spec(x).params), cache, x)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def fnet_mixture_of_experts():
    return _layer(fn.MixtureOfExperts(4, 6, top_k=2), X)


# Experts are full in batch order: a token depends on the tokens before it.
@built(b=causal((None, 0), 0))
def fnet_mixture_of_experts_with_a_capacity():
    return _layer(fn.MixtureOfExperts(2, 6, top_k=1, capacity=0.8), X)


# The second choices of the first tokens come after the first choices of the last.
@built(b=foresees((None, 0), 0))
def fnet_mixture_of_two_experts_with_a_capacity():
    return _layer(fn.MixtureOfExperts(3, 6, top_k=2, capacity=0.5), X)


@built(b=independent((None, 0, 0), 0), t=causal((None, 1, None), 1))
def fnet_lstm_with_lengths():
    lstm = fn.LSTM(6)
    f = lambda params, x, lengths: lstm(params, x, lengths=lengths)
    return f, (filled(lstm.spec(X).params), X, LENGTHS)


@built(b=independent((None, 0, 0), 0), t=foresees((None, 1, None), 1))
def fnet_bidirectional_gru_with_lengths():
    gru = fn.GRU(6, bidirectional=True)
    f = lambda params, x, lengths: gru(params, x, lengths=lengths)
    return f, (filled(gru.spec(X).params), X, LENGTHS)


@built(b=independent(*SHARED), t=causal(*SHARED_T))
def fnet_gru_and_rnn():
    return _layer(fn.Sequential(fn.GRU(6, unroll=2), fn.RNN(4)), X)


def _text_model(model, *inputs):
    """The last token of the vocabulary has NaN in the table of embeddings."""
    f, (params, *inputs) = _layer(model, *inputs)
    table = params["embed"]["embedding"]
    table[-1] = np.nan
    tokens = np.minimum(inputs[0], VOCABULARY - 2)
    tokens[0, -1] = VOCABULARY - 1
    return f, (params, tokens, *inputs[1:])


# finite: about causality. Strictly, the NaN of a later token comes through.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def fnet_gpt():
    return _text_model(models.GPT(VOCABULARY, D, 2, HEADS, context=T), TOKENS)


# finite: about causality.
@built(b=independent((None, 0, 0), 0), t=foresees_nan((None, 1, None), 1))
def fnet_gpt_with_lengths():
    model = models.GPT(VOCABULARY, D, 2, HEADS, context=T, stacked=False)
    _, args = _text_model(model, TOKENS)
    return lambda params, tokens, lengths: model(params, tokens, lengths), (*args, LENGTHS)


# finite: about causality.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def fnet_decoder():
    model = models.Decoder(VOCABULARY, D, 2, 4, 2, 6, context=T)
    return _text_model(model, TOKENS)


@built(b=independent(*SHARED), t=causal(*SHARED_T))
def fnet_lstm_language_model():
    return _text_model(models.LSTMLanguageModel(VOCABULARY, D), TOKENS)


@built(b=independent((None, 0, 0), 0))
def fnet_lstm_classifier():
    return _layer(models.LSTMClassifier(3, VOCABULARY, D), TOKENS, LENGTHS)


@built(b=independent((None, 0, 0), 0), t=foresees((None, 1, None), 1))
def fnet_bert_with_lengths():
    model = models.Bert(VOCABULARY, D, 2, HEADS, 6, context=T, head="masked_lm")
    return _layer(model, TOKENS, LENGTHS)


IMAGES = normal(B, 8, 8, 3)


@built(b=independent((None, None, 0), 0))
def fnet_cnn_in_evaluation():
    model = models.CNN(5, (4, 6), convs=1)
    params, state = filled(tuple(model.spec(IMAGES)))
    return lambda params, state, x: model(params, x, state=state)[0], (params, state, IMAGES)


@built(b=mixes((None, None, 0), 0))
def fnet_cnn_in_training():
    model = models.CNN(5, (4, 6), convs=1)
    params, state = filled(tuple(model.spec(IMAGES, train=True)))
    run = lambda params, state, x: model(params, x, state=state, train=True)[0]
    return run, (params, state, IMAGES)


@built(b=independent(*SHARED))
def fnet_vit():
    return _layer(models.ViT(D, 2, HEADS, classes=5, patch=4, size=8), IMAGES)


# Flax linen.


def _linen(model, *inputs, **options):
    key = random_key()
    shapes = jax.eval_shape(lambda: model.init(key, *inputs, **options))
    return lambda params, *inputs: model.apply(params, *inputs, **options), (
        filled(shapes),
        *inputs,
    )


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def linen_dense_and_norm():
    nn = pytest.importorskip("flax.linen")
    return _linen(nn.Sequential([nn.Dense(6), nn.gelu, nn.LayerNorm(), nn.Dense(D)]), X)


@built(b=mixes(*SHARED), t=independent(*SHARED_T))
def linen_layer_norm_over_the_batch():
    nn = pytest.importorskip("flax.linen")
    return _linen(nn.LayerNorm(reduction_axes=0, feature_axes=-1), X)


# finite: about causality.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def linen_causal_attention():
    nn = pytest.importorskip("flax.linen")
    mask = nn.make_causal_mask(jnp.ones((B, T)))
    return _linen(nn.MultiHeadDotProductAttention(HEADS), X, mask=mask)


@built(b=independent(*SHARED), t=causal(*SHARED_T))
def linen_causal_convolution():
    nn = pytest.importorskip("flax.linen")
    return _linen(nn.Conv(6, (3,), padding="CAUSAL", kernel_dilation=2), X)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def linen_batch_norm_in_evaluation():
    nn = pytest.importorskip("flax.linen")
    return _linen(nn.BatchNorm(use_running_average=True), X)


@built(b=mixes(*SHARED), t=foresees(*SHARED_T))
def linen_batch_norm_in_training():
    nn = pytest.importorskip("flax.linen")
    _, args = _linen(nn.BatchNorm(use_running_average=False), X)
    norm = nn.BatchNorm(use_running_average=False)
    return lambda params, x: norm.apply(params, x, mutable=["batch_stats"])[0], args


@built(b=independent((None, 0, 0), 0), t=causal((None, 1, None), 1))
def linen_lstm_with_lengths():
    nn = pytest.importorskip("flax.linen")
    model = nn.RNN(nn.OptimizedLSTMCell(6))
    _, args = _linen(model, X)
    f = lambda params, x, lengths: model.apply(params, x, seq_lengths=lengths)
    return f, (*args, LENGTHS)


@built(b=independent(*SHARED), t=foresees(*SHARED_T))
def linen_bidirectional_gru():
    nn = pytest.importorskip("flax.linen")
    return _linen(nn.Bidirectional(nn.RNN(nn.GRUCell(6)), nn.RNN(nn.GRUCell(6))), X)


@built(b=independent((None, None, 0), 0))
def linen_dropout():
    nn = pytest.importorskip("flax.linen")
    drop = nn.Dropout(0.5, deterministic=False)
    return lambda _, key, x: drop.apply({}, x, rngs={"dropout": key}), ({}, random_key(), ROWS)


@built(b=independent(*SHARED))
def linen_convolutional_network():
    nn = pytest.importorskip("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.relu(nn.Conv(4, (3, 3))(x)), (2, 2), (2, 2))
            x = nn.GroupNorm(2)(nn.Conv(6, (3, 3), strides=2)(x))
            return nn.Dense(5)(x.reshape(x.shape[0], -1))

    return _linen(Network(), IMAGES)


# Flax nnx.


def _nnx(make):
    nnx = pytest.importorskip("flax.nnx")
    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx, nnx.Rngs(0))))
    return lambda state: nnx.merge(graph, state), filled(state)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def nnx_dense_and_norm():
    merge, state = _nnx(
        lambda nnx, rngs: nnx.Sequential(
            nnx.Linear(D, 6, rngs=rngs), nnx.gelu, nnx.LayerNorm(6, rngs=rngs)
        )
    )
    return lambda state, x: merge(state)(x), (state, X)


# finite: about causality.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def nnx_causal_attention():
    merge, state = _nnx(lambda nnx, rngs: nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs))
    return lambda state, x: merge(state)(x, mask=jnp.asarray(TRIL)[None, None]), (state, X)


@built(b=mixes(*SHARED), t=foresees(*SHARED_T))
def nnx_batch_norm_in_training():
    merge, state = _nnx(lambda nnx, rngs: nnx.BatchNorm(D, rngs=rngs))
    return lambda state, x: merge(state)(x, use_running_average=False), (state, X)


@built(b=independent(*SHARED), t=independent(*SHARED_T))
def nnx_batch_norm_in_evaluation():
    merge, state = _nnx(lambda nnx, rngs: nnx.BatchNorm(D, rngs=rngs))
    return lambda state, x: merge(state)(x, use_running_average=True), (state, X)


@built(b=independent(*SHARED), t=causal(*SHARED_T))
def nnx_convolution():
    merge, state = _nnx(lambda nnx, rngs: nnx.Conv(D, 6, 3, padding="CAUSAL", rngs=rngs))
    return lambda state, x: merge(state)(x), (state, X)


@built(b=independent((None, None, 0), 0))
def nnx_dropout():
    nnx = pytest.importorskip("flax.nnx")
    drop = nnx.Dropout(0.5, deterministic=False)
    return lambda _, key, x: drop(x, rngs=nnx.Rngs(dropout=key)), ({}, random_key(), ROWS)


# Equinox: modules of one example, under vmap.


def _equinox(make):
    eqx = pytest.importorskip("equinox")
    key = random_key()
    model = eqx.filter_eval_shape(make, eqx.nn, key)
    arrays, rest = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    return lambda arrays: eqx.combine(arrays, rest), filled(arrays)


@built(b=independent(*SHARED))
def equinox_mlp():
    merge, arrays = _equinox(lambda nn, key: nn.MLP(D, 5, 6, 2, key=key))
    return lambda arrays, x: jax.vmap(merge(arrays))(x), (arrays, ROWS)


# finite: about causality.
@built(b=independent(*SHARED), t=foresees_nan(*SHARED_T))
def equinox_causal_attention():
    merge, arrays = _equinox(lambda nn, key: nn.MultiheadAttention(HEADS, D, key=key))
    f = lambda arrays, x: jax.vmap(lambda row: merge(arrays)(row, row, row, mask=TRIL))(x)
    return f, (arrays, X)


@built(b=independent(*SHARED), t=foresees(*SHARED_T))
def equinox_convolution():
    merge, arrays = _equinox(lambda nn, key: nn.Conv1d(D, 6, 3, padding=1, key=key))
    return lambda arrays, x: jax.vmap(lambda row: merge(arrays)(row.T).T)(x), (arrays, X)


@built(b=independent(*SHARED), t=causal(*SHARED_T))
def equinox_gru():
    merge, arrays = _equinox(lambda nn, key: nn.GRUCell(D, 6, key=key))

    def f(arrays, x):
        cell = merge(arrays)

        def step(hidden, row):
            hidden = cell(row, hidden)
            return hidden, hidden

        return jax.vmap(lambda rows: lax.scan(step, jnp.zeros(6), rows)[1])(x)

    return f, (arrays, X)


@built(b=mixes(*SHARED))
def equinox_batch_norm_in_training():
    eqx = pytest.importorskip("equinox")
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(D, "batch", mode="batch")
    arrays, rest = eqx.partition((norm, state), eqx.is_array)

    def f(arrays, x):
        norm, state = eqx.combine(arrays, rest)
        return jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)[0]

    return f, (jax.tree.map(np.asarray, arrays), ROWS)


@built(b=independent((None, 0, 0), 0))
def equinox_dropout_with_a_key_in_each_row():
    eqx = pytest.importorskip("equinox")
    drop = eqx.nn.Dropout(0.5)
    keys = jax.random.wrap_key_data(np.arange(2 * B, dtype=np.uint32).reshape(B, 2))
    f = lambda _, keys, x: jax.vmap(lambda key, row: drop(row, key=key))(keys, x)
    return f, ({}, keys, ROWS)


# Haiku: recurrent cores with time first.


def _haiku(make, *inputs):
    hk = pytest.importorskip("haiku")
    model = hk.transform_with_state(lambda *inputs: make(hk, *inputs))
    params, held = filled(jax.eval_shape(model.init, random_key(), *inputs))
    return lambda params, held, *inputs: model.apply(params, held, None, *inputs)[0], (
        params,
        held,
        *inputs,
    )


HAIKU, HAIKU_T = ((None, None, 0), 0), ((None, None, 1), 1)


@built(b=independent(*HAIKU), t=independent(*HAIKU_T))
def haiku_mlp_and_norm():
    return _haiku(lambda hk, x: hk.LayerNorm(-1, True, True)(hk.nets.MLP([6, D])(x)), X)


# finite: about causality.
@built(b=independent(*HAIKU), t=foresees_nan(*HAIKU_T))
def haiku_causal_attention():
    def attention(hk, x):
        attention = hk.MultiHeadAttention(HEADS, 4, w_init=hk.initializers.Constant(0.1))
        return attention(x, x, x, mask=jnp.asarray(TRIL)[None, None])

    return _haiku(attention, X)


@built(b=independent((None, None, 1), 1), t=causal((None, None, 0), 0))
def haiku_lstm():
    def unroll(hk, x):
        core = hk.LSTM(6)
        return hk.dynamic_unroll(core, x, core.initial_state(B))[0]

    return _haiku(unroll, TBD)


# A step where the flag is set begins anew.
@built(b=independent((None, None, 1, 1), 1), t=causal((None, None, 0, 0), 0))
def haiku_core_with_resets():
    def unroll(hk, x, reset):
        core = hk.ResetCore(hk.GRU(6))
        return hk.dynamic_unroll(core, (x, reset), core.initial_state(B))[0]

    return _haiku(unroll, TBD, integers(2, T, B).astype(bool))


@built(b=mixes(*HAIKU))
def haiku_batch_norm_in_training():
    return _haiku(lambda hk, x: hk.BatchNorm(True, True, 0.9)(x, is_training=True), ROWS)


@built(b=independent(*HAIKU), t=foresees(*HAIKU_T))
def haiku_convolution():
    return _haiku(lambda hk, x: hk.Conv1D(6, 3)(x), X)

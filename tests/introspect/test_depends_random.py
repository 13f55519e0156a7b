"""Random programs: whatever changes an output is among the positions that `depends` allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import introspect
from fnet.introspect._depends._claims import Claim
from fnet.introspect._depends._conditions import Assumptions
from fnet.introspect._depends._reach import FAR

B, T, D = 3, 5, 4


@pytest.fixture(autouse=True)
def as_a_stranger(quickly):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def hostile(rng, shape):
    yield rng.normal(size=shape).astype(np.float32) * 3
    for value in (np.nan, np.inf, -np.inf, 1e30, -0.0):
        yield np.full(shape, value, np.float32)


def observed(f, x, axis, finite=False):
    """[output position, input position]: whether changing the one ever changed bits of the other."""
    run = jax.jit(f)
    before = np.asarray(run(x))
    n = x.shape[axis]
    seen = np.zeros((before.shape[axis], n), bool)
    rng = np.random.default_rng(1)
    for j in range(n):
        at = (slice(None),) * axis + (j,)
        for value in hostile(rng, x[at].shape):
            if finite and not np.isfinite(value).all():
                continue
            other = x.copy()
            other[at] = value
            after = np.asarray(run(other))
            same = (before == after) | (np.isnan(before) & np.isnan(after))
            if not finite:
                same &= (np.signbit(before) == np.signbit(after)) | np.isnan(before)
            seen[:, j] |= ~np.moveaxis(same, axis, 0).reshape(len(seen), -1).all(1)
    return seen


def allowed(f, x, axis, assume=False):
    """[output position, input position]: what the analysis allows, and its verdicts' conditions."""
    report = introspect.depends(f, x, axes={"a": axis})
    _, (reach,) = report._reaches(Claim(report._axis("a"), "a"), Assumptions(assume))
    size = reach.shape[axis]
    others = tuple(i for i in range(3) if i != axis)
    low = np.broadcast_to(reach.low.min(others, initial=FAR).reshape(-1), (size,))
    high = np.broadcast_to(reach.high.max(others, initial=-1).reshape(-1), (size,))
    j = np.arange(x.shape[axis])
    return (low[:, None] <= j) & (j <= high[:, None])


def program(seed):
    """A function [B, T, D] -> [B, T, D] of up to eight random operations."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    steps = [pick(*OPERATIONS)(rng) for _ in range(rng.integers(2, 9))]

    def f(x):
        values = [x]
        for step, which in steps:
            values.append(step(values[-1], values[which % len(values)]))
        return values[-1]

    return f


def operation(make):
    """Draws an operation's constants; it gets the last value and an earlier one."""
    return lambda rng: (make(rng), int(rng.integers(0, 8)))


def axis_of(rng):
    return int(rng.integers(0, 3))


def masked(rng):
    kind = rng.integers(0, 5)
    shift = int(rng.integers(-1, 2))

    def f(x, y):
        scores = jnp.einsum("bqd,bkd->bqk", x, y) / 4
        q, k = jnp.arange(T)[:, None], jnp.arange(T)[None]
        mask = k <= q + shift if kind < 4 else jnp.abs(q - k) <= 1
        if kind == 0:
            weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
        elif kind == 1:
            weights = jax.nn.softmax(scores + jnp.where(mask, 0, -1e9), -1)
        elif kind == 2:
            weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min), -1)
        else:
            weights = jnp.tanh(scores) * mask
        return jnp.einsum("bqk,bkd->bqd", weights, y)

    return f


def scanned(rng):
    axis, back = axis_of(rng), bool(rng.integers(2))

    def f(x, y):
        turned = jnp.moveaxis(x, axis, 0)

        def step(carry, row):
            carry = jnp.tanh(carry * 0.5 + row)
            return carry, carry + row

        _, rows = lax.scan(step, jnp.zeros(turned.shape[1:]), turned, reverse=back)
        return jnp.moveaxis(rows, 0, axis)

    return f


def moved(rng):
    axis, by, kind = axis_of(rng), int(rng.integers(1, 3)), rng.integers(0, 7)
    order = rng.permutation((B, T, D)[axis])

    def f(x, y):
        if kind == 0:
            return jnp.roll(x, by, axis)
        if kind == 1:
            return jnp.flip(x, axis)
        if kind == 2:
            return jnp.take(x, order, axis)
        if kind == 3:
            pads = [(by, 0) if i == axis else (0, 0) for i in range(3)]
            return lax.slice_in_dim(jnp.pad(x, pads), 0, x.shape[axis], axis=axis)
        if kind == 4:
            first = lax.slice_in_dim(y, 0, 1, axis=axis)
            rest = lax.slice_in_dim(x, 1, x.shape[axis], axis=axis)
            return jnp.concatenate([first, rest], axis)
        if kind == 5:
            return x.at[(slice(None),) * axis + (order,)].set(y)
        return lax.dynamic_update_slice_in_dim(x, lax.slice_in_dim(y, 0, 1, axis=axis), 1, axis)

    return f


def reduced(rng):
    axis, kind = axis_of(rng), rng.integers(0, 6)

    def f(x, y):
        if kind == 0:
            return x - x.mean(axis, keepdims=True)
        if kind == 1:
            return jax.nn.softmax(x, axis)
        if kind == 2:
            return jnp.cumsum(x, axis)
        if kind == 3:
            return jnp.flip(lax.cummax(jnp.flip(x, axis), axis=axis), axis)
        if kind == 4:
            return jnp.sort(x, axis)
        return x + y.max(axis, keepdims=True)

    return f


def reshaped(rng):
    kind = rng.integers(0, 4)
    kernel = rng.normal(size=(3, D, D)).astype(np.float32)
    square = rng.normal(size=(D, D)).astype(np.float32)

    def f(x, y):
        if kind == 0:
            return jnp.tanh(x.reshape(B * T, D) @ square).reshape(B, T, D)
        if kind == 1:
            return x.swapaxes(0, 1).reshape(T, B * D).reshape(T, B, D).swapaxes(0, 1)
        if kind == 2:
            return x.reshape(B, T * D)[:, ::-1].reshape(B, T, D)
        return lax.conv_general_dilated(
            x, kernel, (1,), [(2, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )

    return f


def pointwise(rng):
    kind, square = rng.integers(0, 7), rng.normal(size=(D, D)).astype(np.float32)
    rows, late = rng.integers(0, 2, (B, 1, 1)), np.arange(T)[None, :, None] >= rng.integers(1, T)

    def f(x, y):
        return (
            lambda: jnp.tanh(x) + y,
            lambda: x * y,
            lambda: x @ square,
            lambda: jnp.where(late, x, y),
            lambda: jnp.where(x > 0, x, 0.1 * y),
            lambda: x * jnp.asarray(rows, x.dtype),
            lambda: lax.cond(y[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
        )[kind]()

    return f


def looked_up(rng):
    axis, kind = axis_of(rng), rng.integers(0, 4)

    def f(x, y):
        if kind == 0:
            return jnp.take_along_axis(x, jnp.argsort(y, axis), axis)
        if kind == 1:
            return jax.vmap(lambda row, i: row[i % T] + row)(x, jnp.argmax(y[:, :, 0], 1))
        if kind == 2:
            start = jnp.argmax(jnp.nan_to_num(y[0, :, 0])).astype(jnp.int32)
            return x + lax.dynamic_slice_in_dim(x, start, 1, 1)
        return lax.fori_loop(0, 3, lambda i, z: jnp.tanh(z) + jnp.roll(y, i, axis), x)

    return f


OPERATIONS = [
    operation(make)
    for make in (masked, scanned, moved, moved, reduced, reshaped, pointwise, pointwise, looked_up)
]


def examine(seed):
    f = program(seed)
    x = np.random.default_rng(seed).normal(size=(B, T, D)).astype(np.float32)
    with np.errstate(all="ignore"):
        for axis in range(3):
            seen = observed(f, x, axis)
            proved = allowed(f, x, axis)
            assert not (seen & ~proved).any(), (seed, axis, np.argwhere(seen & ~proved))
            report = introspect.depends(f, x, axes={"a": axis})
            verdict = report.verdict("causal", "a")
            if verdict.status == "proved if" and verdict.holds(x):
                for j, row in enumerate(np.moveaxis(x, axis, 0)):
                    other = x.copy()
                    at = (slice(None),) * axis + (j,)
                    other[at] = row[::-1] * 2 + 0.5
                    if verdict.holds(other):
                        before, after = np.asarray(jax.jit(f)(x)), np.asarray(jax.jit(f)(other))
                        changed = ~np.moveaxis(before == after, axis, 0).reshape(
                            len(before.swapaxes(0, axis)), -1
                        ).all(1)
                        assert not changed[:j].any(), (seed, axis, j)


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    examine(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_random_programs(block):
    for seed in range(100 + 50 * block, 150 + 50 * block):
        examine(seed)

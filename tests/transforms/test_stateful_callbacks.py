"""Callbacks under each transform: as often and in the same order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from stateful import TRANSFORMS, X, each_transform

pytestmark = pytest.mark.usefixtures("quickly")
LOGS = [], []  # one for each effect: JAX orders callbacks of the same effect only


def ordered(x):
    jax.debug.callback(lambda x: LOGS[0].append(float(x)), x, ordered=True)


def answered(x):
    def answer(x):
        LOGS[1].append(float(x))
        return np.float32(len(LOGS[1]))

    return io_callback(answer, jax.ShapeDtypeStruct((), "float32"), x, ordered=True)


def straight(x):
    ordered(x.sum())
    jax.jit(ordered)(2 * x.sum())  # without a result
    return answered(3 * x.sum()) + answered(x[0])


def loops(x):
    def body(total, y):
        total = lax.cond(y > 2, lambda t: t + answered(t), lambda t: t + y, total)
        return jax.jit(lambda t: (ordered(-t), t)[1])(total), total

    def test(carried):
        ordered(carried[0])
        return carried[0] < 3

    return lax.scan(body, 0.0, x), lax.while_loop(
        test, lambda c: (c[0] + 1, c[1] + answered(c[1])), (0.0, x[0])
    )


def told(x):
    """sin(x), of an equation that both calls back and has results."""
    return lax.cond(x.sum() > -100, lambda x: (ordered(x.sum()), jnp.sin(x))[1], jnp.cos, x)


def gradient_of_a_scan(x):
    def loss(w):
        def body(h, y):
            d = told(jnp.tanh(h @ w))
            return h + jnp.exp(-jnp.sin(d) * jnp.cos(d)) * y, None

        return lax.scan(body, jnp.ones((4, 4)), x)[0].sum()

    return jax.grad(loss)(jnp.eye(4))


def gradient_of_straight_code(x):
    def loss(w):
        h = jnp.ones((4, 4)) * x[:, None]
        for i in range(8):
            h = jnp.tanh(jnp.sin(jnp.exp(-jnp.square(h @ w))))
            if i % 4 == 3:
                h = told(h)
                changed = jax.new_ref(h)
                changed[0] = jnp.sin(h[1])
                h = jax.freeze(changed)
        return h.sum()

    return jax.grad(loss)(jnp.eye(4))


def gradient_of_remat(x):
    @jax.checkpoint
    def layer(x):
        ordered(x.sum())
        return jnp.sin(jnp.sin(x))

    return jax.grad(lambda x: layer(x).sum())(x)


def custom_rules(x):
    @jax.custom_jvp
    def tangent(x):
        ordered(x)
        return jnp.sin(x)

    @tangent.defjvp
    def _(primals, tangents):
        ordered(2 * primals[0])
        return jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]

    @jax.custom_vjp
    def cotangent(x):
        ordered(x)
        return jnp.sin(x)

    def backward(x, g):
        ordered(4 * x)
        return (g * jnp.cos(x),)

    cotangent.defvjp(lambda x: (ordered(3 * x), (jnp.sin(x), x))[1], backward)
    both = lambda x: cotangent(tangent(x))
    return both(x[0]), jax.grad(both)(x[1])


EFFECTS = [
    straight,
    loops,
    gradient_of_a_scan,
    gradient_of_straight_code,
    gradient_of_remat,
    custom_rules,
]


def logged(f):
    for log in LOGS:
        log.clear()
    jax.block_until_ready([f(X), f(2 * X)])
    jax.effects_barrier()
    return [list(log) for log in LOGS]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("f", EFFECTS)
@each_transform
def test_callbacks_happen_as_often_and_in_the_same_order(f, transform):
    want = logged(f)
    assert len(want[0]) >= 4
    if transform == "rematerialize" and f is gradient_of_straight_code:
        assert "rematted_computation" in str(
            jax.jit(TRANSFORMS[transform](f)).lower(X).as_text(debug_info=True)
        )
    for log, expected in zip(logged(TRANSFORMS[transform](f)), want, strict=True):
        np.testing.assert_allclose(
            log, expected, 5e-2 if transform == "autocast" else 1e-5, strict=True
        )

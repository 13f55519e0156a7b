"""tune where vmap leaves products transposed: operands and results stay as they stand in memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fnet import transforms as ft
from fnet.jaxpr import Value, bodies
from fnet.transforms._tune import _layout

pytestmark = pytest.mark.usefixtures("every_size")


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 0.5, shape), jnp.float32)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width):
        key = jax.random.key(0)
        self.norm, self.attention = (
            eqx.nn.LayerNorm(width),
            eqx.nn.MultiheadAttention(2, width, key=key),
        )
        self.up, self.down = (
            eqx.nn.Linear(a, b, use_bias=False, key=key)  # a bias would put the batch first again
            for a, b in ((width, 4 * width), (4 * width, width))
        )

    def __call__(self, x):  # [time, width]
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(y))))(jax.vmap(self.norm)(x))


def transformer():
    params, static = eqx.partition((Block(8), Block(8)), eqx.is_array)

    def loss(params, x):
        for block in eqx.combine(params, static):
            x = jax.vmap(block)(x)
        return (x**2).mean()

    return jax.value_and_grad(loss), (params, normal(1, 3, 6, 8))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in bodies(eqn):
            yield from equations(sub.jaxpr)


def shapes(f, args, name):
    """The shapes of the first operands of a primitive's equations."""
    return {
        eqn.invars[0].aval.shape
        for eqn in equations(jax.make_jaxpr(f)(*args).jaxpr)
        if eqn.primitive.name == name
    }


def test_a_vmapped_transformer():
    step, args = transformer()
    tuned = ft.tune(step, "cpu")
    for got, want in zip(
        jax.tree.leaves(tuned(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert shapes(step, args, "tanh") == {(32, 3, 6)}
    assert shapes(ft.tune(step, "cpu"), args, "tanh") == {(3, 6, 32)}
    assert shapes(ft.tune(step, "cpu", rules={"products": False}), args, "tanh") == {(32, 3, 6)}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("one", "other", "left", "right"),
    [
        ((5, 4), (2, 3, 4), (1,), (2,)),  # w a
        ((5, 4), (4, 2, 3), (1,), (0,)),
        ((2, 3, 4), (5, 4), (2,), (1,)),  # a w
        ((2, 4, 3), (4, 5), (1,), (0,)),
        ((5, 2, 3), (2, 3, 4), (1, 2), (0, 1)),  # weight gradients
        ((2, 5, 3), (4, 3, 2), (2, 0), (1, 2)),
        ((2, 3, 5), (4, 2, 3), (0, 1), (1, 2)),
        ((2, 3, 5), (3, 2, 4), (1, 0), (0, 1)),
        ((2, 3, 4, 5), (6, 4, 5), (2, 3), (1, 2)),  # several axes stay: as it is
        ((2, 3, 4), (4, 5, 6), (2,), (0,)),
    ],
)
def test_forms_of_a_product(one, other, left, right):
    x, y = normal(1, *one), normal(2, *other)
    f = lambda x, y: lax.dot_general(jnp.sin(x), jnp.cos(y), ((left, right), ((), ())))
    assert [row.rule for row in ft.explain(ft.tune(f, "cpu"), x, y).rows] == ["products"]
    np.testing.assert_allclose(ft.tune(f, "cpu")(x, y), f(x, y), rtol=0, atol=1e-5)


def test_products_of_one_matrix_with_each_of_many():
    """They do not change, because the weights would be transposed."""
    x, w = normal(1, 8, 4), normal(2, 3, 4, 8)
    f = ft.tune(jax.vmap(lambda x, w: jnp.tanh(x) @ w, (None, 0)), "cpu")
    assert not ft.explain(f, x, w).rows


def test_what_follows_a_transposed_product():
    w, a, bias = normal(1, 5, 4), normal(2, 2, 3, 4), normal(3, 5)

    def f(w, a, bias, mask):
        y = lax.dot_general(w, a, (((1,), (2,)), ((), ())))  # [5, 2, 3]
        y = jnp.where(mask, y + bias[:, None, None], 2 * y) / jnp.exp(y)
        z = jnp.tanh(y.transpose(2, 0, 1)) * 3
        return (
            y,
            z.transpose(1, 2, 0),
            z.sum((0, 2)),
            jnp.isfinite(y),
            lax.scan(lambda c, x: (c + x.sum(), jnp.cosh(x)), 0.0, y)[1],
        )

    for mask in jnp.asarray(True), a[None, ..., 0] > jnp.zeros((5, 1, 1)):
        for got, want in zip(ft.tune(f, "cpu")(w, a, bias, mask), f(w, a, bias, mask)):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    args = w, a, bias, jnp.asarray(True)
    assert shapes(f, args, "tanh") == {(3, 5, 2)} and shapes(ft.tune(f, "cpu"), args, "tanh") == {
        (2, 3, 5)
    }


def test_two_transposes_are_none():
    y = normal(1, 2, 3, 4)
    there = _layout.transposed(y, (2, 0, 1))
    assert there.x.shape == (4, 2, 3) and there.note == (2, 0, 1)
    back = jax.make_jaxpr(lambda x: x.transpose(1, 2, 0))(there.x).jaxpr.eqns[0]
    (value,) = _layout.followed(back, [there])
    assert value.note is None
    np.testing.assert_array_equal(value.x, y)
    slice_of_a_loop = Value(y[0], (2, 0, 1))
    turned = jax.make_jaxpr(jnp.transpose)(y[0]).jaxpr.eqns[0]
    assert _layout.followed(turned, [slice_of_a_loop]) is None

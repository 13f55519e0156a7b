"""Hessian-vector products, per-example values, and JAX's own transforms handed on unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close
from jax.flatten_util import ravel_pytree

import fnet.transforms as ft
from fnet import layers as nn

MODEL = nn.Sequential(nn.Dense(3), jnp.tanh, nn.Dropout(0.5), nn.Dense(1))
X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)), jnp.float32)
PARAMS, _ = MODEL.init(jax.random.key(0), X)


def loss(params, x):
    return jnp.square(MODEL(params, x)).mean()


@pytest.mark.parametrize(
    "name",
    [
        "grad",
        "value_and_grad",
        "jacobian",
        "hessian",
        "jit",
        "vmap",
        "custom_vjp",
        "custom_jvp",
        "checkpoint",
    ],
)
def test_jax_transforms_are_jax_s_own(name):
    assert getattr(ft, name) is getattr(jax, name)
    assert name in ft.__all__


@pytest.mark.exhaustive
def test_per_example_equals_a_loop():
    got = jax.jit(ft.per_example(jax.value_and_grad(loss)))(PARAMS, X)
    rows = [jax.value_and_grad(loss)(PARAMS, X[i : i + 1]) for i in range(len(X))]
    close(got, jax.tree.map(lambda *a: jnp.stack(a), *rows))
    close(jax.tree.map(lambda a: a.mean(0), got), jax.value_and_grad(loss)(PARAMS, X))


@pytest.mark.independent(in_axes=(None, 0))
def test_the_gradient_of_an_example_depends_on_it_alone():
    return ft.per_example(jax.value_and_grad(loss)), PARAMS, X


@pytest.mark.parametrize("argnums", [0, (0,), -2, (-2,)])
def test_per_example_argnums(argnums):
    f = lambda x, scale: (x * scale).sum()
    close(ft.per_example(f, argnums=argnums)(X, jnp.float32(2)), (2 * X).sum(1))


@pytest.mark.exhaustive
def test_per_example_draws_differ_by_row():
    def noisy(params, x, key):
        return MODEL(params, x, key=key, train=True)[0, 0]

    x, key = jnp.tile(X[:1], (6, 1)), jax.random.key(1)
    got = ft.per_example(noisy)(PARAMS, x, key)
    close(got, jnp.stack([noisy(PARAMS, x[:1], jax.random.fold_in(key, i)) for i in range(6)]))
    assert len(set(got.tolist())) > 1


def test_per_example_hands_scalars_to_every_row():
    close(ft.per_example(lambda _, x, scale: (x * scale).sum())(None, X, 2.0), 2 * X.sum(1))


@pytest.mark.exhaustive
def test_hvp_is_hessian_times_vector():
    v = jax.tree.map(jnp.cos, PARAMS)
    got = jax.jit(ft.hvp(loss))(PARAMS, v, X)
    flat, rebuild = ravel_pytree(PARAMS)
    hessian = jax.jit(jax.hessian(lambda flat: loss(rebuild(flat), X)))(flat)
    close(got, rebuild(hessian @ ravel_pytree(v)[0]))


def test_hvp_hands_options_on():
    f = lambda x, *, power: (x**power).sum()
    x = jnp.array([1.0, 2.0])
    close(ft.hvp(f)(x, jnp.ones(2), power=3), 6 * x)


ROWS = "the batched arguments must be arrays with the same number of rows (argnums= says which arguments are batched)"
ERRORS = {
    "vector": (
        lambda: ft.hvp(lambda x: (x**2).sum())(jnp.ones(3), jnp.ones(4)),
        "hvp: the vector must have the structure, shapes and dtypes of the first argument "
        "float32[3]; got float32[4]",
    ),
    "rows": (
        lambda: ft.per_example(loss)(None, {"x": jnp.ones((8, 2)), "y": jnp.ones(4)}),
        f"per_example: {ROWS}; got argument 1['x'] (8, 2); argument 1['y'] (4,)",
    ),
    "no arrays": (lambda: ft.per_example(loss)(PARAMS, 2.0), f"per_example: {ROWS}; got no arrays"),
    "argnums": (
        lambda: ft.per_example(loss, argnums=2)(PARAMS, X),
        "per_example: argnums names argument 2; the function was called with 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error(name):
    attempt, text = ERRORS[name]
    with pytest.raises(ValueError) as caught:
        attempt()
    assert str(caught.value) == text

"""Derivatives of every layer: each mode traces, and the values are those of finite differences."""

import chex
import jax
import jax.numpy as jnp
import pytest
from checks import close, sampled
from conformance import FEW, KINDS, call, prepared
from jax.flatten_util import ravel_pytree
from layer_cases import CASES, inputs

from fnet import transforms as ft

# Derivatives.


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", sampled(CASES, FEW))
def test_derivatives_of_every_kind_trace(name):
    """Reverse, forward, forward over reverse, the Hessian both ways: nothing ends forward mode."""
    case, params, state, x = prepared(name)
    floats = [a for a in x if a.dtype == jnp.float32]

    def loss(args):
        params, floats = args
        rest = iter(floats)
        y, _ = call(case, train=True)(
            params, state, *(next(rest) if a.dtype == jnp.float32 else a for a in x)
        )
        return jnp.square(y).sum()

    args = params, floats
    for derivative in (jax.grad(loss), jax.jacfwd(loss)):
        assert jax.tree.map(jnp.shape, jax.eval_shape(derivative, args)) == jax.tree.map(
            jnp.shape, args
        )
    assert jax.tree.map(jnp.shape, jax.eval_shape(ft.hvp(loss), args, args)) == jax.tree.map(
        jnp.shape, args
    )
    for hessian in (jax.hessian(loss), jax.jacrev(jax.grad(loss))):
        rows = jax.eval_shape(hessian, args)
        assert len(jax.tree.leaves(rows)) == len(jax.tree.leaves(args)) ** 2


def flat(name):
    """The layer as a function of one vector of parameters and float inputs, in float64, and that
    vector."""
    case, params, state, _ = prepared(name)
    params, state = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, state))
    x = inputs(case, 2, jnp.float64)
    floats = [a for a in x if a.dtype == jnp.float64]
    vector, rebuild = ravel_pytree((params, floats))

    @jax.jit
    def f(vector):
        params, floats = rebuild(vector)
        rest = iter(floats)
        filled = [next(rest) if a.dtype == jnp.float64 else a for a in x]
        return call(case, train=True)(params, state, *filled)[0]

    return f, vector


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "name",
    sampled(
        sorted(
            set(KINDS) - {"Attention", "BatchNorm", "Dropout"}
            | {"Attention_grouped", "BatchNorm_bare", "Conv_1d_causal"}
        ),
        ["Attention_grouped", "BatchNorm_bare", "Conv_1d_causal", "Dense", "RNN"],
    ),
)
def test_numerical_gradients(name):
    """Forward and reverse against finite differences."""
    with jax.enable_x64(True):
        f, vector = flat(name)
        chex.assert_numerical_grads(f, (vector,), 1, atol=1e-6 / vector.size, rtol=1e-5, eps=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["Maxout", "BatchNorm_bare", "Attention_grouped"])
def test_hvp_is_hessian_times_vector(name):
    with jax.enable_x64(True):
        f, vector = flat(name)
        loss = lambda vector: jnp.square(f(vector)).sum()
        v = jnp.cos(jnp.arange(vector.size, dtype=vector.dtype))
        close(jax.jit(ft.hvp(loss))(vector, v), jax.jit(jax.hessian(loss))(vector) @ v, 1e-6)

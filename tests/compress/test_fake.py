"""Quantization-aware training: values of `quantize`, derivatives of the paper, and a loss that
decreases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from fnet import compress
from fnet import layers as nn
from fnet import transforms as ft

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(32, 8)), jnp.float32)


def product(p, x):
    return x @ p["w"]


@pytest.mark.quick_cases("format0", "format2")
@pytest.mark.parametrize(
    "format",
    [
        compress.Int8(),
        compress.Int4(2),
        compress.Int8(activations="dynamic"),
        compress.Int8(activations="percentile"),
    ],
)
def test_programs_read_the_values_of_the_result(format):
    stats = compress.calibrate(product, {"w": W}, [X], gram=False)
    fake = compress.fake_quantize({"w": W}, {"w": format}, stats=stats)
    f = ft.use_implicit_arrays(product)
    np.testing.assert_allclose(f(fake, X), f(compress.convert(fake), X), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        compress.convert(fake)["w"].codes,
        compress.quantize({"w": W}, {"w": format}, stats=stats)["w"].codes,
    )


@pytest.mark.exhaustive
def test_derivatives_are_those_of_the_paper():
    """Equations 3 to 5 of Esser et al. (2020), with a step that clips a part of the values."""
    fake = compress.fake_quantize({"w": W}, {"w": compress.Int4(None)})["w"]
    fake = jax.tree.map(lambda a: a / 2 if a.shape[0] == 1 else a, fake)
    weight = jnp.asarray(RNG.normal(size=W.shape), jnp.float32)
    grad = jax.grad(lambda fake: (weight * fake.materialize()).sum())(fake)
    scaled = np.asarray(W / fake.step)
    inside = np.abs(scaled) < 7
    np.testing.assert_allclose(grad.values, np.where(inside, weight, 0), rtol=1e-5, atol=1e-6)
    by_step = np.where(inside, np.round(scaled) - scaled, np.sign(scaled) * 7) * np.asarray(weight)
    np.testing.assert_allclose(
        grad.step, by_step.sum(0, keepdims=True) / np.sqrt(8 * 7), rtol=1e-4, atol=1e-5
    )


def test_inputs_pass_derivatives():
    fake = compress.fake_quantize({"w": W}, {"w": compress.Int8(activations="dynamic")})
    got = jax.grad(lambda x: ft.use_implicit_arrays(product)(fake, x).sum())(X)
    want = jax.grad(lambda x: product({"w": fake["w"].materialize()}, x).sum())(X)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    check_grads(
        lambda x: ft.use_implicit_arrays(product)(
            compress.convert(compress.fake_quantize({"w": W}, {"w": compress.Int4(None)})), x
        ),
        (X,),
        1,
        rtol=1e-2,
    )


@pytest.mark.exhaustive
def test_training_recovers_what_rounding_lost():
    """A network with 4-bit kernels: trained further it fits the targets of the original better than
    its rounding."""
    model = nn.Sequential(nn.Dense(16), jax.nn.relu, nn.Dense(1))
    params = model.init(jax.random.key(0), X)[0]
    targets = model(params, X)
    recipe = {".*": compress.Int4(None)}
    f = ft.use_implicit_arrays(model)
    loss = lambda p: jnp.square(f(p, X) - targets).mean()
    fake = compress.fake_quantize(params, recipe)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(carry, _):
        p, state = carry
        updates, state = optimizer.update(jax.grad(loss)(p), state, p)
        return (optax.apply_updates(p, updates), state), None

    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        trained = jax.lax.scan(step, (fake, optimizer.init(fake)), None, 200)[0][0]
    rounded, final = loss(compress.quantize(params, recipe)), loss(compress.convert(trained))
    assert final < 0.5 * rounded
    np.testing.assert_allclose(final, loss(trained), rtol=1e-4)


def test_errors():
    with pytest.raises(
        TypeError, match=r"fake_quantize: expected compress.Int8\(\) or Int4\(\) for 'w'; got NF4"
    ):
        compress.fake_quantize({"w": W}, {"w": compress.NF4()})
    with pytest.raises(ValueError, match="w needs statistics of its inputs for activations='mse'"):
        compress.fake_quantize({"w": W}, {"w": compress.Int8(activations="mse")})

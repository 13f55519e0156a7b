"""Training steps that are split along time have the losses, gradients and parameters of one
device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import sampled
from context_cases import CASES, TIME, tokens
from one_device import compared, in_float64

from fnet import layers as nn
from fnet import models
from fnet import training as tr
from fnet import transforms as ft

pytestmark = pytest.mark.usefixtures("quickly", "standard_promotion")
MESHES = {"2x4": {"data": 2, "context": 4}, "1x8": {"data": 1, "context": 8}}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("mesh", sampled(MESHES, ["2x4"]))
@pytest.mark.parametrize("name", sampled(CASES, ["packed", "by_hand"]))
def test_a_step_has_the_gradients_of_one_device(name, mesh):
    compared(CASES[name], MESHES[mesh], 1e-5)


# The modules of nnx are float32, and so are the sums of a cross entropy in chunks.
EXACT = [name for name in CASES if name not in ("flax_nnx", "chunked")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", EXACT)
def test_a_step_in_float64_has_the_gradients_of_one_device(name, mesh):
    with jax.enable_x64(True):
        compared(CASES[name], MESHES[mesh], 1e-9, cast=in_float64)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["data", "zero1", "fsdp", "context", "context+remat"])
def test_strategies(strategy):
    plan = compared(CASES["packed"], MESHES["2x4"], 1e-5, strategy)
    assert plan.strategy.startswith(strategy)


@pytest.mark.exhaustive
def test_microbatches():
    """Each device has a part of each text, also if a microbatch is a single one."""
    model, tx = models.GPT(64, 32, 2, 2, context=64), optax.sgd(0.1)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, batch, *, microbatches=2):
        def loss(params, batch):
            return model.cross_entropy(params, batch[:, :-1], batch[:, 1:]).mean()

        value, grads = ft.microbatch(ft.value_and_grad(loss), microbatches)(state.params, batch)
        return state.apply(tx, grads), {"loss": value, "grads": grads}

    compared(
        lambda: (step, init, tokens(2, TIME + 1)), MESHES["1x8"], 1e-5, "context+microbatches=2"
    )


@pytest.mark.exhaustive
def test_forward_mode_derivatives_are_those_of_one_device():
    """XLA divides the tangents of attention."""

    def init(key):
        return {"params": jax.random.normal(key, (32, 32)) / 6}

    def step(state, batch):
        def loss(w):
            x = (batch @ w).reshape(*batch.shape[:2], 4, 8)
            y = nn.dot_product_attention(x, x, x, causal=True)
            return jnp.square(y).sum(-1).mean()

        grads, curvature = jax.jvp(jax.grad(loss), (state["params"],), (state["params"],))
        return {"params": state["params"] - 0.1 * grads}, {"grads": grads, "curvature": curvature}

    x = np.random.default_rng(0).normal(size=(2, TIME, 32)).astype(np.float32)
    with jax.enable_x64(True):
        compared(lambda: (step, init, x), MESHES["2x4"], 1e-9, cast=in_float64)

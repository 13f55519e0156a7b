"""Steps whose experts lie on different devices, compiled for TPUs that are not attached."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

from fnet import models, parallel
from fnet import training as tr

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def planned(strategy, mesh, rules=None, devices="v5e:2x4"):
    sizes = {"vocab_size": 256, "width": 256, "depth": 2, "heads": 2, "hidden": 512}
    model, tx = models.Decoder(kv_heads=1, context=128, experts=8, **sizes), optax.sgd(0.1)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, tokens):
        loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply(tx, grads), {"loss": value}

    batch = jax.ShapeDtypeStruct((16, 129), jnp.int32)
    options = {"devices": devices, "mesh": mesh, "rules": rules}
    return parallel.plan(step, init, batch, strategy=strategy, **options)


def sent(ledger, collective):
    """The bytes that a chip sends in the layers with experts, outside of attention."""
    return sum(
        each.sent
        for each in ledger.transfers
        if each.collective == collective and each.scope == "blocks"
    )


def test_tokens_travel_instead_of_kernels():
    chosen = planned("expert", {"data": 2, "expert": 4}).chosen
    assert chosen.compiled.arguments == chosen.arguments
    estimated = sent(chosen.estimate.ledger, "all-to-all")
    # What is only multiplied, one of two arrays in each pass, the compiler sends in bfloat16.
    assert sent(chosen.ledger, "all-to-all") == pytest.approx(0.75 * estimated, rel=0.01)
    kernels = {f"blocks/{name}": (None, "tensor") for name in ("gate", "up", "down")}
    annotated = planned("fsdp+pins", {"data": 2, "tensor": 4}, kernels).chosen.ledger
    assert sent(annotated, "all-to-all") == 0
    assert annotated.sent > 5 * chosen.ledger.sent

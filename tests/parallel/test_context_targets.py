"""Steps that are split along time, compiled for TPUs that are not attached."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def planned(model, time, devices="v5e:4x4"):
    """The plan of a step in bfloat16, of a batch with one text."""
    tx = optax.sgd(0.1)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, tokens):
        loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = ft.autocast(ft.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(tx, grads), {"loss": value}

    batch = jax.ShapeDtypeStruct((1, time + 1), jnp.int32)
    return parallel.plan(step, init, batch, devices=devices, strategy="context")


def attention(plan, collective):
    """The bytes that a chip sends for attention, compiled and estimated."""
    both = plan.chosen.compiled.ledger, plan.chosen.estimate.ledger
    return [
        sum(
            each.sent
            for each in ledger.transfers
            if each.collective == collective and each.scope.startswith("blocks/attention")
        )
        for ledger in both
    ]


def test_ulysses_has_the_chips_kernel():
    plan = planned(models.GPT(256, 256, 2, 16, context=2048), 2048)
    assert dict(plan.mesh.shape) == {"data": 1, "context": 16}
    assert ": ulysses (" in plan.explain() and "; ring: " in plan.explain()
    compiled = plan.chosen.compiled
    assert compiled.arguments == plan.chosen.arguments
    sent, estimated = attention(plan, "all-to-all")
    assert sent == pytest.approx(estimated, rel=0.02)


def test_a_ring_sends_each_key_once_for_all_its_queries():
    """Key/value heads are not repeated for the query heads that share them."""
    sizes = {"vocab_size": 256, "width": 256, "depth": 2, "hidden": 512, "context": 2048}
    plan = planned(models.Decoder(heads=8, kv_heads=2, **sizes), 2048)
    said = plan.explain()
    assert "ring (" in said and "no ulysses: 8 heads are not a multiple of 16" in said
    assert plan.chosen.compiled.arguments == plan.chosen.arguments
    sent, estimated = attention(plan, "collective-permute")
    assert sent == pytest.approx(estimated, rel=0.05)

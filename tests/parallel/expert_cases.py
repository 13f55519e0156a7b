"""Training steps of models with a mixture of experts, whose metrics have the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from context_cases import TX, cross_entropy, tokens

from fnet import layers as nn
from fnet import models
from fnet import training as tr
from fnet import transforms as ft

TIME, ROWS = 12, 8


def trained(model, loss, batch, route=None):
    """`loss(params, batch)` is that of each row or token. `route` is the path of a router that
    sends most tokens to few experts."""

    def init(key):
        params = model.init(key, jax.tree.map(lambda x: x[:1], batch["x"]))[0]
        return tr.TrainState.create(params, TX)

    def step(state, batch, *, microbatches=1):
        mean = lambda params, batch: loss(params, batch).mean()
        grad = ft.microbatch(ft.value_and_grad(mean), microbatches)
        value, grads = grad(state.params, batch)
        return state.apply(TX, grads), {"loss": value, "grads": grads}

    return step, init, batch


def decoder(rows=ROWS, time=TIME, **options):
    sizes = {"vocab_size": 64, "width": 16, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 24}
    model = models.Decoder(context=64, **sizes, **options)
    batch = {"x": tokens(rows, time), "labels": tokens(rows, time)[:, ::-1].copy()}

    def loss(params, batch):
        more = {"segments": batch["segments"]} if "segments" in batch else {}
        return cross_entropy(model, params, batch["x"], batch["labels"], **more)

    return trained(model, loss, batch)


def mixtral():
    return decoder(experts=4, experts_per_token=2)


def mixtral_with_capacity():
    return decoder(experts=4, experts_per_token=2, expert_capacity=0.8)


def qwen3_moe():
    return decoder(
        experts=8,
        experts_per_token=3,
        normalize_experts=False,
        qk_norm="head",
    )


def packed():
    """Two texts in each row."""
    step, init, batch = decoder(experts=4, expert_capacity=1.0)
    segments = np.where(np.arange(TIME) < np.arange(3, 3 + ROWS)[:, None], 1, 2)
    return step, init, batch | {"segments": segments.astype(np.int32)}


def layer(experts=8, top_k=2, capacity=None, rows=ROWS):
    """A layer alone, whose inputs are so alike that most of them choose the same experts."""
    model = nn.MixtureOfExperts(experts, 24, top_k=top_k, capacity=capacity, normalize=False)
    x = np.random.default_rng(0).normal(size=(rows, TIME, 16)) * 0.5 + 1
    loss = lambda params, batch: jnp.square(model(params, batch["x"]) - 1)
    return trained(model, loss, {"x": x.astype(np.float32)})


def top_1():
    return layer(top_k=1)


def top_1_with_capacity():
    return layer(top_k=1, capacity=1.25)


def top_2():
    return layer()


def top_2_with_capacity():
    return layer(capacity=0.6)


def with_padding():
    """Positions that no expert processes, and rows of which only one device has a part."""
    model = nn.MixtureOfExperts(4, 24, capacity=0.7)
    x = np.random.default_rng(0).normal(size=(ROWS, TIME, 16)).astype(np.float32)
    valid = np.arange(TIME) < np.arange(ROWS)[:, None] * 2

    def loss(params, batch):
        return jnp.square(model(params, batch["x"], batch["valid"]) - 1)

    return trained(model, loss, {"x": x, "valid": valid})


def unrolled():
    """A step whose layers are not in a scan, with auxiliary losses of the routers."""
    model = nn.Sequential(*(nn.Residual(nn.MixtureOfExperts(4, 24)) for _ in range(2)))
    x = np.random.default_rng(0).normal(size=(ROWS, TIME, 16)).astype(np.float32)

    def loss(params, batch):
        y, seen = ft.capture(model, ".*router")(params, batch["x"])
        balance = sum(nn.load_balancing_loss(logits, 2) for logits in seen.values())
        return jnp.square(y - 1) + 0.01 * balance

    return trained(model, loss, {"x": x})


def without_experts():
    def step(state, x):
        grads = jax.grad(lambda w: jnp.square(x @ w).mean())(state["params"])
        return {"params": state["params"] - grads}, {}

    return step, lambda key: {"params": jnp.ones(16)}, np.ones((ROWS, 16), np.float32)


CASES = {
    each.__name__: each
    for each in (
        mixtral,
        mixtral_with_capacity,
        qwen3_moe,
        packed,
        top_1,
        top_1_with_capacity,
        top_2,
        top_2_with_capacity,
        with_padding,
        unrolled,
    )
}

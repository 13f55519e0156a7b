"""Training steps that tests of plan run: fnet's own, one of Flax, and plain JAX."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fnet import layers as nn
from fnet import models
from fnet import training as tr
from fnet import transforms as ft

N = 8
TX = optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(0.1, momentum=0.9))


def gpt():
    model = models.GPT(64, 64, 2, 2, context=16)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17)).astype(np.int32)

    def init(key):
        return tr.TrainState.create(model.init(key, jnp.zeros((1, 16), jnp.int32))[0], TX)

    def step(state, batch, *, microbatches=1):
        loss = lambda params, batch: model.cross_entropy(
            params, batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        ).mean()
        value, grads = ft.microbatch(jax.value_and_grad(loss), microbatches)(state.params, batch)
        return state.apply(TX, grads), {"loss": value}

    return step, init, {"tokens": tokens}


def cnn():
    """BatchNorm's statistics are over the whole microbatch, wherever it lies."""
    model = nn.Sequential(
        nn.Conv(32, 3, use_bias=False),
        nn.BatchNorm(),
        jax.nn.relu,
        nn.MaxPool(2),
        nn.Conv(64, 3),
        jax.nn.relu,
        nn.GlobalAvgPool(),
        nn.Dense(8),
    )
    x = np.random.default_rng(0).normal(3, 1, (32, 8, 8, 3)).astype(np.float32)

    def init(key):
        params, state = model.init(key, x[:1])
        return tr.TrainState.create(params, TX, state=state)

    def step(state, batch, *, microbatches=2):
        def loss(params, before, x):
            y, after = model(params, x, state=before, train=True)
            return jnp.square(y - 1).mean(), after

        each = ft.microbatch(jax.value_and_grad(loss, has_aux=True), microbatches, carry=1)
        (value, after), grads = each(state.params, state.state, batch)
        return state.apply(TX, grads, state=after), {"loss": value}

    return step, init, x


def flax():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
            return x + linen.Dense(64)(linen.gelu(linen.Dense(128)(x)))

    x = np.random.default_rng(0).normal(size=(16, 8, 64)).astype(np.float32)

    def init(key):
        params = Block().init(key, x[:1])
        return {"params": params, "opt": TX.init(params)}

    def step(state, batch):
        loss = lambda params: jnp.square(Block().apply(params, batch)).mean()
        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    return step, init, x


def mlp():
    model = nn.Sequential(nn.Dense(512), jnp.tanh, nn.Dense(16))
    x = jax.ShapeDtypeStruct((4096, 32), jnp.float32)

    def init(key):
        return tr.TrainState.create(model.init(key, x)[0], TX)

    def step(state, x):
        return state.apply(
            TX, jax.grad(lambda params: jnp.square(model(params, x)).mean())(state.params)
        ), {}

    return step, init, x


RULES = {
    r"blocks/attention/(query|key|value)/kernel": (None, None, "tensor"),
    r"blocks/attention/out/kernel": (None, "tensor"),
    r"blocks/fc/kernel": (None, None, "tensor"),
    r"blocks/proj/kernel": (None, "tensor"),
}
TENSOR = {"mesh": {"data": -1, "tensor": 2}, "rules": RULES}


def transformer():
    """A language model in plain JAX, of stacked blocks, its weights large beside its activations."""
    width, vocab, depth, rows, time = 128, 512, 4, 32, 32
    shapes = {
        "embed": (vocab, width),
        "q": (depth, width, width),
        "o": (depth, width, width),
        "up": (depth, width, 4 * width),
        "down": (depth, 4 * width, width),
    }

    def init(key):
        return {
            "params": {name: jax.random.normal(key, shape) * 0.02 for name, shape in shapes.items()}
        }

    def step(state, batch):
        def loss(params):
            x = params["embed"][batch[:, :-1]]

            def block(x, p):
                h = (x @ p["q"]).reshape(*x.shape[:2], 4, -1)
                h = jax.nn.dot_product_attention(h, h, h, is_causal=True).reshape(x.shape)
                x = x + h @ p["o"]
                return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

            x, _ = lax.scan(
                jax.checkpoint(block), x, {k: v for k, v in params.items() if k != "embed"}
            )
            return optax.softmax_cross_entropy_with_integer_labels(
                x @ params["embed"].T, batch[:, 1:]
            ).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    return step, init, jax.ShapeDtypeStruct((rows, time + 1), jnp.int32)


def narrow():
    """Weights of 512 x 512 and a batch of 64 rows: activations are the smaller of the two."""

    def init(key):
        return {"params": [jax.random.normal(key, (512, 512)) * 0.04 for _ in range(4)]}

    def step(state, batch):
        def loss(params):
            x = batch
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.square(x).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value

    return step, init, jax.ShapeDtypeStruct((64, 512), jnp.float32)


CASES_ON_EXPLICIT_MESHES = {"gpt": gpt, "cnn": cnn, "flax": flax}

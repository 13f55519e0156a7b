"""Training steps with layers, which tests of pipelines run: `case(dtype) -> (step, state, batch)`.

Each step returns the new state, the loss and the gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft

TX = optax.sgd(0.02, momentum=0.9)  # no quotients of rounding errors, as Adam has
ROWS = 16


def trained(loss, params, batch, dtype, *, microbatches=1):
    """A step that minimizes `loss(params, batch)`."""
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
    params, batch = jax.tree.map(cast, (params, batch))

    def step(state, batch):
        value_and_grad = ft.microbatch(jax.value_and_grad(loss), microbatches)
        value, grads = value_and_grad(state["params"], batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value, "grads": grads}

    return step, {"params": params, "opt": TX.init(params)}, batch


def cross_entropy(logits, labels):
    """Of all positions, in the dtype of the logits."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tokens(time, vocab=32):
    return jnp.asarray(np.random.default_rng(0).integers(0, vocab, (ROWS, time)), jnp.int32)


def language(model, dtype, time=9, **options):
    batch = {"tokens": tokens(time, model.vocab_size)}
    params, _ = model.init(jax.random.key(0), batch["tokens"][:1, :-1])

    def loss(params, batch):
        t = batch["tokens"]
        return cross_entropy(model(params, t[:, :-1]), t[:, 1:])

    return trained(loss, params, batch, dtype, **options)


def mlp(dtype, *, checkpointed=False, depth=8, **options):
    """Layers in a scan that is written by hand, of a network in plain JAX."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "w": jax.random.normal(keys[0], (depth, 16, 16)) / 4,
        "b": jnp.zeros((depth, 16)),
        "head": jax.random.normal(keys[1], (16, 4)),
    }
    x = jax.random.normal(keys[2], (ROWS, 16))

    def layer(x, p):
        return x + jnp.tanh(x @ p["w"] + p["b"][None]), None

    def loss(params, x):
        each = jax.checkpoint(layer) if checkpointed else layer
        x, _ = lax.scan(each, x, {"w": params["w"], "b": params["b"]})
        return jnp.square(x @ params["head"] - 1).mean()

    return trained(loss, params, x, dtype, **options)


def counted(dtype):
    """The carry also counts the layers, and sums a penalty over the batch."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (8, 16, 16)) / 4}
    x = jax.random.normal(keys[1], (ROWS, 16))

    def loss(params, x):
        def layer(carry, w):
            x, penalty, number = carry
            y = jnp.tanh(x @ w) / (1 + number.astype(x.dtype))
            return (x + y, penalty + jnp.square(y).sum(), number + 1), y.sum()

        start = x, jnp.zeros((), x.dtype), jnp.int32(0)
        (x, penalty, number), sums = lax.scan(layer, start, params["w"])
        return jnp.square(x).mean() + penalty / x.size + sums[0] * number.astype(x.dtype) / x.size

    return trained(loss, params, x, dtype)


def context(dtype):
    """All layers read a context with rows, and weights that they share."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w": jax.random.normal(keys[0], (8, 16, 16)) / 4,
        "shared": jax.random.normal(keys[1], (16, 16)) / 4,
    }
    batch = {
        "x": jax.random.normal(keys[2], (ROWS, 5, 16)),
        "context": jax.random.normal(keys[3], (ROWS, 3, 16)),
        "valid": jnp.arange(ROWS) % 3 + 1,
    }

    def loss(params, batch):
        context = jnp.tanh(batch["context"] @ params["shared"])
        valid = jnp.arange(3)[None] < batch["valid"][:, None]

        def layer(x, w):
            scores = jnp.einsum("btd,bsd->bts", x @ w, context)
            weights = jax.nn.softmax(jnp.where(valid[:, None], scores, -1e9), -1)
            x = x + jnp.einsum("bts,bsd->btd", weights, context) @ params["shared"]
            return x, None

        x, _ = lax.scan(layer, batch["x"], params["w"])
        return jnp.square(x).mean()

    return trained(loss, params, batch, dtype)


def dropout(dtype):
    """Each layer draws from its own key, for the whole batch."""
    block = nn.Residual(nn.Dense(16), nn.Dropout(0.5), jnp.tanh)
    model = nn.Sequential(nn.Stack(block, 8), nn.Dense(4))
    x = jax.random.normal(jax.random.key(1), (ROWS, 16))
    params, state = model.init(jax.random.key(0), x)

    def loss(params, batch):
        y, _ = model(params, batch["x"], state=state, key=batch["key"], train=True)
        return jnp.square(y - 1).mean()

    return trained(loss, params, {"x": x, "key": jax.random.key(7)}, dtype)


def recurrent(dtype):
    """A loop over time in each layer."""
    model = nn.Sequential(nn.Stack(nn.Residual(nn.LSTM(16)), 8), nn.Dense(4))
    x = jax.random.normal(jax.random.key(1), (ROWS, 6, 16))
    params, _ = model.init(jax.random.key(0), x)
    return trained(lambda params, x: jnp.square(model(params, x) - 1).mean(), params, x, dtype)


def convolutions(dtype):
    block = nn.Residual(nn.Conv(8, 3), nn.GroupNorm(2), jax.nn.relu)
    model = nn.Sequential(nn.Stack(block, 8), nn.GlobalAvgPool(), nn.Dense(4))
    x = jax.random.normal(jax.random.key(1), (ROWS, 6, 6, 8))
    params, _ = model.init(jax.random.key(0), x)
    return trained(lambda params, x: jnp.square(model(params, x) - 1).mean(), params, x, dtype)


def vit(dtype):
    model = models.ViT(16, 8, 2, patch=4, size=8, classes=4)
    x = jax.random.normal(jax.random.key(1), (ROWS, 8, 8, 3))
    params, _ = model.init(jax.random.key(0), x)
    return trained(lambda params, x: jnp.square(model(params, x) - 1).mean(), params, x, dtype)


def gpt(dtype, **options):
    return language(models.GPT(32, 16, 8, 2, context=8), dtype, **options)


def packed(dtype):
    """Several texts in a row, which attention keeps apart."""
    model = models.GPT(32, 16, 8, 2, context=8)
    segments = jnp.asarray(np.random.default_rng(1).integers(0, 2, (ROWS, 8)).cumsum(-1), jnp.int32)
    batch = {"tokens": tokens(9), "segments": segments}
    params, _ = model.init(jax.random.key(0), batch["tokens"][:1, :-1])

    def loss(params, batch):
        t = batch["tokens"]
        logits = model(params, t[:, :-1], segments=batch["segments"])
        return cross_entropy(logits, t[:, 1:])

    return trained(loss, params, batch, dtype)


def gqa(dtype):
    return language(models.Decoder(32, 16, 8, 4, 2, 24, context=16), dtype)


def rematerialized(dtype):
    step, state, batch = gpt(dtype)
    return ft.rematerialize(step), state, batch


CASES = {
    "mlp": mlp,
    "checkpoint": lambda dtype: mlp(dtype, checkpointed=True),
    "microbatch": lambda dtype: mlp(dtype, microbatches=2),
    "counted": counted,
    "context": context,
    "dropout": dropout,
    "recurrent": recurrent,
    "convolutions": convolutions,
    "gpt": gpt,
    "gpt microbatch": lambda dtype: gpt(dtype, microbatches=2),
    "packed": packed,
    "gqa": gqa,
    "vit": vit,
    "rematerialize": rematerialized,
}

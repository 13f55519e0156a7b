"""Training steps with layers, which tests of pipelines run: `case(dtype) -> (step, state, batch)`.

Each step returns the new state, the loss and the gradients.
"""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
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
        with jax.numpy_dtype_promotion("standard"):  # for Flax and Optax
            value, grads = value_and_grad(state["params"], batch)
            updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value, "grads": grads}

    return step, {"params": params, "opt": TX.init(params)}, batch


def certain(tree):
    """The leaves of a tree by path, without the biases of keys, whose gradients are rounding errors,
    because attention does not depend on them."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}
    return {path: x for path, x in leaves.items() if "['key']['bias']" not in path}


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


def keyed(dtype):
    """The carry has the random key of the next layer, and a sum of zeros that stays zero."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {"w": jax.random.normal(keys[0], (8, 16, 16)) / 4}
    batch = {"x": jax.random.normal(keys[1], (ROWS, 16)), "key": jax.random.key(3)}

    def loss(params, batch):
        def layer(carry, w):
            x, key, zeros = carry
            key, own = jax.random.split(key)
            keep = jax.random.bernoulli(own, 0.5, x.shape)
            return (x + jnp.where(keep, jnp.tanh(x @ w), 0), key, zeros + 0 * w), zeros

        start = batch["x"], batch["key"], jnp.zeros_like(params["w"][0])
        (x, *_), zeros = lax.scan(layer, start, params["w"])
        return jnp.square(x).mean() + zeros.sum()

    return trained(loss, params, batch, dtype)


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
    "keyed": keyed,
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


# Blocks without a loop.


def blocks(dtype):
    """Blocks in plain JAX, one after another, between two other layers."""
    keys = jax.random.split(jax.random.key(0), 7)
    params = {
        "first": jax.random.normal(keys[0], (4, 16)),
        "blocks": [{"w": jax.random.normal(key, (16, 16)) / 4} for key in keys[1:5]],
        "head": jax.random.normal(keys[5], (16, 4)),
    }

    def loss(params, x):
        x = x @ params["first"]
        for block in params["blocks"]:
            x = x + jnp.tanh(x @ block["w"])
        return jnp.square(x @ params["head"] - 1).mean()

    return trained(loss, params, jax.random.normal(keys[6], (ROWS, 4)), dtype)


def unstacked(dtype):
    return language(models.GPT(32, 16, 4, 2, context=8, stacked=False), dtype)


def lstm(dtype):
    return language(models.LSTMLanguageModel(32, 16, 4), dtype)


def linen_transformer(dtype):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            y = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(y)
            return x + linen.Dense(16)(linen.gelu(linen.Dense(32)(linen.LayerNorm()(x))))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            x = linen.Embed(32, 16)(tokens)
            for _ in range(4):
                x = Block()(x)
            return linen.Dense(32)(linen.LayerNorm()(x))

    t = tokens(8)
    params = Model().init(jax.random.key(0), t[:1])
    loss = lambda params, t: cross_entropy(Model().apply(params, t[:, :-1]), t[:, 1:])
    return trained(loss, params, t, dtype)


def nnx_transformer(dtype):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = (nnx.LayerNorm(16, rngs=rngs) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 16, dtype=dtype, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])
            self.head = nnx.Linear(16, 32, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    graph, params = nnx.split(Model(nnx.Rngs(0)))
    params = nnx.to_pure_dict(params)

    def loss(params, t):
        state = nnx.state(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
        nnx.replace_by_pure_dict(state, params)
        return cross_entropy(nnx.merge(graph, state)(t[:, :-1]), t[:, 1:])

    return trained(loss, params, tokens(8), dtype)


UNROLLED = {
    "blocks": blocks,
    "unstacked": unstacked,
    "lstm": lstm,
    "linen": linen_transformer,
    "nnx": nnx_transformer,
}

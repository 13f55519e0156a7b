"""Training steps of models with attention, whose metrics have the gradients: fnet's own models, one
of linen, one of nnx, and attention written by hand."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fnet import layers as nn
from fnet import models
from fnet import training as tr
from fnet import transforms as ft

TX = optax.sgd(0.1, momentum=0.9)
TIME = 32


def tokens(rows, time, below=64):
    return np.random.default_rng(0).integers(0, below, (rows, time)).astype(np.int32)


def trained(model, loss, batch):
    """`loss(params, batch)` is that of each row or token."""

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], TX)

    def step(state, batch):
        mean = lambda params: loss(params, batch).mean()
        value, grads = ft.value_and_grad(mean)(state.params)
        return state.apply(TX, grads), {"loss": value, "grads": grads}

    return step, init, batch


def cross_entropy(model, params, inputs, labels, **options):
    """In float64 from the logits, because `model.cross_entropy` has float32 sums."""
    if not jax.config.jax_enable_x64:
        return model.cross_entropy(params, inputs, labels, **options)
    logits = model(params, inputs, **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def language_model(model, time=TIME + 1):
    def loss(params, batch):
        return cross_entropy(model, params, batch["tokens"][:, :-1], batch["tokens"][:, 1:])

    return trained(model, loss, {"tokens": tokens(2, time)})


def gpt(**options):
    return language_model(models.GPT(64, 32, 2, 4, context=64, **options))


def shifted():
    """The batch has as many tokens as the devices divide, so attention runs over one less."""
    return language_model(models.GPT(64, 32, 2, 2, context=64), TIME)


def chunked():
    """The logits are computed in chunks of time, each of which is split."""

    def init(key):
        return {"params": jax.random.normal(key, (64, 32)) * 0.3}

    def step(state, batch):
        def loss(table):
            x = table[batch[:, :-1]]
            heads = x.reshape(*x.shape[:2], 4, 8)
            y = nn.dot_product_attention(heads, heads, heads, causal=True)
            x = x + y.reshape(x.shape)
            return nn.linear_cross_entropy(x, table.T, batch[:, 1:], chunk_size=256).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {"params": state["params"] - grads}, {"loss": value, "grads": grads}

    return step, init, tokens(1, 513)


def packed():
    """Texts of several lengths in each row, and padding."""
    model = models.GPT(64, 32, 2, 2, context=64)
    texts = [tokens(1, size)[0] for size in (20, 9, 30, 12, 7, 2, 5, 3, 17, 10)]
    batch = tr.Packed(texts, length=TIME, batch_size=2)(0)

    def loss(params, batch):
        labels, weights = nn.next_tokens(batch["tokens"], batch["segments"])
        segments = batch["segments"]
        return cross_entropy(model, params, batch["tokens"], labels, segments=segments) * weights

    return trained(model, loss, batch)


def decoder(**options):
    sizes = {"vocab_size": 64, "width": 32, "depth": 2, "hidden": 48, "context": 64}
    return models.Decoder(**sizes, **options)


def llama():
    return language_model(decoder(heads=8, kv_heads=4))


def llama_in_a_ring():
    return language_model(decoder(heads=4, kv_heads=2))


def mistral():
    """Blocks with a window and blocks without one."""
    return language_model(decoder(heads=2, kv_heads=1, window=(8, None)))


def vit():
    model = models.ViT(width=32, depth=2, heads=2, classes=8, patch=4, size=32)
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    return trained(model, lambda params, x: jnp.square(model(params, x)), images)


def flax_linen():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            mask = linen.make_causal_mask(x[..., 0])
            attention = linen.MultiHeadDotProductAttention(num_heads=4)
            x = x + attention(linen.LayerNorm()(x), mask=mask)
            return x + linen.Dense(32)(linen.gelu(linen.Dense(64)(x)))

    x = np.random.default_rng(0).normal(size=(2, TIME, 32)).astype(np.float32)

    def init(key):
        params = Block().init(key, jnp.zeros((1, TIME, 32)))
        return {"params": params, "opt": TX.init(params)}

    def step(state, batch):
        loss = lambda params: jnp.square(Block().apply(params, batch)).mean()
        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = TX.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"loss": value, "grads": grads}

    return step, init, x


def flax_nnx():
    """With attention of fnet in a module of nnx, which is updated in place."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.qkv = nnx.Linear(32, 96, rngs=rngs)
            self.out = nnx.Linear(32, 32, rngs=rngs)

        def __call__(self, x):
            q, k, v = (y.reshape(*x.shape[:2], 2, 16) for y in jnp.split(self.qkv(x), 3, -1))
            y = nn.dot_product_attention(q, k, v, causal=True)
            return x + self.out(y.reshape(x.shape))

    x = np.random.default_rng(0).normal(size=(2, TIME, 32)).astype(np.float32)

    def init(key):
        model = Block(nnx.Rngs(key))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(lambda model: jnp.square(model(batch)).mean())(model)
        optimizer.update(model, grads)
        return {"loss": value, "grads": nnx.to_pure_dict(grads)}

    return step, init, x


def by_hand():
    """Attention in jnp, in a scan over layers."""

    def block(x, p):
        q, k, v = (jnp.einsum("btf,fhd->bthd", x, p[name]) for name in "qkv")
        logits = jnp.einsum("bthd,bshd->bhts", q, k) / 4
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen[None, None], logits, -1e30))
        y = jnp.einsum("bhts,bshd->bthd", weights, v)
        return x + jnp.einsum("bthd,hdf->btf", y, p["o"]), None

    def init(key):
        keys = iter(jax.random.split(key, 5))
        draw = lambda *shape: jax.random.normal(next(keys), shape) * 0.2
        blocks = {name: draw(2, 32, 4, 8) for name in "qkv"} | {"o": draw(2, 4, 8, 32)}
        return {"params": {"embed": draw(64, 32), "blocks": blocks}}

    def step(state, batch):
        def loss(params):
            x, _ = jax.lax.scan(block, params["embed"][batch[:, :-1]], params["blocks"])
            logits = x @ params["embed"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": new}, {"loss": value, "grads": grads}

    return step, init, tokens(2, TIME + 1)


CASES = {
    each.__name__: each
    for each in (
        gpt,
        shifted,
        chunked,
        packed,
        llama,
        llama_in_a_ring,
        mistral,
        vit,
        flax_linen,
        flax_nnx,
        by_hand,
    )
}

"""The models in flax.linen. Mixed: `dtype=bfloat16` on every module, as its documentation has it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run, fitted, nested


def build(workload, weights, batches, *, train, mixed, tuned=False):
    model = MODELS[type(workload)](workload, jnp.bfloat16 if mixed else jnp.float32)
    like = jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), batches[0][0])
    params, stats = fitted(like["params"], nested(weights)), nested(weights, stats=True)

    def apply(params, stats, x, train):
        if not (train and stats):
            return model.apply({"params": params, "batch_stats": stats}, x, train), stats
        logits, updated = model.apply({"params": params, "batch_stats": stats}, x, train, mutable=["batch_stats"])
        return logits, updated["batch_stats"]

    return Run(apply, params, stats, batches, train=train, tuned=tuned)


class MLP(nn.Module):
    w: spec.MLP
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):                                          # [batch, features]
        for i, width in enumerate(self.w.widths[1:]):
            x = nn.Dense(width, dtype=self.dtype, name=f"dense{i}")(nn.relu(x) if i else x)
        return x


class CNN(nn.Module):
    w: spec.CNN
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):                                          # [batch, height, width, channels]
        i = 0
        for stage in self.w.stages:
            for channels in stage:
                x = nn.relu(nn.Conv(channels, (3, 3), dtype=self.dtype, name=f"conv{i}")(x))
                i += 1
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(self.w.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))


class Block(nn.Module):
    heads: int
    bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, mask=None):                                      # [batch, time, width]
        width = x.shape[-1]
        options = {"use_bias": self.bias, "dtype": self.dtype}
        norm = functools.partial(nn.LayerNorm, epsilon=spec.EPSILON, **options)
        y = norm(name="norm1")(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, name="attn", **options)(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * width, name="up", **options)(norm(name="norm2")(x)))
        return x + nn.Dense(width, name="down", **options)(y)


class GPT(nn.Module):
    w: spec.GPT
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens, train):                                     # [batch, time]
        w = self.w
        embed = nn.Embed(w.vocab, w.width, dtype=self.dtype, name="token")
        position = nn.Embed(w.time, w.width, dtype=self.dtype, name="position")
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))          # [batch, time, width]
        for i in range(w.depth):
            x = Block(w.heads, w.bias, self.dtype, name=f"block{i}")(x, nn.make_causal_mask(tokens))
        x = nn.LayerNorm(epsilon=spec.EPSILON, use_bias=w.bias, dtype=self.dtype, name="norm")(x)
        return embed.attend(x)


MODELS = {spec.MLP: MLP, spec.CNN: CNN, spec.GPT: GPT}

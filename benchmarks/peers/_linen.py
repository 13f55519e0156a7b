"""The models in flax.linen. With mixed precision, every module has `dtype=bfloat16`, as in Flax'
documentation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run, fitted, nested


def build(workload, weights, batches, *, train, mixed, **how):
    model = MODELS[type(workload)](workload, jnp.bfloat16 if mixed else jnp.float32)
    like = jax.eval_shape(
        functools.partial(model.init, train=False), jax.random.key(0), batches[0][0]
    )
    params = {
        name: _cell(tree) if name.startswith("lstm") else tree
        for name, tree in nested(weights).items()
    }
    params, stats = fitted(like["params"], params), nested(weights, stats=True)

    def apply(params, stats, x, train):
        if not (train and stats):
            return model.apply({"params": params, "batch_stats": stats}, x, train), stats
        logits, updated = model.apply(
            {"params": params, "batch_stats": stats}, x, train, mutable=["batch_stats"]
        )
        return logits, updated["batch_stats"]

    return Run(apply, params, stats, batches, train=train, **how)


def _cell(lstm):
    """Returns the weights of an LSTM for each gate: the kernels ii, if, ig and io of the input, and
    the kernels hi, hf, hg and ho of the state, with the biases."""
    tree = {}
    for i, gate in enumerate("ifgo"):
        kernel, recurrent, bias = (
            np.split(lstm[name], 4, -1)[i] for name in ("kernel", "recurrent_kernel", "bias")
        )
        tree |= {f"i{gate}": {"kernel": kernel}, f"h{gate}": {"kernel": recurrent, "bias": bias}}
    return tree


class MLP(nn.Module):
    w: spec.MLP
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):  # [batch, features]
        for i, width in enumerate(self.w.widths[1:]):
            x = nn.Dense(width, dtype=self.dtype, name=f"dense{i}")(nn.relu(x) if i else x)
        return x


class CNN(nn.Module):
    w: spec.CNN
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):  # [batch, height, width, channels]
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
    def __call__(self, x, mask=None):  # [batch, time, width]
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
    scanned: bool = False  # whether the blocks are one nn.scan over stacked weights

    @nn.compact
    def __call__(self, tokens, train):  # [batch, time]
        w = self.w
        embed = nn.Embed(w.vocab, w.width, dtype=self.dtype, name="token")
        position = nn.Embed(w.time, w.width, dtype=self.dtype, name="position")
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))  # [batch, time, width]
        mask = nn.make_causal_mask(tokens)
        if self.scanned:
            run = nn.scan(
                lambda block, x, _: (block(x, mask), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=w.depth,
            )
            x, _ = run(Block(w.heads, w.bias, self.dtype, name="blocks"), x, None)
        for i in range(0 if self.scanned else w.depth):
            x = Block(w.heads, w.bias, self.dtype, name=f"block{i}")(x, mask)
        x = nn.LayerNorm(epsilon=spec.EPSILON, use_bias=w.bias, dtype=self.dtype, name="norm")(x)
        return embed.attend(x)


class ViT(nn.Module):
    w: spec.ViT
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):  # [batch, height, width, channels]
        w = self.w
        patch = (w.patch, w.patch)
        x = nn.Conv(w.width, patch, patch, "VALID", dtype=self.dtype, name="patch")(x)
        x = x.reshape(len(x), -1, w.width)  # [batch, tokens, width]
        x = x + nn.Embed(x.shape[1], w.width, dtype=self.dtype, name="position")(
            jnp.arange(x.shape[1])
        )
        for i in range(w.depth):
            x = Block(w.heads, True, self.dtype, name=f"block{i}")(x)
        x = nn.LayerNorm(epsilon=spec.EPSILON, dtype=self.dtype, name="norm")(x).mean(1)
        return nn.Dense(w.classes, dtype=self.dtype, name="head")(x)


class Residual(nn.Module):
    width: int
    out: int
    stride: int
    bottleneck: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):  # [batch, height, width, channels]
        a, b, stride = self.width, self.out, self.stride
        convs = (
            [(1, a, 1), (3, a, stride), (1, b, 1)]
            if self.bottleneck
            else [(3, a, stride), (3, b, 1)]
        )
        y = x
        for j, (window, channels, strides) in enumerate(convs, 1):
            y = conv_norm(channels, window, strides, f"conv{j}", f"norm{j}", self.dtype, train)(y)
            y = nn.relu(y) if j < len(convs) else y
        if x.shape != y.shape:
            x = conv_norm(b, 1, stride, "shortcut", "shortcut_norm", self.dtype, train)(x)
        return nn.relu(x + y)


def conv_norm(channels, window, stride, conv, norm, dtype, train):
    return nn.Sequential(
        [
            nn.Conv(
                channels,
                (window, window),
                stride,
                window // 2,
                use_bias=False,
                dtype=dtype,
                name=conv,
            ),
            nn.BatchNorm(not train, momentum=0.9, epsilon=spec.EPSILON, dtype=dtype, name=norm),
        ]
    )


class ResNet(nn.Module):
    w: spec.ResNet
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, train):  # [batch, height, width, channels]
        w = self.w
        window, stride = (7, 2) if w.photos else (3, 1)
        x = nn.relu(conv_norm(w.width, window, stride, "stem", "stem_norm", self.dtype, train)(x))
        if w.photos:
            x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for i, (_, width, out, stride) in enumerate(w.blocks()):
            x = Residual(width, out, stride, w.bottleneck, self.dtype, name=f"block{i}")(x, train)
        return nn.Dense(w.classes, dtype=self.dtype, name="head")(x.mean((1, 2)))


class LSTM(nn.Module):
    w: spec.LSTM
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens, train):  # [batch, time]
        w = self.w
        x = nn.Embed(w.vocab, w.width, dtype=self.dtype, name="token")(tokens)
        for i in range(w.depth):
            x = nn.RNN(nn.OptimizedLSTMCell(w.width, dtype=self.dtype, name=f"lstm{i}"))(x)
        return nn.Dense(w.vocab, dtype=self.dtype, name="head")(x)  # [batch, time, vocab]


MODELS = {
    spec.MLP: MLP,
    spec.CNN: CNN,
    spec.GPT: GPT,
    spec.ViT: ViT,
    spec.ResNet: ResNet,
    spec.LSTM: LSTM,
}

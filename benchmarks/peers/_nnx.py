"""The models in flax.nnx, with `nnx.jit` and `nnx.Optimizer`. With mixed precision, every module
has
`dtype=bfloat16`."""

from __future__ import annotations

import functools
import itertools
import re

import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.peers import _steps
from benchmarks.peers import _workloads as spec


def build(workload, weights, batches, *, train, mixed):
    return Run(workload, weights, batches, train=train, mixed=mixed)


class Run(_steps.Run):
    """Runs the steps of an nnx model, with the methods of `_steps.Run`. The state is in the model
    and the optimizer."""

    def __init__(self, workload, weights, batches, *, train, mixed):
        self.batches = [(jnp.asarray(x), jnp.asarray(y)) for x, y in batches]
        dtype = jnp.bfloat16 if mixed else jnp.float32
        model = MODELS[type(workload)](workload, dtype=dtype, rngs=nnx.Rngs(0))
        _fill(model, weights)
        model.train() if train else model.eval()
        self.train = train
        self.state = (
            (model, nnx.Optimizer(model, _steps.optimizer(), wrt=nnx.Param)) if train else (model,)
        )
        self.f = _step if train else nnx.jit(lambda model, x: model(x))

    def step(self, i):
        x, y = self.batches[i % len(self.batches)]
        return self.f(*self.state, x, y) if self.train else self.f(*self.state, x)


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def _step(model, optimizer, x, y):
    def loss(model):
        logits = model(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


CELL = {"dense_i/kernel": "kernel", "dense_h/kernel": "recurrent_kernel", "dense_h/bias": "bias"}


def _fill(model, weights):
    """Copies the weights into the model by name. The weights of block.0.attn.query.kernel are at
    block0/attn/query/kernel."""
    left, filled = dict(weights), []
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))):
        name = re.sub(r"/(\d+)", r"\1", "/".join(map(str, path)))
        if "/cell/" in name:
            layer, inner = name.split("/cell/")
            name = f"{layer}/{CELL[inner]}"
        filled.append((path, variable.replace(jnp.asarray(left.pop(name).reshape(variable.shape)))))
    nnx.update(model, nnx.from_flat_state(filled))
    if left:
        raise ValueError(f"weights that the model does not have: {sorted(left)}")


class MLP(nnx.Module):
    def __init__(self, w, **options):
        self.dense = nnx.List(
            [nnx.Linear(a, b, **options) for a, b in itertools.pairwise(w.widths)]
        )

    def __call__(self, x):  # [batch, features]
        for i, dense in enumerate(self.dense):
            x = dense(nnx.relu(x) if i else x)
        return x


class CNN(nnx.Module):
    def __init__(self, w, **options):
        self.stages = w.stages
        channels = (3, *(width for stage in w.stages for width in stage))
        self.conv = nnx.List(
            [nnx.Conv(a, b, (3, 3), **options) for a, b in itertools.pairwise(channels)]
        )
        self.head = nnx.Linear(channels[-1], w.classes, **options)

    def __call__(self, x):  # [batch, height, width, channels]
        convs = iter(self.conv)
        for stage in self.stages:
            for _ in stage:
                x = nnx.relu(next(convs)(x))
            x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.head(x.mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, width, heads, bias, **options):
        options |= {"use_bias": bias}
        self.norm1, self.norm2 = (
            nnx.LayerNorm(width, epsilon=spec.EPSILON, **options) for _ in range(2)
        )
        self.attn = nnx.MultiHeadAttention(heads, width, decode=False, **options)
        self.up = nnx.Linear(width, 4 * width, **options)
        self.down = nnx.Linear(4 * width, width, **options)

    def __call__(self, x, mask=None):  # [batch, time, width]
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, w, *, rngs, scanned=False, **options):
        block = lambda rngs: Block(w.width, w.heads, w.bias, rngs=rngs, **options)
        stacked = nnx.split_rngs(splits=w.depth)(nnx.vmap(block))
        self.scanned = scanned  # whether the blocks are one nnx.scan over stacked weights
        self.block = stacked(rngs) if scanned else nnx.List([block(rngs) for _ in range(w.depth)])
        options |= {"rngs": rngs}
        self.token = nnx.Embed(w.vocab, w.width, **options)
        self.position = nnx.Embed(w.time, w.width, **options)
        self.norm = nnx.LayerNorm(w.width, epsilon=spec.EPSILON, use_bias=w.bias, **options)

    def __call__(self, tokens):  # [batch, time]
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        if self.scanned:
            x = nnx.scan(
                lambda x, block: block(x, mask), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )(x, self.block)
        for block in () if self.scanned else self.block:
            x = block(x, mask)
        return self.token.attend(self.norm(x))  # [batch, time, vocab]


class ViT(nnx.Module):
    def __init__(self, w, **options):
        patch = (w.patch, w.patch)
        self.patch = nnx.Conv(3, w.width, patch, patch, padding="VALID", **options)
        self.position = nnx.Embed((w.size // w.patch) ** 2, w.width, **options)
        self.block = nnx.List([Block(w.width, w.heads, True, **options) for _ in range(w.depth)])
        self.norm = nnx.LayerNorm(w.width, epsilon=spec.EPSILON, **options)
        self.head = nnx.Linear(w.width, w.classes, **options)

    def __call__(self, x):  # [batch, height, width, channels]
        x = self.patch(x)
        x = x.reshape(len(x), -1, x.shape[-1])  # [batch, tokens, width]
        x = x + self.position(jnp.arange(x.shape[1]))
        for block in self.block:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Residual(nnx.Module):
    def __init__(self, before, width, out, stride, bottleneck, **options):
        convs = (
            [(before, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
            if bottleneck
            else [(before, width, 3, stride), (width, out, 3, 1)]
        )
        self.n = len(convs)
        for j, sizes in enumerate(convs, 1):
            conv, norm = _conv_norm(*sizes, **options)
            setattr(self, f"conv{j}", conv)
            setattr(self, f"norm{j}", norm)
        self.projects = before != out or stride != 1
        if self.projects:
            self.shortcut, self.shortcut_norm = _conv_norm(before, out, 1, stride, **options)

    def __call__(self, x):  # [batch, height, width, channels]
        y = x
        for j in range(1, self.n + 1):
            y = getattr(self, f"norm{j}")(getattr(self, f"conv{j}")(y))
            y = nnx.relu(y) if j < self.n else y
        return nnx.relu(y + (self.shortcut_norm(self.shortcut(x)) if self.projects else x))


def _conv_norm(a, b, window, stride, **options):
    return (
        nnx.Conv(a, b, (window, window), stride, padding=window // 2, use_bias=False, **options),
        nnx.BatchNorm(b, momentum=0.9, epsilon=spec.EPSILON, **options),
    )


class ResNet(nnx.Module):
    def __init__(self, w, **options):
        self.photos = w.photos
        self.stem, self.stem_norm = _conv_norm(
            3, w.width, *((7, 2) if w.photos else (3, 1)), **options
        )
        self.block = nnx.List([Residual(*sizes, w.bottleneck, **options) for sizes in w.blocks()])
        self.head = nnx.Linear(list(w.blocks())[-1][2], w.classes, **options)

    def __call__(self, x):  # [batch, height, width, channels]
        x = nnx.relu(self.stem_norm(self.stem(x)))
        if self.photos:
            x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for block in self.block:
            x = block(x)
        return self.head(x.mean((1, 2)))


class LSTM(nnx.Module):
    def __init__(self, w, **options):
        self.token = nnx.Embed(w.vocab, w.width, **options)
        self.lstm = nnx.List(
            [nnx.RNN(nnx.OptimizedLSTMCell(w.width, w.width, **options)) for _ in range(w.depth)]
        )
        self.head = nnx.Linear(w.width, w.vocab, **options)

    def __call__(self, tokens):  # [batch, time]
        x = self.token(tokens)  # [batch, time, width]
        for lstm in self.lstm:
            x = lstm(x)
        return self.head(x)  # [batch, time, vocab]


MODELS = {
    spec.MLP: MLP,
    spec.CNN: CNN,
    spec.GPT: GPT,
    spec.ViT: ViT,
    spec.ResNet: ResNet,
    spec.LSTM: LSTM,
}

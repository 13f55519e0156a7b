"""The models in Equinox. As in its documentation, channels are first, and a model computes one
example and is vmapped.

With mixed precision, parameters and inputs are cast to bfloat16 inside the loss.
"""

from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run
from benchmarks.peers._torch_layout import channels_first, transposed


def build(workload, weights, batches, *, train, mixed, **how):
    make = MODELS[type(workload)]
    state = None
    if make is ResNet:
        model, state = eqx.nn.make_with_state(make)(workload, key=jax.random.key(0))
        model = eqx.nn.inference_mode(model, not train)
    else:
        model = eqx.filter_eval_shape(make, workload, key=jax.random.key(0))
    model, state = _filled(model, state, weights)
    params, static = eqx.partition(model, eqx.is_array)
    low = jnp.bfloat16 if mixed else jnp.float32

    def apply(params, state, x, train):
        params = jax.tree.map(lambda a: a.astype(low), params)
        model = eqx.combine(params, static)
        x = x if x.dtype == jnp.int32 else x.astype(low)
        if state is None:
            return jax.vmap(model)(x), state
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)

    return Run(apply, params, state, transposed(batches), train=train, **how)


NAMES = {"query_proj": "query", "key_proj": "key", "value_proj": "value", "output_proj": "out"}
KINDS = {
    "weight": ("kernel", "scale", "embedding"),
    "weight_ih": ("kernel",),
    "weight_hh": ("recurrent_kernel",),
}


def _filled(model, state, weights):
    """Returns the model and its state with the arrays of `weights`. Arrays are matched by path,
    such as block[0].attn.query_proj.weight."""
    left = dict(weights)

    def fill(path, leaf):
        if isinstance(leaf, eqx.nn.BatchNorm):
            return jax.tree_util.tree_map_with_path(
                lambda inner, leaf: fill((*path, *inner), leaf), leaf
            )
        if not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array):
            return leaf
        place, name = _place(path)
        kind = next(kind for kind in KINDS.get(name, (name,)) if f"{place}/{kind}" in left)
        array = left.pop(f"{place}/{kind}")
        return jnp.asarray(
            (channels_first(array) if kind.endswith("kernel") else array).reshape(leaf.shape)
        )

    norm = lambda node: isinstance(node, eqx.nn.BatchNorm)
    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=norm):
        if norm(node):
            place, _ = _place((*path, "weight"))
            state = state.set(
                node.batch_state_index,
                tuple(jnp.asarray(left.pop(f"{place}/{kind}")) for kind in ("mean", "var")),
            )
    model = jax.tree_util.tree_map_with_path(fill, model, is_leaf=norm)
    if left:
        raise ValueError(f"weights that the model does not have: {sorted(left)}")
    return model, state


def _place(path):
    """Returns the parent path in `weights` and the name of a leaf: ("block0/attn/query", "weight")
    for block[0].attn.query_proj.weight. The two layers of a ConvNorm are named conv1 and norm1."""
    text = "/".join(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)
    text = re.sub(r"/(\d+)", r"\1", text)
    text = re.sub(r"convs(\d+)/(conv|norm)", lambda m: f"{m[2]}{int(m[1]) + 1}", text)
    text = re.sub(
        r"(stem|shortcut)/(conv|norm)", lambda m: m[1] + ("_norm" if m[2] == "norm" else ""), text
    )
    *parents, name = text.split("/")
    return "/".join(NAMES.get(parent, parent) for parent in parents), name


class MLP(eqx.Module):
    dense: list

    def __init__(self, w, key):
        self.dense = [eqx.nn.Linear(a, b, key=key) for a, b in zip(w.widths, w.widths[1:])]

    def __call__(self, x):  # [features]
        for i, dense in enumerate(self.dense):
            x = dense(jax.nn.relu(x) if i else x)
        return x


class CNN(eqx.Module):
    conv: list
    head: eqx.nn.Linear
    pool_after: frozenset = eqx.field(static=True)

    def __init__(self, w, key):
        widths = [channels for stage in w.stages for channels in stage]
        self.conv = [
            eqx.nn.Conv2d(a, b, 3, padding=1, key=key) for a, b in zip((3, *widths), widths)
        ]
        self.head = eqx.nn.Linear(widths[-1], w.classes, key=key)
        self.pool_after = frozenset(
            sum(map(len, w.stages[: i + 1])) - 1 for i in range(len(w.stages))
        )

    def __call__(self, x):  # [channels, height, width]
        for i, conv in enumerate(self.conv):
            x = jax.nn.relu(conv(x))
            if i in self.pool_after:
                x = eqx.nn.MaxPool2d(2, 2)(x)
        return self.head(x.mean((1, 2)))


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attn: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, heads, bias, key):
        self.norm1, self.norm2 = (
            eqx.nn.LayerNorm(width, spec.EPSILON, use_bias=bias) for _ in range(2)
        )
        self.attn = eqx.nn.MultiheadAttention(
            heads,
            width,
            use_query_bias=bias,
            use_key_bias=bias,
            use_value_bias=bias,
            use_output_bias=bias,
            key=key,
        )
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=bias, key=key)
        self.down = eqx.nn.Linear(4 * width, width, use_bias=bias, key=key)

    def __call__(self, x, mask=None):  # [time, width]
        y = jax.vmap(self.norm1)(x)
        x = x + self.attn(y, y, y, mask)
        return x + jax.vmap(self._feed_forward)(jax.vmap(self.norm2)(x))

    def _feed_forward(self, x):
        return self.down(jax.nn.gelu(self.up(x)))


class GPT(eqx.Module):
    token: eqx.nn.Embedding
    position: eqx.nn.Embedding
    block: list
    norm: eqx.nn.LayerNorm

    def __init__(self, w, key):
        self.token = eqx.nn.Embedding(w.vocab, w.width, key=key)
        self.position = eqx.nn.Embedding(w.time, w.width, key=key)
        self.block = [Block(w.width, w.heads, w.bias, key) for _ in range(w.depth)]
        self.norm = eqx.nn.LayerNorm(w.width, spec.EPSILON, use_bias=w.bias)

    def __call__(self, tokens):  # [time]
        time = jnp.arange(len(tokens))
        x = jax.vmap(self.token)(tokens) + jax.vmap(self.position)(time)  # [time, width]
        for block in self.block:
            x = block(x, time[:, None] >= time)
        return jax.vmap(self.norm)(x) @ self.token.weight.T  # [time, vocab]


class ViT(eqx.Module):
    patch: eqx.nn.Conv2d
    position: eqx.nn.Embedding
    block: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, w, key):
        self.patch = eqx.nn.Conv2d(3, w.width, w.patch, w.patch, key=key)
        self.position = eqx.nn.Embedding((w.size // w.patch) ** 2, w.width, key=key)
        self.block = [Block(w.width, w.heads, True, key) for _ in range(w.depth)]
        self.norm = eqx.nn.LayerNorm(w.width, spec.EPSILON)
        self.head = eqx.nn.Linear(w.width, w.classes, key=key)

    def __call__(self, x):  # [channels, height, width]
        x = self.patch(x)
        x = x.reshape(len(x), -1).T + self.position.weight  # [tokens, width]
        for block in self.block:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0))


class ConvNorm(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm

    def __init__(self, a, b, window, stride, key):
        self.conv = eqx.nn.Conv2d(a, b, window, stride, window // 2, use_bias=False, key=key)
        self.norm = eqx.nn.BatchNorm(b, "batch", spec.EPSILON, momentum=0.9, mode="batch")

    def __call__(self, x, state):
        y, state = self.norm(self.conv(x), state)
        return y.astype(x.dtype), state


class Residual(eqx.Module):
    convs: list
    shortcut: ConvNorm | None

    def __init__(self, before, width, out, stride, bottleneck, key):
        convs = (
            [(before, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1)]
            if bottleneck
            else [(before, width, 3, stride), (width, out, 3, 1)]
        )
        self.convs = [ConvNorm(*sizes, key) for sizes in convs]
        self.shortcut = (
            ConvNorm(before, out, 1, stride, key) if before != out or stride != 1 else None
        )

    def __call__(self, x, state):  # [channels, height, width]
        y = x
        for j, conv in enumerate(self.convs, 1):
            y, state = conv(y, state)
            y = jax.nn.relu(y) if j < len(self.convs) else y
        if self.shortcut is not None:
            x, state = self.shortcut(x, state)
        return jax.nn.relu(x + y), state


class ResNet(eqx.Module):
    stem: ConvNorm
    block: list
    head: eqx.nn.Linear
    photos: bool = eqx.field(static=True)

    def __init__(self, w, key):
        self.stem = ConvNorm(3, w.width, *((7, 2) if w.photos else (3, 1)), key)
        self.block = [Residual(*sizes, w.bottleneck, key) for sizes in w.blocks()]
        self.head = eqx.nn.Linear(list(w.blocks())[-1][2], w.classes, key=key)
        self.photos = w.photos

    def __call__(self, x, state):  # [channels, height, width]
        x, state = self.stem(x, state)
        x = jax.nn.relu(x)
        if self.photos:
            x = eqx.nn.MaxPool2d(3, 2, 1)(x)
        for block in self.block:
            x, state = block(x, state)
        return self.head(x.mean((1, 2))), state


class LSTM(eqx.Module):
    token: eqx.nn.Embedding
    lstm: list
    head: eqx.nn.Linear

    def __init__(self, w, key):
        self.token = eqx.nn.Embedding(w.vocab, w.width, key=key)
        self.lstm = [eqx.nn.LSTMCell(w.width, w.width, key=key) for _ in range(w.depth)]
        self.head = eqx.nn.Linear(w.width, w.vocab, key=key)

    def __call__(self, tokens):  # [time]
        x = jax.vmap(self.token)(tokens)  # [time, width]
        for cell in self.lstm:
            zero = jnp.zeros(cell.hidden_size, x.dtype)
            _, x = jax.lax.scan(
                lambda carry, x, cell=cell: ((new := cell(x, carry)), new[0]), (zero, zero), x
            )
        return jax.vmap(self.head)(x)  # [time, vocab]


MODELS = {
    spec.MLP: MLP,
    spec.CNN: CNN,
    spec.GPT: GPT,
    spec.ViT: ViT,
    spec.ResNet: ResNet,
    spec.LSTM: LSTM,
}

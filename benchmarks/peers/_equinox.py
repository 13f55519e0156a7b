"""The models in Equinox, channels first and one example at a time under vmap, as its documentation has them.

Mixed: parameters and inputs cast to bfloat16 inside the loss.
"""

from __future__ import annotations

import re

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run
from benchmarks.peers._torch_layout import channels_first, transposed


def build(workload, weights, batches, *, train, mixed, tuned=False):
    model = eqx.filter_eval_shape(MODELS[type(workload)], workload, key=jax.random.key(0))
    params, static = eqx.partition(_filled(model, weights), eqx.is_array)
    low = jnp.bfloat16 if mixed else jnp.float32

    def apply(params, stats, x, train):
        params = jax.tree.map(lambda a: a.astype(low), params)
        return jax.vmap(eqx.combine(params, static))(x if x.dtype == jnp.int32 else x.astype(low)), stats

    return Run(apply, params, {}, transposed(batches), train=train, tuned=tuned)


NAMES = {"query_proj": "query", "key_proj": "key", "value_proj": "value", "output_proj": "out"}


def _filled(model, weights):
    """The model with its arrays replaced, by the names of its fields: block[0].attn.query_proj.weight."""
    left = dict(weights)

    def fill(path, leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        *parents, name = re.sub(r"\[(\d+)\]", r"\1", jax.tree_util.keystr(path)).strip(".").split(".")
        place = "/".join(NAMES.get(parent, parent) for parent in parents)
        for kind in ("kernel", "scale", "embedding") if name == "weight" else (name,):
            if f"{place}/{kind}" in left:
                array = left.pop(f"{place}/{kind}")
                if kind == "kernel":
                    array = channels_first(array)
                return jnp.asarray(array.reshape(leaf.shape))
        raise ValueError(f"no weights for {jax.tree_util.keystr(path)}")

    filled = jax.tree_util.tree_map_with_path(fill, model)
    if left:
        raise ValueError(f"weights that the model does not have: {sorted(left)}")
    return filled


class MLP(eqx.Module):
    dense: list

    def __init__(self, w, key):
        self.dense = [eqx.nn.Linear(a, b, key=key) for a, b in zip(w.widths, w.widths[1:])]

    def __call__(self, x):                                                 # [features]
        for i, dense in enumerate(self.dense):
            x = dense(jax.nn.relu(x) if i else x)
        return x


class CNN(eqx.Module):
    conv: list
    head: eqx.nn.Linear
    pool_after: frozenset = eqx.field(static=True)

    def __init__(self, w, key):
        widths = [channels for stage in w.stages for channels in stage]
        self.conv = [eqx.nn.Conv2d(a, b, 3, padding=1, key=key) for a, b in zip((3, *widths), widths)]
        self.head = eqx.nn.Linear(widths[-1], w.classes, key=key)
        self.pool_after = frozenset(sum(map(len, w.stages[:i + 1])) - 1 for i in range(len(w.stages)))

    def __call__(self, x):                                                 # [channels, height, width]
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
        self.norm1, self.norm2 = (eqx.nn.LayerNorm(width, spec.EPSILON, use_bias=bias) for _ in range(2))
        self.attn = eqx.nn.MultiheadAttention(
            heads, width, use_query_bias=bias, use_key_bias=bias, use_value_bias=bias, use_output_bias=bias, key=key)
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=bias, key=key)
        self.down = eqx.nn.Linear(4 * width, width, use_bias=bias, key=key)

    def __call__(self, x, mask=None):                                      # [time, width]
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

    def __call__(self, tokens):                                            # [time]
        time = jnp.arange(len(tokens))
        x = jax.vmap(self.token)(tokens) + jax.vmap(self.position)(time)   # [time, width]
        for block in self.block:
            x = block(x, time[:, None] >= time)
        return jax.vmap(self.norm)(x) @ self.token.weight.T                # [time, vocab]


MODELS = {spec.MLP: MLP, spec.CNN: CNN, spec.GPT: GPT}

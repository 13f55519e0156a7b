"""The table of every layer: how it is made, what it takes, what shape it gives. test_conformance.py
drives it.

A layer that `fnet.layers` exports and this table lacks fails a test; so does a parameter name that
differs from golden_names.json, which is written anew by

    python tests/layers/layer_cases.py
"""

import json
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fnet import layers as nn

GOLDEN = pathlib.Path(__file__).with_name("golden_names.json")
BATCH = 8  # one row for each of the eight devices


class Case(NamedTuple):
    """`shapes` without the batch; an int stands for integer tokens below it, in a [4] row."""

    layer: nn.Layer
    shapes: tuple[Any, ...]
    out: tuple[int, ...]
    options: Mapping = MappingProxyType({})


@nn.layer
def residual_block(scope, x, *, channels, stride=1):
    y = jnp.tanh(nn.BatchNorm()(scope["norm1"], nn.Conv(channels, 3, stride)(scope["conv1"], x)))
    y = nn.BatchNorm()(scope["norm2"], nn.Conv(channels, 3)(scope["conv2"], y))
    if x.shape != y.shape:
        x = nn.Conv(channels, 1, stride)(scope["shortcut"], x)
    return jnp.tanh(x + y)


class MLP(nn.Layer):
    widths: tuple[int, ...]
    dropout: float = 0.0

    def forward(self, scope, x):
        for i, width in enumerate(self.widths[:-1]):
            x = jnp.tanh(nn.Dense(width)(scope[f"fc{i}"], x))
            x = nn.Dropout(self.dropout)(scope[f"drop{i}"], x)
        return nn.Dense(self.widths[-1])(scope["head"], x)


class Tied(nn.Layer):
    """A block of attention between a table and its transpose."""

    def forward(self, scope, tokens):
        embed, at = nn.Embed(6, 4), scope["embed"]
        x = embed(at, tokens)
        x = nn.Stack(nn.Residual(nn.LayerNorm(), nn.Attention(2, causal=True)), 2)(
            scope["blocks"], x
        )
        return embed.attend(at, x)


def normal(key, shape, dtype=jnp.float32):
    return 0.02 * jax.random.normal(key, shape, dtype)


ROW, SEQ, IMG = (4,), (4, 4), (4, 4, 4)  # features; [time, features]; [height, width, channels]

CASES = {
    "Dense": Case(nn.Dense(4), (ROW,), ROW),
    "Dense_normal": Case(nn.Dense(4, kernel_init=normal), (ROW,), ROW),
    "Dense_no_bias": Case(nn.Dense(3, use_bias=False), (SEQ,), (4, 3)),
    "Maxout": Case(nn.Maxout(4, 3), (ROW,), ROW),
    "MixtureOfExperts": Case(nn.MixtureOfExperts(3, 5, activation=jnp.tanh), (SEQ,), SEQ),
    "Conv": Case(nn.Conv(4, 3), (IMG,), IMG),
    "Conv_1d_causal": Case(nn.Conv(4, 3, padding="CAUSAL", dilation=2, groups=2), (SEQ,), SEQ),
    "Conv_strided": Case(
        nn.Conv(6, (3, 2), (2, 1), padding=[(1, 0), 1], use_bias=False), (IMG,), (2, 5, 6)
    ),
    "Conv_3d": Case(nn.Conv(2, 2, padding="VALID"), ((2, 2, 2, 4),), (1, 1, 1, 2)),
    "DepthwiseConv": Case(nn.DepthwiseConv(3, 2, multiplier=2), (IMG,), (2, 2, 8)),
    "ConvTranspose": Case(nn.ConvTranspose(3, 3, 2), (SEQ,), (8, 3)),
    "Embed": Case(nn.Embed(6, 4), (6,), SEQ),
    "LayerNorm": Case(nn.LayerNorm(), (SEQ,), SEQ),
    "RMSNorm": Case(nn.RMSNorm(use_bias=True), (SEQ,), SEQ),
    "GroupNorm": Case(nn.GroupNorm(2), (IMG,), IMG),
    "BatchNorm": Case(nn.BatchNorm(), (IMG,), IMG),
    "BatchNorm_bare": Case(nn.BatchNorm(use_scale=False, use_bias=False), (ROW,), ROW),
    "Attention": Case(nn.Attention(2), (SEQ,), SEQ),
    "Attention_grouped": Case(
        nn.Attention(
            2, kv_heads=1, head_dim=4, causal=True, rotary=nn.Rotary(), window=2, use_bias=False
        ),
        (SEQ,),
        SEQ,
    ),
    "Attention_cross": Case(nn.Attention(2), (SEQ, (3, 5)), SEQ),
    "Attention_dropout": Case(nn.Attention(2, dropout=0.5), (SEQ,), SEQ),
    "MaxPool": Case(nn.MaxPool(2), (IMG,), (2, 2, 4)),
    "MaxPool_same": Case(nn.MaxPool(3, 1, padding="SAME"), (IMG,), IMG),
    "AvgPool": Case(nn.AvgPool(3, 2, padding="SAME"), (IMG,), (2, 2, 4)),
    "GlobalAvgPool": Case(nn.GlobalAvgPool(), (IMG,), ROW),
    "Flatten": Case(nn.Flatten(), (SEQ,), (16,)),
    "Dropout": Case(nn.Dropout(0.5, broadcast=(1,)), (SEQ,), SEQ),
    "RNN": Case(nn.RNN(3), (SEQ,), (4, 3)),
    "LSTM": Case(nn.LSTM(3), (SEQ,), (4, 3)),
    "GRU": Case(nn.GRU(2, bidirectional=True), (SEQ,), SEQ),
    "Sequential": Case(nn.Sequential(nn.Dense(3), jnp.tanh, head=nn.Dense(4)), (ROW,), ROW),
    "Residual": Case(
        nn.Residual(nn.Dense(3), jnp.tanh, shortcut=nn.Dense(3, use_bias=False)), (ROW,), (3,)
    ),
    "Parallel": Case(nn.Parallel(nn.Dense(4), jnp.tanh, wide=nn.Dropout(0.5)), (ROW,), ROW),
    "Stack": Case(
        nn.Stack(nn.Sequential(nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5)), 3), (ROW,), ROW
    ),
    "Remat": Case(
        nn.Remat(nn.Sequential(nn.Dense(4), nn.BatchNorm(), nn.Dropout(0.5))), (ROW,), ROW
    ),
    "MLP": Case(MLP([5, 5, 3], dropout=0.5), (ROW,), (3,)),
    "residual_block": Case(residual_block(channels=6, stride=2), (IMG,), (2, 2, 6)),
    "Tied": Case(Tied(), (6,), (4, 6)),
}


def inputs(case, batch=BATCH, dtype=jnp.float32):
    """The case's inputs, the same in every test; float ones in `dtype`."""
    draw = np.random.default_rng(0)
    made = []
    for shape in case.shapes:
        if isinstance(shape, int):
            made.append(jnp.asarray(draw.integers(0, shape, (batch, 4)), jnp.int32))
        else:
            made.append(jnp.asarray(draw.normal(size=(batch, *shape)), dtype))
    return tuple(made)


def golden():
    """{case: {"params": {path: shape}, "state": {...}}}, read from the specs."""
    table = {}
    for name, case in CASES.items():
        spec = case.layer.spec(*inputs(case), **case.options)
        table[name] = {
            kind: {
                "/".join(str(part.key) for part in path): list(leaf.shape)
                for path, leaf in jax.tree.leaves_with_path(tree)
            }
            for kind, tree in spec._asdict().items()
        }
    return table


if __name__ == "__main__":
    lines = [f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in golden().items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")

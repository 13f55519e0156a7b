"""The models in fnet."""

from __future__ import annotations

import jax

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run, nested
from fnet import layers as nn
from fnet import transforms as ft


def build(workload, weights, batches, *, train, mixed, tuned=False):
    model = MODELS[type(workload)](w=workload)

    def apply(params, stats, x, train):
        return model(params, x, state=stats, train=train)

    wrap = (lambda f: ft.autocast(f, "bfloat16")) if mixed else (lambda f: f)
    return Run(apply, nested(weights), nested(weights, stats=True), batches, train=train, tuned=tuned, wrap=wrap)


@nn.layer
def _mlp(scope, x, *, w):                                                  # [batch, features]
    for i, width in enumerate(w.widths[1:]):
        x = nn.Dense(width)(scope[f"dense{i}"], jax.nn.relu(x) if i else x)
    return x


@nn.layer
def _cnn(scope, x, *, w):                                                  # [batch, height, width, channels]
    i = 0
    for stage, widths in enumerate(w.stages):
        for channels in widths:
            x = jax.nn.relu(nn.Conv(channels, 3)(scope[f"conv{i}"], x))
            i += 1
        x = nn.MaxPool(2)(scope[f"pool{stage}"], x)
    return nn.Dense(w.classes)(scope["head"], nn.GlobalAvgPool()(scope["mean"], x))


@nn.layer
def _block(scope, x, *, heads, bias, causal):                              # [batch, time, width]
    width = x.shape[-1]
    y = nn.LayerNorm(use_bias=bias)(scope["norm1"], x)
    x = x + nn.Attention(heads, causal=causal, use_bias=bias)(scope["attn"], y)
    y = nn.LayerNorm(use_bias=bias)(scope["norm2"], x)
    y = jax.nn.gelu(nn.Dense(4 * width, use_bias=bias)(scope["up"], y))
    return x + nn.Dense(width, use_bias=bias)(scope["down"], y)


@nn.layer
def _gpt(scope, tokens, *, w):                                             # [batch, time]
    embed, at = nn.Embed(w.vocab, w.width), scope["token"]
    position = scope["position"].param("embedding", (w.time, w.width), jax.nn.initializers.normal(0.02))
    x = embed(at, tokens) + position[None]                                 # [batch, time, width]
    for i in range(w.depth):
        x = _block(heads=w.heads, bias=w.bias, causal=True)(scope[f"block{i}"], x)
    return embed.attend(at, nn.LayerNorm(use_bias=w.bias)(scope["norm"], x))


MODELS = {spec.MLP: _mlp, spec.CNN: _cnn, spec.GPT: _gpt}

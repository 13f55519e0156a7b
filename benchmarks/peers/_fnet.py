"""The models in fnet."""

from __future__ import annotations

import jax

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run, nested
from fnet import layers as nn
from fnet import transforms as ft


def build(workload, weights, batches, *, train, mixed, **how):
    model = MODELS[type(workload)](w=workload)

    def apply(params, stats, x, train):
        return model(params, x, state=stats, train=train)

    wrap = (lambda f: ft.autocast(f, "bfloat16")) if mixed else (lambda f: f)
    return Run(
        apply, nested(weights), nested(weights, stats=True), batches, train=train, **how, wrap=wrap
    )


@nn.layer
def _mlp(scope, x, *, w):  # [batch, features]
    for i, width in enumerate(w.widths[1:]):
        x = nn.Dense(width)(scope[f"dense{i}"], jax.nn.relu(x) if i else x)
    return x


@nn.layer
def _cnn(scope, x, *, w):  # [batch, height, width, channels]
    i = 0
    for stage, widths in enumerate(w.stages):
        for channels in widths:
            x = jax.nn.relu(nn.Conv(channels, 3)(scope[f"conv{i}"], x))
            i += 1
        x = nn.MaxPool(2)(scope[f"pool{stage}"], x)
    return nn.Dense(w.classes)(scope["head"], nn.GlobalAvgPool()(scope["mean"], x))


@nn.layer
def _block(scope, x, *, heads, bias, causal):  # [batch, time, width]
    width = x.shape[-1]
    y = nn.LayerNorm(use_bias=bias)(scope["norm1"], x)
    x = x + nn.Attention(heads, causal=causal, use_bias=bias)(scope["attn"], y)
    y = nn.LayerNorm(use_bias=bias)(scope["norm2"], x)
    y = jax.nn.gelu(nn.Dense(4 * width, use_bias=bias)(scope["up"], y))
    return x + nn.Dense(width, use_bias=bias)(scope["down"], y)


@nn.layer
def _gpt(scope, tokens, *, w):  # [batch, time]
    embed, at = nn.Embed(w.vocab, w.width), scope["token"]
    position = scope["position"].param(
        "embedding", (w.time, w.width), jax.nn.initializers.normal(0.02)
    )
    x = embed(at, tokens) + position[None]  # [batch, time, width]
    for i in range(w.depth):
        x = _block(heads=w.heads, bias=w.bias, causal=True)(scope[f"block{i}"], x)
    return embed.attend(at, nn.LayerNorm(use_bias=w.bias)(scope["norm"], x))


@nn.layer
def _vit(scope, x, *, w):  # [batch, height, width, channels]
    x = nn.Conv(w.width, w.patch, w.patch, padding="VALID")(scope["patch"], x)
    x = x.reshape(len(x), -1, w.width)  # [batch, tokens, width]
    x = (
        x
        + scope["position"].param("embedding", x.shape[1:], jax.nn.initializers.normal(0.02))[None]
    )
    for i in range(w.depth):
        x = _block(heads=w.heads, bias=True, causal=False)(scope[f"block{i}"], x)
    return nn.Dense(w.classes)(scope["head"], nn.LayerNorm()(scope["norm"], x).mean(1))


def _residual(scope, x, width, out, stride, bottleneck):  # [batch, height, width, channels]
    convs = (
        [(1, width, 1), (3, width, stride), (1, out, 1)]
        if bottleneck
        else [(3, width, stride), (3, out, 1)]
    )
    y = x
    for j, (window, channels, strides) in enumerate(convs, 1):
        y = nn.Conv(channels, window, strides, padding=window // 2, use_bias=False)(
            scope[f"conv{j}"], y
        )
        y = nn.BatchNorm()(scope[f"norm{j}"], y)
        y = jax.nn.relu(y) if j < len(convs) else y
    if x.shape != y.shape:
        x = nn.Conv(out, 1, stride, padding=0, use_bias=False)(scope["shortcut"], x)
        x = nn.BatchNorm()(scope["shortcut_norm"], x)
    return jax.nn.relu(x + y)


@nn.layer
def _resnet(scope, x, *, w):  # [batch, height, width, channels]
    window, stride = (7, 2) if w.photos else (3, 1)
    x = nn.Conv(w.width, window, stride, padding=window // 2, use_bias=False)(scope["stem"], x)
    x = jax.nn.relu(nn.BatchNorm()(scope["stem_norm"], x))
    if w.photos:
        x = nn.MaxPool(3, 2, padding=1)(scope["pool"], x)
    for i, (_, width, out, stride) in enumerate(w.blocks()):
        x = _residual(scope[f"block{i}"], x, width, out, stride, w.bottleneck)
    return nn.Dense(w.classes)(scope["head"], x.mean((1, 2)))


@nn.layer
def _lstm(scope, tokens, *, w):  # [batch, time]
    x = nn.Embed(w.vocab, w.width)(scope["token"], tokens)  # [batch, time, width]
    for i in range(w.depth):
        x = nn.LSTM(w.width)(scope[f"lstm{i}"], x)
    return nn.Dense(w.vocab)(scope["head"], x)


MODELS = {
    spec.MLP: _mlp,
    spec.CNN: _cnn,
    spec.GPT: _gpt,
    spec.ViT: _vit,
    spec.ResNet: _resnet,
    spec.LSTM: _lstm,
}

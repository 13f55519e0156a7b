"""The models in jax.numpy, as written without a library. They have the parameter tree of fnet's
models.

With mixed precision, activations and the operands of products and convolutions are in bfloat16.
Norms, softmax and the loss are in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run, nested


def build(workload, weights, batches, *, train, mixed, **how):
    low = jnp.bfloat16 if mixed else jnp.float32
    model = functools.partial(MODELS[type(workload)], workload, low)
    return Run(model, nested(weights), nested(weights, stats=True), batches, train=train, **how)


def _dense(p, x, low):
    y = x.astype(low) @ p["kernel"].astype(low)
    return y + p["bias"].astype(low) if "bias" in p else y


def _conv(p, x, low, stride=1, padding=None):
    pad = p["kernel"].shape[0] // 2 if padding is None else padding
    y = lax.conv_general_dilated(
        x.astype(low),
        p["kernel"].astype(low),
        (stride, stride),
        [(pad, pad)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + p["bias"].astype(low) if "bias" in p else y


def _layer_norm(p, x, low):
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    y = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + spec.EPSILON) * p["scale"]
    return (y + p["bias"] if "bias" in p else y).astype(low)


def _mlp(w, low, params, stats, x, train):  # [batch, features]
    for i in range(len(w.widths) - 1):
        x = _dense(params[f"dense{i}"], jax.nn.relu(x) if i else x, low)
    return x, stats


def _max_pool(x, size, strides, padding="VALID"):
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, size, size, 1), (1, strides, strides, 1), padding
    )


def _cnn(w, low, params, stats, x, train):  # [batch, height, width, channels]
    i = 0
    for stage in w.stages:
        for _ in stage:
            x = jax.nn.relu(_conv(params[f"conv{i}"], x, low))
            i += 1
        x = _max_pool(x, 2, 2)
    return _dense(params["head"], x.mean((1, 2)), low), stats


def _block(p, x, heads, causal, low):  # [batch, time, width]
    y = _layer_norm(p["norm1"], x, low)
    q, k, v = (
        _dense(p["attn"][name], y, low).reshape(*x.shape[:2], heads, -1)
        for name in ("query", "key", "value")
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape)
    x = x + _dense(p["attn"]["out"], y, low)
    y = jax.nn.gelu(_dense(p["up"], _layer_norm(p["norm2"], x, low), low))
    return x + _dense(p["down"], y, low)


def _gpt(w, low, params, stats, tokens, train):  # [batch, time]
    table = params["token"]["embedding"]
    x = (table[tokens] + params["position"]["embedding"][: tokens.shape[1]]).astype(low)
    for i in range(w.depth):
        x = _block(params[f"block{i}"], x, w.heads, True, low)
    return _layer_norm(params["norm"], x, low) @ table.T.astype(low), stats  # [batch, time, vocab]


def _vit(w, low, params, stats, x, train):  # [batch, height, width, channels]
    x = _conv(params["patch"], x, low, w.patch, padding=0)
    x = x.reshape(len(x), -1, w.width)  # [batch, tokens, width]
    x = x + params["position"]["embedding"].astype(low)
    for i in range(w.depth):
        x = _block(params[f"block{i}"], x, w.heads, False, low)
    x = _layer_norm(params["norm"], x, low).mean(1)
    return _dense(params["head"], x, low), stats


def _batch_norm(p, s, x, low, train):
    x = x.astype(jnp.float32)
    mean, var = s["mean"], s["var"]
    if train:
        mean = x.mean((0, 1, 2))
        var = jnp.square(x - mean).mean((0, 1, 2))
        s = {"mean": 0.9 * s["mean"] + 0.1 * mean, "var": 0.9 * s["var"] + 0.1 * var}
    return ((x - mean) * (lax.rsqrt(var + spec.EPSILON) * p["scale"]) + p["bias"]).astype(low), s


def _resnet(w, low, params, stats, x, train):  # [batch, height, width, channels]
    new = {}

    def conv_norm(x, conv, norm, stride, at=()):
        p, s, out = params, stats, new
        for name in at:
            p, s, out = p[name], s[name], out.setdefault(name, {})
        y, out[norm] = _batch_norm(p[norm], s[norm], _conv(p[conv], x, low, stride), low, train)
        return y

    x = jax.nn.relu(conv_norm(x, "stem", "stem_norm", 2 if w.photos else 1))
    if w.photos:
        x = _max_pool(x, 3, 2, ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i, (before, _, out, stride) in enumerate(w.blocks()):
        at, y = (f"block{i}",), x
        strides = (1, stride, 1) if w.bottleneck else (stride, 1)
        for j, each in enumerate(strides, 1):
            y = conv_norm(y, f"conv{j}", f"norm{j}", each, at)
            y = jax.nn.relu(y) if j < len(strides) else y
        if before != out or stride != 1:
            x = conv_norm(x, "shortcut", "shortcut_norm", stride, at)
        x = jax.nn.relu(x + y)
    return _dense(params["head"], x.mean((1, 2)), low), new


def _cell(kernel, carry, projected):
    hidden, cell = carry
    i, f, g, o = jnp.split((projected + hidden @ kernel).astype(jnp.float32), 4, -1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = (jax.nn.sigmoid(o) * jnp.tanh(cell)).astype(hidden.dtype)
    return (hidden, cell), hidden


def _lstm(w, low, params, stats, tokens, train):  # [batch, time]
    x = params["token"]["embedding"][tokens].astype(low).swapaxes(0, 1)  # [time, batch, width]
    for i in range(w.depth):
        p = params[f"lstm{i}"]

        zero = jnp.zeros((tokens.shape[0], w.width), jnp.float32)
        cell = functools.partial(_cell, p["recurrent_kernel"].astype(low))
        _, x = lax.scan(cell, (zero.astype(low), zero), _dense(p, x, low))
    return _dense(params["head"], x.swapaxes(0, 1), low), stats  # [batch, time, vocab]


MODELS = {
    spec.MLP: _mlp,
    spec.CNN: _cnn,
    spec.GPT: _gpt,
    spec.ViT: _vit,
    spec.ResNet: _resnet,
    spec.LSTM: _lstm,
}

"""The models in jax.numpy, as one writes them without a library; fnet's parameter tree.

Mixed: operands of products and convolutions in bfloat16, activations too; norms, softmax and the loss in float32.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.peers import _workloads as spec
from benchmarks.peers._steps import Run, nested


def build(workload, weights, batches, *, train, mixed, tuned=False):
    low = jnp.bfloat16 if mixed else jnp.float32
    model = functools.partial(MODELS[type(workload)], workload, low)
    return Run(model, nested(weights), nested(weights, stats=True), batches, train=train, tuned=tuned)


def _dense(p, x, low):
    y = x.astype(low) @ p["kernel"].astype(low)
    return y + p["bias"].astype(low) if "bias" in p else y


def _conv(p, x, low, strides=1):
    y = lax.conv_general_dilated(x.astype(low), p["kernel"].astype(low), (strides, strides), "SAME",
                                 dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return y + p["bias"].astype(low) if "bias" in p else y


def _layer_norm(p, x, low):
    x = x.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    y = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + spec.EPSILON) * p["scale"]
    return (y + p["bias"] if "bias" in p else y).astype(low)


def _mlp(w, low, params, stats, x, train):                                 # [batch, features]
    for i in range(len(w.widths) - 1):
        x = _dense(params[f"dense{i}"], jax.nn.relu(x) if i else x, low)
    return x, stats


def _max_pool(x, size, strides, padding="VALID"):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, size, size, 1), (1, strides, strides, 1), padding)


def _cnn(w, low, params, stats, x, train):                                 # [batch, height, width, channels]
    i = 0
    for stage in w.stages:
        for _ in stage:
            x = jax.nn.relu(_conv(params[f"conv{i}"], x, low))
            i += 1
        x = _max_pool(x, 2, 2)
    return _dense(params["head"], x.mean((1, 2)), low), stats


def _block(p, x, heads, causal, low):                                      # [batch, time, width]
    y = _layer_norm(p["norm1"], x, low)
    q, k, v = (_dense(p["attn"][name], y, low).reshape(*x.shape[:2], heads, -1) for name in ("query", "key", "value"))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape)
    x = x + _dense(p["attn"]["out"], y, low)
    y = jax.nn.gelu(_dense(p["up"], _layer_norm(p["norm2"], x, low), low))
    return x + _dense(p["down"], y, low)


def _gpt(w, low, params, stats, tokens, train):                            # [batch, time]
    table = params["token"]["embedding"]
    x = (table[tokens] + params["position"]["embedding"][:tokens.shape[1]]).astype(low)
    for i in range(w.depth):
        x = _block(params[f"block{i}"], x, w.heads, True, low)
    return _layer_norm(params["norm"], x, low) @ table.T.astype(low), stats    # [batch, time, vocab]


MODELS = {spec.MLP: _mlp, spec.CNN: _cnn, spec.GPT: _gpt}

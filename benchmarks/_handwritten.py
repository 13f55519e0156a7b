"""Steps in bfloat16, as an expert writes them in plain JAX: GPT-2, ResNet-50, and decoding of one
token with a Llama.

`benchmarks.accelerators` compares fnet with these steps. Of the alternatives that were compiled,
the steps use those with the least memory traffic: unrolled layers, residual stream and logits in
bfloat16, statistics in one pass, and a bfloat16 cache [batch, heads, time, head_dim].
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fnet import layers as nn

BF16, F32 = jnp.bfloat16, jnp.float32


def shapes(dtype=F32):
    return lambda *shape: jax.ShapeDtypeStruct(shape, dtype)


# GPT-2.


def gpt_params(vocab_size, width, depth, context):
    s = shapes()
    block = dict(
        norm1=s(width),
        norm1_bias=s(width),
        qkv=s(width, 3 * width),
        qkv_bias=s(3 * width),
        out=s(width, width),
        out_bias=s(width),
        norm2=s(width),
        norm2_bias=s(width),
        up=s(width, 4 * width),
        up_bias=s(4 * width),
        down=s(4 * width, width),
        down_bias=s(width),
    )
    return dict(
        tokens=s(vocab_size, width),
        positions=s(context, width),
        norm=s(width),
        norm_bias=s(width),
        blocks=[block] * depth,
    )


def _layer_norm(x, scale, bias):
    z = x.astype(F32)
    mean = z.mean(-1, keepdims=True)
    var = jnp.square(z).mean(-1, keepdims=True) - jnp.square(mean)
    return ((z - mean) * lax.rsqrt(var + 1e-5) * scale.astype(F32) + bias.astype(F32)).astype(BF16)


def gpt_loss(params, tokens, *, attention, heads):
    """Computes the loss of GPT-2, with the forward pass of nanoGPT."""
    low = jax.tree.map(lambda x: x.astype(BF16), params)
    x, labels = tokens[:, :-1], tokens[:, 1:]
    batch, time = x.shape
    h = low["tokens"][x] + low["positions"][None, :time]  # [batch, time, width]
    for p in low["blocks"]:
        q, k, v = jnp.split(
            _layer_norm(h, p["norm1"], p["norm1_bias"]) @ p["qkv"] + p["qkv_bias"], 3, -1
        )
        q, k, v = (a.reshape(batch, time, heads, -1) for a in (q, k, v))
        h = h + attention(q, k, v).reshape(h.shape) @ p["out"] + p["out_bias"]
        y = jax.nn.gelu(
            _layer_norm(h, p["norm2"], p["norm2_bias"]) @ p["up"] + p["up_bias"], approximate=True
        )
        h = h + y @ p["down"] + p["down_bias"]
    h = _layer_norm(h, low["norm"], low["norm_bias"])
    logits = lax.dot_general(
        h, low["tokens"], (((2,), (1,)), ((), ())), preferred_element_type=BF16
    ).astype(F32)
    hits = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == labels[..., None]
    return (jax.nn.logsumexp(logits, -1) - jnp.where(hits, logits, 0).sum(-1)).mean()


def cudnn(q, k, v):
    # jax.nn's implementation="cudnn" runs the same kernels, but compiles only if cuDNN is
    # installed.
    return nn.dot_product_attention(q, k, v, causal=True)


def splash(q, k, v):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    time, heads, dim = q.shape[1:]
    mask = masks.MultiHeadMask([masks.CausalMask((time, time))] * heads)
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
    )
    sizes = kernel.BlockSizes(**dict.fromkeys(names, min(512, time)), use_fused_bwd_kernel=True)
    run = kernel.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)
    q, k, v = (x.swapaxes(1, 2) for x in ((q.astype(F32) / np.sqrt(dim)).astype(q.dtype), k, v))
    return jax.vmap(run)(q, k, v).swapaxes(1, 2)


def gpt(platform, vocab_size, width, depth, heads, context, batch):
    """Returns (training step, indices of the donated arguments, shapes of the arguments)."""
    tx = optax.adamw(6e-4)
    params = gpt_params(vocab_size, width, depth, context)
    loss = functools.partial(
        gpt_loss, attention=cudnn if platform == "cuda" else splash, heads=heads
    )
    tokens = jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)
    return (
        train_step(jax.value_and_grad(loss), tx),
        (0, 1),
        (params, jax.eval_shape(tx.init, params), tokens),
    )


def train_step(gradient, tx):
    def step(params, opt_state, *batch):
        value, grads = gradient(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


# ResNet, with the parameters of fnet's ResNet.


def _conv(p, x, stride, padding):
    return lax.conv_general_dilated(
        x,
        p["kernel"].astype(x.dtype),
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _batch_norm(p, state, x):
    z = x.astype(F32)
    mean = z.mean((0, 1, 2))
    var = jnp.square(z).mean((0, 1, 2)) - jnp.square(mean)
    new = {
        "mean": 0.9 * state["mean"] + 0.1 * lax.stop_gradient(mean),
        "var": 0.9 * state["var"] + 0.1 * lax.stop_gradient(var),
    }
    factor = lax.rsqrt(var + 1e-5) * p["scale"]
    return x * factor.astype(x.dtype) + (p["bias"] - mean * factor).astype(x.dtype), new


def resnet_loss(params, state, images, labels, *, depths):
    new = {}
    x = _conv(params["stem"]["conv"], images.astype(BF16), 2, 3)
    x, stats = _batch_norm(params["stem"]["norm"], state["stem"]["norm"], x)
    new["stem"] = {"norm": stats}
    x = lax.reduce_window(
        jax.nn.relu(x),
        -jnp.inf,
        lax.max,
        (1, 3, 3, 1),
        (1, 2, 2, 1),
        [(0, 0), (1, 1), (1, 1), (0, 0)],
    )
    for number, depth in enumerate(depths, 1):
        stage, old = params[f"stage{number}"], state[f"stage{number}"]
        blocks = {}
        for i in range(depth):
            p, s, blocks[f"block{i}"] = stage[f"block{i}"], old[f"block{i}"], {}
            stride, stats = 2 if number > 1 and i == 0 else 1, blocks[f"block{i}"]
            y = x
            for c, (step, padding) in enumerate(((1, 0), (stride, 1), (1, 0)), 1):
                y, stats[f"norm{c}"] = _batch_norm(
                    p[f"norm{c}"], s[f"norm{c}"], _conv(p[f"conv{c}"], y, step, padding)
                )
                y = jax.nn.relu(y) if c < 3 else y
            if "shortcut" in p:
                x = _conv(p["shortcut"]["conv"], x, stride, 0)
                x, kept = _batch_norm(p["shortcut"]["norm"], s["shortcut"]["norm"], x)
                stats["shortcut"] = {"norm": kept}
            x = jax.nn.relu(x + y)
        new[f"stage{number}"] = blocks
    x = x.astype(F32).mean((1, 2)).astype(BF16)
    logits = (
        lax.dot_general(
            x,
            params["head"]["kernel"].astype(BF16),
            (((1,), (0,)), ((), ())),
            preferred_element_type=F32,
        )
        + params["head"]["bias"][None]
    )
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new


# Llama, one token.


def decode(vocab_size, width, depth, heads, kv_heads, hidden, batch, capacity):
    """Returns (step, indices of the donated arguments, shapes of the arguments). The step decodes
    one token greedily. All examples are at the same position."""
    s, dim = shapes(BF16), width // heads
    block = dict(
        norm1=s(width),
        qkv=s(width, width + 2 * kv_heads * dim),
        out=s(width, width),
        norm2=s(width),
        up=s(width, 2 * hidden),
        down=s(hidden, width),
    )
    params = dict(tokens=s(vocab_size, width), norm=s(width), blocks=[block] * depth)
    cache = [(s(batch, kv_heads, capacity, dim),) * 2] * depth

    def norm(x, scale):
        z = x.astype(F32)
        return (z * lax.rsqrt(jnp.square(z).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale

    def step(params, token, at, cache):
        angle = at.astype(F32) * 10000.0 ** (-np.arange(0, dim, 2, dtype=np.float32) / dim)
        sin, cos = jnp.sin(angle), jnp.cos(angle)

        def rotated(x):
            a, b = jnp.split(x.astype(F32), 2, -1)
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)

        x, new = params["tokens"][token], []
        for p, (keys, values) in zip(params["blocks"], cache):
            q, k, v = jnp.split(norm(x, p["norm1"]) @ p["qkv"], (width, width + kv_heads * dim), -1)
            q, k = (
                rotated(q.reshape(batch, kv_heads, -1, dim)),
                rotated(k.reshape(batch, kv_heads, 1, dim)),
            )
            keys = lax.dynamic_update_slice(keys, k, (0, 0, at, 0))
            values = lax.dynamic_update_slice(values, v.reshape(k.shape), (0, 0, at, 0))
            logits = jnp.einsum("bgrd,bgsd->bgrs", q, keys, preferred_element_type=F32) / np.sqrt(
                dim
            )
            weights = jax.nn.softmax(jnp.where(jnp.arange(capacity) <= at, logits, -1e30)).astype(
                x.dtype
            )
            x = x + jnp.einsum("bgrs,bgsd->bgrd", weights, values).reshape(batch, width) @ p["out"]
            gate, up = jnp.split(norm(x, p["norm2"]) @ p["up"], 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ p["down"]
            new.append((keys, values))
        logits = jnp.einsum(
            "bd,vd->bv", norm(x, params["norm"]), params["tokens"], preferred_element_type=F32
        )
        return logits.argmax(-1).astype(jnp.int32), at + 1, new

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return step, (3,), (params, jax.ShapeDtypeStruct((batch,), jnp.int32), scalar, cache)

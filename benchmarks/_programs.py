"""The programs of `benchmarks.corpus`: models of fnet, handwritten programs, and models of other
libraries."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import layers as nn
from fnet import models

PROGRAMS = {}


def program(name):
    """Returns a decorator that registers a function under a name. The function returns (f, params,
    inputs), and the program is `f(params, *inputs)`."""

    def add(make):
        PROGRAMS[name] = make
        return make

    return add


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def tokens(*shape, below=256):
    return jnp.asarray(np.random.default_rng(0).integers(1, below, shape).astype(np.int32))


def of_model(model, *inputs):
    """Returns the program of a model of fnet. The state of the model is constant."""
    params, state = model.init(jax.random.key(0), *inputs)

    def f(params, *inputs):
        options = {"state": state, "train": True, "key": jax.random.key(0)} if state else {}
        out = model(params, *inputs, **options)
        return out[0] if state else out

    return f, params, inputs


for _name, _model, _inputs in (
    ("mlp, batch 8", models.MLP((256, 256, 10)), [draw(8, 784)]),
    ("mlp, batch 512", models.MLP((512, 512, 10)), [draw(512, 784)]),
    ("cnn, batch 2", models.CNN(10, (16, 32), 2), [draw(2, 32, 32, 3)]),
    ("cnn, batch 64", models.CNN(10, (32, 64), 2), [draw(64, 32, 32, 3)]),
    ("alexnet", models.AlexNet(classes=10), [draw(2, 224, 224, 3)]),
    ("resnet9", models.ResNet9(width=16), [draw(32, 32, 32, 3)]),
    ("resnet18, 64 pixels", models.ResNet.preset("resnet18"), [draw(4, 64, 64, 3)]),
    ("resnet50, 64 pixels", models.ResNet.preset("resnet50"), [draw(2, 64, 64, 3)]),
    ("mobilenet", models.MobileNetV2(), [draw(2, 96, 96, 3)]),
    ("efficientnet", models.EfficientNet.preset("efficientnet_lite0"), [draw(2, 96, 96, 3)]),
    (
        "convnext",
        models.ConvNeXt((1, 1, 2, 1), (32, 64, 128, 256), classes=10),
        [draw(4, 64, 64, 3)],
    ),
    ("vit", models.ViT(192, 4, 3, classes=10, patch=16, size=96), [draw(4, 96, 96, 3)]),
    ("gpt, 64 tokens", models.GPT(256, 128, 4, 4, context=64), [tokens(8, 64)]),
    ("gpt, 256 tokens", models.GPT(256, 256, 2, 4, context=256), [tokens(8, 256)]),
    (
        "decoder, grouped queries",
        models.Decoder(256, 128, 4, 4, 2, 352, context=128),
        [tokens(8, 128)],
    ),
    ("bert", models.Bert(256, 128, 4, 4, 512, context=128, head="masked_lm"), [tokens(8, 128)]),
    ("lstm language model", models.LSTMLanguageModel(256, 128), [tokens(16, 64)]),
):
    PROGRAMS[_name] = functools.partial(of_model, _model, *_inputs)


def recurrent(layer, batch, time_, features, hidden):
    f = layer(hidden)
    params, _ = f.init(jax.random.key(0), x := draw(batch, time_, features))
    return lambda params, x: f(params, x), params, (x,)


PROGRAMS["lstm, 32 x 32"] = functools.partial(recurrent, nn.LSTM, 32, 32, 64, 128)
PROGRAMS["lstm, batch 1"] = functools.partial(recurrent, nn.LSTM, 1, 128, 64, 128)
PROGRAMS["gru, 32 x 32"] = functools.partial(recurrent, nn.GRU, 32, 32, 64, 128)


# Handwritten convolutions.


def conv(x, w, *, strides=1, dilation=1, groups=1, padding="SAME"):
    n = x.ndim - 2
    axes = "DHW"[-n:]
    return lax.conv_general_dilated(
        x,
        w,
        (strides,) * n,
        padding,
        rhs_dilation=(dilation,) * n,
        feature_group_count=groups,
        dimension_numbers=(f"N{axes}C", f"{axes}IO", f"N{axes}C"),
    )


def stack(shape, kernel, count, **options):
    """Returns a program with `count` convolutions, each followed by a ReLU."""

    def f(params, x):
        for w in params:
            x = jax.nn.relu(conv(x, w, **options))
        return x

    return f, [0.1 * draw(*kernel, seed=i) for i in range(count)], (draw(*shape),)


# {name: (shape of x, shape of a kernel, number of kernels, options of the convolutions)}
STACKS = {
    "depthwise convolutions": ((8, 32, 32, 64), (3, 3, 1, 64), 3, dict(groups=64)),
    "grouped convolutions (ResNeXt)": ((8, 16, 16, 128), (3, 3, 16, 128), 3, dict(groups=8)),
    "dilated convolutions": ((8, 32, 32, 32), (3, 3, 32, 32), 3, dict(dilation=2)),
    "convolutions of 1 x 1": ((8, 32, 32, 64), (1, 1, 64, 64), 4, {}),
    "strided convolutions": ((8, 64, 64, 16), (3, 3, 16, 16), 3, dict(strides=2)),
    "convolutions of 7 x 7": ((4, 32, 32, 16), (7, 7, 16, 16), 2, {}),
    "convolutions in 1-D": ((16, 256, 64), (5, 64, 64), 3, {}),
    "convolutions in 3-D": ((2, 16, 16, 16, 16), (3, 3, 3, 16, 16), 2, {}),
    "convolutions of one image": ((1, 128, 128, 16), (3, 3, 16, 16), 3, {}),
}
for _name, (_shape, _kernel, _count, _options) in STACKS.items():
    PROGRAMS[_name] = functools.partial(stack, _shape, _kernel, _count, **_options)


@program("wavenet")
def wavenet():
    def f(params, x):  # causal, dilated, gated
        skips = 0.0
        for i, (filter_, gate, mix) in enumerate(params):
            padded = jnp.pad(x, ((0, 0), (2**i, 0), (0, 0)))
            y = jnp.tanh(conv(padded, filter_, dilation=2**i, padding="VALID")) * jax.nn.sigmoid(
                conv(padded, gate, dilation=2**i, padding="VALID")
            )
            skips = skips + y
            x = x + y @ mix
        return skips

    params = [
        tuple(
            0.1 * draw(*shape, seed=3 * i + j)
            for j, shape in enumerate(((2, 32, 32), (2, 32, 32), (32, 32)))
        )
        for i in range(6)
    ]
    return f, params, (draw(8, 256, 32),)


@program("unet")
def unet():
    def f(params, x):
        down, middle, up, last = params
        kept = []
        for w in down:
            x = jax.nn.relu(conv(x, w))
            kept.append(x)
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = jax.nn.relu(conv(x, middle))
        for w, other in zip(up, reversed(kept)):
            x = jax.image.resize(x, (*other.shape[:3], x.shape[3]), "nearest")
            x = jax.nn.relu(conv(jnp.concatenate([x, other], -1), w))
        return conv(x, last)

    kernels = lambda *shapes: [0.1 * draw(3, 3, *shape, seed=i) for i, shape in enumerate(shapes)]
    down, (middle,), up = kernels((3, 16), (16, 32)), kernels((32, 64)), kernels((96, 32), (48, 16))
    return f, (down, middle, up, 0.1 * draw(1, 1, 16, 2)), (draw(4, 64, 64, 3),)


# Handwritten products and attention.


@program("mlp-mixer")
def mixer():
    def f(params, x):  # [batch, patches, features]
        for a, b, c, d in params:
            x = x + jnp.swapaxes(jax.nn.gelu(jnp.swapaxes(x, 1, 2) @ a) @ b, 1, 2)
            x = x + jax.nn.gelu(x @ c) @ d
        return x

    shapes = ((64, 128), (128, 64), (128, 512), (512, 128))
    params = [
        tuple(0.05 * draw(*shape, seed=4 * i + j) for j, shape in enumerate(shapes))
        for i in range(3)
    ]
    return f, params, (draw(16, 64, 128),)


def attention(batch, time_, heads, features):
    def f(params, x):
        q, k, v = ((x @ w).reshape(batch, time_, heads, -1) for w in params[:3])
        logits = jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(features // heads)
        logits = jnp.where(jnp.tril(jnp.ones((time_, time_), bool)), logits, -1e9)
        y = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(logits), v)
        return y.reshape(batch, time_, features) @ params[3]

    return (
        f,
        [0.05 * draw(features, features, seed=i) for i in range(4)],
        (draw(batch, time_, features),),
    )


for _shape in ((8, 64, 4, 64), (2, 512, 4, 128), (32, 32, 8, 256), (1, 1024, 2, 64)):
    PROGRAMS[f"attention {'x'.join(map(str, _shape))}"] = functools.partial(attention, *_shape)


@program("t5, encoder and decoder")
def t5():
    width, heads = 128, 4

    def attend(w, x, y):
        q, k, v = (a.reshape(*a.shape[:2], heads, -1) for a in (x @ w[0], y @ w[1], y @ w[2]))
        mixed = jnp.einsum(
            "bhij,bjhd->bihd", jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k)), v
        )
        return mixed.reshape(x.shape) @ w[3]

    norm = lambda x: x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    feed = lambda w, x: jax.nn.relu(x @ w[0]) @ w[1]

    def f(params, x, y):
        encoder, decoder = params
        for layer in encoder:
            x = x + attend(layer["attention"], norm(x), norm(x))
            x = x + feed(layer["feed"], norm(x))
        for layer in decoder:
            y = y + attend(layer["attention"], norm(y), norm(y))
            y = y + attend(layer["cross"], norm(y), norm(x))
            y = y + feed(layer["feed"], norm(y))
        return norm(y)

    square = lambda seed: [0.05 * draw(width, width, seed=seed + i) for i in range(4)]
    layer = lambda i: {
        "attention": square(i),
        "cross": square(i + 9),
        "feed": [0.05 * draw(width, 512, seed=i), 0.05 * draw(512, width, seed=i)],
    }
    return (
        f,
        ([layer(0), layer(1)], [layer(2), layer(3)]),
        (draw(8, 64, width), draw(8, 48, width, seed=1)),
    )


@program("scan over layers")
def scanned():
    def f(params, x):
        return lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w[0]) @ w[1], None), x, params)[0]

    return f, (0.05 * draw(6, 128, 512), 0.05 * draw(6, 512, 128)), (draw(256, 128),)


@program("remat of layers")
def remat():
    def f(params, x):
        block = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w[0]) @ w[1])
        for w in params:
            x = block(x, w)
        return x

    return f, [(0.05 * draw(128, 512), 0.05 * draw(512, 128)) for _ in range(4)], (draw(256, 128),)


@program("vmap of networks")
def mapped():
    one = lambda w, x: jax.nn.relu(x @ w[0]) @ w[1]
    f = lambda params, x: jax.vmap(one, (0, None))(params, x)
    return f, (0.05 * draw(16, 256, 256), 0.05 * draw(16, 256, 10)), (draw(64, 256),)


@program("wide and shallow")
def wide():
    return (
        lambda params, x: jax.nn.relu(x @ params[0]) @ params[1],
        (0.02 * draw(2048, 2048), 0.02 * draw(2048, 2048)),
        (draw(64, 2048),),
    )


@program("mixture of experts")
def experts():
    f = nn.MixtureOfExperts(8, 256)
    params, _ = f.init(jax.random.key(0), x := draw(8, 64, 128))
    return lambda params, x: f(params, x), params, (x,)


# Other libraries.


@program("flax: convolutions and BatchNorm")
def linen_cnn():
    import flax.linen as linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for features in (16, 32):
                x = linen.relu(
                    linen.BatchNorm(use_running_average=False)(linen.Conv(features, (3, 3))(x))
                )
                x = linen.max_pool(x, (2, 2), (2, 2))
            return linen.Dense(10)(x.mean((1, 2)))

    net, x = Net(), draw(32, 32, 32, 3)
    variables = net.init(jax.random.key(0), x)
    apply = lambda params, x: net.apply(
        {**variables, "params": params}, x, mutable=["batch_stats"]
    )[0]
    return apply, variables["params"], (x,)


@program("flax: transformer")
def linen_transformer():
    import flax.linen as linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x):
            for _ in range(2):
                x = x + linen.MultiHeadDotProductAttention(4)(linen.LayerNorm()(x))
                x = x + linen.Dense(128)(linen.gelu(linen.Dense(512)(linen.LayerNorm()(x))))
            return x

    net, x = Net(), draw(8, 64, 128)
    return net.apply, net.init(jax.random.key(0), x), (x,)


@program("equinox: convolutions")
def equinox_cnn():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(0), 2)
    net = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 16, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(16, 32, 3, key=keys[1]),
        ]
    )
    params, rest = eqx.partition(net, eqx.is_array)
    return lambda params, x: jax.vmap(eqx.combine(params, rest))(x), params, (draw(16, 3, 32, 32),)


@program("haiku: mlp and LayerNorm")
def haiku_mlp():
    import haiku as hk

    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.LayerNorm(-1, True, True)(hk.nets.MLP([256, 256, 10])(x)))
    )
    x = draw(128, 256)
    return net.apply, net.init(jax.random.key(0), x), (x,)

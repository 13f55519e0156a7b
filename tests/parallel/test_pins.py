"""Activation pins: numbers stay, and what is sent is what pins by hand send."""

import functools

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import sampled
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import models, parallel
from fnet import transforms as ft
from fnet.parallel._pins import pin

N = 8
MESH = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
ROWS, WHOLE = NamedSharding(MESH, P("data")), NamedSharding(MESH, P())


def fsdp(tree):
    """Every array with a large axis is split along its last axis that 8 divides; those of a scan
    are not first ones."""

    def where(x):
        axes = [i for i, size in enumerate(x.shape) if size % N == 0]
        return (
            NamedSharding(MESH, P(*[None] * axes[-1], "data")) if axes and x.size >= 512 else WHOLE
        )

    return jax.tree.map(where, tree)


def gradient(loss):
    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return grads, value  # as they are: an update would hide their errors

    return step


def tokens(rows, time, vocab):
    return jnp.asarray(np.random.default_rng(0).integers(0, vocab, (rows, time + 1)), jnp.int32)


def gpt(rows=16, time=16, width=32, depth=2, vocab=64, **options):
    model = models.GPT(vocab, width, depth, 2, context=time, **options)
    params, _ = model.init(jax.random.key(0), jnp.zeros((1, time), jnp.int32))

    def loss(params, t):
        logits = model(params, t[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, t[:, 1:]).mean()

    return gradient(loss), params, tokens(rows, time, vocab)


def cnn():
    model = nn.Sequential(
        nn.Conv(16, 3),
        nn.BatchNorm(),
        jax.nn.relu,
        nn.MaxPool(2),
        nn.Conv(32, 3),
        jax.nn.relu,
        nn.GlobalAvgPool(),
        nn.Dense(8),
    )
    x = jax.random.normal(jax.random.key(1), (16, 8, 8, 3))
    params, state = model.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.square(model(params, x, state=state, train=True)[0]).mean()

    return gradient(loss), params, x


def flax():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = x + linen.MultiHeadDotProductAttention(num_heads=2)(linen.LayerNorm()(x))
            return x + linen.Dense(32)(linen.gelu(linen.Dense(64)(x)))

    x = jax.random.normal(jax.random.key(1), (16, 8, 32))
    params = Block().init(jax.random.key(0), x)
    return gradient(lambda params, x: jnp.square(Block().apply(params, x)).mean()), params, x


def lstm():
    x = jax.random.normal(jax.random.key(1), (16, 6, 16))
    model = nn.LSTM(32)
    params, _ = model.init(jax.random.key(0), x)
    return gradient(lambda params, x: jnp.square(model(params, x)).mean()), params, x


CASES = {
    "gpt": gpt,
    "gpt unrolled": functools.partial(gpt, stacked=False),
    "gpt in bfloat16": lambda: (lambda s, p, b: (ft.autocast(s, "bfloat16"), p, b))(*gpt()),
    "cnn": cnn,
    "flax": flax,
    "lstm": lstm,
    "microbatches": lambda: (lambda s, p, b: (gradient_microbatched(), p, b))(*cnn()),
}


def gradient_microbatched():
    model = nn.Sequential(
        nn.Conv(16, 3),
        nn.BatchNorm(),
        jax.nn.relu,
        nn.MaxPool(2),
        nn.Conv(32, 3),
        jax.nn.relu,
        nn.GlobalAvgPool(),
        nn.Dense(8),
    )
    _, state = model.init(jax.random.key(0), jnp.ones((2, 8, 8, 3)))
    loss = lambda params, x: jnp.square(model(params, x, state=state)[0]).mean()

    def step(params, x):
        value, grads = ft.microbatch(jax.value_and_grad(loss), 2)(params, x)
        return grads, value

    return step


def spread(step, params, batch, place):
    shardings = place(params)
    batch_sharding = jax.tree.map(lambda _: ROWS, batch)
    jitted = jax.jit(
        step, in_shardings=(shardings, batch_sharding), out_shardings=(shardings, WHOLE)
    )
    return jitted.lower(params, batch).compile(
        {"xla_backend_optimization_level": 0}
    )  # it runs once


def error(got, want):
    """max|a - b| / max|b| of the worst leaf; one that vanishes but for rounding, like the gradient
    of a key's bias, is measured by the largest."""
    got, want = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (got, want))
    least = 1e-2 * max(np.abs(b).max() for b in want)
    return max(np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in zip(got, want))


@pytest.mark.quick_cases("cnn")
@pytest.mark.parametrize("name", sampled(CASES, ["gpt", "cnn", "microbatches"]))
def test_numbers_on_eight_chips_are_those_of_one(name):
    step, params, batch = CASES[name]()
    want = jax.jit(step)(params, batch)
    compiled = spread(pin(step, MESH), params, batch, fsdp)
    got = compiled(jax.device_put(params, fsdp(params)), jax.device_put(batch, ROWS))
    assert error(got, want) <= (2e-2 if "bfloat16" in name else 1e-5)
    assert jax.tree.map(lambda x: x.sharding, got[0]) == fsdp(params)


def transformer(hand=lambda x: x):
    """A language model of stacked blocks, with its activations passed through `hand`."""
    width, vocab, depth, time, rows = 128, 512, 4, 32, 32
    shapes = {
        "embed": (vocab, width),
        "q": (depth, width, width),
        "o": (depth, width, width),
        "up": (depth, width, 4 * width),
        "down": (depth, 4 * width, width),
    }

    def loss(params, t):
        x = hand(params["embed"][t[:, :-1]])

        def block(x, p):
            h = hand(x @ p["q"]).reshape(*x.shape[:2], 4, -1)
            h = jax.nn.dot_product_attention(h, h, h, is_causal=True).reshape(x.shape)
            x = hand(x + hand(h @ p["o"]))
            return hand(x + hand(jax.nn.gelu(hand(x @ p["up"])) @ p["down"])), None

        x, _ = lax.scan(jax.checkpoint(block), x, {k: v for k, v in params.items() if k != "embed"})
        logits = hand(x @ params["embed"].T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, t[:, 1:]).mean()

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return gradient(loss), params, jax.ShapeDtypeStruct((rows, time + 1), jnp.int32)


@pytest.mark.exhaustive
def test_pins_gather_weights_as_pins_by_hand_do():
    def by_hand(x):
        return lax.with_sharding_constraint(
            x, NamedSharding(MESH, P("data", *[P.UNCONSTRAINED] * (x.ndim - 1)))
        )

    step, params, batch = transformer()
    plain, pinned, hand = (
        parallel.ledger(spread(f, params, batch, fsdp)).sent
        for f in (step, pin(step, MESH), transformer(by_hand)[0])
    )
    assert pinned <= 1.05 * hand and pinned < 0.6 * plain, (plain, pinned, hand)


def test_a_shard_map_of_all_axes_is_left_alone():
    def set_column(x):  # divided wrongly by XLA on some meshes, but not inside of shard_map
        return x.at[:, 0].set(0.0)

    spec = P("data")

    def step(w, x):
        y = jax.shard_map(set_column, mesh=MESH, in_specs=spec, out_specs=spec)(x @ w)
        return w - y.sum(0)[None], y.sum()

    x, w = np.arange(64.0, dtype=np.float32).reshape(16, 4), np.eye(4, dtype=np.float32)
    for activations in (True, False):
        pinned = jax.jit(pin(step, MESH, activations=activations), in_shardings=(WHOLE, ROWS))
        for a, b in zip(pinned(w, x), step(w, x)):
            np.testing.assert_allclose(a, b)

"""Programs whose arguments lie on a mesh with the explicit axes data and model, as users of JAX
write them. They run on a mesh of any size, also of one device."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import layers as nn


class Program(NamedTuple):
    f: Callable
    arrays: tuple  # pairs (array, its spec)

    def args(self, mesh):
        return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in self.arrays)


PROGRAMS: dict[str, Program] = {}


def mesh(*sizes):
    devices = jax.devices()[: sizes[0] * sizes[1]]
    return jax.make_mesh(
        sizes, ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=devices
    )


def normal(*shape):
    return np.random.default_rng(list(shape)).normal(size=shape).astype(np.float32)


def program(*arrays):
    """A decorator. `arrays` are tuples (array, *spec)."""

    def decorate(f):
        PROGRAMS[f.__name__.strip("_")] = Program(f, tuple((x, P(*spec)) for x, *spec in arrays))
        return f

    return decorate


X, W, V = (normal(8, 6), "data"), (normal(6, 4), None, "model"), (normal(4, 6), "model")
TOKENS = (np.random.default_rng(0).integers(0, 10, (8, 5)), "data")
IMAGES, STACK = (normal(8, 6, 6, 4), "data"), (normal(3, 6, 6), None, None, "model")
HEADS = [(normal(8, 4, 2, n), "data", None, "model") for n in (8, 8, 8)]


@program(X, W, V)
def mlp(x, w, v):
    def loss(w, v):
        y = jnp.einsum("bi,io->bo", jnp.tanh(x @ w), v, out_sharding=P("data", None))
        return jnp.mean(jnp.square(y))

    return jax.value_and_grad(loss, (0, 1))(w, v)


@program(X, W)
def outputs(x, w):
    return x @ w, x * 2, w.sum(0), x.sum(0), x.T, lax.with_sharding_constraint(x, P("data", None))


@program(TOKENS, (normal(10, 6), None, "model"))
def embedding(tokens, table):
    def looked_up(table):
        return table.at[tokens].get(out_sharding=P("data", None, "model"))

    return looked_up(table), jax.grad(lambda table: jnp.sin(looked_up(table)).sum())(table)


@program(X, W)
def resharded(x, w):
    y = jax.sharding.reshard(x @ w, P(None, "data"))
    return jnp.tanh(y), jax.sharding.reshard(y.T, P("data", "model"))


@program(X, W)
def automatic(x, w):
    f = jax.sharding.auto_axes(lambda x, w: jnp.tanh(x @ w), out_sharding=P("data", "model"))
    return jnp.sin(f(x, w)), jax.grad(lambda w: jnp.sin(f(x, w)).sum())(w)


@program(X, W)
def one_automatic_axis(x, w):
    @functools.partial(jax.sharding.auto_axes, axes="model", out_sharding=P("data", "model"))
    def f(x, w):
        return jnp.tanh(x @ w) * 2

    return jnp.sin(f(x, w))


@program(X, W)
def explicit_in_automatic(x, w):
    @functools.partial(jax.sharding.auto_axes, out_sharding=P("data", "model"))
    def f(x, w):
        product = lambda x, w: jnp.tanh(x @ w)
        places = P("data"), P(None, "model")
        return 2 * jax.sharding.explicit_axes(product, in_sharding=places)(x, w)

    return jnp.sin(f(x, w))


@program(X, W)
def shard_map(x, w):
    def f(x, w):
        return lax.psum(jnp.tanh(x @ w).sum(), ("data", "model"))

    mapped = jax.shard_map(f, in_specs=(P("data"), P(None, "model")), out_specs=P())
    return mapped(x, w), jax.grad(mapped, 1)(x, w)


@program(X, W)
def shard_map_over_one_axis(x, w):
    return jax.shard_map(
        lambda x, w: lax.psum(jnp.tanh(x @ w).sum(0), "data"),
        in_specs=(P("data"), P()),
        out_specs=P(),
        axis_names={"data"},
    )(x, w)


@program(X, STACK)
def scan(x, stack):
    def block(x, w):
        x = jax.sharding.reshard(jnp.tanh(x @ w), P("data", None))
        return x, x.sum(0)

    run = lambda x, stack: lax.scan(block, x, stack)
    return run(x, stack), jax.grad(lambda *args: run(*args)[0].sum(), (0, 1))(x, stack)


@program(X, STACK)
def recomputed_scan(x, stack):
    def block(x, w):
        y = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return jax.sharding.reshard(y, P("data", None)), None

    return jax.grad(lambda *args: lax.scan(block, *args)[0].sum(), (0, 1))(x, stack)


@program(X)
def loops_and_branches(x):
    looped = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))
    counted = lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x)
    branch = lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    return looped, counted, branch(x), jax.grad(lambda x: branch(x).sum())(x)


@program(X, W)
def activations(x, w):
    f = lambda x, w: jax.nn.logsumexp(jax.nn.gelu(jax.nn.relu(x @ w)), 1).sum()
    return jax.value_and_grad(f, (0, 1))(x, w)


@program(X, W)
def custom_derivatives(x, w):
    @jax.custom_vjp
    def product(x, w):
        return jnp.tanh(x @ w)

    def backward(saved, g):
        x, w = saved
        dx = jnp.einsum("bo,io->bi", g, w, out_sharding=P("data", None))
        return dx, jnp.einsum("bi,bo->io", x, g, out_sharding=P(None, "model"))

    product.defvjp(lambda x, w: (product(x, w), (x, w)), backward)

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda primals, tangents: (sine(*primals), 2 * tangents[0]))
    return jax.value_and_grad(lambda x, w: sine(product(x, w)).sum(), (0, 1))(x, w)


def with_gradients(f):
    return lambda *args: (
        f(*args),
        jax.grad(lambda *args: jnp.sin(f(*args)).sum(), range(len(args)))(*args),
    )


def convolution(groups):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


@program(IMAGES, (normal(3, 3, 4, 8),))
def convolutions(x, w):
    return with_gradients(convolution(1))(x, w)


@program(IMAGES, (normal(1, 1, 4, 8),))
def pointwise(x, w):
    return with_gradients(convolution(1))(x, w)


@program(IMAGES, (normal(3, 3, 1, 4),))
def depthwise(x, w):
    # Not the gradient of w, which XLA computes wrongly on a mesh of two axes.
    return with_gradients(lambda x: convolution(4)(x, w))(x)


@program(IMAGES)
def pooling(x):
    tiles = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    overlapping = lambda x: lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"
    )
    sums = lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
    return [with_gradients(f)(x) for f in (tiles, overlapping, sums)]


@program(*HEADS)
def attention(q, k, v):
    return with_gradients(functools.partial(jax.nn.dot_product_attention, is_causal=True))(q, k, v)


@program(*HEADS)
def own_attention(q, k, v):
    def f(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
        scores = jnp.where(jnp.tri(4, dtype=bool)[None, None], scores, -1e9)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    return with_gradients(f)(q, k, v)


@program(X)
def random(x):
    key = jax.random.key(0)
    return x + jax.random.normal(key, x.shape, out_sharding=P("data", None))


@program(X, W)
def shapes(x, w):
    return (
        jnp.reshape(x, (8, 2, 3), out_sharding=P("data", None, None)),
        jnp.broadcast_to(x[:, None], (8, 2, 6), out_sharding=P("data", "model", None)),
        jnp.zeros((8, 2), out_sharding=P("data", "model")),
        jnp.concatenate([x, jnp.zeros_like(x)], 1),
        jnp.pad(x, ((0, 0), (1, 1))),
        jnp.stack([w, w]),
        jnp.expand_dims(w, 0),
        jnp.squeeze(w[None]),
    )


@program(X)
def indexing(x):
    return (
        x[:, :3],
        x[:, ::2],
        x[:, 0],
        x.at[:, 1].set(0.0),
        lax.dynamic_slice(x, (0, 1), (8, 2)),
        jnp.roll(x, 1, 1),
        jnp.where(x > 0, x, 0),
    )


@program((normal(4, 8, 6), "data"), (normal(4, 6, 4), "data", None, "model"))
def batched(x, w):
    return with_gradients(jnp.matmul)(x, w), jax.vmap(lambda x, w: jnp.tanh(x @ w))(x, w)


@program(X, W)
def vmap(x, w):
    return jax.vmap(lambda x: jnp.tanh(x @ w))(x), jax.vmap(jax.grad(lambda x: (x @ w).sum()))(x)


@program(X, W)
def jit(x, w):
    return jax.jit(lambda x, w: jnp.sin(x @ w))(x, w)


@program(X)
def norms(x):
    def f(x, axis):
        centered = x - x.mean(axis, keepdims=True)
        return centered * lax.rsqrt(jnp.square(centered).mean(axis, keepdims=True) + 1e-5)

    return jax.value_and_grad(lambda x: (f(x, 0) * jnp.sin(f(x, 1))).sum())(x)


@program(X, W)
def half(x, w):
    x = x.astype(jnp.bfloat16)
    return jax.value_and_grad(lambda w: jnp.tanh(x @ w.astype(x.dtype)).astype(w.dtype).sum())(w)


@program(X)
def reductions(x):
    return jnp.cumsum(x, 1), jnp.sort(x, 1), lax.top_k(x, 2), jnp.argmax(x, 1), x.max(), x.mean(0)


@program(X, (np.arange(8) % 6, "data"))
def cross_entropy(x, labels):
    def chosen(x):
        return -jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1).mean()

    def one_hot(x):
        return -(jax.nn.log_softmax(x) * jax.nn.one_hot(labels, 6)).sum(1).mean()

    return jax.value_and_grad(chosen)(x), jax.value_and_grad(one_hot)(x)


@program((normal(8, 6), "data", "model"), (normal(6, 4), "model"))
def contraction(x, w):
    f = lambda x, w: jnp.einsum("bi,io->bo", x, w, out_sharding=P("data", None))
    return with_gradients(f)(x, w)


@program((normal(8, 6), "data", "model"), (normal(6, 4), "model"))
def unreduced_sum(x, w):
    parts = jnp.einsum("bi,io->bo", x, w, out_sharding=P("data", None, unreduced={"model"}))
    return jax.sharding.reshard(parts, P("data", None))


@program(X)
def layers(x):
    network = nn.Sequential(nn.Dense(16), nn.LayerNorm(), jax.nn.relu, nn.Dense(6))
    params = network.init(jax.random.key(0), x)[0]
    return jax.value_and_grad(lambda params: jnp.square(network(params, x) - x).mean())(params)

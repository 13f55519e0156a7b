"""The table of functions that precision is tested on: fnet's models, and strangers that know
nothing of fnet.

Each case makes a scalar loss of a parameter tree.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import layers as nn


class Case(NamedTuple):
    """`make() -> (loss, params, inputs)`, with `loss(params, *inputs)` a scalar.

    `bfloat16` and `float16` bound the relative error of gradients. `leaf_by_leaf` is False where
    they hold for the gradient as one vector alone: an activation that rounding carries over relu's
    kink, or past its neighbor in a max pool, moves its gradient by the whole of it, whatever the
    precision, and BatchNorm puts many near the kink. `forward` is False where JAX has no forward
    mode for the function (custom_vjp). `by_hand` bounds the error of gradients relative to that of
    casts written by hand, below 1 where autocast saves roundings between operations; it is None
    where the function does not run on 16-bit arguments. `eagerly` is False where JAX takes too long
    for the function operation by operation, or cannot run it so.
    """

    make: Callable[[], tuple[Callable, Any, tuple]]
    bfloat16: float = 2e-2
    float16: float = 3e-3
    leaf_by_leaf: bool = True
    forward: bool = True
    by_hand: float | None = 0.9
    eagerly: bool = False


CASES: dict[str, Case] = {}


def case(name, **options):
    def add(make):
        CASES[name] = Case(functools.cache(make), **options)
        return make

    return add


def normal(seed, *shape, scale=1.0, mean=0.0):
    return jnp.asarray(np.random.default_rng(seed).normal(mean, scale, shape), jnp.float32)


def filled(shapes):
    """Arrays of these shapes, as layers initialize them, but off the zeros and ones where gradients
    vanish by symmetry.

    Kernels have the variance 1 / inputs, scales and variances are about 1, all else about 0.
    Nothing is compiled.
    """

    def leaf(number, path, shape):
        name, shape, dtype = jax.tree_util.keystr(path[-1:], simple=True), shape.shape, shape.dtype
        if dtype != jnp.float32:
            return jnp.zeros(shape, dtype)
        if len(shape) > 1 and name not in ("scale", "bias", "offset"):
            return normal(number, *shape, scale=np.prod(shape[:-1]) ** -0.5)
        return normal(number, *shape, scale=0.05, mean=float(name in ("scale", "var")))

    paths, structure = jax.tree.flatten_with_path(shapes)
    return jax.tree.unflatten(structure, [leaf(i, *pair) for i, pair in enumerate(paths)])


def labels(count, classes):
    return jnp.arange(count) % classes


def cross_entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# fnet's own.


def _layer(model, x, target=None):
    params, state = filled(jax.eval_shape(model.init, jax.random.key(0), x))

    def loss(params, x):
        y, _ = model(params, x, state=state, train=True)
        return (
            jnp.square(y - target).mean()
            if target is not None
            else cross_entropy(y, labels(len(y), y.shape[-1]))
        )

    return loss, params, (x,)


@case("mlp", by_hand=1.15, eagerly=True)
def mlp():
    model = nn.Sequential(nn.Dense(64), jax.nn.relu, nn.Dense(64), jax.nn.gelu, nn.Dense(10))
    return _layer(model, normal(1, 16, 32))


# Of ten draws of the input, bfloat16 carries activations of this net over a kink in all (errors of
# 4e-2 to 1e-1) and float16 in seven (1e-2 to 1e-1); of Haiku's in nine (up to 5e-2) and in two
# (3e-2). Float32 does, too, where its inputs alone are rounded. These are draws where float16 does
# not; test_kinks has one of each where it does.


@case("conv and BatchNorm", by_hand=1.15, bfloat16=1e-1, leaf_by_leaf=False)
def conv(draw=6):
    model = nn.Sequential(
        nn.Conv(8, 3, use_bias=False),
        nn.BatchNorm(),
        jax.nn.relu,
        nn.MaxPool(2),
        nn.Conv(16, 3, use_bias=False),
        nn.BatchNorm(),
        jax.nn.relu,
        nn.GlobalAvgPool(),
        nn.Dense(10),
    )
    return _layer(model, normal(draw, 8, 8, 8, 3, scale=3, mean=5))


@case("attention")
def attention():
    model = nn.Residual(nn.LayerNorm(), nn.Attention(4, causal=True))
    return _layer(model, normal(1, 2, 12, 32), normal(2, 2, 12, 32))


@case("LSTM", by_hand=1.25, eagerly=True)
def lstm():
    return _layer(nn.LSTM(16), normal(1, 4, 10, 8), normal(2, 4, 10, 16))


@case("Stack with Remat", eagerly=True)
def stack():
    block = nn.Residual(nn.LayerNorm(), nn.Dense(64), jax.nn.gelu, nn.Dense(32))
    return _layer(nn.Stack(nn.Remat(block), 3), normal(1, 8, 32), normal(2, 8, 32))


# Strangers.


@case("linen transformer block")
def linen_transformer():
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            h = linen.LayerNorm()(x)
            x = x + linen.MultiHeadDotProductAttention(num_heads=4)(h, h)
            h = linen.Dense(64)(linen.LayerNorm()(x))
            return x + linen.Dense(32)(linen.gelu(h))

    x, target = normal(1, 2, 10, 32), normal(2, 2, 10, 32)
    params = filled(jax.eval_shape(Block().init, jax.random.key(0), x))
    return lambda params, x: jnp.square(Block().apply(params, x) - target).mean(), params, (x,)


@case("nnx CNN", bfloat16=1e-1, leaf_by_leaf=False)
def nnx_cnn():
    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8 * 16, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2), (2, 2))
            return self.head(x.reshape(x.shape[0], -1))

    graph, *both = nnx.split(nnx.eval_shape(lambda: CNN(nnx.Rngs(0))), nnx.Param, ...)
    params, rest = (filled(nnx.to_pure_dict(state)) for state in both)

    def loss(params, x):
        with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm needs it
            return cross_entropy(
                nnx.merge(graph, nnx.State(params), nnx.State(rest))(x), labels(8, 10)
            )

    return loss, params, (normal(1, 8, 8, 8, 3),)


@case("Equinox MLP", by_hand=1.0)
def equinox_mlp():
    mlp = functools.partial(eqx.nn.MLP, 16, 8, 64, 2, activation=jax.nn.silu)
    params, static = eqx.partition(
        eqx.filter_eval_shape(mlp, key=jax.random.key(0)), lambda x: hasattr(x, "shape")
    )
    params = filled(params)

    def loss(params, x, y):
        return optax.l2_loss(jax.vmap(eqx.combine(params, static))(x), y).mean()

    return loss, params, (normal(1, 16, 16), normal(2, 16, 8))


@case("Haiku ResNet block", bfloat16=1e-1, leaf_by_leaf=False)
def haiku_resnet(draw=1):
    def forward(x):
        x = hk.nets.ResNet.BlockV1(
            8, 1, True, {"create_scale": True, "create_offset": True, "decay_rate": 0.9}, False
        )(x, is_training=True, test_local_stats=False)
        return hk.Linear(10)(x.mean((1, 2)))

    model, x = hk.without_apply_rng(hk.transform_with_state(forward)), normal(draw, 8, 6, 6, 4)

    def loss(params, x):
        with jax.numpy_dtype_promotion("standard"):  # Haiku's BatchNorm needs it
            return cross_entropy(model.apply(params, state, x)[0], labels(8, 10))

    with jax.numpy_dtype_promotion("standard"):
        params, state = filled(jax.eval_shape(model.init, jax.random.key(0), x))
    return loss, params, (x,)


@case("Optax loss")
def optax_loss():
    def loss(w, x, y):
        logits = x @ w
        return (
            optax.safe_softmax_cross_entropy(logits, jax.nn.one_hot(y, 8)).mean()
            + optax.sigmoid_focal_loss(logits, jax.nn.one_hot(y, 8)).mean()
            + optax.huber_loss(logits).mean()
            + optax.cosine_distance(x @ w, x[:, :8]).mean()
        )

    return loss, normal(1, 32, 8, scale=0.3), (normal(2, 16, 32), labels(16, 8))


@case("while_loop solver", eagerly=True)
def solver():
    def loss(params, x):
        step = lambda p, z, x: jnp.tanh(z @ p["w"] + x @ p["u"] + p["b"])
        frozen, given = lax.stop_gradient((params, x))
        unsettled = lambda carry: (carry[2] < 60) & (jnp.abs(carry[0] - carry[1]).max() > 1e-2)
        start = (step(frozen, jnp.zeros_like(x), given), jnp.zeros_like(x), 0)
        z, _, _ = lax.while_loop(
            unsettled, lambda c: (step(frozen, c[0], given), c[0], c[2] + 1), start
        )
        return jnp.square(step(params, z, x)).mean()

    return (
        loss,
        {
            "w": normal(1, 32, 32, scale=0.08),
            "u": normal(2, 32, 32, scale=0.3),
            "b": normal(3, 32, scale=0.3)[None],
        },
        (normal(4, 8, 32),),
    )


@case("conjugate gradients", by_hand=None)
def linear_solve():
    def loss(params, x):
        w, b = params
        matrix = w @ w.T / 32 + 3 * jnp.eye(32)
        return jnp.square(
            jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, b, maxiter=20)[0] - x
        ).mean()

    return loss, (normal(1, 32, 32), normal(2, 32)), (normal(3, 32),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(x, w, power, shift):
    return jax.nn.sigmoid(x) * (x @ w) ** power + x[shift][None]


def _gated_forward(x, w, power, shift):
    y = x @ w
    return jax.nn.sigmoid(x) * y**power + x[shift][None], (x, w, y, shift, 2.5, 3)


def _gated_backward(power, saved, g):
    x, w, y, shift, _, _ = saved
    s = jax.nn.sigmoid(x)
    dy = g * s * power * y ** (power - 1)
    dx = g * y**power * s * (1 - s) + dy @ w.T
    return dx.at[shift].add(g.sum(0)), x.T @ dy, None


gated.defvjp(_gated_forward, _gated_backward)


@case("custom_vjp", by_hand=1.15, forward=False, eagerly=True)
def custom_vjp():
    def loss(w, x, shift):
        return jnp.square(gated(jax.nn.relu(x @ w), w, 2, shift)).mean()

    return loss, normal(1, 32, 32, scale=0.15), (normal(2, 8, 32), jnp.int32(3))


@jax.custom_jvp
def polar(x, w):
    h = x @ w
    return jnp.sqrt(1 + h * h), jnp.tanh(h), jnp.argmax(h, axis=-1)


@polar.defjvp
def _polar_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    outputs = polar(x, w)
    length, angle, index = outputs
    dh = dx @ w + x @ dw
    return outputs, (
        dh * (x @ w) / length,
        dh * (1 - angle * angle),
        np.zeros(index.shape, jax.dtypes.float0),
    )


@case("custom_jvp of several outputs", by_hand=1.2, eagerly=True)
def custom_jvp():
    def loss(w, x):
        length, angle, index = polar(x, w)
        return (length * angle).mean() + (angle * jax.nn.one_hot(index, angle.shape[-1])).sum()

    return loss, normal(1, 32, 16, scale=0.2), (normal(2, 8, 32),)


@case("shard_map", by_hand=1.15)
def shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        part = lambda w, x: lax.pmean(jnp.square(jnp.tanh(x @ w)).mean(), "data")
        return jax.shard_map(part, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(w, x)

    return loss, normal(1, 32, 16, scale=0.2), (normal(2, 16, 32),)


@case("jax.nn.dot_product_attention", by_hand=None)
def dot_product_attention():
    def loss(params, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
        return jnp.square(
            jnp.einsum(
                "bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), params["o"]
            )
            - x
        ).mean()

    return (
        loss,
        {
            **{name: normal(i, 32, 4, 8, scale=0.3) for i, name in enumerate("qkv")},
            "o": normal(4, 4, 8, 32, scale=0.3),
        },
        (normal(5, 2, 12, 32),),
    )


@jax.custom_batching.custom_vmap
def projected(x, w):
    return jnp.tanh(x @ w)


@projected.def_vmap
def _projected_batch(size, batched, x, w):
    x, w = (a if b else jnp.broadcast_to(a, (size, *a.shape)) for a, b in zip((x, w), batched))
    return jnp.tanh(jnp.einsum("bij,bjk->bik", x, w)), True


@case("custom_vmap", by_hand=1.15, eagerly=True)
def custom_vmap():
    # JAX differentiates a custom_vmap in forward mode alone, so that its gradient is that of the
    # stage after it.
    def loss(params, x):
        h = projected(x, lax.stop_gradient(params["fixed"]))
        return jnp.square(lax.stop_gradient(h) @ params["w"]).mean()

    return (
        loss,
        {"fixed": normal(1, 32, 32, scale=0.2), "w": normal(2, 32, 8, scale=0.2)},
        (normal(3, 8, 32),),
    )


@case("jit inside, with donation", by_hand=1.15)
def nested_jit():
    @functools.partial(jax.jit, donate_argnums=0)
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss(params, x):
        for w in params:
            x = layer(x, w)
        return jnp.square(x).mean()

    return loss, [normal(i, 32, 32, scale=0.2) for i in range(3)], (normal(9, 8, 32),)

"""Functions over a padded axis: fnet's layers, flax, and plain JAX as strangers write it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax import lax

from fnet import layers as nn

D, HEADS = 4, 2
DRAW = np.random.default_rng(0)
SQUARE, WIDE = DRAW.normal(size=(D, D)), DRAW.normal(size=(D, 3 * D))
TEXT = "b, t, d"


@dataclasses.dataclass(frozen=True)
class Case:
    """A function, the axes of its arguments, and its arguments for a length."""

    f: Callable
    axes: Any
    inputs: Callable[[int], tuple]


def draw(n, *shape):
    return np.random.default_rng(n).normal(size=shape)


def of_rows(f):
    """A function of x [b, t, d]."""
    return Case(f, TEXT, lambda n: (draw(n, 2, n, D),))


def of_vector(f):
    return Case(f, "t", lambda n: (draw(n, n),))


def of_tokens(f, vocabulary=7):
    return Case(f, "b, t", lambda n: (draw(n, 2, n, 1)[..., 0].astype(np.int32) % vocabulary,))


def of_image(f):
    return Case(f, "b, t, w, d", lambda n: (draw(n, 2, n, 5, D),))


def with_mask(f):
    """A function of x [b, t, d] and a mask [b, t] of which the first position is True."""

    def inputs(n):
        mask = draw(n + 1, 2, n) > 0
        mask[:, 0] = True
        return draw(n, 2, n, D), mask

    return Case(f, (TEXT, "b, t"), inputs)


def of_layer(layer, *, shape=(2, None, D), state=False, train=False, axes=TEXT, key=False):
    """A layer of fnet with its parameters, and its state if it has one."""
    example = jnp.zeros([5 if n is None else n for n in shape], jnp.float32)
    params, start = layer.init(jax.random.key(1), example)
    double = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    params, start = double(params), double(start)
    options = {"train": train} | ({"key": jax.random.key(3)} if key else {})

    def f(params, x):
        return layer(params, x, state=start, **options) if state or train else layer(params, x)

    return Case(
        f, (None, axes), lambda n: (params, draw(n, *[n if m is None else m for m in shape]))
    )


def gradient(case, argnums=0, of=lambda y: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(y))):
    return Case(jax.grad(lambda *args: of(case.f(*args)), argnums), case.axes, case.inputs)


# Plain JAX.


def attention(x, causal=False, scale=D**-0.5):
    q, k, v = jnp.split(x @ WIDE, 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) * scale
    if causal:
        t = x.shape[1]
        keep = jnp.arange(t)[:, None] >= jnp.arange(t)[None]
        scores = jnp.where(keep, scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v


def heads(x):
    b, t, d = x.shape
    q, k, v = (
        each.reshape(b, t, HEADS, d // HEADS).transpose(0, 2, 1, 3)
        for each in jnp.split(x @ WIDE, 3, axis=-1)
    )
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-1)
    return (weights @ v).transpose(0, 2, 1, 3).reshape(b, t, d)


def masked_attention(x, mask):
    scores = jnp.einsum("btd,bsd->bts", x, x)
    scores = jnp.where(mask[:, None, :], scores, jnp.finfo(scores.dtype).min)
    return jax.nn.softmax(scores, axis=-1) @ x


def standardized(x):
    mean, variance = x.mean((0, 1)), x.var((0, 1))
    return (x - mean) / jnp.sqrt(variance + 1e-5), mean


def convolved(padding, stride=1, dilation=1, transposed=1):
    kernel = draw(9, 3, D, D)
    return of_rows(
        lambda x: lax.conv_general_dilated(
            x,
            kernel,
            (stride,),
            padding,
            lhs_dilation=(transposed,),
            rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
    )


def pooled(reduce, start, padding, window=3, stride=2):
    return of_image(
        lambda x: lax.reduce_window(
            x, np.asarray(start, x.dtype), reduce, (1, window, 2, 1), (1, stride, 1, 1), padding
        )
    )


def cross_entropy(tokens):
    table = draw(5, 7, 7)
    logits = jnp.asarray(table)[tokens]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].reshape(-1, 7), tokens[:, 1:].reshape(-1)
    )
    return losses.mean()


def lstm_by_hand(x):
    def step(carry, each):
        h, c = carry
        i, f, o, g = jnp.split(each @ DRAWN_IN + h @ DRAWN_STATE, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[0], D), x.dtype)
    over = lambda reverse: lax.scan(step, (start, start), x.swapaxes(0, 1), reverse=reverse)
    (last, _), ahead = over(False)
    _, back = over(True)
    return jnp.concatenate([ahead, back], -1).swapaxes(0, 1), last


DRAWN_IN, DRAWN_STATE = draw(3, D, 4 * D), draw(4, D, 4 * D)


def halves(x):
    """The later half after the earlier one."""
    middle = x.shape[0] // 2
    return jnp.concatenate([x[middle:], x[:middle]])


def ctc(x):
    paddings = jnp.zeros(x.shape[:2], x.dtype)
    labels = jnp.ones((x.shape[0], 2), jnp.int32)
    return optax.ctc_loss(x, paddings, labels, jnp.zeros(labels.shape, x.dtype))


def histogram(tokens):
    flat = tokens.reshape(-1)
    counts = jnp.zeros(7).at[flat].add(1.0)
    return counts / counts.sum(), jax.ops.segment_max(flat * 2, flat, num_segments=7)


def beam(x):
    values, index = lax.top_k(x.sum(-1), 1)
    return values, jnp.take_along_axis(x, index[..., None], axis=1)


def loop(x):
    total = lax.fori_loop(
        0, x.shape[0], lambda i, total: total * 0.5 + x[i], jnp.zeros((), x.dtype)
    )
    return total, lax.while_loop(lambda s: s[1] > 0, lambda s: (s[0] + x[s[1]], s[1] - 1),
                                 (jnp.zeros((), x.dtype), x.shape[0] - 1))[0]  # fmt: skip


def distances(x):
    return jnp.square(x[:, :, None] - x[:, None]).sum(-1).min(-1), jnp.linalg.norm(x, axis=(1, 2))


def dropped(x):
    keep = jax.random.bernoulli(jax.random.key(1), 0.5, x.shape)
    noise = jax.random.normal(jax.random.key(2), (x.shape[1], D), x.dtype)
    return jnp.where(keep, x, 0) + noise


def flax_case(module, n_in=D, shape=(2, None, D), axes=TEXT, **options):
    variables = module.init(
        jax.random.key(0), jnp.zeros([4 if n is None else n for n in shape], jnp.float32)
    )
    variables = jax.tree.map(lambda x: np.asarray(x, np.float64), variables)
    f = lambda variables, x: module.apply(variables, x, **options)
    return Case(
        f, (None, axes), lambda n: (variables, draw(n, *[n if m is None else m for m in shape]))
    )


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x, train=True):
        x = linen.Conv(D, (3,), strides=2)(x)
        x = linen.BatchNorm(use_running_average=not train)(x)
        x = x + linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x))
        return linen.Dense(3)(linen.relu(x)).mean(1)


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.up, self.norm = nnx.Linear(D, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x):
        return nnx.max_pool(self.norm(self.up(x)), (2,), (2,)).sum(1)


def of_tower():
    tower = Tower(nnx.Rngs(0))
    graph, state = nnx.split(tower)
    state = jax.tree.map(lambda x: np.asarray(x, np.float64), state)

    def f(state, x):
        module = nnx.merge(graph, state)
        y = module(x)
        return y, nnx.state(module, nnx.BatchStat)

    fresh = lambda: jax.tree.map(np.copy, state)  # f updates it in place
    return Case(f, (None, TEXT), lambda n: (fresh(), draw(n, 2, n + 1, D)))


PLAIN = {
    "mean": of_rows(lambda x: x.mean(1)),
    "pool over time": with_mask(
        lambda x, m: jnp.where(m[..., None], x, 0).sum(1) / m.sum(1, keepdims=True)
    ),
    "extremes": of_rows(
        lambda x: (x.max(1), x.min(), x.argmax(1), x.argmin(1), jnp.median(x, 1)[0])
    ),
    "logic": of_rows(lambda x: ((x > 0).all(1), (x > 1).any(1), (x > 0).sum(), jnp.prod(x, 1))),
    "variance": of_rows(lambda x: (x.std(1), jnp.cov(x[0].T))),
    "standardized": of_rows(standardized),
    "attention": of_rows(attention),
    "causal attention": of_rows(lambda x: attention(x, causal=True)),
    "heads": of_rows(heads),
    "masked attention": with_mask(masked_attention),
    "dot_product_attention": of_rows(
        lambda x: jax.nn.dot_product_attention(*[x.reshape(2, -1, HEADS, D // HEADS)] * 3)
    ),
    "logsumexp": of_rows(lambda x: jax.nn.logsumexp(x, axis=1)),
    "log_softmax": of_rows(lambda x: jax.nn.log_softmax(x, axis=1)),
    "conv same": convolved("SAME"),
    "conv same stride 2": convolved("SAME", 2),
    "conv same stride 3": convolved("SAME", 3),
    "conv valid": Case(convolved("VALID").f, TEXT, lambda n: (draw(n, 2, n + 2, D),)),
    "conv same lower": convolved("SAME_LOWER", 2),
    "conv causal": convolved([(2, 0)]),
    "conv wide": convolved([(3, 5)], 2),
    "conv cropped": Case(convolved([(-1, -1)]).f, TEXT, lambda n: (draw(n, 2, n + 4, D),)),
    "conv dilated": convolved("SAME", 1, 2),
    "conv transposed": of_rows(
        lambda x: lax.conv_transpose(
            x, draw(9, 3, D, D), (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
    ),
    "conv transposed valid": of_rows(
        lambda x: lax.conv_transpose(
            x, draw(9, 3, D, D), (3,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
        )
    ),
    "depthwise": of_rows(
        lambda x: lax.conv_general_dilated(
            x,
            draw(9, 3, 1, D),
            (2,),
            "SAME",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=D,
        )
    ),
    "correlation": of_vector(lambda x: (jnp.convolve(x, x), jnp.correlate(x, x[:1], "full"))),
    "max pool same": pooled(lax.max, -np.inf, "SAME"),
    "max pool valid": Case(
        pooled(lax.max, -np.inf, "VALID").f, "b, t, w, d", lambda n: (draw(n, 2, n + 2, 5, D),)
    ),
    "sum pool same": pooled(lax.add, 0.0, "SAME", 2, 3),
    "min pool": pooled(lax.min, np.inf, ((0, 0), (2, 1), (0, 0), (0, 0))),
    "mean pool": of_rows(lambda x: linen.avg_pool(x, (2,), (2,), "SAME", count_include_pad=False)),
    "global pool": of_image(lambda x: linen.avg_pool(x, x.shape[1:3])),
    "sort": of_rows(lambda x: (jnp.sort(x, 1), jnp.argsort(x, 1), jnp.argsort(-x, 1)[:, 0])),
    "rank": of_vector(lambda x: jnp.argsort(jnp.argsort(x))),
    "quantile": of_vector(lambda x: (jnp.median(x), jnp.sort(x)[::-1])),
    "cumulative": of_rows(lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 1), lax.cummax(x, 1))),
    "cumulative back": of_rows(
        lambda x: (
            lax.cumsum(x, 1, reverse=True),
            lax.cummin(x, 1, reverse=True),
            lax.cumlogsumexp(x, 1, reverse=True),
        )
    ),
    "top k": of_rows(beam),
    "cross entropy": Case(
        cross_entropy, "b, t", lambda n: (draw(n, 2, n + 1).astype(np.int32) % 7,)
    ),
    "mean squared": of_rows(lambda x: jnp.square(x[:, 1:] - x[:, :-1]).sum()),
    "ctc": of_rows(ctc),
    "lstm by hand": of_rows(lstm_by_hand),
    "loops": of_vector(loop),
    "halves": of_vector(halves),
    "reversed": of_rows(lambda x: (x[:, ::-1], jnp.flip(x, (1, 2)), x[:, ::2], x[:, 1::2])),
    "rolled": of_rows(lambda x: (jnp.roll(x, 1, 1), jnp.roll(x, -2, 1))),
    "ends": of_rows(lambda x: (x[:, -1], x[:, 0], x[:, -1:], x[:, :-1])),
    "indices": of_vector(
        lambda x: (x[jnp.array([-1, 0, 100])], x[jnp.arange(3) - 2], x.at[-1].set(9.0))
    ),
    "written": of_vector(lambda x: x.at[jnp.arange(x.shape[0])].multiply(jnp.arange(x.shape[0]))),
    "padded": of_rows(lambda x: jnp.pad(x, ((0, 0), (2, 1), (0, 0)), constant_values=1.0).sum(1)),
    "reflected": Case(lambda x: jnp.pad(x, (1, 1), "reflect"), "t", lambda n: (draw(n, n + 1),)),
    "edge": of_vector(lambda x: jnp.pad(x, (2, 3), "edge")),
    "joined": of_rows(lambda x: jnp.concatenate([x, jnp.ones((2, 1, D)), x[:, ::-1]], 1)),
    "class token": of_rows(
        lambda x: attention(jnp.concatenate([jnp.zeros((2, 1, D)), x], 1))[:, 0]
    ),
    "flattened": of_rows(lambda x: (x.reshape(-1, D), x.reshape(-1), x.reshape(-1).sum())),
    "flattened and back": of_rows(lambda x: jnp.tanh(x.reshape(-1, D) @ SQUARE).reshape(x.shape)),
    "transposed": of_rows(lambda x: x.swapaxes(0, 1).reshape(-1, 2 * D)),
    "repeated": of_rows(lambda x: (jnp.repeat(x, 2, axis=1), jnp.tile(x, (1, 2, 1)))),
    "positions": of_rows(lambda x: x + jnp.sin(jnp.arange(x.shape[1]) / x.shape[1])[:, None]),
    "outer": of_rows(distances),
    "gram": of_rows(lambda x: jnp.einsum("btd,bte->bde", x, x) / x.shape[1]),
    "inverse": of_rows(lambda x: jnp.linalg.inv(jnp.einsum("btd,bte->bde", x, x) + jnp.eye(D))),
    "histogram": of_tokens(histogram),
    "embedded": of_tokens(lambda t: jnp.asarray(draw(5, 7, D))[t].mean(1)),
    "searched": of_vector(lambda x: jnp.searchsorted(jnp.sort(x), jnp.array([-1.0, 0.0, 1.0]))),
    "interpolated": of_vector(
        lambda x: jnp.interp(jnp.array([0.3, 0.5]), jnp.arange(x.shape[0]) / x.shape[0], x)
    ),
    "associative": of_vector(
        lambda x: lax.scan(lambda c, a: (c * a + 1, c), jnp.ones((), x.dtype), x, reverse=True)
    ),
    "drawn": of_rows(dropped),
    "vmapped": of_rows(jax.vmap(lambda x: jax.nn.softmax(x @ x.T, -1).sum(0))),
    "jitted": of_rows(jax.jit(lambda x: jax.nn.gelu(x).mean(1))),
    "rematerialized": gradient(of_rows(jax.checkpoint(lambda x: jnp.sin(x @ SQUARE).mean(1)))),
    "branch": of_rows(lambda x: lax.cond(x.sum() > 0, lambda x: x.mean(1), lambda x: x.max(1), x)),
    "two lengths": Case(
        lambda x, y: jax.nn.softmax(x @ y.T, -1) @ y / x.shape[0],
        ("t, d", "2*t + 1, d"),
        lambda n: (draw(n, n, D), draw(n, 2 * n + 1, D)),
    ),
}
LAYERS = {
    "fnet attention": lambda: of_layer(nn.Attention(HEADS)),
    "fnet causal": lambda: of_layer(nn.Attention(HEADS, causal=True)),
    "fnet conv": lambda: of_layer(nn.Sequential(nn.Conv(D, 3, 2), jax.nn.relu, nn.GlobalAvgPool())),
    "fnet image": lambda: of_layer(
        nn.Sequential(
            nn.Conv(D, 3),
            nn.MaxPool(2, padding="SAME"),
            nn.AvgPool(2, padding="SAME"),
            nn.GlobalAvgPool(),
        ),
        shape=(2, None, 6, D),
        axes="b, t, w, d",
    ),
    "fnet batch norm": lambda: of_layer(nn.BatchNorm(), state=True, train=True),
    "fnet lstm": lambda: of_layer(nn.LSTM(3, bidirectional=True)),
    "fnet gru": lambda: of_layer(nn.GRU(3)),
    "fnet group norm": lambda: of_layer(nn.GroupNorm(2)),
    "fnet stack": lambda: of_layer(
        nn.Stack(nn.Residual(nn.Sequential(nn.LayerNorm(), nn.Dense(D))), 3)
    ),
    "fnet dropout": lambda: of_layer(nn.Dropout(0.5), train=True, key=True),
    # flax.
    "flax encoder": lambda: flax_case(Encoder(), mutable=["batch_stats"]),
    "flax rnn": lambda: flax_case(linen.RNN(linen.LSTMCell(3, param_dtype=jnp.float64))),
    "flax conv": lambda: flax_case(linen.Conv(3, (4,), padding="CIRCULAR")),
    "flax nnx": lambda: of_tower(),
}
GRADIENTS = {
    "mean": 0, "attention": 0, "causal attention": 0, "masked attention": 0, "variance": 0,
    "conv same stride 2": 0, "conv transposed": 0, "conv wide": 0, "max pool same": 0,
    "mean pool": 0, "sort": 0, "cumulative": 0, "lstm by hand": 0, "ctc": 0, "logsumexp": 0,
    "flattened": 0, "joined": 0, "two lengths": (0, 1), "fnet attention": (0, 1),
    "fnet conv": (0, 1), "fnet image": (0, 1), "fnet lstm": (0, 1), "fnet batch norm": (0, 1),
    "flax encoder": (0, 1), "flax rnn": (0, 1), "top k": 0, "depthwise": 0, "edge": 0, "indices": 0,
}  # fmt: skip
NAMES = (*PLAIN, *LAYERS, *(f"gradient of {name}" for name in GRADIENTS))


@functools.cache
def case(name):
    """The case of a name in `NAMES`."""
    if name in PLAIN:
        return PLAIN[name]
    if name in LAYERS:
        return LAYERS[name]()
    of = name.removeprefix("gradient of ")
    return gradient(case(of), GRADIENTS[of])

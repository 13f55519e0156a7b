"""Functions written for one text per row, f(params, x, lengths), whose rows are independent: the
result for a text is the one that the function computes of it alone, without padding."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import layers as nn

D, V = 4, 7
LENGTHS = 3, 1, 4, 1, 4, 1, 6, 3
ROWS, LENGTH = 5, 8


@dataclasses.dataclass
class Case:
    """A function, its parameters, and whether its texts are tokens (int [t]) or vectors [t, D]."""

    name: str
    f: Callable
    params: dict
    tokens: bool = False
    gradient: bool = True
    tolerance: float = 1e-9


def rng(*shape, seed=0):
    return np.random.default_rng(seed + 7 * len(shape) + sum(shape)).normal(size=shape)


CASES: dict[str, Case] = {}


def case(name, params=None, **options):
    def register(f):
        CASES[name] = Case(name, f, params or {}, **options)
        return f

    return register


def mask_of(x, lengths):
    return jnp.arange(x.shape[1]) < lengths[:, None]


W = {"w": rng(D, D)}
QKV = {"q": rng(D, D), "k": rng(D, D, seed=1), "v": rng(D, D, seed=2)}
EMBED = {"embed": rng(V, D), "out": rng(D, V, seed=3)}
HEADS = {"qkv": rng(D, 3, 2, 3), "out": rng(2, 3, D)}


@case("bag of words", {**EMBED}, tokens=True)
def _(p, x, lengths):
    mask = mask_of(x, lengths)
    return (p["embed"][x] * mask[..., None]).sum(1) / lengths[:, None]


@case("plain mean")
def _(p, x, lengths):
    return x.mean(1)


@case("statistics", W)
def _(p, x, lengths):
    y = x @ p["w"]
    return jnp.stack([y.mean(1), y.std(1), y.max(1), y.min(1)], 1)


# JAX itself cannot differentiate products and extremes over sizes of any value.
@case("product", gradient=False)
def _(p, x, lengths):
    return x.prod(1), lax.cumprod(x, 1), lax.cumlogsumexp(x, 1)


@case("logsumexp")
def _(p, x, lengths):
    return jax.nn.logsumexp(x, axis=1)


@case("softmax over time", W)
def _(p, x, lengths):
    return jax.nn.softmax(x @ p["w"], axis=1)


@case("counts", gradient=False)
def _(p, x, lengths):
    return (x > 0).sum(1), (x > 0).any(1), (x > -1).all(1), x.argmax(1), x.argmin(1)


@case("positions", {"table": rng(LENGTH, D)})
def _(p, x, lengths):
    return x + p["table"][: x.shape[1]]


@case("embedded positions", {"table": rng(LENGTH, D)})
def _(p, x, lengths):
    return x * p["table"][jnp.arange(x.shape[1])]


@case("sinusoids")
def _(p, x, lengths):
    angles = jnp.arange(x.shape[1])[:, None] * jnp.array([1.0, 0.1])
    return x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)


@case("relative positions")
def _(p, x, lengths):
    return x * (jnp.arange(x.shape[1]) / x.shape[1])[None, :, None]


@case("attention", QKV)
def _(p, x, lengths):
    q, k, v = (x @ p[name] for name in "qkv")
    scores = jnp.einsum("ntd,nsd->nts", q, k) / 2
    scores = jnp.where(mask_of(x, lengths)[:, None], scores, -1e9)
    return jax.nn.softmax(scores) @ v


@case("attention without masks", QKV)
def _(p, x, lengths):
    q, k, v = (x @ p[name] for name in "qkv")
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


@case("causal attention", HEADS)
def _(p, x, lengths):
    q, k, v = jnp.einsum("ntd,dchk->cnhtk", x, p["qkv"])
    scores = jnp.einsum("nhtk,nhsk->nhts", q, k)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("nhts,nhsk,hkd->ntd", weights, v, p["out"])


@case("merged heads", HEADS)
def _(p, x, lengths):
    n, t, _ = x.shape
    q, k, v = jnp.einsum("ntd,dchk->cnhtk", x, p["qkv"]).reshape(3, -1, t, 3)
    weights = jax.nn.softmax(q @ k.swapaxes(1, 2))
    y = (weights @ v).reshape(n, 2, t, 3).swapaxes(1, 2)
    return y.reshape(n, t, 6) @ p["out"].reshape(6, D)


@case("biased attention", {**QKV, "bias": rng(2 * LENGTH)})
def _(p, x, lengths):
    q, k, v = (x @ p[name] for name in "qkv")
    i = jnp.arange(x.shape[1])
    bias = p["bias"][i[:, None] - i[None, :] + LENGTH]
    return jax.nn.softmax(q @ k.swapaxes(1, 2) + bias) @ v


@case("jax's attention", HEADS, tolerance=1e-6)  # its softmax is float32
def _(p, x, lengths):
    q, k, v = jnp.einsum("ntd,dchk->cnthk", x, p["qkv"])
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("nthk,hkd->ntd", y, p["out"])


@case("fnet's attention", HEADS)
def _(p, x, lengths):
    q, k, v = jnp.einsum("ntd,dchk->cnthk", x, p["qkv"])
    y = nn.dot_product_attention(q, k, v, lengths=lengths)
    y += nn.dot_product_attention(q, k, v, causal=True, window=2)
    mask = jnp.arange(x.shape[1])[:, None] + 1 >= jnp.arange(x.shape[1])
    y += nn.dot_product_attention(q, k, v, mask=mask)
    y += nn.dot_product_attention(q, k, v, mask=mask_of(x, lengths)[:, None, :])
    return jnp.einsum("nthk,hkd->ntd", y, p["out"])


@case("linear attention", QKV)
def _(p, x, lengths):
    q, k, v = (jax.nn.sigmoid(x @ p[name]) for name in "qkv")
    return q @ jnp.einsum("ntd,nte->nde", k, v)


@case("attention pooling", {"query": rng(D), **W})
def _(p, x, lengths):
    weights = jax.nn.softmax(jnp.where(mask_of(x, lengths), x @ p["query"], -1e9))
    pooled = jnp.einsum("nt,ntd->nd", weights, x)
    return jnp.einsum("nd,ntd->nt", pooled @ p["w"], x)


@case("first")
def _(p, x, lengths):
    return x[:, 0]


@case("last")
def _(p, x, lengths):
    return x[:, -1]


@case("last by length")
def _(p, x, lengths):
    return x[jnp.arange(x.shape[0]), lengths - 1]


@case("last taken along the axis")
def _(p, x, lengths):
    return jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]


@case("last one-hot")
def _(p, x, lengths):
    return (x * jax.nn.one_hot(lengths - 1, x.shape[1], dtype=x.dtype)[..., None]).sum(1)


@case("next token", EMBED, tokens=True)
def _(p, x, lengths):
    logits = (p["embed"][x] @ p["out"])[:, :-1]
    losses = jax.nn.logsumexp(logits, -1)
    losses -= jnp.take_along_axis(logits, x[:, 1:, None], -1)[..., 0]
    mask = jnp.arange(1, x.shape[1]) < lengths[:, None]
    return (losses * mask).sum(1)


@case("shifts")
def _(p, x, lengths):
    right = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)
    left = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)), constant_values=3)
    return right * left + jnp.roll(x, 1, axis=1) + x[:, ::-1]


@case("longer than the text")
def _(p, x, lengths):
    y = jnp.pad(x, ((0, 0), (2, 1), (0, 0)), constant_values=0.5)
    return (y[:, :-3] * y[:, 3:] + y[:, 1:-2]).cumsum(1)


@case("start token", {"start": rng(D)})
def _(p, x, lengths):
    start = jnp.broadcast_to(p["start"], (x.shape[0], 1, D))
    y = jnp.concatenate([start, x], 1)
    scores = jnp.einsum("ntd,nsd->nts", y, y)
    return (jax.nn.softmax(scores) @ y)[:, 0]


@case("cumulative")
def _(p, x, lengths):
    return jnp.cumsum(x, 1) * lax.cumsum(x[:, 1:], 1, reverse=True).sum(1)[:, None]


@case("cumulative extremes", gradient=False)
def _(p, x, lengths):
    return lax.cummax(x, 1) + lax.cummin(x, 1, reverse=True)


@case("running mean by a product")
def _(p, x, lengths):
    lower = jnp.tril(jnp.ones((x.shape[1], x.shape[1])))
    return jnp.einsum("ts,nsd->ntd", lower / lower.sum(1, keepdims=True), x)


@case("sorted")
def _(p, x, lengths):
    return jnp.sort(x, axis=1)


@case("sorted features")
def _(p, x, lengths):
    return jnp.sort(x, axis=2)[:, :, ::-1]


@case("flattened", W)
def _(p, x, lengths):
    n, t, d = x.shape
    return jax.nn.relu(x.reshape(n * t, d) @ p["w"]).reshape(n, t, d)


@case("time first", W)
def _(p, x, lengths):
    t, n, d = x.swapaxes(0, 1).shape
    return (x.swapaxes(0, 1).reshape(-1, d) @ p["w"]).reshape(t, n, d).swapaxes(0, 1)


@case("experts", {"router": rng(D, 2), "w": rng(2, D, D)})
def _(p, x, lengths):
    """All tokens of the batch, in the order of their experts."""
    tokens = x.reshape(-1, D)
    chosen = (tokens @ p["router"]).argmax(-1)
    order = jnp.argsort(chosen)
    y = jnp.where(chosen[order][:, None] == 0, tokens[order] @ p["w"][0], tokens[order] @ p["w"][1])
    first = jnp.bincount(chosen, length=2)[0]  # in this order, tokens of expert 0 come first
    y = jnp.where((jnp.arange(y.shape[0]) < first)[:, None], y, 2 * y)
    return jnp.zeros_like(tokens).at[order].set(y).reshape(x.shape)


@case("written", W)
def _(p, x, lengths):
    x = jnp.asarray(x)
    y = x.at[:, 0].set(x[:, 0] @ p["w"]).at[:, -1].add(1.0)
    return y.at[jnp.arange(x.shape[0]), lengths - 1].multiply(3.0)


@case("layers", {"w": rng(3, D, D)})
def _(p, x, lengths):
    def block(x, w):
        return x + jnp.tanh(x @ w) / x.shape[1], x.mean(1)

    y, means = lax.scan(block, x, p["w"])
    return y, means.swapaxes(0, 1)


@case("recurrence", {"w": rng(D, D), "u": rng(D, D, seed=5)})
def _(p, x, lengths):
    def step(h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        return h, h

    last, y = lax.scan(step, jnp.zeros((x.shape[0], D)), x.swapaxes(0, 1))
    return last, y.swapaxes(0, 1)


@case("recurrence both ways", {"w": rng(D, D), "u": rng(D, D, seed=5)})
def _(p, x, lengths):
    def step(carry, inputs):
        h, count = carry
        x, valid = inputs
        new = jnp.tanh(x @ p["w"] + h @ p["u"] + count)
        h = jnp.where(valid[:, None], new, h)
        return (h, count + 1.0), h

    xs = x.swapaxes(0, 1), mask_of(x, lengths).T
    begin = x[:, 0], jnp.zeros(())
    (a, _), y = lax.scan(step, begin, xs)
    (b, _), z = lax.scan(step, begin, xs, reverse=True)
    return a, b, (y * z).swapaxes(0, 1)


@case("crf", {"w": rng(D, V), "pairs": rng(V, V)})
def _(p, x, lengths):
    scores = x @ p["w"]

    def step(alpha, inputs):
        score, i = inputs
        new = jax.nn.logsumexp(alpha[:, :, None] + p["pairs"], 1) + score
        return jnp.where((i < lengths)[:, None], new, alpha), None

    rest = scores[:, 1:].swapaxes(0, 1), jnp.arange(1, x.shape[1])
    alpha, _ = lax.scan(step, scores[:, 0], rest)
    return jax.nn.logsumexp(alpha, 1)


def convolved(x, kernel, **options):
    return lax.conv_general_dilated(x, kernel, dimension_numbers=("NWC", "WIO", "NWC"), **options)


@case("convolution", {"w": rng(3, D, 5)})
def _(p, x, lengths):
    return convolved(x, p["w"], window_strides=(1,), padding="SAME")


@case("causal convolution", {"w": rng(3, D, 5)})
def _(p, x, lengths):
    return convolved(x, p["w"], window_strides=(1,), padding=[(4, 0)], rhs_dilation=(2,))


@case("depthwise convolution", {"w": rng(3, 1, D)})
def _(p, x, lengths):
    y = convolved(x, p["w"], window_strides=(1,), padding=[(2, 0)], feature_group_count=D)
    return jax.nn.relu(y)


@case("strided convolution", {"w": rng(3, D, 5)})
def _(p, x, lengths):
    return convolved(x, p["w"], window_strides=(2,), padding=[(1, 1)]).sum(1)


@case("cnn", {"a": rng(3, D, 5), "b": rng(2, 5, 3)})
def _(p, x, lengths):
    x = x * mask_of(x, lengths)[..., None]
    y = jax.nn.relu(convolved(x, p["a"], window_strides=(1,), padding="SAME"))
    y = convolved(y, p["b"], window_strides=(1,), padding=[(1, 0)])
    return jnp.where(mask_of(x, lengths)[..., None], y, -jnp.inf).max(1)


@case("pooled")
def _(p, x, lengths):
    x = jnp.sin(3 * x)
    y = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 1), (1, 1, 1), [(0, 0), (1, 1), (0, 0)])
    z = lax.reduce_window(x, 0.0, lax.add, (1, 2, 1), (1, 1, 1), [(0, 0), (1, 0), (0, 0)])
    return y * z


@case("fnet's lstm", {"init": lambda: nn.LSTM(3, bidirectional=True)})
def _(p, x, lengths):
    return nn.LSTM(3, bidirectional=True)(p, x, lengths=lengths)


@case("fnet's gru", {"init": lambda: nn.GRU(3)})
def _(p, x, lengths):
    return nn.GRU(3).scan(p, x, lengths=lengths)


def parameters(each):
    """The parameters of a case, in float64."""
    params = each.params
    if "init" in params:
        params, _ = params["init"]().init(jax.random.key(0), np.zeros((2, 3, D)))
    return jax.tree.map(lambda w: np.asarray(w, np.float64), params)


def texts_of(each, seed=0):
    draw = np.random.default_rng(seed)
    if each.tokens:
        return [draw.integers(0, V, n).astype(np.int32) for n in LENGTHS]
    return [draw.normal(size=(n, D)) for n in LENGTHS]


# The texts of each row, with the places at which they begin. Row 3 is empty.
PLACES = [[(0, 3), (3, 1), (4, 4)], [(1, 1), (3, 4)], [(0, 1), (2, 6)], [], [(5, 3)]]


def packed(texts, junk):
    """Returns (rows, segments, [(row, start, length)]), with `junk` at padding."""
    first = np.asarray(texts[0])
    rows = np.full((ROWS, LENGTH, *first.shape[1:]), junk, first.dtype)
    segments = np.zeros((ROWS, LENGTH), np.int32)
    where, rest = [], iter(texts)
    for r, row in enumerate(PLACES):
        for number, (start, length) in enumerate(row, 1):
            text = next(rest)
            assert len(text) == length
            rows[r, start : start + length] = text
            segments[r, start : start + length] = number
            where.append((r, start, length))
    return rows, segments, where

"""Programs that XLA divides rightly: `parallel.check` must find nothing in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import layers as nn
from fnet import models
from fnet import transforms as ft

DATA, ROWS = {"data": 4}, P("data")
BOTH = {"data": 2, "model": 2}


class Program(NamedTuple):
    """A step, its arguments, a mesh, and the shardings of the arguments."""

    step: Callable
    args: tuple
    mesh: dict[str, int]
    shardings: Any


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _squares(f: Callable) -> Callable:
    """The loss of a function, and its gradient for the first argument."""

    def loss(*args: Any) -> Any:
        return sum(jnp.sum(jnp.square(jnp.abs(y))) for y in jax.tree.leaves(f(*args)))

    return jax.value_and_grad(loss)


def _layer(layer: Any, x: Any) -> Program:
    """The gradient of a layer's parameters; the rows are split."""
    params, state = jax.eval_shape(layer.init, jax.random.key(0), x)
    step = _squares(layer)
    if state:
        step = _squares(lambda p, x, s: layer(p, x, state=s, train=True)[0])
        return Program(step, (params, x, state), DATA, (P(), ROWS, P()))
    return Program(step, (params, x), DATA, (P(), ROWS))


def _mlp(w: Any, x: Any) -> Any:
    for each in w:
        x = jax.nn.gelu(x @ each)
    return x


def _adam() -> Program:
    tx = optax.adamw(1e-3)
    params = {"w": f32(8, 4), "b": f32(4)}

    def step(state: Any, x: Any) -> Any:
        params, moments = state
        loss = lambda p: jnp.square(x @ p["w"] + p["b"][None]).mean()
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = params, jax.eval_shape(tx.init, params)
    return Program(step, (state, f32(8, 8)), DATA, (P(), ROWS))


def _gpt() -> Program:
    model = models.GPT(vocab_size=16, width=8, depth=2, heads=2, context=8)
    tokens = i32(4, 8)
    params = jax.eval_shape(lambda key, x: model.init(key, x)[0], jax.random.key(0), tokens)

    def loss(params: Any, tokens: Any) -> Any:
        logits = model(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    tokens = i32(4, 9)
    return Program(jax.value_and_grad(loss), (params, tokens), DATA, (P(), ROWS))


def _lstm(w: Any, x: Any) -> Any:
    def cell(carry: Any, row: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(jnp.concatenate([row, h], -1) @ w, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((x.shape[0], w.shape[1] // 4))
    return lax.scan(cell, (zeros, zeros), jnp.moveaxis(x, 1, 0))[1]


def _moe(w: Any, x: Any) -> Any:
    experts, router = w
    gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
    mixed = jnp.einsum("be,edh->bdh", jax.nn.one_hot(chosen[:, 0], 4), experts)
    return jnp.einsum("bd,bdh->bh", x, mixed) * gates[:, :1]


def _graph(w: Any, x: Any, senders: Any, receivers: Any) -> Any:
    messages = jnp.tanh(x[senders] @ w)
    return jax.ops.segment_sum(messages, receivers, x.shape[0])


def _newton(x: Any) -> Any:
    def body(state: Any) -> Any:
        i, y = state
        return i + 1, y - (y**3 - x) / (3 * y**2 + 1)

    return lax.while_loop(lambda state: state[0] < 4, body, (0, jnp.ones_like(x)))[1]


def _kmeans(centers: Any, x: Any) -> Any:
    nearest = jnp.argmin(((x[:, None] - centers[None]) ** 2).sum(-1), -1)
    counts = jnp.zeros(len(centers)).at[nearest].add(1.0)
    return jnp.zeros_like(centers).at[nearest].add(x) / (counts[:, None] + 1)


def _sinkhorn(x: Any) -> Any:
    def step(x: Any, _: Any) -> Any:
        x = x - jax.nn.logsumexp(x, 0, keepdims=True)
        return x - jax.nn.logsumexp(x, 1, keepdims=True), None

    return lax.scan(step, x, length=3)[0]


def _accumulated(w: Any, x: Any) -> Any:
    grad = jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w)).sum())
    add = lambda total, rows: (total + grad(w, rows), None)
    return lax.scan(add, jnp.zeros_like(w), x.reshape(2, -1, x.shape[-1]))[0]


def _branches(w: Any, x: Any, i: Any) -> Any:
    return lax.switch(i, [lambda x: x @ w, lambda x: jnp.tanh(x) @ w, lambda x: -x @ w], x)


@jax.custom_jvp
def _clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


@_clipped.defjvp
def _(primals: tuple, tangents: tuple) -> Any:
    return _clipped(*primals), tangents[0]


PROGRAMS: dict[str, Callable[[], Program]] = {
    "mlp": lambda: Program(_squares(_mlp), ([f32(8, 8)] * 2, f32(8, 8)), DATA, (P(), ROWS)),
    "mlp, tensor parallel": lambda: Program(
        _squares(_mlp),
        ([f32(8, 8)] * 2, f32(8, 8)),
        BOTH,
        ([P(None, "model"), P("model")], P("data")),
    ),
    "mlp, fully sharded": lambda: Program(
        _squares(_mlp), ([f32(8, 8)] * 2, f32(8, 8)), DATA, (ROWS, ROWS)
    ),
    "mlp, recomputed": lambda: Program(
        _squares(jax.checkpoint(_mlp)), ([f32(8, 8)] * 2, f32(8, 8)), DATA, (P(), ROWS)
    ),
    "mlp, bfloat16": lambda: Program(
        ft.autocast(_squares(_mlp), "bfloat16"), ([f32(8, 8)] * 2, f32(8, 8)), DATA, (P(), ROWS)
    ),
    "accumulated gradients": lambda: Program(
        _accumulated, (f32(8, 4), f32(8, 8)), DATA, (P(), ROWS)
    ),
    "per-example gradients": lambda: Program(
        jax.vmap(jax.grad(lambda w, x: jnp.square(jnp.tanh(x @ w)).sum()), (None, 0)),
        (f32(8, 4), f32(8, 8)),
        DATA,
        (P(), ROWS),
    ),
    "hessian": lambda: Program(
        jax.hessian(lambda w, x: jnp.square(jnp.tanh(x @ w)).sum()),
        (f32(4), f32(8, 4)),
        DATA,
        (P(), ROWS),
    ),
    "adamw": _adam,
    "gpt": _gpt,
    "attention": lambda: _layer(nn.Attention(2, causal=True), f32(4, 8, 8)),
    "layer norm": lambda: _layer(nn.LayerNorm(), f32(8, 8)),
    "batch norm": lambda: _layer(nn.BatchNorm(), f32(8, 4, 4, 4)),
    "group norm": lambda: _layer(nn.GroupNorm(2), f32(8, 4, 4, 4)),
    "conv, one axis": lambda: _layer(nn.Conv(4, 3), f32(4, 4, 4, 4)),
    "pooling": lambda: _layer(
        nn.Sequential(nn.MaxPool(2), nn.AvgPool(2), nn.Flatten(), nn.Dense(4)), f32(4, 8, 8, 4)
    ),
    "embedding": lambda: Program(
        _squares(lambda w, tokens: w[tokens]), (f32(8, 4), i32(8, 4)), DATA, (P(), ROWS)
    ),
    "embedding, split table": lambda: Program(
        _squares(lambda w, tokens: w[tokens]), (f32(8, 4), i32(8, 4)), BOTH, (P("model"), P("data"))
    ),
    "lstm": lambda: Program(_squares(_lstm), (f32(8, 16), f32(4, 3, 4)), DATA, (P(), ROWS)),
    "mixture of experts": lambda: Program(
        _squares(_moe), ((f32(4, 8, 8), f32(8, 4)), f32(8, 8)), BOTH, (P("model"), P("data"))
    ),
    "graph": lambda: Program(
        _squares(_graph), (f32(4, 4), f32(8, 4), i32(16), i32(16)), DATA, (P(), ROWS, ROWS, ROWS)
    ),
    "newton": lambda: Program(_newton, (f32(8, 4),), DATA, ROWS),
    "k-means": lambda: Program(_kmeans, (f32(4, 4), f32(8, 4)), DATA, (P(), ROWS)),
    "sinkhorn": lambda: Program(_squares(_sinkhorn), (f32(8, 8),), BOTH, P("data", "model")),
    "branches": lambda: Program(
        _squares(_branches), (f32(8, 4), f32(8, 8), i32()), DATA, (P(), ROWS, P())
    ),
    "custom derivative": lambda: Program(_squares(_clipped), (f32(8, 4),), DATA, ROWS),
    "sorting": lambda: Program(
        _squares(lambda x: (jnp.sort(x, 0), jnp.cumsum(x, 0))),
        (f32(8, 4),),
        DATA,
        ROWS,
    ),
    "spectrum": lambda: Program(
        _squares(lambda x: jnp.fft.rfft(x, axis=0)), (f32(8, 4),), DATA, ROWS
    ),
    "covariance": lambda: Program(
        _squares(lambda x: jnp.linalg.cholesky(x.T @ x + 4 * jnp.eye(4))), (f32(8, 4),), DATA, ROWS
    ),
    "solve": lambda: Program(
        _squares(lambda a, b: jnp.linalg.solve(a @ a.mT + 4 * jnp.eye(4)[None], b)),
        (f32(4, 4, 4), f32(4, 4, 2)),
        DATA,
        ROWS,
    ),
    "dropout": lambda: Program(
        _squares(lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0)),
        (f32(8, 4),),
        DATA,
        ROWS,
    ),
    "sums of rows": lambda: Program(
        lambda x: lax.associative_scan(jnp.add, x), (f32(8, 4),), DATA, P(None, "data")
    ),
    "large sums": lambda: Program(
        lambda x: (jnp.sum(x), jnp.mean(x, 0), jnp.var(x), x.T @ x), (f32(512, 8),), DATA, ROWS
    ),
    "half precision": lambda: Program(
        _squares(lambda x: jax.nn.softmax(x @ x.T)),
        (jax.ShapeDtypeStruct((16, 8), jnp.float16),),
        DATA,
        ROWS,
    ),
    "quantiles": lambda: Program(lambda x: jnp.quantile(x, 0.25, axis=0), (f32(8, 4),), DATA, ROWS),
}

"""Random programs of operations along time, packed, equal those of each text alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pack_cases import CASES, LENGTH, D, packed, rng, texts_of
from test_pack import TEXTS, compare, wide  # noqa: F401 (a fixture)

from fnet import transforms as ft

KERNEL, TABLE, MATRIX = rng(3, D, D), rng(LENGTH, D), rng(D, D)


def attended(x):
    weights = jax.nn.softmax(jnp.einsum("ntd,nsd->nts", x, x))
    return jnp.einsum("nts,nsd->ntd", weights, x)


def looked_back(x):
    near = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])
    scores = jnp.where((near >= 0) & (near < 3), x @ x.swapaxes(1, 2), -jnp.inf)
    return jax.nn.softmax(scores) @ x


def convolved(x):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, KERNEL, (1,), "SAME", dimension_numbers=numbers)


def scanned(x, reverse=False):
    def step(h, y):
        h = jnp.tanh(h @ MATRIX + y)
        return h, h

    begin = jnp.zeros((x.shape[0], D)) + 0.1
    return lax.scan(step, begin, x.swapaxes(0, 1), reverse=reverse)[1].swapaxes(0, 1)


# Each from [n, t, D] to [n, t, D].
OPERATIONS = {
    "attended": attended,
    "looked back": looked_back,
    "convolved": convolved,
    "scanned": scanned,
    "scanned back": lambda x: scanned(x, reverse=True),
    "shifted": lambda x: jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=0.5),
    "ahead": lambda x: jnp.concatenate([x[:, 1:], x[:, :1] * 0.5], 1),
    "rolled": lambda x: jnp.roll(x, 1, 1) - x,
    "reversed": lambda x: x[:, ::-1] * 0.9 + x,
    "summed": lambda x: jnp.cumsum(x, 1) / (1 + jnp.arange(x.shape[1]))[:, None],
    "centered": lambda x: x - x.mean(1, keepdims=True),
    "scaled": lambda x: x / (1 + jnp.abs(x).max((1, 2), keepdims=True)),
    "placed": lambda x: x * jnp.asarray(TABLE)[: x.shape[1]],
    "late": lambda x: x * (jnp.arange(x.shape[1]) / x.shape[1])[:, None],
    "ends": lambda x: x + x[:, :1] * x[:, -1:],
    "mixed": lambda x: jax.nn.gelu(x.reshape(-1, D) @ MATRIX).reshape(x.shape),
    "normed": lambda x: x / jnp.sqrt(1e-3 + (x * x).mean(-1, keepdims=True)),
    "pairs": lambda x: jnp.tanh(x[:, :, None] - x[:, None]).mean(2),
    "weighed": lambda x: jax.nn.softmax(x, axis=1) * x.shape[1],
}
LAST = {
    "tokens": lambda x: x,
    "mean": lambda x: x.mean(1),
    "last": lambda x: x[:, -1],
    "norm": lambda x: jax.nn.logsumexp(x, axis=(1, 2)),
    "gram": lambda x: jnp.einsum("ntd,nte->nde", x, x),
}


@pytest.mark.parametrize(
    "seed",
    [pytest.param(i, marks=pytest.mark.exhaustive) if i > 2 else i for i in range(40)],
)
def test_a_random_program(seed):
    draw = np.random.default_rng(seed)
    names = draw.choice(list(OPERATIONS), 4)
    last = draw.choice(list(LAST))

    def f(x):
        for name in names:
            x = OPERATIONS[name](x)
        return LAST[last](x)

    texts = texts_of(CASES["plain mean"], seed)
    rows, segments, where = packed(texts, np.nan)
    both = lambda x: (f(x), jax.grad(lambda x: jnp.sin(f(x)).sum())(x))
    y, gradient = ft.pack(both, axes="n, t, ...", texts=TEXTS)(rows, segments=segments)
    alone = [jax.jit(both)(text[None]) for text in texts]
    compare(y, [one for one, _ in alone], where, segments.shape)
    compare(gradient, [one for _, one in alone], where, segments.shape, 1e-8)

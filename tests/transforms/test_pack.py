"""A packed function equals the function of each text alone, without padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import sampled
from pack_cases import CASES, LENGTHS, packed, parameters, texts_of

from fnet import transforms as ft

TEXTS = len(LENGTHS) + 2
QUICK = (
    "bag of words", "attention", "next token", "last by length", "positions", "recurrence",
    "convolution",
)  # fmt: skip


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        with jax.numpy_rank_promotion("allow"):
            yield


def junk_of(each):
    return np.int32(2**30) if each.tokens else np.nan


def close(got, want, tolerance=1e-9):
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape and got.dtype == want.dtype
    scale = max(1.0, np.abs(want.astype(float)).max(initial=0))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


def compare(leaf, alone, where, rows, tolerance=1e-9):
    """Compares a packed output, of tokens or of texts, with those of the texts alone."""
    leaf = np.asarray(leaf)
    for i, ((row, start, _), want) in enumerate(zip(where, alone)):
        want = np.asarray(want)[0]
        if leaf.shape[:2] == rows and leaf.ndim > want.ndim:
            close(leaf[row, start : start + len(want)], want, tolerance)
        else:
            close(leaf[i], want, tolerance)
    if leaf.shape[:2] == rows:
        mine = np.zeros(rows, bool)
        for (row, start, _), want in zip(where, alone):
            mine[row, start : start + np.asarray(want).shape[1]] = True
        assert not leaf[~mine].any()
    else:
        assert not leaf[len(where) :].any()


@pytest.mark.parametrize("name", sampled(list(CASES), QUICK))
def test_equals_each_text_alone(name):
    each, params = CASES[name], parameters(CASES[name])
    texts = texts_of(each)
    rows, segments, where = packed(texts, junk_of(each))
    f = ft.pack(each.f, axes=(None, "n, t, ...", "segments"), texts=TEXTS)
    got = jax.tree.leaves(f(params, rows, segments))
    run = jax.jit(each.f)
    alone = [
        jax.tree.leaves(run(params, text[None], np.array([len(text)], np.int32))) for text in texts
    ]
    for i, leaf in enumerate(got):
        compare(leaf, [one[i] for one in alone], where, segments.shape, each.tolerance)


def total(f):
    """A loss of a function's outputs, whose derivatives are those of each text alone."""

    def loss(params, x, lengths):
        parts = [
            jnp.sin(y + 0.3 * i).sum() for i, y in enumerate(jax.tree.leaves(f(params, x, lengths)))
        ]
        return sum(parts)

    return loss


GRADIENTS = [name for name, each in CASES.items() if each.gradient]


@pytest.mark.parametrize("name", sampled(GRADIENTS, QUICK))
def test_gradients_equal_those_of_each_text_alone(name):
    each, params = CASES[name], parameters(CASES[name])
    texts = texts_of(each)
    rows, segments, where = packed(texts, junk_of(each))
    argnums = 0 if each.tokens else (0, 1)
    step = jax.value_and_grad(total(each.f), argnums)
    value, grads = ft.pack(step, axes=(None, "n, t, ...", "segments"), texts=TEXTS)(
        params, rows, segments
    )
    run = jax.jit(step)
    alone = [run(params, text[None], np.array([len(text)], np.int32)) for text in texts]
    close(value, sum(one for one, _ in alone), each.tolerance)
    if not each.tokens:
        grads, tokens = grads
        compare(tokens, [one[1] for _, one in alone], where, segments.shape, each.tolerance)
        alone = [(one, both[0]) for one, both in alone]
    for leaf, *ones in zip(*map(jax.tree.leaves, (grads, *(one for _, one in alone)))):
        close(leaf, sum(map(np.asarray, ones)), each.tolerance)

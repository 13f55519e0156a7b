"""tune's rule for products of bfloat16 arrays, by whomever they were cast: one form of matrices,
float32 sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import transforms as ft
from fnet.transforms._tune import _cpu
from fnet.transforms._tune import _library as library

B = jnp.bfloat16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    monkeypatch.setattr(library, "bfloat16_pays", lambda: True)
    monkeypatch.setattr(_cpu, "LARGE_LOW", 0)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(0, 1, shape), B)


def fired(f, *args, **how):
    return {row.rule for row in ft.explain(ft.tune(f, "cpu", **how), *args).rows}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "form",
    [
        "ij,jk->ik",
        "ji,jk->ik",
        "ji,jk->ki",
        "ij,kj->ik",
        "btd,de->bte",
        "btd,bte->de",
        "btd,bte->ed",
        "de,bte->dbt",
        "bthd,bshd->bhts",
        "bhts,bshd->bthd",
        "bhts,bthd->bshd",
        "bij,bi->bj",
        "i,i->",
        "ij,j->i",
    ],
)
@pytest.mark.parametrize("dtype", [B, pytest.param(jnp.float32, marks=pytest.mark.exhaustive)])
def test_every_form(form, dtype):
    sizes = {"b": 2, "d": 4, "e": 5, "h": 3, "i": 7, "j": 6, "k": 4, "s": 5, "t": 6}
    x, y = (
        normal(i, *(sizes[axis] for axis in part))
        for i, part in enumerate(form.split("->")[0].split(","))
    )
    f = lambda x, y: jnp.einsum(form, x, y, preferred_element_type=dtype)
    assert fired(f, x, y) == {"bfloat16_products"}
    z = ft.tune(f, "cpu")(x, y)
    assert z.dtype == dtype
    exact = np.einsum(form, np.asarray(x, np.float64), np.asarray(y, np.float64))
    np.testing.assert_allclose(
        np.asarray(z, np.float64), exact, rtol=2**-8 if dtype == B else 1e-6, atol=1e-5
    )


def hand(params, x, y):
    """A step with casts by hand, as users write them."""

    def loss(params):
        a = x.astype(B)
        for w in params:
            a = jnp.tanh(a @ w.astype(B))
        return jnp.mean((a.astype(jnp.float32) - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient)


@pytest.mark.exhaustive
def test_a_step_with_casts_by_hand():
    params = [normal(i, 16, 16).astype(jnp.float32) / 4 for i in range(3)]
    args = params, normal(5, 2, 8, 16).astype(jnp.float32), normal(6, 2, 8, 16).astype(jnp.float32)
    assert fired(hand, *args) == {"bfloat16_products"}
    wide = [
        jax.tree.map(lambda a: np.asarray(a, np.float32), f(*args))
        for f in (hand, ft.tune(hand, "cpu"))
    ]
    # A few roundings to 8 bits, 2^-8 each, in three layers and back.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3), *wide)


def test_what_xla_is_given():
    """Products of [batch, m, k] with [batch, k, n] or [batch, n, k], with float32 sums, and no
    others."""
    params = [normal(i, 16, 16).astype(jnp.float32) for i in range(3)]
    args = params, normal(5, 2, 8, 16).astype(jnp.float32), normal(6, 2, 8, 16).astype(jnp.float32)
    text = jax.jit(ft.tune(hand, "cpu")).lower(*args).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 8  # three forward, two for inputs, three for weights
    for line in products:
        assert "batching_dims = [0] x [0]" in line and line.rstrip().split("->")[1].split(" loc")[
            0
        ].endswith("xf32>")
        assert "contracting_dims = [2] x [1]" in line or "contracting_dims = [2] x [2]" in line


def test_under_vmap_it_is_turned_round():
    w, x = normal(0, 5, 4), normal(1, 3, 2, 4)
    f = lambda w, x: jnp.exp(
        jnp.moveaxis(jnp.tensordot(w, x, (1, 2)), 0, -1)
    )  # [5, 3, 2], read as [3, 2, 5]
    tuned = jax.jit(ft.tune(f, "cpu"))
    assert " transpose(" not in tuned.lower(w, x).compile().as_text()
    got, want = (np.asarray(g(w, x), np.float32) for g in (tuned, f))
    np.testing.assert_allclose(got, want, rtol=2e-2)  # one rounding to 8 bits before exp


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_stay_where_they_were(bad):
    x, y = normal(0, 8, 6).at[3, 2].set(bad), normal(1, 8, 5)
    z = ft.tune(lambda x, y: jnp.einsum("ji,jk->ik", x, y), "cpu")(x, y)
    assert not np.isfinite(np.asarray(z[2], np.float32)).any()
    assert np.isfinite(np.delete(np.asarray(z, np.float32), 2, 0)).all()


def test_where_it_does_not_apply(monkeypatch):
    x, y = normal(0, 4, 4), normal(1, 4, 4)
    f = lambda x, y: x.T @ y
    assert not fired(f, x, y, rules={"bfloat16_products": False})
    assert not fired(f, x.astype(jnp.float16), y.astype(jnp.float16))
    monkeypatch.setattr(_cpu, "LARGE_LOW", 65)
    assert not fired(f, x, y)
    monkeypatch.setattr(_cpu, "LARGE_LOW", 64)
    assert fired(f, x, y)
    monkeypatch.setattr(library, "bfloat16_pays", lambda: False)
    assert not fired(f, x, y)

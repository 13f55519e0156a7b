"""autocast in float16: constants and factors that its narrow range does not hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import transforms as ft

W = jnp.eye(3)
X = jnp.array([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0]])  # a row of zeros: padding, or units that are off


def near(got, want, limit=2e-3):
    assert got.dtype == want.dtype and np.isfinite(got).all()
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit * np.abs(want).max())


PROGRAMS = {
    "1e-8 added": lambda w: (h := X @ w) / (jnp.abs(h).max(-1, keepdims=True) + 1e-8) @ w,
    "1e-12 at least": lambda w: (
        (h := X @ w) / jnp.maximum(jnp.abs(h).max(-1, keepdims=True), 1e-12) @ w
    ),
    "where": lambda w: (h := X @ w) / jnp.where(jnp.abs(h) > 0, h, 1e-10) @ w,
    "compared with 1e-8": lambda w: jnp.where(jnp.abs(h := X @ w) > 1e-8, h, 1.0) @ w,
    "clipped at 1e-9": lambda w: (h := X @ w) / jnp.clip(jnp.abs(h), 1e-9, 10.0) @ w,
    "an array of 1e-9": lambda w: (h := X @ w) / (jnp.abs(h) + jnp.full((3,), 1e-9)[None]) @ w,
    "times 3e4 over 3e4": lambda w: ((X @ w) * 3e4 / 3e4) @ w,
    "over 1e-4 times 1e-4": lambda w: ((X @ w) / 1e-4 * 1e-4) @ w,
    "times 1e-6 times 1e6": lambda w: ((X @ w) * 1e-6 * 1e6) @ w,
    "1e5 added": lambda w: ((X @ w) + 1e5 - 1e5) @ w,
    "scaled in a scan": lambda w: jax.lax.scan(
        lambda c, _: ((c @ w) * 3e4 / 3e4, None), X, length=2
    )[0],
    "scaled in remat": lambda w: jax.checkpoint(lambda w: ((X @ w) * 3e4 / 3e4) @ w)(w),
}


@pytest.mark.quick_cases("bfloat16-scaled in remat")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values(name, dtype):
    f = PROGRAMS[name]
    near(ft.autocast(f, dtype)(W), f(W), 2e-3 if dtype == "float16" else 2e-2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["1e-8 added", "1e-12 at least", "times 3e4 over 3e4", "scaled in remat"]
)
def test_gradients(name):
    loss = lambda w: jnp.square(PROGRAMS[name](w)).mean()
    want = jax.grad(loss)(W)
    near(jax.grad(ft.autocast(loss, "float16"))(W), want, 1e-2)
    near(ft.autocast(jax.grad(loss), "float16")(W), want, 1e-2)


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [(2.0**6, "float16"), (2.0**-10, "float16"), (2.0**7, "float32"), (2.0**-11, "float32")],
)
def test_explain_says_which_factors_fit(factor, dtype):
    rows = ft.explain(ft.autocast(lambda w: ((X @ w) * factor) @ w, "float16"), W).rows
    (row,) = [row for row in rows if row.primitive == "mul"]
    assert row.dtype == dtype and ("does not fit" in row.reason) == (dtype == "float32")
    rows = ft.explain(ft.autocast(lambda w: ((X @ w) * 1e30) @ w, "bfloat16"), W).rows
    assert [row.dtype for row in rows if row.primitive == "mul"] == ["bfloat16"]

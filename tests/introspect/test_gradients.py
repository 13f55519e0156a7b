"""check_gradient: right and wrong derivatives, in float64 and where a function insists on float32."""

import jax
import jax.numpy as jnp
import pytest

from fnet import introspect
from fnet import layers as nn

X = jax.random.normal(jax.random.key(0), (3, 5))
MODEL = nn.Sequential(
    hidden=nn.Dense(6), act=nn.Sequential(jnp.tanh), norm=nn.LayerNorm(), head=nn.Dense(2)
)
PARAMS = jax.tree.map(lambda p: p + 0.1, MODEL.init(jax.random.key(1), X)[0])


def test_right_derivatives():
    report = introspect.check_gradient(lambda params, x: jnp.sum(MODEL(params, x) ** 2), PARAMS, X)
    assert report.equal and report.dtype == "float64" and report.worst.error < 1e-6
    assert {row.path for row in report.rows} == {
        "hidden/kernel",
        "hidden/bias",
        "norm/scale",
        "norm/bias",
        "head/kernel",
        "head/bias",
    }
    assert str(report).endswith("all derivatives agree (in float64, tolerance 1e-03)")
    assert introspect.check_gradient(MODEL, PARAMS, X).equal  # no scalar


@jax.custom_vjp
def wrong(x):
    return jnp.sin(x)


wrong.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * 1.02,))


@jax.custom_vjp
def narrow(x):
    return jnp.sin(x.astype(jnp.float32))


narrow.defvjp(
    lambda x: (narrow(x), x),
    lambda x, g: ((g * jnp.cos(x.astype(jnp.float32)) * 1.02).astype(x.dtype),),
)


@pytest.mark.parametrize("f", [wrong, narrow], ids=["float64", "float32 inside"])
def test_a_wrong_derivative_is_named(f):
    loss = lambda params: jnp.sum(f(params["a"]).astype(params["b"].dtype) * params["b"])
    report = introspect.check_gradient(loss, {"a": X, "b": 2 + X})
    assert not report.equal and report.worst.path == "a" and 0.01 < report.worst.error < 0.03
    assert report.rows[1].path == "b" and report.rows[1].error < 1e-3
    assert "the derivative by a is wrong" in str(report)


def test_functions_of_float32_alone():
    table = jnp.arange(5, dtype=jnp.float32)
    with jax.numpy_dtype_promotion("strict"):
        report = introspect.check_gradient(lambda x: jnp.sum(jnp.sin(x) * table[None]), X)
    assert report.equal and report.dtype == "float32"
    assert introspect.check_gradient(lambda x: jnp.sum(jax.nn.relu(x)), X).equal
    root = lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))  # whose gradient is NaN
    assert introspect.check_gradient(root, X).worst.error == float("inf")


@pytest.mark.exhaustive
def test_a_derivative_that_is_zero():
    """The bias of the keys has no influence: its derivative is a rounding error."""
    model, x = (
        nn.Sequential(attention=nn.Attention(1)),
        jax.random.normal(jax.random.key(0), (2, 4, 6)),
    )
    params, _ = model.init(jax.random.key(1), x)
    f = lambda params, x: jnp.sum(jnp.sin(model(params, x)))
    assert introspect.check_gradient(f, params, x).equal


def test_errors():
    with pytest.raises(TypeError, match="the first argument has no floating-point arrays"):
        introspect.check_gradient(lambda x: x, jnp.arange(3))
    with pytest.raises(TypeError, match="the function returns nothing of a floating-point dtype"):
        introspect.check_gradient(lambda x: x > 0, X)

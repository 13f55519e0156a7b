"""statistics: numbers by hand, dead units, layers of a stack, histograms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fnet import introspect
from fnet import layers as nn
from fnet import training as tr

X = jax.random.normal(jax.random.key(0), (6, 5))
MODEL = nn.Sequential(hidden=nn.Dense(4), relu=nn.Sequential(jax.nn.relu), head=nn.Dense(2))
PARAMS = MODEL.init(jax.random.key(1), X)[0]
PARAMS["hidden"]["bias"] = jnp.array([0.0, -100.0, 0.0, 0.0])  # the second unit is never positive


def loss(params, x):
    return jnp.sum(MODEL(params, x) ** 2)


def test_numbers_by_hand():
    report = introspect.statistics(loss, PARAMS, X)
    hidden = np.asarray(X @ PARAMS["hidden"]["kernel"] + PARAMS["hidden"]["bias"][None])
    tail = lambda h: jnp.sum((jax.nn.relu(h) @ PARAMS["head"]["kernel"]) ** 2)
    cotangent = np.asarray(jax.grad(tail)(jnp.asarray(hidden)))
    rows = {row.name: row for row in (*report.sites, *report.parameters)}
    assert list(rows) == [
        "hidden",
        "relu",
        "head",
        "head/bias",
        "head/kernel",
        "hidden/bias",
        "hidden/kernel",
    ]
    row = rows["hidden"]
    np.testing.assert_allclose(
        [row.mean, row.std, row.largest, row.gradient],
        [hidden.mean(), hidden.std(), np.abs(hidden).max(), np.linalg.norm(cotangent)],
        rtol=1e-5,
    )
    assert row.dead == 0.25 and row.nonfinite == 0 and rows["head"].dead == 0
    gradient = jax.grad(loss)(PARAMS, X)["hidden"]["kernel"]
    np.testing.assert_allclose(rows["hidden/kernel"].gradient, np.linalg.norm(gradient), rtol=1e-5)
    assert rows["hidden/kernel"].dead == 0.25
    np.testing.assert_allclose(report.result, loss(PARAMS, X), rtol=1e-6)
    np.testing.assert_allclose(report.arrays["values/hidden"], hidden, rtol=1e-5)
    assert "hidden         " in str(report) and "25 %" in str(report)


def test_layers_of_a_stack_and_values_that_are_not_finite():
    model = nn.Sequential(blocks=nn.Stack(nn.Sequential(dense=nn.Dense(5)), 2))
    params, _ = model.init(jax.random.key(0), X)
    params["blocks"]["dense"]["bias"] = params["blocks"]["dense"]["bias"].at[1, 0].set(jnp.inf)
    report = introspect.statistics(
        lambda params, x: jnp.sum(model(params, x)), params, X, pattern="blocks/.*"
    )
    assert [(row.name, row.nonfinite) for row in report.sites] == [
        ("blocks/dense [0]", 0),
        ("blocks/dense [1]", 6),
    ]


def test_histograms():
    report = introspect.statistics(loss, PARAMS, X)
    histograms = {name: tr.Histogram(x) for name, x in report.arrays.items()}
    assert {
        "values/hidden",
        "cotangents/hidden",
        "parameters/head/bias",
        "gradients/head/bias",
    } <= set(histograms)


def test_errors():
    with pytest.raises(
        TypeError,
        match=r"statistics: the function must return a floating-point scalar, such as a "
        r"loss; got float32\[6, 2\]",
    ):
        introspect.statistics(MODEL, PARAMS, X)

"""Attention under autocast: products in 16 bits, softmax and gradients in float32, and which form
is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close

from fnet import layers as nn
from fnet import transforms as ft

MODEL = nn.Residual(nn.LayerNorm(), nn.Attention(4, causal=True, use_bias=False))
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 70, 32)), jnp.float32)
PARAMS, _ = MODEL.init(jax.random.key(0), X)


def loss(params, x):
    return jnp.square(MODEL(params, x)).mean()


def equations(jaxpr, name):
    """Those of this name, those inside jits included."""
    return [
        found
        for eqn in jaxpr.eqns
        for found in (
            [eqn]
            if eqn.primitive.name == name
            else equations(eqn.params["jaxpr"].jaxpr, name)
            if "jaxpr" in eqn.params
            else []
        )
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_around_the_gradient_and_inside_it(dtype):
    want = jax.jit(jax.grad(loss))(PARAMS, X)
    for f in (ft.autocast(jax.grad(loss), dtype), jax.grad(ft.autocast(loss, dtype))):
        jaxpr = jax.make_jaxpr(f)(PARAMS, X).jaxpr
        (forward,) = equations(jaxpr, "attention")
        (backward,) = equations(jaxpr, "attention_backward")
        assert forward.params["compute"] == backward.params["compute"] == dtype
        assert [v.aval.dtype for v in forward.outvars] == [dtype, jnp.float32, jnp.float32]
        close(jax.jit(f)(PARAMS, X), want, 1e-2)


def test_gradients_of_float32_operands_are_float32():
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(1, 70, 2, 4)), jnp.float32)
        for i in range(3)
    )
    f = jax.grad(
        ft.autocast(lambda *x: nn.dot_product_attention(*x, causal=True).sum(), "bfloat16"),
        (0, 1, 2),
    )
    (backward,) = equations(jax.make_jaxpr(f)(q, k, v).jaxpr, "attention_backward")
    assert [x.aval.dtype for x in backward.outvars] == [jnp.float32] * 3
    fine = jax.jit(f)(q, k, v)[2]
    assert (fine != fine.astype(jnp.bfloat16).astype(jnp.float32)).any()


@pytest.mark.exhaustive
def test_second_derivatives():
    along = jax.tree.map(jnp.cos, PARAMS)
    hvp = lambda f: jax.jit(lambda p: jax.jvp(lambda p: jax.grad(f)(p, X), (p,), (along,))[1])(
        PARAMS
    )
    close(hvp(ft.autocast(loss, "bfloat16")), hvp(loss), 3e-2)


def test_what_the_author_keeps_in_float32_stays():
    whole = ft.autocast(jax.grad(loss), "bfloat16", rules={"1": "float32"})
    assert (
        equations(jax.make_jaxpr(whole)(PARAMS, X).jaxpr, "attention")[0].params["compute"]
        == jnp.float32
    )
    with jax.default_matmul_precision("highest"):
        exact = jax.make_jaxpr(ft.autocast(jax.grad(loss), "bfloat16"))(PARAMS, X).jaxpr
    assert equations(exact, "attention")[0].params["compute"] == jnp.float32
    again = ft.autocast(ft.autocast(loss, "float16"), "bfloat16")
    assert (
        equations(jax.make_jaxpr(again)(PARAMS, X).jaxpr, "attention")[0].params["compute"]
        == jnp.float16
    )


@pytest.mark.parametrize(
    ("options", "time", "words"),
    [
        ({"causal": True}, 70, "keys that are hidden from a whole block of queries are skipped"),
        ({"causal": True}, 20, "plain XLA, because so few queries fit into one block"),
        ({}, 70, "plain XLA, because no key is hidden from all queries"),
    ],
)
def test_explain_names_the_form(options, time, words):
    model = nn.Attention(4, **options)
    params, _ = model.init(jax.random.key(0), X[:, :time])
    rows = ft.explain(
        ft.autocast(jax.grad(lambda p, x: model(p, x).sum()), "bfloat16"), params, X[:, :time]
    ).rows
    reasons = {row.primitive: row.reason for row in rows}
    assert reasons["attention"] == f"a product: low-precision operands, float32 sums; {words}"
    assert reasons["attention_backward"].endswith(words)

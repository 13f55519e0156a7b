"""autocast: constants, carries, scopes, the author's own casts, other transforms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same
from jax import lax
from precision_cases import CASES, normal
from precision_checks import BF16, F16, F32, equations, once, products, worst

from fnet import layers as nn
from fnet import transforms as ft
from fnet.hardware import Policy


@pytest.mark.parametrize("form", ["grad(ac f)", "ac(grad f)"])
def test_weight_gradients_are_summed_and_kept_in_float32(form):
    f, params, inputs = CASES["mlp"].make()
    g = (
        jax.grad(ft.autocast(f, "bfloat16"))
        if form == "grad(ac f)"
        else ft.autocast(jax.grad(f), "bfloat16")
    )
    text = jax.jit(g).lower(params, *inputs).as_text()
    dots = re.findall(r"dot_general.*: \((.*)\) -> (.*)", text)
    assert len(dots) == 8  # three forward, three for weights, two for activations
    for operands, result in dots:
        assert operands.count("bf16") == 2 and result.strip().endswith("xf32>"), (operands, result)


X, Y = normal(1, 4, 8), normal(2, 8, 4)


# Constants.


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("dtype", "fill"), [("float16", -1e9), ("bfloat16", float(jnp.finfo(F32).min))]
)
def test_masks_stay_finite(dtype, fill):
    def f(x, y, mask):
        return jax.nn.softmax(jnp.where(mask, x @ y, fill) * 1.0)

    mask = jnp.arange(4)[None] <= jnp.arange(4)[:, None]
    got = ft.autocast(f, dtype)(X, Y, mask)
    assert np.isfinite(got).all() and (np.asarray(got)[~np.asarray(mask)] == 0).all()
    assert worst(got, f(X, Y, mask)) < 2e-2


def test_a_literal_follows_through_jit():
    """jnp.where hands its fill to a jitted function; it does not make the product float32."""
    f = lambda x, y: jnp.where(x @ y > 0, x @ y, 0.5) @ jnp.ones((4, 2))
    seen = [
        e.outvars[0].aval.dtype
        for e in equations(ft.autocast(f, "bfloat16"), X, Y)
        if e.primitive.name == "select_n"
    ]
    assert seen == [BF16]


# Control flow.


def test_carries_and_branches_keep_their_dtypes():
    w = normal(5, 8, 8, scale=0.3)

    def f(x, w):
        x = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)
        x, ys = lax.scan(lambda h, _: (jnp.tanh(h @ w), h @ w), x, length=2)
        x = lax.cond(x.sum() > 0, lambda h: h @ w, lambda h: h + 1, x)
        return lax.while_loop(lambda h: jnp.abs(h @ w).max() > 1, lambda h: (h @ w) / 2, x), ys

    cast = ft.autocast(f, "bfloat16")
    got, want = once(cast, X, w), once(f, X, w)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, want)
    assert worst(got, want) < 2e-2
    assert products(cast, X, w)["plain"] == 0
    for eqn in equations(cast, X, w):
        if eqn.primitive.name in ("while", "cond"):
            assert all(v.aval.dtype != BF16 for v in eqn.outvars)


def test_gradients_of_float32_uses_are_added_up_in_float32():
    """Rounded one by one and then added up in 16 bits, as BatchNorm's would be, they no longer
    cancel."""

    def f(w, x):
        h = x @ w
        return jnp.tanh((h - h.mean(0, keepdims=True)) @ Y.T).sum()

    eqns = equations(jax.grad(ft.autocast(f, "bfloat16")), Y, X)
    assert {e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "add_any"} == {F32}
    widened = [
        e
        for e in eqns
        if e.primitive.name == "convert_element_type" and e.outvars[0].aval.dtype == F32
    ]
    assert len(widened) == 1


# What the author says.


def test_the_authors_casts_and_precision_win():
    cast = ft.autocast(
        lambda x, y: (x.astype(F16) @ y.astype(F16)).astype(F32) + x @ x.T, "bfloat16"
    )
    dots = [
        e.invars[0].aval.dtype for e in equations(cast, X, Y) if e.primitive.name == "dot_general"
    ]
    assert dots == [F16] and products(cast, X, Y)["bfloat16", "float32"] == 1
    high = ft.autocast(lambda x, y: jnp.matmul(x, y, precision="highest"), "bfloat16")
    same(high(X, Y), jnp.matmul(X, Y, precision="highest"))


@pytest.mark.exhaustive
def test_without_jit():
    product = lambda a: jnp.tanh(a @ a.T)
    loop = lambda a: lax.scan(lambda carry, row: (carry + product(row[None]).sum(), None), 0.0, a)[
        0
    ]
    x = jax.random.normal(jax.random.key(0), (8, 16))
    for f in (product, loop, jax.grad(loop), jax.vmap(lambda row: product(row[None]))):
        want = ft.autocast(f, "bfloat16")(x)
        with jax.disable_jit():
            got = ft.autocast(f, "bfloat16")(x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_full_precision():
    f = lambda x, y: ft.full_precision(jnp.matmul)(x @ y, x)
    for g in (ft.autocast(f, "bfloat16"), ft.autocast(jax.jit(f), "bfloat16")):
        assert products(g, X, Y) == {("bfloat16", "float32"): 1, "plain": 1}
    grad = jax.grad(lambda x, y: f(x, y).sum())
    assert (
        products(ft.autocast(grad, "bfloat16"), X, Y)["plain"] == 3
    )  # the products of its backward pass too


MODEL = nn.Sequential(body=nn.Sequential(nn.Dense(8), jnp.tanh, nn.Dense(8)), head=nn.Dense(2))


def _loss(params, x):
    return jnp.square(MODEL(params, x)).mean()


def test_rules_by_scope_forward_and_backward():
    params, _ = MODEL.init(jax.random.key(0), X)
    count = lambda rules, policy="bfloat16": products(
        ft.autocast(jax.grad(_loss), policy, rules=rules), params, X
    )
    assert count(None)["plain"] == 0
    assert count({"head": "float32"})["plain"] == 3  # forward, weights, activations
    assert count({"body": "float32"})["plain"] == 5  # a prefix; its input needs no gradient
    assert count({"body/0": "bfloat16", "body": "float32"})["plain"] == 3  # the first that matches
    assert count({".*": "float32"})["plain"] == 8
    mixed = count({"head": "float16"})
    assert mixed["float16", "float32"] + mixed["float16", "float16"] == 3
    low = count({"head": "bfloat16"}, "float32")
    assert low["plain"] == 5 and sum(low.values()) == 8
    inside = jax.grad(ft.autocast(_loss, "bfloat16", rules={"head": "float32"}))
    assert products(inside, params, X)["plain"] == 3
    policy = Policy(compute="bfloat16", rules=(("head", "float32"),))
    assert products(ft.autocast(_loss, policy), params, X)["plain"] == 1
    assert products(ft.autocast(_loss, policy, rules={"head": "bfloat16"}), params, X)["plain"] == 0


def test_a_rule_that_matches_nothing_names_what_is_near():
    params, _ = MODEL.init(jax.random.key(0), X)
    message = "autocast: the rule 'haed' matches no scope; nearest: 'head'"
    with pytest.raises(ValueError, match=re.escape(message)):
        ft.autocast(_loss, "bfloat16", rules={"haed": "float32"})(params, X)
    with pytest.raises(ValueError, match="the function has no named scopes"):
        ft.autocast(jnp.matmul, "bfloat16", rules={"head": "float32"})(X, Y)


def test_a_rule_behind_a_wider_one_is_named():
    params, _ = MODEL.init(jax.random.key(0), X)
    message = (
        "autocast: the rule 'body/0' is not used, because all that it matches ('body/0') matches the "
        "earlier 'body': move 'body/0' up, or remove it"
    )
    rules = {"head": "float32", "body": "float32", "body/0": "bfloat16"}
    with pytest.raises(ValueError, match=re.escape(message)):
        ft.autocast(_loss, "bfloat16", rules=rules)(params, X)
    policy = Policy(compute="bfloat16", rules=(("body", "float32"), ("body/0", "bfloat16")))
    with pytest.raises(ValueError, match="the rule 'body/0' is not used"):
        ft.autocast(_loss, policy)(params, X)
    ft.autocast(_loss, policy, rules={".*": "bfloat16"})(params, X)  # overrides the policy


def test_bad_input_in_one_sentence():
    with pytest.raises(
        ValueError, match=r"'float16' or the name of a chip in hardware\.chips; got 'bfloat17'"
    ):
        ft.autocast(jnp.matmul, "bfloat17")
    with pytest.raises(
        TypeError, match=r"expected a hardware\.Policy or a string as policy; got a int"
    ):
        ft.autocast(jnp.matmul, 16)
    with pytest.raises(
        ValueError, match=r"the rule 'head' \(float32, bfloat16, float16\); got 'int8'"
    ):
        ft.autocast(jnp.matmul, "bfloat16", rules={"head": "int8"})
    with pytest.raises(
        ValueError, match=r"autocast: the pattern '\(' is not a regular expression \(missing"
    ):
        ft.autocast(jnp.matmul, "bfloat16", rules={"(": "float32"})
    with pytest.raises(
        TypeError, match=r"autocast: expected a dict {pattern: dtype} as rules; got \['head'\]"
    ):
        ft.autocast(jnp.matmul, "bfloat16", rules=["head"])
    with pytest.raises(
        TypeError,
        match=re.escape(
            "autocast changes only float32 values, and the function has none; "
            "its inputs are int32[3]"
        ),
    ):
        ft.autocast(lambda x: x + 1, "bfloat16")(jnp.arange(3))


# Identities.


def test_float32_is_the_function_itself_and_nesting_changes_nothing():
    f, params, inputs = CASES["mlp"].make()
    assert str(jax.make_jaxpr(ft.autocast(f, "float32"))(params, *inputs)) == str(
        jax.make_jaxpr(f)(params, *inputs)
    )
    one = ft.autocast(f, "bfloat16")
    two = ft.autocast(one, "bfloat16")
    assert products(two, params, *inputs) == products(one, params, *inputs)
    same(two(params, *inputs), one(params, *inputs))


def test_auto_asks_the_chip():
    assert ft.autocast(jnp.matmul).autocast[1].compute in (F32, BF16)
    assert ft.autocast(jnp.matmul, "NVIDIA H100 80GB HBM3").autocast[1].compute == BF16
    assert ft.autocast(jnp.matmul, "Tesla V100-SXM2-16GB").autocast[1].compute == F16


def test_other_dtypes_are_left_alone():
    def f(x, y, n, flag, key, z):
        draw = jax.random.normal(key, (4,))
        return x @ y, n @ n.T, flag & True, draw, z * z

    key = jax.random.key(3)
    args = (
        X,
        Y,
        jnp.arange(6).reshape(2, 3),
        jnp.array([True, False]),
        key,
        jnp.ones(3, jnp.complex64),
    )
    got, want = ft.autocast(f, "bfloat16")(*args), f(*args)
    same(got[1:], want[1:])
    with jax.enable_x64(True):
        x = jnp.ones((3, 3), jnp.float64) / 3
        low = ft.autocast(lambda x, y: (x @ x, y @ y), "bfloat16")(x, x.astype(F32))
        same(low[0], x @ x)
        assert low[0].dtype == np.float64 and low[1].dtype == F32


# Other transforms.


def test_remat_policies_see_products():
    w = [normal(i, 32, 32, scale=0.2) for i in range(2)]
    block = lambda w, x: jnp.sin(jnp.sin(x @ w[0]) @ w[1]).sum()

    def saved(policy):
        grad = jax.grad(ft.autocast(jax.checkpoint(block, policy=policy), "bfloat16"))
        return sum(products(grad, w, normal(9, 8, 32)).values())

    every, none = (
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
    )
    assert saved(none) > saved(every)
    assert saved(jax.checkpoint_policies.dots_saveable) == saved(every)
    assert saved(jax.checkpoint_policies.dots_with_no_batch_dims_saveable) == saved(every)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_that_remat_saves_are_saved_in_the_low_dtype(dtype):
    w, x = normal(0, 32, 32, scale=0.2), normal(1, 8, 32)
    f = lambda w, x: (jnp.tanh(jnp.tanh(x @ w) @ w) @ w).sum()
    step = jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable))
    cast = ft.autocast(step, dtype)
    marked = [eqn for eqn in equations(cast, w, x) if eqn.primitive.name == "reduce_precision"]
    assert marked and {v.aval.dtype.name for eqn in marked for v in eqn.outvars} == {dtype}
    exact, got, by_hand = step(w, x), cast(w, x), step(w.astype(dtype), x.astype(dtype))
    error = lambda g: jnp.abs(g.astype(jnp.float32) - exact).max()
    assert 0 < error(got) < 1.2 * error(by_hand)
    kept = ft.autocast(lambda x: lax.reduce_precision(x @ w, 8, 7), dtype)  # rounding by the user
    assert all(
        v.aval.dtype == jnp.float32
        for eqn in equations(kept, x)
        if eqn.primitive.name == "reduce_precision"
        for v in eqn.outvars
    )


def test_pmap():
    w, x = normal(1, 8, 4), normal(2, 8, 3, 8)
    f = lambda w, x: lax.pmean(jnp.tanh(x @ w).sum(), "i")
    run = lambda f: jax.pmap(f, axis_name="i", in_axes=(None, 0))(w, x)
    assert worst(run(jax.grad(ft.autocast(f, "bfloat16"))), run(jax.grad(f))) < 2e-2

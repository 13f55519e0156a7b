"""rewrite: an empty rule changes nothing; a rule sees every equation once, anywhere, and is held to its outputs."""

import collections
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from precision_cases import CASES, normal

from fnet import transforms as ft
from fnet._jax import sub_jaxprs


def nothing(primitive, scope, inputs, equation):
    return NotImplemented


def operations(f, *args):
    text = jax.jit(f).lower(*args).as_text()
    return collections.Counter(re.findall(r"stablehlo\.(\w+)", text))


@pytest.mark.parametrize("name", CASES)
def test_an_empty_rule_leaves_the_lowered_operations(name):
    f, params, inputs = CASES[name].make()
    grad = jax.value_and_grad(f)
    want = operations(grad, params, *inputs)
    assert operations(ft.rewrite(grad, nothing), params, *inputs) == want
    inside = operations(jax.value_and_grad(ft.rewrite(f, nothing)), params, *inputs)
    if name == "shard_map":    # traced anew under grad, it broadcasts what its scalars vary over elsewhere
        for counts in (inside, want):
            counts.pop("broadcast_in_dim"), counts.pop("reshape")
    assert inside == want


@pytest.mark.parametrize("name", ["mlp", "custom_vjp", "custom_jvp of several outputs", "while_loop solver"])
def test_an_empty_rule_leaves_values(name):
    f, params, inputs = CASES[name].make()
    g = ft.rewrite(f, nothing)
    same(g(params, *inputs), f(params, *inputs))
    same(jax.jit(jax.grad(g))(params, *inputs), jax.jit(jax.grad(f))(params, *inputs))


def test_jit_keeps_its_name_donation_and_shardings():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))

    def step(x, y):
        return x + y

    inner = jax.jit(step, donate_argnums=0, in_shardings=(split, None), out_shardings=split)
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    want, got = (jax.make_jaxpr(f)(x, x).eqns[0].params for f in (inner, ft.rewrite(inner, nothing)))
    for name in ("name", "donated_invars", "in_shardings", "out_shardings", "inline", "keep_unused"):
        assert got[name] == want[name], name


def test_a_function_called_60_times_is_rewritten_once():
    calls = collections.Counter()

    def rule(primitive, scope, inputs, equation):
        calls[primitive] += 1
        return NotImplemented

    layer = jax.jit(jnp.sin)

    def f(x):
        for _ in range(60):
            x = layer(x)
        return x

    jax.make_jaxpr(ft.rewrite(f, rule))(1.0)
    assert calls["jit"] == 60 and calls["sin"] == 1


def double_sines(primitive, scope, inputs, equation):
    return [2 * jnp.sin(inputs[0])] if primitive == "sin" else NotImplemented


@pytest.mark.parametrize("f", [
    jnp.sin, jax.jit(jnp.sin), jax.checkpoint(jnp.sin), jax.vmap(jnp.sin),
    lambda x: lax.scan(lambda c, v: (c, jnp.sin(v)), 0.0, x)[1],
    lambda x: lax.cond(x.sum() > -9, jnp.sin, jnp.cos, x),
    lambda x: lax.fori_loop(0, 1, lambda i, v: jnp.sin(v), x),
    jax.vmap(lambda x: lax.while_loop(lambda v: v > 0.9, lambda v: jnp.sin(v) - 1, x)),
], ids=["plain", "jit", "remat", "vmap", "scan", "cond", "while", "batched while"])
def test_a_rule_reaches_inside(f):
    x = jnp.array([0.95, 0.95, 0.95])
    shift = f(x) - jnp.sin(x)    # the batched while's body takes 1 away
    np.testing.assert_allclose(ft.rewrite(f, double_sines)(x), 2 * jnp.sin(x) + shift, rtol=1e-6)
    sines = str(jax.make_jaxpr(ft.rewrite(f, double_sines))(x)).count(" mul ")
    assert sines == str(jax.make_jaxpr(f)(x)).count(" mul ") + 1


@pytest.mark.parametrize("wrap", [
    lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: lax.cond(x > 0, f, f, x),
    lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
    lambda f: lambda x: lax.fori_loop(0, 1, lambda i, v: f(v), x),
], ids=["plain", "jit", "remat", "cond", "scan", "while"])
def test_a_rule_may_close_over_a_tracer(wrap):
    @jax.jit
    def outer(shift, x):
        def rule(primitive, scope, inputs, equation):
            return [jnp.sin(inputs[0]) + shift] if primitive == "sin" else NotImplemented
        return ft.rewrite(wrap(jnp.sin), rule)(x)

    np.testing.assert_allclose(outer(2.0, 0.5), np.sin(0.5) + 2, rtol=1e-6)
    np.testing.assert_allclose(outer(3.0, 0.5), np.sin(0.5) + 3, rtol=1e-6)


@pytest.mark.parametrize(("given", "shown"), [
    (lambda x: [x[:1]], "a list of float32[1]"), (lambda x: [x.astype(jnp.bfloat16)], "a list of bfloat16[3]"),
    (lambda x: x, "float32[3]"), (lambda x: [x, x], "a list of float32[3], float32[3]"),
])
def test_what_a_rule_returns_is_checked(given, shown):
    rule = lambda primitive, scope, inputs, equation: given(inputs[0]) if primitive == "sin" else NotImplemented

    def f(x):
        with jax.named_scope("wave"):
            return jnp.sin(x)

    message = f"rewrite: for 'sin' at 'wave' the rule must return a list of float32[3]; it returned {shown}"
    with pytest.raises(TypeError, match=re.escape(message) + "$"):
        ft.rewrite(f, rule)(jnp.ones(3))


def test_scopes_are_the_same_forward_and_backward():
    seen = collections.defaultdict(set)

    def rule(primitive, scope, inputs, equation):
        seen[primitive].add(scope)
        return NotImplemented

    def f(w, x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return (x @ w).sum()

    jax.make_jaxpr(ft.rewrite(jax.vmap(jax.grad(f), (None, 0)), rule))(normal(1, 3, 2), normal(2, 4, 5, 3))
    assert seen["dot_general"] == {"outer/inner"}


def test_values_are_dropped_after_their_last_use():
    alive, most = [], []

    def rule(primitive, scope, inputs, equation):
        if primitive != "sin":
            return NotImplemented
        out = jnp.sin(inputs[0])
        alive.append(weakref.ref(out))
        most.append(sum(ref() is not None for ref in alive))
        return [out]

    def f(x):
        for _ in range(20):
            x = jnp.sin(x)
        return x

    ft.rewrite(f, rule)(jnp.ones(3))
    assert max(most) <= 3


def test_sub_jaxprs_of_a_batched_while_survive():
    f = jax.vmap(lambda x: lax.while_loop(lambda v: v > 1, lambda v: v / 2, x))
    eqns = jax.make_jaxpr(ft.rewrite(f, nothing))(jnp.arange(4.0)).eqns
    assert [sub.kind for e in eqns for sub in sub_jaxprs(e)] == ["while_cond", "while_body"]
    same(ft.rewrite(f, nothing)(jnp.arange(4.0)), f(jnp.arange(4.0)))

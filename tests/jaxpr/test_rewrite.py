"""rewrite: an empty rule changes nothing; a rule sees every equation once, anywhere, and is held to
its outputs."""

import collections
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same
from jax import lax
from precision_cases import normal

from fnet import transforms as ft
from fnet.jaxpr import bodies


def nothing(primitive, scope, inputs, equation):
    return NotImplemented


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


@pytest.mark.quick_cases("batched while")
@pytest.mark.parametrize(
    "f",
    [
        jnp.sin,
        jax.jit(jnp.sin),
        jax.checkpoint(jnp.sin),
        jax.vmap(jnp.sin),
        lambda x: lax.scan(lambda c, v: (c, jnp.sin(v)), 0.0, x)[1],
        lambda x: lax.cond(x.sum() > -9, jnp.sin, jnp.cos, x),
        lambda x: lax.fori_loop(0, 1, lambda i, v: jnp.sin(v), x),
        jax.vmap(lambda x: lax.while_loop(lambda v: v > 0.9, lambda v: jnp.sin(v) - 1, x)),
    ],
    ids=["plain", "jit", "remat", "vmap", "scan", "cond", "while", "batched while"],
)
def test_a_rule_reaches_inside(f):
    x = jnp.array([0.95, 0.95, 0.95])
    shift = f(x) - jnp.sin(x)  # the batched while's body takes 1 away
    np.testing.assert_allclose(ft.rewrite(f, double_sines)(x), 2 * jnp.sin(x) + shift, rtol=1e-6)
    sines = str(jax.make_jaxpr(ft.rewrite(f, double_sines))(x)).count(" mul ")
    assert sines == str(jax.make_jaxpr(f)(x)).count(" mul ") + 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.cond(x > 0, f, f, x),
        lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
        lambda f: lambda x: lax.fori_loop(0, 1, lambda i, v: f(v), x),
    ],
    ids=["plain", "jit", "remat", "cond", "scan", "while"],
)
def test_a_rule_may_close_over_a_tracer(wrap):
    @jax.jit
    def outer(shift, x):
        def rule(primitive, scope, inputs, equation):
            return [jnp.sin(inputs[0]) + shift] if primitive == "sin" else NotImplemented

        return ft.rewrite(wrap(jnp.sin), rule)(x)

    np.testing.assert_allclose(outer(2.0, 0.5), np.sin(0.5) + 2, rtol=1e-6)
    np.testing.assert_allclose(outer(3.0, 0.5), np.sin(0.5) + 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (lambda x: [x[:1]], "a list of float32[1]"),
        (lambda x: [x.astype(jnp.bfloat16)], "a list of bfloat16[3]"),
        (lambda x: x, "float32[3]"),
        (lambda x: [x, x], "a list of float32[3], float32[3]"),
        (lambda x: None, "None (to decline, return NotImplemented)"),
        (lambda x: ["sin"], "a list of a str"),
        (lambda x: [], "a list of nothing"),
    ],
)
def test_what_a_rule_returns_is_checked(given, shown):
    rule = lambda primitive, scope, inputs, equation: (
        given(inputs[0]) if primitive == "sin" else NotImplemented
    )

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

    jax.make_jaxpr(ft.rewrite(jax.vmap(jax.grad(f), (None, 0)), rule))(
        normal(1, 3, 2), normal(2, 4, 5, 3)
    )
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
    assert [sub.kind for e in eqns for sub in bodies(e)] == ["while_cond", "while_body"]
    same(ft.rewrite(f, nothing)(jnp.arange(4.0)), f(jnp.arange(4.0)))


# custom_vmap.


def _with_a_rule_of_its_own():
    @jax.custom_batching.custom_vmap
    def waves(x, y):
        return jnp.sin(x) + y, jnp.cos(y)

    @waves.def_vmap
    def batch(
        size, batched, x, y
    ):  # unlike what vmap would make of it, so that one sees it was asked
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        return (10 * jnp.sin(x) + y, jnp.cos(y)), (True, batched[1])

    return waves


@pytest.mark.exhaustive
def test_a_rule_reaches_inside_custom_vmap_and_into_its_batching_rule():
    f, x, y = _with_a_rule_of_its_own(), jnp.array([0.3, 0.9]), jnp.array([1.0, 2.0])
    g = ft.rewrite(f, double_sines)
    np.testing.assert_allclose(g(x, y)[0], 2 * jnp.sin(x) + y, 1e-6)
    np.testing.assert_allclose(g(x, y)[1], jnp.cos(y), 1e-6)
    for h in (
        jax.vmap(g),
        jax.jit(jax.vmap(g)),
        jax.vmap(jax.jit(g)),
        ft.rewrite(jax.vmap(f), double_sines),
    ):
        np.testing.assert_allclose(h(x, y)[0], 20 * jnp.sin(x) + y, 1e-6)
        np.testing.assert_allclose(h(x, y)[1], jnp.cos(y), 1e-6)
    alone = jax.vmap(g, (0, None))(
        x, y[0]
    )  # the second output does not vary, as the user's rule says
    np.testing.assert_allclose(alone[0], 20 * jnp.sin(x) + y[0], 1e-6)
    np.testing.assert_allclose(alone[1], jnp.cos(y[0]) * jnp.ones(2), 1e-6)


@pytest.mark.exhaustive
def test_custom_vmap_stays_what_it_is():
    f, x, y = _with_a_rule_of_its_own(), jnp.array([0.3, 0.9]), jnp.array([1.0, 2.0])
    g = ft.rewrite(f, nothing)
    assert [e.primitive.name for e in jax.make_jaxpr(g)(x, y).eqns] == ["custom_vmap_call"]
    same(g(x, y), f(x, y))
    same(jax.vmap(g)(x, y), jax.vmap(f)(x, y))
    tangents = jax.jvp(g, (x, y), (y, x))
    same(tangents, jax.jvp(f, (x, y), (y, x)))
    two = lambda f: jax.vmap(jax.vmap(f, (0, None)), (None, 0))
    same(two(g)(x, y), two(f)(x, y))


def test_a_scope_inside_custom_vmap_is_seen():
    seen = set()

    @jax.custom_batching.custom_vmap
    def f(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    @f.def_vmap
    def batch(size, batched, x):
        with jax.named_scope("rule"):
            return jnp.sin(x), True

    def rule(primitive, scope, inputs, equation):
        seen.add((primitive, scope))
        return NotImplemented

    def outer(x):
        with jax.named_scope("outer"):
            return f(x)

    jax.vmap(ft.rewrite(outer, rule))(jnp.ones(3))
    assert {("sin", "outer/inner"), ("sin", "outer/rule")} <= seen


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: lax.scan(lambda c, _: (c, f(c)), x, None, length=2)[1],
        lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
        lambda f: (
            lambda x: lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1])), (0, x))
        ),
    ],
    ids=["plain", "jit", "remat", "scan", "cond", "while"],
)
def test_primitives_that_jax_expands_before_compilation(wrap):
    f = wrap(
        lambda x: (
            jnp.unique(x, size=3, fill_value=0.0) + jnp.nonzero(x, size=3)[0].astype("float32")
        )
    )
    x = jnp.array([1.0, -2.0, 1.0])
    for g in (ft.rewrite(f, lambda *_: NotImplemented), ft.tune(f, "cpu"), ft.rematerialize(f)):
        same(jax.jit(g)(x), jax.jit(f)(x))

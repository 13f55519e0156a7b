"""rewrite with an empty rule: the lowered program is the same to the letter, and jit's name,
donation and shardings."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import close, same, sampled
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from precision_cases import CASES
from precision_checks import batched

from fnet import transforms as ft

MESH = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
FLAT = jax.ShapeDtypeStruct((8,), jnp.float32)


def nothing(primitive, scope, inputs, equation):
    return NotImplemented


def lowered(f, *args):
    return jax.jit(lambda *args: f(*args)).lower(*args).as_text()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "name",
    sampled(
        CASES,
        ["mlp", "LSTM", "custom_vjp", "custom_vmap", "shard_map", "jit inside, with donation"],
    ),
)
def test_the_lowered_program_is_the_same(name):
    """To the letter: values, gradients, names, donation and shardings with it."""
    f, params, inputs = CASES[name].make()
    plain = jax.value_and_grad(f)
    g, inside = ft.rewrite(plain, nothing), jax.value_and_grad(ft.rewrite(f, nothing))
    want = lowered(plain, params, *inputs)
    assert lowered(g, params, *inputs) == want
    if (
        name == "shard_map"
    ):  # traced anew under grad, it broadcasts what its scalars vary over elsewhere
        count = lambda text: collections.Counter(re.findall(r"(?:stablehlo|sdy|func)\.(\w+)", text))
        got, want = count(lowered(inside, params, *inputs)), count(want)
        assert {k for k in got | want if got[k] != want[k]} <= {"broadcast_in_dim", "reshape"}
    else:
        assert lowered(inside, params, *inputs) == want
    want = lowered(batched(plain), params, *inputs)
    assert lowered(batched(g), params, *inputs) == want
    assert lowered(ft.rewrite(batched(plain), nothing), params, *inputs) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.eagerly])
def test_values_are_the_same_operation_by_operation(name):
    f, params, inputs = CASES[name].make()
    same(ft.rewrite(f, nothing)(params, *inputs), f(params, *inputs))
    plain = jax.grad(f)
    want = plain(
        params, *inputs
    )  # differentiated as it runs; the other two are traced first, and compiled in parts
    close(ft.rewrite(plain, nothing)(params, *inputs), want, 1e-6)
    close(jax.grad(ft.rewrite(f, nothing))(params, *inputs), want, 1e-6)


# jit.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"donate_argnums": 0},
        {"inline": True},
        {"keep_unused": True},
        {"in_shardings": NamedSharding(MESH, P("data")), "out_shardings": NamedSharding(MESH, P())},
    ],
    ids=lambda options: next(iter(options), "none"),
)
def test_jit_stays_jit(options):
    def step(x, y):
        return x + y

    inner = jax.jit(step, **options)
    (eqn,) = jax.make_jaxpr(inner)(FLAT, FLAT).eqns
    (got,) = jax.make_jaxpr(ft.rewrite(inner, nothing))(FLAT, FLAT).eqns
    assert got.primitive is eqn.primitive and got.params.keys() == eqn.params.keys()
    for name in eqn.params.keys() - {"jaxpr"}:
        assert got.params[name] == eqn.params[name], name
    text = lowered(ft.rewrite(inner, nothing), FLAT, FLAT)
    assert text == lowered(inner, FLAT, FLAT)
    if not options.get("inline"):
        assert "func.func private @step" in text


def double(primitive, scope, inputs, equation):
    return [inputs[0] * 2.0] if primitive == "sin" else NotImplemented


def test_donation_survives_a_rule():
    step = jax.jit(lambda x, y: (jnp.sin(x) + y, y), donate_argnums=0)
    x, y = jnp.ones(8), jnp.ones(8)
    out, _ = ft.rewrite(step, double)(x, y)
    assert out.tolist() == [3.0] * 8 and x.is_deleted() and not y.is_deleted()
    outer = jax.jit(ft.rewrite(lambda x, y: (jnp.sin(x) + y, y), double), donate_argnums=0)
    assert outer.lower(FLAT, FLAT).as_text().count("tf.aliasing_output") == 1


def test_static_arguments_and_shapes_are_part_of_what_is_kept():
    calls = []

    def rule(primitive, scope, inputs, equation):
        calls.append((primitive, *(x.shape for x in inputs)))
        return NotImplemented

    rows = jax.jit(lambda x, n: jnp.sin(x).reshape(n, -1), static_argnums=1)
    both = ft.rewrite(lambda x: (rows(x, 2), rows(x, 4), rows(x, 2), rows(x[:4], 2)), rule)
    assert [y.shape for y in jax.eval_shape(both, FLAT)] == [(2, 4), (4, 2), (2, 4), (2, 2)]
    sines = [shapes for primitive, *shapes in calls if primitive == "sin"]
    assert sines == [
        [(8,)],
        [(8,)],
        [(4,)],
    ]  # once for n = 2, once for n = 4, once for the other shape
    assert ft.rewrite(rows, nothing)(jnp.ones(8), 2).shape == (2, 4)


def test_shardings_under_jit():
    split = NamedSharding(MESH, P("data"))
    inner = jax.jit(jnp.sin, in_shardings=split, out_shardings=split)
    got = jax.jit(ft.rewrite(inner, double))(jnp.ones(8))
    assert got.sharding.is_equivalent_to(split, 1) and got.tolist() == [2.0] * 8
    constrained = ft.rewrite(lambda x: lax.with_sharding_constraint(jnp.sin(x), split), double)
    assert jax.jit(constrained)(jnp.ones(8)).sharding.is_equivalent_to(split, 1)


# Tracers of an outer trace.


def _custom_jvp(f):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), 3.0 * tangents[0]))
    return g


def _custom_vjp(f):
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), None), lambda _, g: (3.0 * g,))
    return g


def _custom_vmap(f):
    g = jax.custom_batching.custom_vmap(f)
    g.def_vmap(lambda size, batched, x: (2.0 * f(x), batched[0]))
    return g


WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(x > 0, f, f, x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "while": lambda f: lambda x: lax.fori_loop(0, 1, lambda i, v: f(v), x),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=P(), out_specs=P()),
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vmap": _custom_vmap,
}
OUTER = {
    "jit": lambda g: jax.jit(g)(0.7),
    "grad": lambda g: jax.grad(g)(0.7),
    "vmap": lambda g: jax.vmap(g)(jnp.array([0.7, 0.8])),
    "scan": lambda g: lax.scan(lambda c, x: (c, g(x)), 0, jnp.array([0.7, 0.8]))[1],
}
# What JAX itself refuses: such functions may not close over what is differentiated, or be batched
# with it.
REFUSED = {
    ("grad", "custom_jvp"),
    ("grad", "custom_vjp"),
    ("grad", "custom_vmap"),
    ("vmap", "custom_vmap"),
}


@pytest.mark.quick_cases(
    "remat-grad", "cond-vmap", "cond-scan", "scan-scan", "custom_jvp-jit", "custom_vmap-scan"
)
@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("wrap", WRAPS)
def test_what_closes_over_a_tracer(outer, wrap):
    """The function and the rule may each close over a value of an outer trace."""
    if (outer, wrap) in REFUSED:
        return
    wrapped = lambda shift: WRAPS[wrap](lambda x: jnp.sin(x) * shift)

    def shifted(primitive, scope, inputs, equation):
        return [jnp.sin(inputs[0]) + 0.0] if primitive == "sin" else NotImplemented

    def by_rule(shift):
        rule = lambda primitive, scope, inputs, equation: (
            [jnp.sin(inputs[0]) * shift] if primitive == "sin" else NotImplemented
        )
        return ft.rewrite(WRAPS[wrap](jnp.sin), rule)(jnp.float32(0.5))

    want = OUTER[outer](lambda shift: wrapped(shift)(jnp.float32(0.5)))
    np.testing.assert_allclose(
        OUTER[outer](lambda s: ft.rewrite(wrapped(s), shifted)(jnp.float32(0.5))), want, 1e-6
    )
    np.testing.assert_allclose(OUTER[outer](by_rule), want, 1e-6)

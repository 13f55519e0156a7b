"""Bodies of equations depend on names inside JAX's equations: these tests say which name JAX has
changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet import hardware as hw
from fnet import transforms as ft
from fnet.jaxpr import bodies, call_name, donated, equations, has_shardings, opened, scan

X = jnp.ones((4, 4))


@jax.custom_jvp
def cube(x):
    return x * x * x


cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def double(x):
    return x + x


double.defvjp(lambda x: (x + x, None), lambda _, g: (g + g,))


@jax.custom_batching.custom_vmap
def batched(x):
    return x + 1


batched.def_vmap(lambda size, which, x: (x + 1, which[0]))


def shard(x):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    return jax.shard_map(lambda y: y * y, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)


CASES = {
    "jit": (jax.jit(lambda x: x @ x), [("call", 1)]),
    "remat2": (jax.checkpoint(lambda x: x @ x), [("call", 1)]),
    "custom_jvp_call": (cube, [("call", 1)]),
    "custom_vjp_call": (double, [("call", 1)]),
    "scan": (lambda x: jax.lax.scan(lambda c, s: (c @ c, s), x, x, length=4), [("scan", 4)]),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
        [("while_cond", None), ("while_body", None)],
    ),
    "cond": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y @ y, lambda y: y, x),
        [("branch", 1), ("branch", 1)],
    ),
    "shard_map": (shard, [("shard_map", 4)]),
    "custom_vmap_call": (batched, [("call", 1)]),
    "custom_linear_solve": (
        lambda x: jax.scipy.sparse.linalg.cg(lambda v: x @ v, x[0])[0],
        [("solve", 1)],
    ),
    "scatter-add": (lambda x: x.at[jnp.array([0, 1])].add(1.0), []),
    "dot_general": (lambda x: x @ x, []),
}


@pytest.mark.parametrize("name", CASES)
def test_bodies(name):
    f, expected = CASES[name]
    equations = [e for e in _jax.make_jaxpr(f)(X).jaxpr.eqns if e.primitive.name == name]
    assert equations, (
        f"JAX {jax.__version__} no longer writes {name!r} into a jaxpr: see fnet/jaxpr/_calls.py, "
        f"bodies"
    )
    try:
        found = bodies(equations[0])
    except (KeyError, AttributeError) as error:
        pytest.fail(
            f"JAX {jax.__version__} moved the parameter {error} of {name!r}: see "
            f"fnet/jaxpr/_calls.py, bodies; it now has {sorted(equations[0].params)}"
        )
    assert [(sub.kind, sub.times) for sub in found] == expected
    for sub in found:
        assert hasattr(sub.jaxpr, "eqns") and len(sub.consts) == len(sub.jaxpr.constvars)


@pytest.mark.parametrize(
    "name", ["jit", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"]
)
def test_a_call_takes_the_inputs_of_its_equation(name):
    (eqn,) = [e for e in _jax.make_jaxpr(CASES[name][0])(X).jaxpr.eqns if e.primitive.name == name]
    (sub,) = bodies(eqn)
    assert sub.inputs == tuple(range(len(eqn.invars)))
    assert [v.aval.shape for v in sub.jaxpr.invars] == [v.aval.shape for v in eqn.invars]
    assert [v.aval.shape for v in sub.jaxpr.outvars] == [v.aval.shape for v in eqn.outvars]


def test_scan():
    def f(w, x, xs):
        return jax.lax.scan(lambda c, s: (c @ w, s[0] + s[1]), x, xs)

    (eqn,) = [
        e
        for e in _jax.make_jaxpr(f)(X, X, (jnp.ones(3), jnp.ones(3))).jaxpr.eqns
        if e.primitive.name == "scan"
    ]
    parts = scan(eqn)
    assert (parts.consts, parts.carry, parts.slices, parts.length) == (1, 1, 2, 3), (
        f"JAX {jax.__version__} changed how scan counts its inputs: {sorted(eqn.params)}"
    )
    assert parts.split("abcd") == (["a"], ["b"], ["c", "d"])
    again = jax.lax.scan(lambda c, s: (c, s), X, jnp.ones(3), **parts.options)
    assert again[1].shape == (3,)


def test_an_unknown_primitive_that_holds_a_jaxpr_says_other():
    class Primitive:
        name = "something_new"

    class Eqn:
        primitive = Primitive()
        invars = (1,)
        params = {  # noqa: RUF012
            "body": _jax.make_jaxpr(lambda x: x + 1)(X),
            "update_jaxpr": _jax.make_jaxpr(lambda x: x)(X),
        }

    assert [sub.kind for sub in bodies(Eqn())] == ["other"]


def test_a_while_and_a_cond_say_which_inputs_their_bodies_receive():
    limit, step = jnp.float32(9), jnp.ones((4, 4))
    f = lambda x: jax.lax.while_loop(lambda c: c.sum() < limit, lambda c: c + step, x)
    eqn = _jax.make_jaxpr(f)(X).jaxpr.eqns[-1]
    for body in bodies(eqn):
        assert [v.aval.shape for v in body.jaxpr.invars] == [
            eqn.invars[i].aval.shape for i in body.inputs
        ]
    test, loop = bodies(eqn)
    assert len(test.inputs) == len(loop.inputs) == 2 and test.inputs[0] != loop.inputs[0]
    eqn = _jax.make_jaxpr(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x))(
        1, X
    ).jaxpr.eqns[-1]
    assert [body.inputs for body in bodies(eqn)] == [(1,)] * 3


def test_equations_at_any_depth():
    step = lambda c, s: (jax.checkpoint(jnp.sin)(c), jax.lax.cond(True, jnp.cos, jnp.tan, s))
    f = jax.jit(lambda x: jax.lax.scan(step, x, x)[1])
    names = {eqn.primitive.name for eqn in equations(_jax.make_jaxpr(f)(X).jaxpr)}
    assert {"jit", "scan", "sin", "cos", "tan"} <= names


def test_calls():
    f = jax.jit(lambda x, y: x * y, donate_argnums=1)
    eqn = _jax.make_jaxpr(lambda x: f(x, x + 1))(X).jaxpr.eqns[-1]
    assert call_name(eqn) == "<lambda>" and donated(eqn) == (False, True) and not has_shardings(eqn)
    placed = jax.jit(jnp.sin, in_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert has_shardings(_jax.make_jaxpr(placed)(X).jaxpr.eqns[0])
    assert call_name(_jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns[0]) is None
    nested = _jax.make_jaxpr(jax.jit(jax.jit(jnp.sin)))(X)
    assert [e.primitive.name for e in opened(nested).jaxpr.eqns] == ["sin"]
    assert (
        opened(_jax.make_jaxpr(placed)(X)).jaxpr.eqns[0].primitive.name == "jit"
    )  # its shardings mean something


def test_an_open_jaxpr_with_constants_in_another_librarys_primitive():
    """As equinox holds functions that are not inlined: tune, count and rewrite do not fail."""
    matrix = jnp.arange(9.0).reshape(3, 3)
    inside = _jax.make_jaxpr(lambda x: jnp.sin(x) @ matrix)(jnp.ones(3))
    held = Primitive("held")
    held.def_impl(lambda x, *, jaxpr: jax.core.eval_jaxpr(jaxpr, inside.consts, x)[0])
    held.def_abstract_eval(lambda x, *, jaxpr: jaxpr.outvars[0].aval)
    mlir.register_lowering(
        held,
        mlir.lower_fun(
            lambda x, *, jaxpr: jax.core.eval_jaxpr(jaxpr, inside.consts, x), multiple_results=True
        ),
    )

    def f(x):
        return 2 * held.bind(x, jaxpr=inside.jaxpr)

    x = jnp.array([0.1, 0.2, 0.3])
    (eqn,) = (eqn for eqn in _jax.make_jaxpr(f)(x).eqns if eqn.primitive.name == "held")
    (body,) = bodies(eqn)
    assert body.kind == "other" and [eqn.primitive.name for eqn in body.jaxpr.eqns] == [
        "sin",
        "dot_general",
    ]
    want = 2 * (np.sin(x) @ np.arange(9.0).reshape(3, 3))
    for transformed in (
        ft.tune(f),
        ft.rewrite(f, lambda *_: NotImplemented),
        ft.autocast(f, "float32"),
    ):
        np.testing.assert_allclose(transformed(x), want, rtol=1e-6)
    assert sum(cost.matmul for cost in hw.count(f, x).scopes.values()) == 2 * 9


def test_constants_that_become_inputs_are_not_donated():
    """A jit's constants belong to the function, which may be called again."""
    c = jnp.arange(4.0)
    (eqn,) = _jax.make_jaxpr(jax.jit(lambda x: x * c, donate_argnums=0))(jnp.ones(4)).jaxpr.eqns
    params, values = _jax.hoisted(eqn.params, eqn.params["jaxpr"])
    assert params["donated_invars"] == (False, True)
    assert len(values) == 1 and values[0].shape == (4,)

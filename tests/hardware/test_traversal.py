"""The reading of jaxprs rests on names inside JAX's equations: these tests say which name moved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fnet._jax import scan_parts, sub_jaxprs

X = jnp.ones((4, 4))


@jax.custom_jvp
def cube(x):
    return x * x * x


cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def double(x):
    return x + x


double.defvjp(lambda x: (x + x, None), lambda _, g: (g + g,))


def shard(x):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    return jax.shard_map(lambda y: y * y, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"))(x)


CASES = {
    "jit": (jax.jit(lambda x: x @ x), [("call", 1)]),
    "remat2": (jax.checkpoint(lambda x: x @ x), [("call", 1)]),
    "custom_jvp_call": (cube, [("call", 1)]),
    "custom_vjp_call": (double, [("call", 1)]),
    "scan": (lambda x: jax.lax.scan(lambda c, s: (c @ c, s), x, x, length=4), [("scan", 4)]),
    "while": (lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x),
              [("while_cond", None), ("while_body", None)]),
    "cond": (lambda x: jax.lax.cond(x.sum() > 0, lambda y: y @ y, lambda y: y, x), [("branch", 1), ("branch", 1)]),
    "shard_map": (shard, [("shard_map", 4)]),
    "custom_linear_solve": (lambda x: jax.scipy.sparse.linalg.cg(lambda v: x @ v, x[0])[0], [("solve", 1)]),
    "scatter-add": (lambda x: x.at[jnp.array([0, 1])].add(1.0), []),
    "dot_general": (lambda x: x @ x, []),
}


@pytest.mark.parametrize("name", CASES)
def test_sub_jaxprs(name):
    f, expected = CASES[name]
    equations = [e for e in jax.make_jaxpr(f)(X).jaxpr.eqns if e.primitive.name == name]
    assert equations, f"JAX {jax.__version__} no longer writes {name!r} into a jaxpr: see fnet/_jax.py, sub_jaxprs"
    try:
        found = sub_jaxprs(equations[0])
    except (KeyError, AttributeError) as error:
        pytest.fail(f"JAX {jax.__version__} moved the parameter {error} of {name!r}: see fnet/_jax.py, sub_jaxprs; "
                    f"it now has {sorted(equations[0].params)}")
    assert [(sub.kind, sub.times) for sub in found] == expected
    for sub in found:
        assert hasattr(sub.jaxpr, "eqns") and len(sub.consts) == len(sub.jaxpr.constvars)


@pytest.mark.parametrize("name", ["jit", "remat2", "custom_jvp_call", "custom_vjp_call"])
def test_a_call_takes_the_inputs_of_its_equation(name):
    (eqn,) = [e for e in jax.make_jaxpr(CASES[name][0])(X).jaxpr.eqns if e.primitive.name == name]
    (sub,) = sub_jaxprs(eqn)
    assert [v.aval.shape for v in sub.jaxpr.invars] == [v.aval.shape for v in eqn.invars]
    assert [v.aval.shape for v in sub.jaxpr.outvars] == [v.aval.shape for v in eqn.outvars]


def test_scan_parts():
    def f(w, x, xs):
        return jax.lax.scan(lambda c, s: (c @ w, s[0] + s[1]), x, xs)

    (eqn,) = [e for e in jax.make_jaxpr(f)(X, X, (jnp.ones(3), jnp.ones(3))).jaxpr.eqns if e.primitive.name == "scan"]
    assert scan_parts(eqn) == (1, 1, 2), f"JAX {jax.__version__} moved how scan counts its inputs: {sorted(eqn.params)}"


def test_an_unknown_primitive_that_holds_a_jaxpr_says_other():
    class Primitive:
        name = "something_new"

    class Eqn:
        primitive = Primitive()
        params = {"body": jax.make_jaxpr(lambda x: x + 1)(X), "update_jaxpr": jax.make_jaxpr(lambda x: x)(X)}  # noqa: RUF012

    assert [sub.kind for sub in sub_jaxprs(Eqn())] == ["other"]


def test_the_name_stack_of_an_equation_is_readable():
    def f(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return (x @ x).sum()

    stacks = {str(e.source_info.name_stack) for e in jax.make_jaxpr(jax.grad(f))(X).jaxpr.eqns
              if e.primitive.name == "dot_general"}
    assert stacks == {"jvp(outer)/inner", "transpose(jvp(outer))/inner"}, (
        f"JAX {jax.__version__} writes scopes in another way, {stacks}: see fnet/hardware/_walk.py")

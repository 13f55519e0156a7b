"""read: a jaxpr as flat frames."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax
from fnet import transforms as ft
from fnet.jaxpr import Scope, bodies, read

X = jnp.ones((4, 4))


def frame(f, *args, **options):
    return read(_jax.make_jaxpr(f)(*args).jaxpr, **options)


def names(frame):
    return [op.eqn.primitive.name for op in frame.ops]


def test_ids_are_constants_then_inputs_then_results():
    table = np.ones((4, 4), np.float32)
    found = frame(lambda x, y: (jnp.sin(y) @ table, x, 2.0), X, X)  # 0: table, 1: x, 2: y
    assert names(found) == ["sin", "dot_general"]
    assert [(op.ins, op.outs) for op in found.ops] == [((2,), (3,)), ((3, 0), (4,))]
    assert found.outputs == {4, 1, None}


def test_literals_have_no_id():
    (op,) = frame(lambda x: x * 2.0, X).ops
    assert op.ins == (0, None) and op.outs == (1,)


def test_calls_are_inlined_at_any_depth():
    @jax.custom_jvp
    def wave(x):
        return jnp.sin(x)

    wave.defjvp(lambda p, t: (wave(*p), t[0]))
    inner = jax.jit(lambda x: jax.checkpoint(wave)(x) + 1)
    found = frame(lambda x: jax.jit(lambda x: inner(x) * 3)(jnp.cos(x)), X)
    assert names(found) == ["cos", "sin", "add", "mul"]
    assert [op.ins[0] for op in found.ops] == [0, 1, 2, 3] and found.outputs == {4}


def test_a_call_that_returns_its_inputs_and_constants():
    found = frame(lambda x, y: jax.jit(lambda x, y: (y, x, 1.0))(x, y), X, X)
    assert found.ops == [] and found.outputs == {1, 0, None}


def test_a_jaxpr_at_two_call_sites_is_read_twice():
    double = jax.jit(lambda x: jnp.sin(x) * 2)

    def f(x):
        with jax.named_scope("first"):
            y = double(x)
        with jax.named_scope("second"):
            return double(y)

    found = frame(f, X)
    assert [(op.eqn.primitive.name, op.scope, op.ins[0], op.outs) for op in found.ops] == [
        ("sin", "first", 0, (1,)),
        ("mul", "first", 1, (2,)),
        ("sin", "second", 2, (3,)),
        ("mul", "second", 3, (4,)),
    ]
    assert found.ops[0].eqn is found.ops[2].eqn


def test_constants_of_an_inner_jit_have_ids_of_their_own():
    table = jnp.arange(16.0).reshape(4, 4)

    def rule(primitive, scope, inputs, equation):
        return [jnp.cos(inputs[0]) @ table] if primitive == "sin" else NotImplemented

    closed = _jax.make_jaxpr(ft.rewrite(jax.jit(jnp.sin), rule))(X)
    assert bodies(closed.jaxpr.eqns[0])[0].consts  # JAX itself passes them as inputs
    found = read(closed.jaxpr)
    assert names(found) == ["cos", "dot_general"]
    cos, product = found.ops
    assert cos.ins == (0,) and product.ins[0] == cos.outs[0]
    assert len({0, *cos.outs, product.ins[1], *product.outs}) == 4


def test_loops_and_branches_are_frames_of_their_own():
    def f(x, i):
        with jax.named_scope("loop"):
            x, _ = lax.scan(lambda c, y: (jnp.sin(c), c + y), x, jnp.ones((3, 4, 4)))
        x = lax.while_loop(lambda c: c.sum() > 0, lambda c: c - 1, x)
        return lax.switch(i, [jnp.cos, jnp.exp, lambda x: x], x)

    found = frame(f, X, 1)
    loops = {op.eqn.primitive.name: op for op in found.ops if op.bodies}
    assert list(loops) == ["scan", "while", "cond"]
    ((body, inside),) = loops["scan"].bodies
    assert body.times == 3 and names(inside) == ["sin", "add"] and inside.ops[0].scope == "loop"
    assert [op.ins for op in inside.ops] == [(0,), (0, 1)] and inside.outputs == {
        2,
        3,
    }  # ids start again
    assert [(body.kind, names(inside)[-1]) for body, inside in loops["while"].bodies] == [
        ("while_cond", "gt"),
        ("while_body", "sub"),
    ]
    assert [names(inside) for _, inside in loops["cond"].bodies] == [["cos"], ["exp"], []]
    assert (
        loops["while"].ins[-1] == loops["scan"].outs[0]
        and loops["cond"].ins[-1] == loops["while"].outs[0]
    )


def test_scopes_and_phases():
    def loss(w):
        with jax.named_scope("layer"):
            return jax.checkpoint(lambda w: jnp.sin(jnp.sin(w)))(w).sum()

    found = frame(jax.grad(loss), X, outer=Scope("model"))
    assert {op.scope for op in found.ops if op.eqn.primitive.name == "cos"} == {"model/layer"}
    assert {op.at.phase for op in found.ops} >= {"forward", "recomputed", "backward"}
    assert any(op.recomputed for op in found.ops) and not found.ops[0].recomputed

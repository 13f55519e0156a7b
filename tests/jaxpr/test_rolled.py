"""Repeated blocks of a program as loops: the same numbers, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same
from jax import lax
from jax.extend.core import jaxpr_as_fun

from fnet import jaxpr

WIDTH = 8
JOINS = ("concatenate", "stack", "jit")  # jnp.stack, in several versions of JAX


def matrices(count):
    """Permutations with signs: all numbers stay small integers, so no rounding hides an error."""
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], (count, 1, WIDTH))
    return [jnp.float32(np.eye(WIDTH)[rng.permutation(WIDTH)] * sign) for sign in signs]


def rows(count=4):
    return jnp.float32(np.random.default_rng(1).integers(-3, 4, (count, WIDTH)))


def chain(depth):
    """A loss and its gradients of a network of equal blocks, each with parameters of its own."""

    def loss(params, x):
        x = x * params["scale"]
        for p in params["blocks"]:
            x = x + jax.nn.relu(x @ p["w"] + p["b"][None])
        return jnp.square(x).sum()

    blocks = [{"w": w, "b": jnp.ones(WIDTH)} for w in matrices(depth)]
    return jax.value_and_grad(loss), {"scale": jnp.float32(2), "blocks": blocks}, rows()


def scans(closed):
    return [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan"]


def rolled(f, *args):
    closed = jaxpr.inlined(jax.make_jaxpr(f)(*args))
    return closed, jaxpr.rolled(closed)


def agree(f, *args):
    """The program and the rolled one return the same numbers."""
    closed, loops = rolled(f, *args)
    arrays = jax.tree.leaves(args)
    same(*(jax.jit(jaxpr_as_fun(each))(*arrays) for each in (loops, closed)))
    return loops


def test_blocks_forward_and_backward():
    loops = agree(*chain(5))
    forward, backward = map(jaxpr.scan, scans(loops))
    assert forward.length == backward.length == 5
    assert not forward.options["reverse"] and backward.options["reverse"]
    assert forward.carry == backward.carry == 1


def test_what_the_backward_pass_reads_stays_stacked():
    """Nothing is stacked but the parameters, and only once."""
    _, loops = rolled(*chain(5))
    stacked = [eqn for eqn in loops.jaxpr.eqns if eqn.primitive.name in JOINS]
    assert sorted(eqn.outvars[0].aval.shape for eqn in stacked) == [(5, 8), (5, 8, 8)]


def test_other_equations_stay():
    """The first block is another one, and the program reads a value of the middle of the chain."""

    def f(ws, x):
        middle = None
        x = jnp.abs(x) @ ws[0]
        for i, w in enumerate(ws[1:]):
            x = jax.nn.relu(x @ w)
            middle = x if i == 1 else middle
        return x, middle + 1

    ws = matrices(6)
    (loop,) = scans(agree(f, ws, rows()))
    assert jaxpr.scan(loop).length == 5


def test_a_carry_of_several_values_and_a_shared_weight():
    def f(ws, shared, x):
        y = x
        for w in ws:
            x, y = jax.nn.relu(x @ w) + y, y @ shared + x
        return x, y

    ws = matrices(4)
    loops = agree(f, ws, jnp.eye(WIDTH), rows())
    parts = jaxpr.scan(scans(loops)[0])
    assert parts.carry >= 2 and parts.length == 4


def test_loops_and_literals_are_compared():
    """Blocks that differ in a literal, or in the body of a loop, are not equal."""

    def f(scales, x):
        for scale in scales:
            turn = lambda c, w, scale=scale: (jax.nn.relu(c @ w) * scale, None)
            x = lax.scan(turn, x, weights)[0]
        return x

    x, weights = rows(), jnp.stack(matrices(3))
    equal = agree(lambda x: f((0.5, 0.5, 0.5, 0.5), x), x)
    assert [jaxpr.scan(eqn).length for eqn in scans(equal)] == [4]
    other = agree(lambda x: f((0.5, 0.25, 0.125, 1.0), x), x)
    assert [jaxpr.scan(eqn).length for eqn in scans(other)] == [3] * 4


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x,
        lambda x: jnp.sin(jnp.sin(jnp.sin(x))),
        lambda x: [x @ x, jnp.sin(x) @ x, jnp.cos(x) @ x],
        lambda x: x @ x,
    ],
)
def test_programs_without_blocks_stay(f):
    closed, loops = rolled(f, jnp.ones((WIDTH, WIDTH)))
    assert loops is closed


def test_random_keys_of_blocks():
    def f(keys, x):
        for key in keys:
            x = x @ jnp.eye(WIDTH) + jax.random.randint(key, x.shape, -3, 4).astype(x.dtype)
        return x

    keys = list(jax.random.split(jax.random.key(0), 4))
    (loop,) = scans(agree(f, keys, rows(2)))
    assert jaxpr.scan(loop).length == 4

"""The scope of a layer's equations is the path of its arrays, and a stack costs linearly in its
depth."""

import re

import jax
import jax.numpy as jnp
import pytest
from checks import counted
from conformance import call, every, prepared

from fnet import layers as nn
from fnet.jaxpr import bodies

# Named scopes: where an array meets the input, the equation carries the array's path.


def uses(jaxpr, names, prefix=()):
    """(path of an argument, scope of an equation that takes it), through every jaxpr inside."""
    for eqn in jaxpr.eqns:
        stack = str(eqn.source_info.name_stack)
        scope = (
            *prefix,
            *(part for part in stack.split("/") if part and not part.startswith("jit(")),
        )
        taken = [names.get(v) if not hasattr(v, "val") else None for v in eqn.invars]
        inner = [sub for sub in bodies(eqn) if len(sub.jaxpr.invars) == len(taken)]
        for sub in inner:
            yield from uses(
                sub.jaxpr, {v: n for v, n in zip(sub.jaxpr.invars, taken) if n is not None}, scope
            )
        if not inner:
            yield from ((path, scope) for path in taken if path is not None)


def scopes(f, *args):
    """Every use of the first argument's leaves in f's jaxpr: {path: {scope, ...}}."""
    paths = [tuple(part.key for part in path) for path, _ in jax.tree.leaves_with_path(args[0])]
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    found = {path: set() for path in paths}
    for path, scope in uses(jaxpr, dict(zip(jaxpr.invars, paths))):
        found[path].add(scope)
    return found


@every
def test_scope_is_path(name):
    case, params, state, x = prepared(name)
    for path, found in scopes(
        lambda *args: call(case, train=True)(*args)[0], params, state, *x
    ).items():
        assert found, path
        assert found == {path[:-1]}, path


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["MLP", "Remat", "Tied"])
def test_scope_is_path_in_compiled_backward(name):
    """What a profile shows: the backward pass of every kernel stands at the kernel's path."""
    case, params, state, x = prepared(name)
    loss = lambda params, *x: jnp.square(call(case, train=True)(params, state, *x)[0]).sum()
    text = jax.jit(jax.grad(loss)).lower(params, *x).compile().as_text()
    found = set()
    for stack in re.findall(r'op_name="([^"]*transpose\([^"]*)"', text):
        parts = re.sub(r"jit\([^()]*\)|\b(jvp|transpose)\(|\)", "", stack).split("/")
        found.add("/".join(part for part in parts[:-1] if part and part not in MACHINERY))
    kernels = {
        "/".join(part.key for part in path[:-1])
        for path, leaf in jax.tree.leaves_with_path(params)
        if path[-1].key in ("kernel", "embedding")
    }
    assert kernels <= found


MACHINERY = ("while", "body", "closed_call", "eval_jaxpr", "checkpoint", "rematted_computation")


@pytest.mark.exhaustive
def test_stack_runs_its_block_as_often_at_any_depth():
    calls = []
    for depth in (2, 48):
        activation = counted(jnp.tanh)
        model = nn.Stack(nn.Sequential(nn.Dense(4), activation), depth)
        x = jnp.ones((2, 4))
        params, _ = model.init(jax.random.key(0), x)
        made = activation.calls
        jax.jit(jax.grad(lambda params, model=model, x=x: model(params, x).sum())).trace(params)
        calls.append((made, activation.calls - made))
    assert calls[0] == calls[1]
    assert max(calls[0]) <= 3


def operations(jaxpr, name=None):
    """How many equations (of that name) run, those inside counted as often as they run."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        total += (
            sum(sub.times * operations(sub.jaxpr, name) for sub in inner)
            if inner
            else (name in (None, eqn.primitive.name))
        )
    return total


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "block",
    [nn.Sequential(nn.Dense(4), jnp.tanh), nn.Residual(nn.LayerNorm(), nn.Attention(2))],
    ids=["dense", "attention"],
)
def test_backward_costs_linearly_in_depth(block):
    x = jnp.ones((2, 4, 4))

    def cost(model):
        params, _ = model.init(jax.random.key(0), x)
        return operations(
            jax.make_jaxpr(jax.grad(lambda params: model(params, x).sum()))(params).jaxpr
        )

    for wrap in (
        lambda depth: nn.Sequential(*[block] * depth),
        lambda depth: nn.Stack(block, depth),
    ):
        two, four, eight = (cost(wrap(depth)) for depth in (2, 4, 8))
        assert four > two
        assert eight - four == 2 * (four - two)


def test_backward_costs_a_small_multiple_of_forward():
    model, x = nn.Sequential(*[nn.Dense(4)] * 8), jnp.ones((2, 4))
    params, _ = model.init(jax.random.key(0), x)
    dots = lambda f: operations(jax.make_jaxpr(f)(params, x).jaxpr, "dot_general")
    assert dots(model) == 8
    assert dots(jax.grad(lambda params, x: model(params, x).sum(), argnums=(0, 1))) == 8 + 2 * 8

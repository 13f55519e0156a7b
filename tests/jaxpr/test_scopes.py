"""Scopes: one path for an operation in the forward pass, the backward pass and recomputation, in
jaxprs and in HLO."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from fnet import _jax
from fnet import layers as nn
from fnet import transforms as ft
from fnet.jaxpr import Scope, bodies, marks, scope_of_operation, scopes_in
from fnet.jaxpr._scopes import TOP, _parsed

STACKS = [
    ("", "", "forward"),
    ("a", "a", "forward"),
    ("a/b", "a/b", "forward"),
    ("jvp(a)/b", "a/b", "forward"),
    ("transpose(jvp(a))/b", "a/b", "backward"),
    ("vmap(jvp(a))/b", "a/b", "forward"),
    ("jvp()", "", "forward"),
    ("transpose(jvp())", "", "backward"),
    ("rematted_computation/block/fc", "block/fc", "recomputed"),
    ("my_jvp(x)", "my_jvp(x)", "forward"),
    ("dense(32)/fc", "dense(32)/fc", "forward"),
    # A scope of the same name around grad and inside it.
    ("fc/jvp(fc)", "fc/fc", "forward"),
    ("fc/transpose(jvp(fc))", "fc/fc", "backward"),
    ("block/block", "block/block", "forward"),
    # What JAX writes twice when it differentiates jax.checkpoint, also in second derivatives and
    # under vmap.
    ("transpose(jvp(a))/jvp(a)", "a", "backward"),
    ("fc/transpose(jvp(fc))/jvp()", "fc", "backward"),
    ("top/transpose(jvp(a))/b/top/jvp(a)/b", "top/a/b", "backward"),
    ("vmap(transpose(jvp(a)))/b/vmap(jvp(a))/b", "a/b", "backward"),
    ("jvp(transpose(jvp(a)))/b/jvp(jvp(a))/b/rematted_computation/fc", "a/b/fc", "recomputed"),
    (
        "transpose(jvp(transpose(jvp(a))))/b/jvp(jvp(a))/b/jvp(transpose(jvp(a)))/b/jvp(jvp(a))/b",
        "a/b",
        "backward",
    ),
]


@pytest.mark.parametrize(("stack", "path", "phase"), STACKS)
def test_name_stacks(stack, path, phase):
    assert _parsed(stack)[:2] == (path, phase)


@pytest.mark.parametrize(
    ("name", "path", "phase"),
    [
        ("jit(step)/transpose(jvp(block))/up/dot_general", "block/up", "backward"),
        ("jit(f)/jvp(blocks)/while/body/closed_call/layer/fc/sin", "blocks/layer/fc", "forward"),
        (
            "jit(f)/transpose(jvp(blocks))/while/body/eval_jaxpr/layer/layer/checkpoint/rematted_computation/fc/cos",
            "blocks/layer/fc",
            "recomputed",
        ),
        ("jit(f)/top/transpose(jvp(a))/b/top/jvp(a)/b/checkpoint/fc/mul", "top/a/b/fc", "backward"),
        ("jit(f)/layer/checkpoint/fc/sin", "layer/fc", "forward"),
        ("jit(f)/add", "", "forward"),
        ("jit(f)/block/(up/add:down/add)", "block", "forward"),
        ("parameter", "", "forward"),
        ("", "", "forward"),
    ],
)
def test_names_of_operations(name, path, phase):
    assert scope_of_operation(name) == Scope(path, phase)


def found(jaxpr, outer=TOP):
    """(path, phase) of every product, at any depth."""
    scope_of = scopes_in(jaxpr, outer)
    for eqn in jaxpr.eqns:
        at = scope_of(eqn)
        if eqn.primitive.name == "dot_general":
            yield at
        for body in bodies(eqn):
            yield from found(body.jaxpr, at)


def dense(w, x):
    with jax.named_scope("fc"):
        return jnp.sin(x @ w)


def scoped(wrap):
    def f(w, x):
        with jax.named_scope("outer"), jax.named_scope("block"):
            return wrap(dense)(w, x)

    return f


def scanned(w, x):
    with jax.named_scope("outer"):

        def step(carry, _):
            with jax.named_scope("block"):
                return jax.checkpoint(dense)(w, carry), None

        return lax.scan(step, x, None, length=3)[0]


def nested(w, x, wrap=lambda f: f):
    def outer(carry, _):
        def inner(carry, _):
            with jax.named_scope("block"):
                return wrap(dense)(w, carry), None

        return lax.scan(inner, carry, None, length=2)[0], None

    with jax.named_scope("outer"):
        return lax.scan(outer, x, None, length=3)[0]


def repeated(w, x, wrap=lambda f: f, loop=False):
    """Scopes that are repeated in the program, not by JAX."""

    def inner(w, x):
        with jax.named_scope("layer"), jax.named_scope("layer"):
            return wrap(dense)(w, x)

    with jax.named_scope("outer"):
        if loop:
            return lax.fori_loop(0, 2, lambda _, x: wrap(inner)(w, x), x)
        return wrap(inner)(w, x)


W, X = jnp.eye(3) / 2, jnp.ones((2, 3))
PROGRAMS = {
    "plain": scoped(lambda f: f),
    "remat": scoped(jax.checkpoint),
    "remat of remat": scoped(lambda f: jax.checkpoint(jax.checkpoint(f))),
    "jit of remat": jax.jit(scoped(jax.checkpoint)),
    "remat of jit": scoped(lambda f: jax.checkpoint(jax.jit(f))),
    "scan of remat": scanned,
    "remat around the scopes": jax.checkpoint(scoped(lambda f: f)),
    "remat of scan": jax.checkpoint(scanned),
    "scan of scan of remat": lambda w, x: nested(w, x, jax.checkpoint),
    "scan of scan": lambda w, x: nested(w, x, lambda f: f),
    "remat of remat in a scan": lambda w, x: nested(
        w, x, lambda f: jax.checkpoint(jax.checkpoint(f))
    ),
    "remat of scan of remat of remat": lambda w, x: jax.checkpoint(
        lambda w, x: nested(w, x, jax.checkpoint)
    )(w, x),
    "cond of remat": lambda w, x: lax.cond(
        x.sum() > 0, scoped(jax.checkpoint), scoped(lambda f: f), w, x
    ),
}
DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(lambda w, x: f(w, x).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda w, x: f(w, x[None]).sum()), (None, 0)),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jax.vmap(lambda r: f(w, r[None]))(x).sum()),
    "gradient norm": lambda f: jax.grad(
        lambda w, x: jnp.square(jax.grad(lambda w: f(w, x).sum())(w)).sum()
    ),
    "hvp": lambda f: lambda w, x: jax.jvp(jax.grad(lambda w: f(w, x).sum()), (w,), (w,))[1],
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_products_have_one_path(program, derivative):
    f = DERIVATIVES[derivative](PROGRAMS[program])
    scopes = list(found(_jax.make_jaxpr(f)(W, X).jaxpr))
    assert scopes and {at.path for at in scopes} == {"outer/block/fc"}
    phases = {at.phase for at in scopes}
    assert "forward" in phases and ("backward" in phases) == (derivative != "value")
    if "remat" in program and derivative == "grad":
        assert "recomputed" in phases


@pytest.mark.parametrize(
    ("wrap", "loop", "derivative"),
    [
        case
        for case in itertools.product(["plain", "remat"], [False, True], DERIVATIVES)
        if case != ("remat", True, "gradient norm")
    ],
)  # whose name stacks are ambiguous
def test_repeated_scopes_are_kept(wrap, loop, derivative):
    wrap = jax.checkpoint if wrap == "remat" else lambda f: f
    f = DERIVATIVES[derivative](lambda w, x: repeated(w, x, wrap, loop))
    assert {at.path for at in found(_jax.make_jaxpr(f)(W, X).jaxpr)} == {"outer/layer/layer/fc"}


@pytest.mark.parametrize("program", ["plain", "remat", "scan of remat", "jit of remat"])
def test_compiled_programs_have_the_same_paths(program):
    f = jax.grad(lambda w, x: PROGRAMS[program](w, x).sum())
    text = jax.jit(f).lower(W, X).compile().as_text()
    names = [
        name for name in re.findall(r'op_name="([^"]*)"', text) if name.endswith("dot_general")
    ]
    assert names and {scope_of_operation(name).path for name in names} == {"outer/block/fc"}


def test_marks():
    eqns = _jax.make_jaxpr(jax.grad(lambda w: dense(w, X).sum()))(W).jaxpr.eqns
    products = [marks(eqn) for eqn in eqns if eqn.primitive.name == "dot_general"]
    assert products == [{"jvp"}, {"jvp", "transpose"}]


@nn.layer
def block(scope, x):
    y = nn.Dense(6)(scope["fc"], x)
    return x + nn.Dense(4)(scope["proj"], jnp.tanh(y))


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["plain", "Remat", "Stack(Remat)", "checkpoint", "rematerialize"])
@pytest.mark.parametrize("inside", [False, True], ids=["around grad", "inside grad"])
def test_rules_reach_products_of_every_phase(form, inside):
    inner = {"Remat": nn.Remat(block()), "Stack(Remat)": nn.Stack(nn.Remat(block()), 2)}.get(
        form, block()
    )
    model = nn.Sequential(blocks=inner, head=nn.Dense(3))
    x = jax.random.normal(jax.random.key(1), (5, 4))
    params, _ = model.init(jax.random.key(0), x)
    call = jax.checkpoint(model.__call__) if form == "checkpoint" else model
    loss = lambda p, x: jnp.square(call(p, x)).mean()
    cast = lambda f: ft.autocast(f, "bfloat16", rules={"blocks": "float32", "head": "float32"})
    gradient = jax.grad(cast(loss)) if inside else cast(jax.grad(loss))
    if form == "rematerialize":
        gradient = ft.rematerialize(gradient)
    wanted = jax.grad(loss)(params, x)
    for a, b in zip(jax.tree.leaves(gradient(params, x)), jax.tree.leaves(wanted), strict=True):
        assert jnp.abs(a - b).max() <= 1e-6 * jnp.abs(b).max()
    paths = {at.path for at in found(_jax.make_jaxpr(gradient)(params, x).jaxpr)}
    assert paths <= {"blocks/fc", "blocks/proj", "head"}

"""The names of JAX's that are not public: each fails here in words when JAX moves it.

What fnet reads out of an equation's parameters is held by tests/hardware/test_traversal.py.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fnet
from fnet import _jax

MOVED = f"JAX {jax.__version__} moved {{}}: mend fnet/_jax.py"
TRANSFORMS = {
    "jit": lambda f: jax.jit(f),
    "vmap": lambda f: jax.vmap(f),
    "scan": lambda f: lambda x: lax.scan(lambda c, a: (c, f(a)), 0, x)[1],
    "cond": lambda f: lambda x: lax.cond(True, f, lambda a: a, x),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "checkpoint": lambda f: lambda x: jax.jit(jax.checkpoint(f))(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_trace_state_tells_traces_apart(name):
    outside, inside = _jax.trace_state(), []

    def f(x):
        inside.append((_jax.trace_state(), _jax.trace_state()))
        return x + 1

    TRANSFORMS[name](f)(jnp.ones(3))
    assert inside
    for first, second in inside:
        assert first == second, MOVED.format("get_opaque_trace_state (two calls in one trace differ)")
        assert first != outside, MOVED.format(f"get_opaque_trace_state ({name} is not seen)")
    assert _jax.trace_state() == outside


def test_trace_state_is_plain_in_named_scope():
    outside = _jax.trace_state()
    with jax.named_scope("a"):
        assert _jax.trace_state() == outside, MOVED.format("get_opaque_trace_state (a named scope changes it)")


def test_name_stack_stands_in_equations():
    def f(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x * x

    eqn = jax.make_jaxpr(f)(1.0).jaxpr.eqns[0]
    assert str(eqn.source_info.name_stack) == "outer/inner", MOVED.format("eqn.source_info.name_stack")


def test_private_names_stand_in_one_file():
    root = pathlib.Path(fnet.__file__).parent
    # jax.core.Tracer is public and stays; the rest of jax.core comes and goes.
    private = re.compile(r"jax\._src|\bjaxlib\.(?!__version__)|jax\.core\.(?!Tracer)|from jax\.core|jax\.extend")
    found = [f"{path.relative_to(root)}:{number}" for path in sorted(root.rglob("*.py")) if path.name != "_jax.py"
             for number, line in enumerate(path.read_text().splitlines(), 1)
             if private.search(line.split("#")[0])]
    assert not found, f"move to fnet/_jax.py: {found}"

"""The table of primitives: its names, what it says of some, and descriptions of fnet's own."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

from fnet import jaxpr
from fnet.jaxpr import _primitives

KINDS = {
    "product",
    "elementwise",
    "transcendental",
    "reduction",
    "scatter",
    "window",
    "sort",
    "linear_algebra",
    "cast",
    "alias",
    "layout",
    "gather",
    "collective",
    "random",
    "effect",
}


def test_every_name_of_the_table_is_a_primitive_of_jax():
    assert jaxpr.unsupported() == ()  # but for optional ones
    optional = set(_primitives._TRAITS) - {
        name for names in _primitives._REQUIRED for name in names
    }
    fnets = {primitive.name for primitive in _primitives._DESCRIPTIONS}
    assert optional - fnets == {"one_minus_square"}


def test_the_table_uses_the_words_of_its_documentation():
    rows = set(_primitives._TRAITS.values())
    # A recurrent layer contains its program, which transforms enter.
    assert {row.kind for row in rows} - {"unknown"} == KINDS
    assert {row.precision for row in rows} == {"exact", "arithmetic", "power", ""}
    assert {row.memory for row in rows} == {"free", "fused", "heavy"}


def test_no_name_is_listed_twice():
    names = [
        name
        for row in _primitives._TABLE.strip().splitlines()
        for name in row.rpartition(":")[2].split()
    ]
    assert len(names) == len(set(names)) > 150


@pytest.mark.parametrize(
    ("f", "kind", "precision", "memory"),
    [
        (lambda x: x @ x, "product", "", "heavy"),
        (lambda x: x * x, "elementwise", "arithmetic", "fused"),
        (lambda x: x**2, "elementwise", "power", "fused"),
        (jnp.tanh, "transcendental", "arithmetic", "fused"),
        (jnp.exp, "transcendental", "", "fused"),
        (lambda x: x.sum(), "reduction", "", "heavy"),
        (lambda x: x.max(), "reduction", "arithmetic", "heavy"),
        (lambda x: x.astype("int8"), "cast", "", "fused"),
        (lambda x: x.reshape(-1), "alias", "exact", "free"),
        (lambda x: x.T, "layout", "exact", "free"),
        (lambda x: lax.rev(x, (0,)), "layout", "exact", "fused"),
        (lambda x: lax.sort(x), "sort", "arithmetic", "heavy"),
        (lambda x: jnp.concatenate([x, x]), "layout", "exact", "heavy"),
        (lambda x: jax.pure_callback(lambda x: x, x, x), "unknown", "", "fused"),
    ],
)
def test_traits(f, kind, precision, memory):
    eqn = jax.make_jaxpr(f)(jnp.ones((3, 3))).jaxpr.eqns[-1]
    assert jaxpr.traits(eqn.primitive.name) == jaxpr.Traits(kind, precision, memory)


def test_pointwise_primitives_depend_on_one_element():
    assert {"add", "exp", "convert_element_type", "copy", "stop_gradient"} <= jaxpr.POINTWISE
    assert jaxpr.POINTWISE.isdisjoint(
        {"reduce_sum", "dot_general", "transpose", "sort", "cumsum", "random_bits"}
    )


def test_describe(monkeypatch):
    for table in ("_TRAITS", "_DESCRIPTIONS"):
        monkeypatch.setattr(_primitives, table, dict(getattr(_primitives, table)))
    mine = Primitive("mine")
    assert jaxpr.traits("mine").kind == "unknown"
    assert (
        jaxpr.description(mine)
        == jaxpr.description(lax.sin_p)
        == jaxpr.Description(jaxpr.Traits("unknown"))
    )
    described = jaxpr.Description(jaxpr.Traits("reduction"), batch_first=True)
    jaxpr.describe(mine, described)
    assert jaxpr.description(mine) is described and jaxpr.traits("mine") == described.traits
    assert not jaxpr.description(Primitive("mine")).batch_first  # another primitive of that name


RENAMED = """
import jax, jax.numpy as jnp
from jax.extend.core import primitives
primitives.tanh_p.name = "hyperbolic"
from fnet import jaxpr
print(*jaxpr.unsupported(), sep="\\n")
(eqn,) = jax.make_jaxpr(jnp.tanh)(1.0).jaxpr.eqns
print(jaxpr.traits(eqn.primitive.name).kind, jaxpr.cost(eqn).kind)
"""


@pytest.mark.exhaustive
def test_a_renamed_primitive_is_unknown_and_reported():
    run = subprocess.run(
        [sys.executable, "-c", RENAMED], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        f"the rules for 'tanh' are disabled: JAX {jax.__version__} has no primitive of that name",
        "unknown unknown",
    ]

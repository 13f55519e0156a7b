"""The table of primitives: its names, what it says of some, and descriptions of fnet's own."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives

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
    assert optional - fnets == {"log2", "one_minus_square", "polynomial"}


def test_every_primitive_of_jax_is_in_the_table_or_known_to_be_absent():
    """A version of JAX that adds one fails here, and not in a user's program."""
    public = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    unknown = {name for name in public if jaxpr.traits(name).kind == "unknown"}
    entered = {"cond", "custom_jvp_call", "custom_lin", "custom_vjp_call", "remat2", "scan"}
    entered |= {"call", "closed_call", "eval_jaxpr", "jit", "while", "custom_linear_solve"}
    opaque = {"approx_top_k", "ragged_all_to_all", "random_gamma", "rng_bit_generator"}
    opaque |= {"eig", "eigh", "hessenberg", "householder_product", "qr", "schur", "svd"}
    assert unknown <= entered | opaque | {"rng_uniform", "tridiagonal", "tridiagonal_solve"}


@pytest.mark.skipif(not hasattr(lax, "polynomial_p"), reason="primitives since jax 0.12")
def test_a_flat_program_has_no_polynomials_and_no_log2():
    def f(x, a, b):
        return lax.polynomial(jnp.log2(x), [a, 2.0, b]), lax.polynomial(b, [1.0] * 12, unroll=3)

    x, a, b = jnp.full((2, 1), 3.0), jnp.ones((2, 3)), jnp.arange(1.0, 4)[None]
    flat = jaxpr.flatten(jax.make_jaxpr(f)(x, a, b))
    assert {"log2", "polynomial"}.isdisjoint(eqn.primitive.name for eqn in flat.eqns)
    y = np.log2(3.0)
    quadratic = np.broadcast_to(1 + 2 * y + np.arange(1, 4) * y * y, (2, 3))
    geometric = sum(np.arange(1.0, 4)[None] ** k for k in range(12))
    for got in (f(x, a, b), jax.core.eval_jaxpr(flat.jaxpr, flat.consts, x, a, b)):
        np.testing.assert_allclose(got[0], quadratic, rtol=1e-6)
        np.testing.assert_allclose(got[1], geometric, rtol=1e-6)


@pytest.mark.skipif(not hasattr(lax, "polynomial_p"), reason="a primitive since jax 0.12")
def test_the_cost_of_a_polynomial_counts_each_power():
    f = lambda x: lax.polynomial(x, [1.0, 2.0, 3.0, 4.0])
    (eqn,) = jax.make_jaxpr(f)(jnp.ones((2, 5))).eqns
    assert jaxpr.cost(eqn)[:2] == ("elementwise", 2 * 3 * 10)


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

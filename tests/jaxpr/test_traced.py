"""Calls as jaxprs, leaves that are no arrays, nnx modules, and values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import same

from fnet import transforms as ft
from fnet.jaxpr import (
    Traced,
    Value,
    bind,
    boxed,
    is_array,
    mutable,
    plain,
    restore,
    results_boxed,
    statics,
    unboxed,
)

X = jnp.arange(3.0)


def evaluated(traced):
    return traced.result(
        jax.core.eval_jaxpr(traced.closed.jaxpr, traced.closed.consts, *traced.arrays)
    )


def test_arrays_are_traced_and_everything_else_passes_through():
    seen = []

    def f(x, mode, *, options):
        seen.append((mode, options["name"], options["scale"]))
        return {
            "y": x * options["scale"] + options["shift"],
            "mode": mode,
            "host": np.ones(2),
            "none": None,
            "n": 3,
        }

    traced = Traced(
        f, (X, "fast"), {"options": {"name": jnp.sin, "scale": 2.0, "shift": np.float32(1)}}
    )
    assert [x.shape for x in traced.arrays] == [
        (3,),
        (),
    ]  # a NumPy scalar has a dtype, a Python number has none
    assert len(traced.closed.jaxpr.outvars) == 1
    got = evaluated(traced)
    same(got.pop("y"), 2 * X + 1)
    assert isinstance(got["host"], np.ndarray) and (got["mode"], got["none"], got["n"]) == (
        "fast",
        None,
        3,
    )
    assert seen == [("fast", jnp.sin, 2.0)]


def test_without_arrays_and_without_results():
    assert evaluated(Traced(lambda: None, (), {})) is None
    assert evaluated(Traced(lambda s: s * 2, ("ab",), {})) == "abab"


def test_shapes_are_enough():
    traced = Traced(lambda x: x @ x, (jax.ShapeDtypeStruct((3, 3), jnp.bfloat16),), {})
    assert traced.closed.out_avals[0].dtype == jnp.bfloat16


def test_errors_name_the_users_function():
    def branches(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(
        jax.errors.TracerBoolConversionError, match=r"branches at .*test_traced\.py"
    ):
        Traced(branches, (X,), {})


# Leaves that are no arrays.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Options:
    rate: float
    weight: jax.Array


@pytest.mark.parametrize(
    ("put", "paths"),
    [
        (boxed, ["['b']", "['f']", "['name']", "['o'].rate"]),
        (results_boxed, ["['f']", "['name']"]),
    ],
)
def test_boxes(put, paths):
    tree = {
        "f": jnp.sin,
        "x": X,
        "name": "a",
        "n": 3,
        "z": 1j,
        "b": True,
        "host": np.ones(2),
        "none": None,
        "o": Options(0.5, X),
    }
    held = put(tree)
    assert [path for path, _ in statics(held)] == paths and statics(held)[-1][1] in ("a", 0.5)
    back = unboxed(held)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree)))
    assert statics(put({"x": X, "n": 3})) == []


def test_boxes_are_a_part_of_the_structure():
    structure = lambda **tree: jax.tree.structure(boxed(tree))
    assert structure(mode="a", x=1) == structure(mode="a", x=2) != structure(mode="b", x=1)
    assert jax.tree.map(lambda x: x + 1, boxed({"f": "a", "x": 1})) == boxed({"f": "a", "x": 2})


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.float32(1), True),
        (np.ones(2), True),
        (X, True),
        (jax.ShapeDtypeStruct((), "int8"), True),
        (jax.random.key(0), True),
        (1, False),
        (True, False),
        ("a", False),
        (jnp.sin, False),
        (None, False),
    ],
)
def test_is_array(x, expected):
    assert is_array(x) is expected


@pytest.mark.parametrize("put", [boxed, results_boxed])
def test_a_leaf_without_a_hash_is_an_error(put):
    with pytest.raises(
        TypeError, match=r"^\['a'\]\[0\] is a set, which is neither an array nor hashable$"
    ):
        put({"a": [{1}]})


class Pair:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "result",
    [Pair, lambda x: {"a": Pair([x])}, lambda x: [lambda: x]],
    ids=["object", "in a tree", "closure"],
)
def test_results_with_hidden_arrays_are_an_error(result):
    with pytest.raises(TypeError, match=r"arrays that were computed inside\. Return the arrays"):
        Traced(lambda x: result(2 * x), (X,), {})
    assert evaluated(Traced(lambda x: Pair(1), (X,), {})).x == 1
    assert evaluated(Traced(lambda x: lambda: 1, (X,), {}))() == 1


# nnx modules.


def test_without_modules_nothing_changes():
    tree = {"x": X, "f": jnp.sin}
    assert mutable.extract(tree) == (tree, None, ()) and mutable.insert(tree, None) == (tree, None)
    assert mutable.updates(None, None) is None
    assert mutable.apply(3, (), None) == 3 and mutable.returned(X, None) is X


def test_modules_as_arrays_and_back():
    nnx = pytest.importorskip("flax.nnx")
    count, other = nnx.Variable(jnp.float32(1)), nnx.Variable(X)
    tree, modules, found = mutable.extract({"a": count, "b": [other, count], "c": 3})
    assert found[0] is count and len(modules.arrays) == 2  # the shared variable once
    assert not any(isinstance(x, nnx.Variable) for x in jax.tree.leaves(tree))
    new, copies = mutable.insert(tree, modules)
    assert new["a"] is new["b"][1] is not count and new["c"] == 3
    new["a"][...] += 1
    assert count[...] == 1
    assert mutable.apply(None, found, mutable.updates(copies, modules)) is None
    assert count[...] == 2
    same(other[...], X)


def test_updates_of_a_traced_function():
    nnx = pytest.importorskip("flax.nnx")
    count = nnx.Variable(jnp.float32(1))

    def f(count, x):
        count[...] += x
        return 2 * count[...]

    traced = Traced(f, (count, jnp.float32(3)), {})
    assert count[...] == 1 and len(traced.closed.jaxpr.outvars) == 2
    assert evaluated(traced) == 8 and count[...] == 4


# Values.


def test_restore_casts_once():
    value = Value(X.astype("bfloat16"), "note")
    aval = jax.typeof(X)
    assert value.note == "note" and value.restored is None
    assert restore(value, aval).dtype == jnp.float32 and restore(value, aval) is restore(
        value, aval
    )
    same(Value(X).x, restore(Value(X), aval))
    assert restore(Value(X), aval) is not None and Value(X).restored is None
    token = object()
    assert restore(Value(token), object()) is token  # what has no dtype stays


def test_bind_and_plain():
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, (0,)))(X).jaxpr.eqns
    (low,) = bind(eqn, [X.astype("bfloat16")])
    assert low.x.dtype == jnp.bfloat16 and low.x == 3
    (high,) = plain(eqn, [Value(X.astype("bfloat16"))])
    assert high.x.dtype == jnp.float32 and high.x == 3
    (eqn,) = jax.make_jaxpr(lambda x: x.astype("int8"))(X).jaxpr.eqns
    assert bind(eqn, [X], new_dtype=jnp.dtype("int16"))[0].x.dtype == jnp.int16


@pytest.mark.parametrize("method", [False, True])
def test_a_module_that_is_the_function_is_updated(method):
    nnx = pytest.importorskip("flax.nnx")
    norm, other = (nnx.BatchNorm(2, rngs=nnx.Rngs(0)) for _ in range(2))
    x = jnp.arange(8.0).reshape(4, 2)
    with jax.numpy_rank_promotion("allow"):
        f = ft.rewrite(norm.__call__ if method else norm, lambda *_: NotImplemented)
        np.testing.assert_allclose(f(x), other(x), rtol=1e-6)
        np.testing.assert_allclose(ft.tune(norm, "cpu")(x), other(x), rtol=1e-6)
    np.testing.assert_allclose(norm.mean[...], other.mean[...], rtol=1e-6)

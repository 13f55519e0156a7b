"""Whatever a tree holds comes back bit for bit: odd dtypes, NaN payloads, keys, empty arrays,
Python's own numbers."""

import pathlib
import struct
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fnet import training as tr
from fnet.training.checkpoints._leaves import DTYPES

SHAPES = [(), (1,), (3,), (2, 3), (0,), (0, 4), (4, 1, 2)]
WIDE = {
    "float64",
    "int64",
    "uint64",
    "complex128",
}  # NumPy's alone where JAX is not told to hold 64 bits


def held(name):
    """Whether this JAX has arrays of a dtype; that it has the name does not say so."""
    try:
        jax.device_put(np.zeros(1, DTYPES[name]))
    except (TypeError, jax.errors.JaxRuntimeError):
        return False
    return True


ON_DEVICE = [name for name in DTYPES if hasattr(jnp, name) and name not in WIDE and held(name)]
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def of_bits(name, shape, seed):
    """Any bits at all, so that every NaN's payload and every denormal comes up; small integers
    their values."""
    dtype, rng = DTYPES[name], np.random.default_rng(seed)
    if dtype.kind == "b" or name in ("int1", "uint1", "int2", "uint2", "int4", "uint4"):
        return rng.integers(0, 2, shape).astype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)


def on_device(name, shape, seed):
    return jax.device_put(of_bits(name, shape, seed))


seeds = st.integers(0, 2**32 - 1)
leaves = st.one_of(
    st.builds(of_bits, st.sampled_from(sorted(DTYPES)), st.sampled_from(SHAPES), seeds),
    st.builds(on_device, st.sampled_from(sorted(ON_DEVICE)), st.sampled_from(SHAPES), seeds),
    st.builds(
        lambda impl, seed, n: jax.random.split(jax.random.key(seed, impl=impl), n),
        st.sampled_from(KEYS),
        seeds,
        st.integers(1, 3),
    ),
    st.builds(jax.random.key, seeds),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.floats(width=32).map(np.float32),
    st.floats(width=32).map(jnp.asarray),
)
names = st.text(st.characters(blacklist_characters="/", blacklist_categories=("Cs",)), max_size=8)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.dictionaries(names, inner, max_size=4)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, st.none())
    ),
    max_leaves=6,
)


def bits(leaf):
    if type(leaf) is int:
        return str(leaf)
    if type(leaf) is float:
        return struct.pack("d", leaf)
    if type(leaf) is complex:
        return struct.pack("dd", leaf.real, leaf.imag)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes()


def same(old, new):
    assert jax.tree.structure(old) == jax.tree.structure(new)
    for (path, a), b in zip(jax.tree.leaves_with_path(old), jax.tree.leaves(new)):
        assert type(a) is type(b), path
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), path
        assert np.shape(a) == np.shape(b) and bits(a) == bits(b), path
        assert getattr(a, "weak_type", None) == getattr(b, "weak_type", None), path


@settings(max_examples=40, deadline=None)
@given(trees)
def test_any_tree_comes_back_bit_for_bit(tree):
    with tempfile.TemporaryDirectory() as folder:
        with tr.Checkpoints(folder) as checkpoints:
            checkpoints.save(3, tree)
        same(tree, tr.Checkpoints(folder).restore(tree))
        assert sorted(path.name for path in pathlib.Path(folder).iterdir()) == [".lock", "3"]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype(tmp_path, name):
    tree = {"host": of_bits(name, (5, 7), 0)} | (
        {"device": on_device(name, (5, 7), 1)} if name in ON_DEVICE else {}
    )
    with tr.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
    same(tree, checkpoints.restore(tree))


def test_a_shape_and_a_key_to_be_filled(tmp_path):
    tree = {"x": jnp.arange(3.0), "keys": jax.random.split(jax.random.key(0, impl="rbg"), 2)}
    with tr.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
    same(tree, checkpoints.restore(jax.eval_shape(lambda: tree)))


def test_big_endian_arrays_keep_their_values(tmp_path):
    tree = {"x": np.arange(3, dtype=">f4")}
    with tr.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, tree)
    back = checkpoints.restore(tree)["x"]
    assert back.tolist() == [0, 1, 2]

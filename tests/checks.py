"""Shared by several tests: measures of equality, counts of calls, leaked tracers, and the quick
cases of tables."""

import contextlib
import functools
import gc

import jax
import numpy as np
import pytest


def close(got, want, tolerance=1e-5):
    """Same structure, shapes and dtypes, and max|a - b| / max|b| within the tolerance for every
    leaf."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want)):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), (name, a.shape, a.dtype, b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(b).all(), name
        error = np.abs(a - b).max(initial=0) / max(
            np.abs(b).max(initial=0), np.finfo(np.float32).tiny
        )
        assert error <= tolerance, f"{name}: {error:.2e} > {tolerance}"


def same(got, want):
    """Bit for bit equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), jax.tree_util.keystr(path))


def sampled(table, quick):
    """The names of a table for `parametrize`: those in `quick` run in `make test`, all in `make
    test-all`."""
    assert {*quick} <= {*table}, {*quick} - {*table}
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in table
    ]


@contextlib.contextmanager
def checking_leaks():
    """`jax.checking_leaks()`, which collects garbage after each trace: here only among what is
    created inside."""
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


def counted(function):
    """`function` with an attribute `calls` that counts how often Python ran it."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        called.calls += 1
        return function(*args, **kwargs)

    called.calls = 0
    return called

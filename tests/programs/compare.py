"""Comparison of the results of two programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import is_array, is_ref


class Differs(Exception):
    """The transformed program and plain JAX disagree."""


def same_structure(got, want):
    got, want = jax.tree.structure(got), jax.tree.structure(want)
    if got != want:
        raise Differs(f"structure: expected {want}, got {got}")


def same_arguments(mine, reference, tolerance, low):
    """Arguments that are mutated in place hold the same values."""
    for (path, y), x in zip(jax.tree.leaves_with_path(reference), jax.tree.leaves(mine)):
        if is_ref(y):
            x, y = x[...], y[...]
        if is_array(y) and not (isinstance(y, jax.Array) and y.is_deleted()):
            same_leaf(
                f"argument {jax.tree_util.keystr(path)} afterwards",
                x,
                y,
                0.1 if low else tolerance,
                None,
            )


def same_sharding(got, want):
    if (
        isinstance(got, jax.Array)
        and isinstance(want, jax.Array)
        and len(want.sharding.device_set) > 1
        and (not got.sharding.is_equivalent_to(want.sharding, want.ndim))
    ):
        raise Differs(f"sharding: expected {want.sharding}, got {got.sharding}")


def largest(x) -> float:
    """The largest finite absolute value of a floating-point array; 0 for anything else."""
    if not is_array(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0.0
    x = np.abs(_wide(x))
    return float(x[np.isfinite(x)].max(initial=0.0))


def same_leaf(where, got, want, tolerance, coarse, floor=0.0):
    """One leaf of a result: kind, dtype, shape, weak type and values.

    Args:
        coarse: what plain JAX returns for arguments rounded to bfloat16, and a tolerance. If it is
            given, the error may be 4 times that of rounding the arguments, plus the tolerance times
            the largest value.
        floor: the least value that errors are relative to.
    """
    if not is_array(want) and not isinstance(want, (bool, int, float, complex)):
        if not (got is want or got == want):
            raise Differs(f"{where}: expected {want!r}, got {got!r}")
        return
    types = jax.typeof(got), jax.typeof(want)
    for name in ("dtype", "shape", "weak_type"):
        mine, theirs = (getattr(t, name, None) for t in types)
        if mine != theirs and not (name == "weak_type" and types[1].dtype == bool):
            raise Differs(f"{where}: {name}: expected {theirs}, got {mine}")
    got, want = _leaf(got), _leaf(want)
    x, y = _wide(got), _wide(want)
    if not y.size:
        return
    z = None if coarse is None else _wide(_leaf(coarse[0]))
    if y.dtype.kind not in "fc":
        if not np.array_equal(x, y) and (z is None or np.array_equal(y, z)):
            raise Differs(f"{where}: expected {_short(y)}, got {_short(x)}")
        return
    finite = np.isfinite(y)
    if not np.array_equal(np.isfinite(x), finite) or not np.array_equal(
        x[~finite], y[~finite], equal_nan=True
    ):
        if z is None or np.array_equal(np.isfinite(z), finite):
            raise Differs(f"{where}: expected {_short(y)}, got {_short(x)}")
        return
    if not finite.any():
        return
    scale = max(np.abs(y[finite]).max(), floor, 1e-30)
    error = np.abs(x[finite] - y[finite]).max() / scale
    if z is None:
        bound = _bound(want, tolerance)
    else:
        same = np.isfinite(z) & finite
        bound = coarse[1] + 4 * (np.abs(z[same] - y[same]).max(initial=0) / scale)
    if not error <= bound:
        raise Differs(
            f"{where}: expected {_short(y)}, got {_short(x)} (relative error {error:.1e}, bound "
            f"{bound:.1e})"
        )


def _bound(want, tolerance) -> float:
    """The tolerance, but not below 4 units in the last place of a narrow dtype."""
    info = jnp.finfo(jnp.result_type(want))
    bound = tolerance or (1e-12 if info.eps < 1e-10 else 1e-5)
    return max(bound, 4 * float(info.eps)) if info.bits < 32 else bound


def _leaf(x):
    """An array whose elements are numbers."""
    if is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if is_array(x) and x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    return x


def _wide(x):
    x = np.asarray(x)
    if (x.dtype.kind in "biufc" and x.dtype.itemsize >= 4) or x.dtype.kind in "biu":
        return x.astype(np.float64) if x.dtype.kind == "f" else x
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(np.int64)


def _short(x):
    flat = np.array2string(np.asarray(x).ravel()[:6], precision=6, separator=", ")
    return flat if np.size(x) <= 6 else f"{flat[:-1]}, ...]"

"""Compares the derivatives of a function with finite differences."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet._util._text_table import aligned
from fnet.jaxpr import array_leaves, check_function

# Relative to a leaf's norm; rounding errors dominate smaller steps.
_STEPS = tuple(2.0**-k for k in range(2, 14, 2))


@dataclasses.dataclass(frozen=True)
class Slope:
    """The derivative of a function by one leaf of its first argument, along one direction.

    Attributes:
        path: the path of the leaf.
        derivative: what `jax.grad` computes.
        difference: what the finite difference estimates.
        uncertainty: the estimated error of the finite difference, from rounding and curvature.
        smallest: the smallest denominator of the relative error; rounding dominates derivatives
            below it.

    >>> rows = introspect.check_gradient(lambda w: jnp.sum(w["a"] ** 2), {"a": jnp.arange(3.0)}).rows
    >>> rows[0].path, bool(abs(rows[0].derivative - rows[0].difference) < 1e-3)
    ('a', True)
    """

    path: str
    derivative: float
    difference: float
    uncertainty: float
    smallest: float

    @property
    def error(self) -> float:
        """The relative error, max(0, |derivative - difference| - 4 uncertainty) / max(|derivative|,
        |difference|, smallest).

        Four times the uncertainty is subtracted because the finite difference is not exact either.
        """
        excess = max(0.0, abs(self.derivative - self.difference) - 4 * self.uncertainty)
        if not np.isfinite([self.derivative, self.difference]).all():
            return float("inf")
        return excess / max(abs(self.derivative), abs(self.difference), self.smallest)


@dataclasses.dataclass(frozen=True)
class GradientCheck:
    """The result of `check_gradient`; `str()` returns a table.

    Attributes:
        rows: a `Slope` for each leaf, the one with the largest error first.
        tolerance: the largest error that counts as equal.
        dtype: the dtype in which the function was evaluated.

    >>> introspect.check_gradient(lambda w: jnp.sum(w ** 2), jnp.arange(3.0)).equal
    True
    """

    rows: tuple[Slope, ...]
    tolerance: float
    dtype: str

    @property
    def worst(self) -> Slope:
        return self.rows[0]

    @property
    def equal(self) -> bool:
        """Whether each derivative agrees with its finite difference, up to `tolerance`."""
        return self.worst.error <= self.tolerance

    def __str__(self):
        table = [("leaf", "derivative", "finite difference", "uncertainty", "error")]
        table += [
            (
                row.path,
                f"{row.derivative:.6g}",
                f"{row.difference:.6g}",
                f"{row.uncertainty:.1e}",
                f"{row.error:.1e}",
            )
            for row in self.rows
        ]
        verdict = (
            "all derivatives agree"
            if self.equal
            else f"the derivative by {self.worst.path} is wrong"
        )
        return "\n".join(
            [
                *aligned(table, left=range(5)),
                f"{verdict} (in {self.dtype}, tolerance {self.tolerance:.0e})",
            ]
        )


def check_gradient(
    f: Callable, *args: Any, tolerance: float = 1e-3, seed: int = 0
) -> GradientCheck:
    """Compares the derivative of `f` by each leaf of its first argument with finite differences.

        report = introspect.check_gradient(loss, params, batch)
        assert report.equal, report

    For each leaf x and a random direction d of norm 1, (f(x + h d) - f(x - h d)) / 2h is computed
    for smaller and smaller steps h, in float64 if f can run in it. What counts is the difference
    that changed least from one step to the next.

    Args:
        f: a function with floating-point results. Of several numbers, a random linear combination
            is differentiated.
        args: the arguments of f. The floating-point leaves of the first one are checked.
        tolerance: the largest relative error that counts as equal. Default 1e-3.
        seed: the seed of the random directions. Default 0.

    Returns:
        A `GradientCheck`.

    Raises:
        TypeError: the first argument or the result of f contains no floating-point arrays.

    >>> check_gradient(lambda x: jnp.sum(jnp.sin(x)), jnp.ones(3)).equal
    True
    """
    check_function("check_gradient", f)
    if not any(map(_real, jax.tree.leaves(args[:1]))):
        raise TypeError(
            "check_gradient: the first argument has no floating-point arrays to differentiate by"
        )
    with contextlib.suppress(TypeError, ValueError), jax.enable_x64(True):  # f may require float32
        wide = jax.tree.map(lambda x: x.astype(jnp.float64) if _real(x) else x, args)
        return _check(f, wide, tolerance, seed)
    return _check(f, args, tolerance, seed)


def _check(f, args, tolerance, seed) -> GradientCheck:
    moving, rebuild = array_leaves(args[0], _real)
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, x in jax.tree.leaves_with_path(args[0])
        if _real(x)
    ]
    rng = np.random.default_rng(seed)

    @jax.jit
    def total(moved):
        return _sum(f(rebuild(moved), *args[1:]), seed)

    gradients = jax.jit(jax.grad(total))(moving)
    rows = []
    for n, x in enumerate(map(np.asarray, moving)):
        direction = rng.normal(size=x.shape)
        direction = (direction / np.linalg.norm(direction)).astype(x.dtype)
        scale = max(float(np.linalg.norm(x.astype(np.float64))), 1.0)

        def at(h, n=n, x=x, direction=direction):
            changed = (x + h * direction).astype(x.dtype)
            return float(total([*moving[:n], jnp.asarray(changed), *moving[n + 1 :]]))

        slopes = [(at(h * scale) - at(-h * scale)) / (2 * h * scale) for h in _STEPS]
        changes = np.abs(np.diff(slopes)).tolist()
        best = int(np.nanargmin(changes)) if not np.isnan(changes).all() else 0
        derivative = float(np.sum(np.asarray(gradients[n], np.float64) * direction))
        rows.append(
            Slope(paths[n] or "the argument", derivative, slopes[best + 1], changes[best], 0.0)
        )
    largest = max(abs(row.derivative) for row in rows)
    smallest = (
        float(np.sqrt(np.finfo(np.float32 if moving[0].dtype.itemsize < 8 else np.float64).eps))
        * largest
    )
    rows = [
        dataclasses.replace(row, smallest=max(smallest, np.finfo(np.float32).tiny)) for row in rows
    ]
    rows.sort(key=lambda row: -row.error)
    return GradientCheck(tuple(rows), tolerance, str(moving[0].dtype))


def _sum(result, seed):
    """Returns a random linear combination of the floating-point results. A scalar result is
    returned unchanged."""
    arrays = [x for x in jax.tree.leaves(result) if _real(x)]
    if not arrays:
        raise TypeError("check_gradient: the function returns nothing of a floating-point dtype")
    if len(arrays) == 1 and arrays[0].ndim == 0:
        return arrays[0]
    keys = jax.random.split(jax.random.key(seed), len(arrays))
    return sum(
        jnp.sum(x * jax.random.normal(key, x.shape, x.dtype)) for key, x in zip(keys, arrays)
    )


def _real(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)

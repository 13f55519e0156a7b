"""Statistics of values, cotangents and gradients by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import transforms as ft
from fnet._util._text_table import aligned
from fnet.jaxpr import check_function


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Statistics of one array: a parameter, or a named value (see `transforms.sites`).

    Attributes:
        name: the path of the parameter, or the name of the value. In a scan or stack, each
            iteration has its own, such as "blocks/mlp [2]".
        mean, std, largest: mean, standard deviation and largest absolute value of the finite
            elements.
        nonfinite: the number of elements that are NaN or infinite.
        dead: the fraction of dead units. A unit, an index of the last axis, is dead if the gradient
            of the result is 0 for all its elements, for example because it enters a relu and is
            never positive.
        gradient: the Euclidean norm of the derivative of the function's result by the array.

    >>> report = introspect.statistics(lambda w: ft.tag(w ** 2, "square").sum(), jnp.array([3.0, 4.0]))
    >>> row = report.parameters[0]
    >>> float(row.mean), float(row.largest), float(row.gradient)
    (3.5, 4.0, 10.0)
    """

    name: str
    mean: float
    std: float
    largest: float
    nonfinite: int
    dead: float
    gradient: float


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The result of `statistics`; `str()` returns a table.

    A `Statistic` holds the numbers of one array: mean, standard deviation, largest absolute value,
    number of NaN and infinite elements, fraction of dead units, and norm of the gradient.

    Attributes:
        result: the result of the function.
        sites: a `Statistic` for each named value, in the order of computation.
        parameters: a `Statistic` for each parameter.
        arrays: the arrays themselves, for histograms, {name: array}. Each named value (site) has
            two, "values/SITE" and its derivative "cotangents/SITE"; each parameter has two,
            "parameters/PATH" and its derivative "gradients/PATH".

    >>> report = introspect.statistics(lambda w, x: ft.tag(x @ w, "product").sum(), jnp.ones((2, 3)), jnp.ones((4, 2)))
    >>> "product" in str(report), sorted(report.arrays)
    (True, ['cotangents/product', 'gradients/params', 'parameters/params', 'values/product'])
    """

    result: float
    sites: tuple[Statistic, ...]
    parameters: tuple[Statistic, ...]
    arrays: Mapping[str, np.ndarray]

    def __str__(self):
        title = ("", "mean", "std", "largest", "not finite", "dead", "gradient norm")
        table = [
            ("site", *title[1:]),
            *map(_cells, self.sites),
            ("parameter", *title[1:]),
            *map(_cells, self.parameters),
        ]
        return "\n".join(aligned(table))


def statistics(f: Callable, params: Any, *args: Any, pattern: str = ".*") -> Statistics:
    """Computes mean, standard deviation, dead units and gradient norms of named values and
    parameters.

        report = introspect.statistics(loss, params, batch)
        print(report)

    The named values are those that `transforms.sites` lists, such as the outputs of layers and what
    `transforms.tag` names. For histograms in TensorBoard, pass `tr.fit(evaluate=)` a function that
    returns `{name: tr.Histogram(x) for name, x in report.arrays.items()}`.

    Args:
        f: a function `f(params, *args)` that returns a floating-point scalar, such as a loss.
        params: the parameters, a tree of arrays.
        args: further arguments of f.
        pattern: a regular expression for the names of values, as in `transforms.capture`. Default:
            all.

    Returns:
        `Statistics`.

    Raises:
        TypeError: f does not return a floating-point scalar.
        ValueError: as in `transforms.capture_cotangents`.

    >>> def loss(w, x):
    ...     with jax.named_scope("hidden"):
    ...         h = jax.nn.relu(x @ w)
    ...     return (h ** 2).mean()
    >>> report = introspect.statistics(loss, jnp.ones((2, 3)), jnp.ones((4, 2)))
    >>> "hidden" in str(report)
    True
    """
    check_function("statistics", f)
    scans = {site.name: len(site.scans) for site in ft.sites(f)(params, *args)}
    result = jax.eval_shape(f, params, *args)
    if getattr(result, "shape", None) != () or not jnp.issubdtype(result.dtype, jnp.floating):
        what = (
            f"{result.dtype}{list(result.shape)}"
            if hasattr(result, "dtype")
            else f"a {type(result).__name__}"
        )
        raise TypeError(
            f"statistics: the function must return a floating-point scalar, such as a loss; got "
            f"{what}"
        )
    (value, values), cotangents = ft.capture_cotangents(
        ft.capture(f, pattern), pattern, has_aux=True
    )(params, *args)
    gradients = jax.tree.leaves(jax.grad(f, allow_int=True)(params, *args))
    arrays: dict[str, np.ndarray] = {}
    sites, parameters = [], []
    for name in [name for name in scans if name in values]:
        for path, x in jax.tree.leaves_with_path(values[name]):
            cotangent = next(
                (y for other, y in jax.tree.leaves_with_path(cotangents[name]) if other == path),
                None,
            )
            if cotangent is not None:
                arrays[f"values/{name}{jax.tree_util.keystr(path)}"] = np.asarray(x)
                arrays[f"cotangents/{name}{jax.tree_util.keystr(path)}"] = np.asarray(cotangent)
                sites += _rows(name + jax.tree_util.keystr(path), x, cotangent, scans[name])
    for (path, x), gradient in zip(jax.tree.leaves_with_path(params), gradients):
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "params"
            arrays[f"parameters/{name}"], arrays[f"gradients/{name}"] = (
                np.asarray(x),
                np.asarray(gradient),
            )
            parameters += _rows(name, x, gradient, 0)
    return Statistics(float(value), tuple(sites), tuple(parameters), arrays)


def _rows(name, x, gradient, scans) -> list[Statistic]:
    """Returns a list with the `Statistic` of the array x. If `scans` is not 0, the first `scans`
    axes of x are the iterations of nested scans, and the list contains one `Statistic` for each
    iteration."""
    if scans:
        return [
            row
            for i in range(len(x))
            for row in _rows(f"{name} [{i}]", x[i], gradient[i], scans - 1)
        ]
    x, gradient = (np.asarray(each, np.float64) for each in (x, gradient))
    finite = x[np.isfinite(x)]
    units = gradient.reshape(-1, gradient.shape[-1]) if gradient.ndim else gradient.reshape(1, 1)
    return [
        Statistic(
            name,
            float(finite.mean()) if finite.size else 0.0,
            float(finite.std()) if finite.size else 0.0,
            float(np.abs(finite).max(initial=0.0)),
            int(x.size - finite.size),
            float((units == 0).all(0).mean()) if units.size else 0.0,
            float(np.linalg.norm(gradient)),
        )
    ]


def _cells(row) -> tuple[str, ...]:
    return (
        row.name,
        f"{row.mean:.3g}",
        f"{row.std:.3g}",
        f"{row.largest:.3g}",
        str(row.nonfinite or ""),
        f"{100 * row.dead:.0f} %" if row.dead else "",
        f"{row.gradient:.3g}",
    )

"""Computes importance scores: how much a function depends on each channel, head or hidden unit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.axes import ACTIVATIONS, observe
from fnet.compress._shrink._groups import Call, Group
from fnet.jaxpr import array_leaves, is_array
from fnet.transforms import capture, sites

METHODS = ("magnitude", "taylor", "activations")
_NAME = re.compile(r"(?:.*/)?" + ACTIVATIONS.format(r"(?P<atom>\d+)") + r"(?:#\d+)?")


def scores(
    method: str,
    call: Call,
    groups: list[Group],
    f: Callable,
    args: tuple,
    kwargs: dict,
    loss: Callable | None,
) -> dict[int, np.ndarray]:
    """Returns {identifier of a group of axes: array with the score of each index, such as a
    channel}. The axes of a group are pruned together. The identifier of a group is the integer
    `Group.atom`.

    Raises:
        ValueError: a score is not finite, or no activations are multiplied by parameters along an
            axis of `groups`.
    """
    found = _scores(method, call, groups, f, args, kwargs, loss)
    for group in groups:
        i, axis, _ = group.members[0]
        name = f"{call.leaves[i].path} ({axis})"
        if group.atom not in found:
            raise ValueError(
                f"shrink: score='activations' cannot rank the indices of {name}: no matrix product "
                "or convolution of an activation and a parameter, outside of while loops and "
                "branches of cond, sums over them. Use another score, or "
                f"keep={{{call.leaves[i].path!r}: 1}}"
            )
        if not np.isfinite(found[group.atom]).all():
            raise ValueError(
                f"shrink: the scores of {name} are NaN or infinite, so its indices cannot be "
                "ranked; pass finite parameters, and arguments on which the function and its "
                "derivatives are finite"
            )
    return found


def _scores(method, call, groups, f, args, kwargs, loss) -> dict[int, np.ndarray]:
    if method == "activations":
        return _activations(call)
    arrays = [leaf.array for leaf in call.leaves]
    if method == "taylor":
        slopes = _gradients(f, args, kwargs, loss)
        known = {id(leaf): slope for leaf, slope in zip(_arrays(args[0]), slopes)}
        arrays = [
            np.asarray(x, float) * np.asarray(known[id(x)], float) if id(x) in known else x
            for x in arrays
        ]
    return {
        group.atom: sum(
            _mean_square(call, arrays[i], i, axis, position) for i, axis, position in group.members
        )
        for group in groups
    }


def _mean_square(call, x, i, axis, position):
    """The mean square of x for each index along one of the axes into which an axis splits, such as
    heads of [heads, head_dim]."""
    sizes = [call.program.atoms.size(atom) for atom in call.program.factors(i)[axis]]
    x = np.moveaxis(np.asarray(x, float), axis, 0).reshape(*sizes, -1)
    return np.square(x).mean(tuple(k for k in range(x.ndim) if k != position))


def _arrays(tree):
    return [x for x in jax.tree.leaves(tree) if is_array(x)]


def _gradients(f, args, kwargs, loss):
    """Returns the derivatives of loss(f(...)) with respect to the arrays of the parameters. For
    integer arrays, the derivatives are zeros."""
    floating = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
    moving, rebuild = array_leaves(args[0], floating)
    slopes = iter(
        jax.jit(jax.grad(lambda arrays: loss(f(rebuild(arrays), *args[1:], **kwargs))))(moving)
    )
    return [next(slopes) if floating(x) else np.zeros(x.shape) for x in _arrays(args[0])]


def _activations(call) -> dict[int, np.ndarray]:
    """Returns {identifier of a group of axes: array with the score of each index, such as a
    channel}. The score of an index is the mean square of the elements at this index in the
    activations that are multiplied by parameters. If several matrix products or convolutions sum
    over axes that are pruned together, the score of an index is the sum of the mean squares for all
    these operations."""
    arrays = [jnp.asarray(leaf.array) for leaf in call.leaves]
    evaluate = lambda *arrays: observe(call.program, list(arrays))
    names = [
        site.name
        for site in sites(evaluate)(*arrays)
        if _NAME.fullmatch(site.name) and site.inside is None
    ]
    found: dict[int, Any] = {}
    if names:
        for name, x in jax.jit(lambda *arrays: capture(evaluate, names)(*arrays)[1])(
            *arrays
        ).items():
            atom, x = int(_NAME.fullmatch(name)["atom"]), np.asarray(x, float)
            found[atom] = found.get(atom, 0) + x.mean(tuple(range(x.ndim - 1)))
    return found

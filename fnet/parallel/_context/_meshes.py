"""The meshes on which the planner splits time, if the user does not state one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fnet.parallel._context._context import attended, check
from fnet.parallel._context._mapped import AXIS
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target


def candidates(target: Target, given: Any, rows: int, *, asked: bool) -> list[dict[str, int]]:
    """Returns the meshes whose devices can share the rows, each as {axis: length}, with the
    shortest axis "context" first. There are none if the user states a mesh.

    Args:
        target: the devices.
        given: the mesh that the user states, or None.
        rows: the number of rows of the batch.
        asked: whether the user has asked for a context.

    Raises:
        ValueError: the user has asked for it, and there is none.
    """
    if given is not None:
        axes = given if isinstance(given, Mapping) else given.shape
        if asked and axes.get(AXIS, 1) < 2:
            raise ValueError(
                f"plan: strategy {AXIS!r} splits time over the mesh axis {AXIS!r}; the mesh has the "
                f"axes {', '.join(axes)}. Add the axis, or leave out mesh="
            )
        return []
    each = target.count // target.groups
    found = []
    for context in range(2, each + 1):
        data = each // context
        if data * context == each and rows % (data * target.groups) == 0:
            slices = {"slice": target.groups} if target.groups > 1 else {}
            found.append({**slices, "data": data, AXIS: context})
    if asked and not found:
        raise ValueError(
            f"plan: strategy {AXIS!r} splits time over several devices of a slice or machine; "
            f"{target} cannot share {rows} rows so"
        )
    return found


def shared(meshes: Sequence[dict[str, int]], rows: int, slices: int) -> list[dict[str, int]]:
    """Returns the meshes whose devices can share the rows of each of so many slices of a batch."""
    over = lambda axes: math.prod(axes.get(name, 1) for name in ("slice", "data"))
    return [axes for axes in meshes if rows % (slices * over(axes)) == 0]


def suitable(meshes: Sequence[dict[str, int]], traced: Any, *, asked: bool) -> list[dict[str, int]]:
    """Returns the meshes over which the time of a step can be split.

    Args:
        meshes: the meshes to choose from.
        traced: the jaxprs of the step, a `Traced`.
        asked: whether the user has asked for it.

    Raises:
        ValueError: the user has asked for it, and there is none.
    """
    if traced.typed or not meshes:
        return []
    closed, found = traced.program(Strategy("data")), []
    why = None
    try:
        times, spans = attended(closed, traced.state, traced.batch, meshes[0][AXIS])
    except ValueError:
        if asked:
            raise
        return []
    for axes in meshes:
        try:
            check(times, spans, traced.batch, axes[AXIS])
        except ValueError as error:
            why = why or error
        else:
            found.append(axes)
    if asked and why and not found:
        raise why
    return found

"""The meshes on which the planner places experts apart, if the user does not state one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from fnet import _jax
from fnet.jaxpr import equations
from fnet.parallel._experts._experts import placed
from fnet.parallel._experts._mixtures import AXIS, mixtures
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target


def candidates(
    target: Target, given: Any, rows: int, traced: Any, *, asked: bool
) -> list[dict[str, int]]:
    """Returns the meshes whose devices can share the experts of a step and the rows of its batch,
    each as {axis: length}, with the longest axis "expert" first. There are none if the user states
    a mesh.

    Args:
        target: the devices.
        given: the mesh that the user states, or None.
        rows: the number of rows of the batch.
        traced: the jaxprs of the step, a `Traced`.
        asked: whether the user has asked for the strategy.

    Raises:
        ValueError: the user has asked for it, and there is none.
    """
    if given is not None:
        axes = given if isinstance(given, Mapping) else given.shape
        if asked and axes.get(AXIS, 1) < 2:
            raise ValueError(
                f"plan: strategy {AXIS!r} splits experts over the mesh axis {AXIS!r}; the mesh has "
                f"the axes {', '.join(axes)}. Add the axis, or leave out mesh="
            )
        return []
    if traced.typed or rows % target.count:
        return _none(asked, f"{rows} rows are not a multiple of {target}")
    numbers = _numbers(traced)
    if not numbers:
        return _none(asked, "the step has no nn.MixtureOfExperts")
    each = target.count // target.groups
    slices = {"slice": target.groups} if target.groups > 1 else {}
    found = [
        {**slices, "data": each // n, AXIS: n}
        for n in range(each, 1, -1)
        if each % n == 0 and all(number % n == 0 for number in numbers)
    ]
    if not found:
        counts = " and ".join(f"{n}" for n in sorted(numbers))
        return _none(asked, f"{counts} experts have no divisor in common with {each} devices")
    return found


def _none(asked: bool, why: str) -> list:
    if asked:
        raise ValueError(f"plan: strategy {AXIS!r} splits experts over devices, but {why}")
    return []


def _numbers(traced: Any) -> set[int]:
    """The numbers of experts of the mixtures of a step."""
    closed = traced.program(Strategy("data"))
    if not any(eqn.primitive.name == "top_k" for eqn in equations(closed.jaxpr)):
        return set()  # without a second trace
    alone = AbstractMesh((1, 1), ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    step = placed(traced.step, alone)
    again = _jax.make_jaxpr(step)(traced.state, traced.batch)
    return {each.experts for each in mixtures(again)}

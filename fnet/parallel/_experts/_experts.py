"""What a plan with the mesh axis "expert" knows about a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType

from fnet import jaxpr
from fnet.layers._experts_apart import ROOM, Apart, apart
from fnet.parallel._experts._mixtures import AXIS, Mixture, kernel_axes, mixtures, transfers
from fnet.parallel._ledger import Transfer
from fnet.parallel._sharding_rules import path_of


@dataclasses.dataclass(frozen=True)
class Experts:
    """How the experts of a step are divided over devices.

    Attributes:
        devices: the length of the mesh axis "expert".
        mixtures: the mixtures of experts of the step.
        rules: the specs of kernels of experts, {path of a parameter: spec}.
    """

    devices: int
    mixtures: tuple[Mixture, ...]
    rules: dict[str, tuple]

    @classmethod
    def of(cls, closed: Any, state: Any, mesh: Any) -> Experts:
        """Analyzes the jaxpr of a step that was traced with `placed`.

        Raises:
            ValueError: the step has no mixture of experts, or the mesh has stages.
        """
        if mesh.shape.get("stage", 1) > 1:
            raise ValueError(
                f"plan: the mesh axes {AXIS!r} and 'stage' cannot be combined, because a stage works "
                "on a part of the layers alone; leave one of them out"
            )
        found = mixtures(closed)
        if not found:
            raise ValueError(
                f"plan: the mesh axis {AXIS!r} splits the experts of nn.MixtureOfExperts, and this "
                "step has none; leave the axis out, or give it another name for rules of your own"
            )
        paths = [path for path, _ in jax.tree.leaves_with_path(state)]
        axes = kernel_axes(closed.jaxpr, len(paths))
        rules = {path_of(paths[i][1:]): (*[None] * axis, AXIS) for i, axis in axes.items()}
        return cls(mesh.shape[AXIS], found, rules)

    def transfers(self, closed: Any, mesh: Any) -> list[Transfer]:
        """The estimated transfers of the mixtures of a step."""
        return transfers(closed, mesh.shape)

    def lines(self, ledger: Any) -> list[str]:
        """What `plan.explain()` says. `ledger` has the estimated transfers."""
        said = []
        for each in self.mixtures:
            sent = sum(
                transfer.sent
                for transfer in ledger.transfers
                if transfer.collective == "all-to-all" and transfer.scope == each.scope
            )
            times = f"{each.times} x " if each.times > 1 else ""
            said.append(
                f"{times}experts at {each.scope or 'the root'}: {each.experts // self.devices} of "
                f"{each.experts} on each of {self.devices} devices; tokens travel to them and back "
                f"by all-to-all, {sent / 2**20:,.1f} MiB sent per step (estimated), with room for "
                f"{ROOM:g} times the mean load; more of them travel in further rounds"
            )
        return said


def active(mesh: Any) -> bool:
    """Whether a mesh has an axis for experts. An explicit axis is the user's own."""
    return _automatic(mesh) and mesh.shape[AXIS] > 1


def _automatic(mesh: Any) -> bool:
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    return kinds.get(AXIS) == AxisType.Auto


def placed(step: Callable, mesh: Any) -> Callable:
    """Returns a step whose experts lie on the devices along the axis "expert" of a mesh, whose axes
    have the type Auto."""
    over = lambda *names: tuple(name for name in names if name in mesh.shape)
    where = Apart(mesh, AXIS, over("slice", "data", AXIS), over("context"))

    @jaxpr.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        with apart(where):
            return step(*args, **kwargs)

    return run

"""A plan: where the arrays of a step lie, and what was compared before it was chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import hardware
from fnet.jaxpr import Compiled
from fnet.parallel import _check, _compile, _cost, _explain
from fnet.parallel._estimate import Estimate
from fnet.parallel._targets import Target
from fnet.parallel._ways import Way


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of spreading a step.

    Attributes:
        way: which. strategy: its name.
        persistent: bytes of the state in each chip's memory, including padding.
        arguments: the same with the chip's part of the batch.
        exact: whether `persistent` and `arguments` are exact; if not, they are estimated.
        estimate: peak and bytes sent, estimated.
        compiled: the same, read from the compiled program; None: not compiled.
        time: of a step at best.
        verdict: "chosen" or why not.
    """

    way: Way
    persistent: int
    arguments: int
    exact: bool
    estimate: Estimate
    compiled: _compile.Compiled | None
    time: _cost.Time
    verdict: str = ""

    @property
    def strategy(self) -> str:
        return str(self.way)

    @property
    def peak(self) -> int:
        """Bytes that a step needs on each chip: compiled, else estimated."""
        return self.compiled.peak if self.compiled and self.compiled.peak is not None else self.estimate.peak

    @property
    def ledger(self):
        """What is sent: compiled, else estimated."""
        return self.compiled.ledger if self.compiled and self.compiled.ledger is not None else self.estimate.ledger


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a step's arrays lie. `print(plan)` says what was compared.

    Attributes:
        target: the chips. mesh: their mesh; one without devices where they cannot be compiled for.
        way: what was chosen.
        state, batch: trees of `NamedSharding`s.
        candidates: what was compared.
        whole: (path, shape, why) of leaves that are on every chip although the strategy splits.
        shapes: the batch's tree of shapes. axes: the axes of the mesh that its rows are spread over.
        unused: paths of the batch's leaves that the step does not read.
        make: what makes a state of a key. find: what finds `most`.
    """

    target: Target
    mesh: Mesh | AbstractMesh
    way: Way
    state: Any
    batch: Any
    whole: tuple[tuple[str, tuple[int, ...], str], ...]
    shapes: Any
    unused: tuple[str, ...]
    make: Callable = dataclasses.field(repr=False)
    candidates: tuple[Candidate, ...] = ()
    find: Callable | None = dataclasses.field(default=None, repr=False)

    @property
    def strategy(self) -> str:
        return str(self.way)

    @property
    def pins(self) -> bool:
        return self.way.pins

    @property
    def chip(self) -> hardware.Chip:
        return self.target.chip

    @property
    def here(self) -> bool:
        """Whether the chips are, so that the plan can be run."""
        return self.target.here

    @property
    def axes(self) -> tuple[str, ...]:
        return rows_over(self.mesh)

    @property
    def most(self) -> tuple[tuple[Way, int], ...]:
        """(way, rows) of the largest batches that one chip holds, estimated; nothing where the plan is for several."""
        return self.find() if self.find else ()

    @property
    def chosen(self) -> Candidate:
        return next(each for each in self.candidates if each.way == self.way)

    def init(self, key: jax.Array) -> Any:
        """The state that `init(key)` makes, born where it belongs: no chip ever holds more of it than its share."""
        self._check_here("init")
        return jax.jit(self.make, out_shardings=self.state)(key)

    def place(self, state: Any) -> Any:
        """A state that exists already, such as one read from a file, put where it belongs. It is copied: the step takes
        over the memory of what it is given."""
        self._check_here("place")
        if jax.tree.structure(state) != jax.tree.structure(self.state):
            raise ValueError(f"plan.place: the state has another structure than was planned for: "
                             f"{jax.tree.structure(state)} and {jax.tree.structure(self.state)}")
        return jax.tree.map(lambda x, where: jax.device_put(jnp.array(x, copy=True), where), state, self.state)

    def _check_here(self, what):
        if not self.here:
            raise ValueError(f"plan.{what}: this plan is for {self.target} that are not here; plan for devices='local' "
                             "to run")

    def jit(self, step: Callable) -> Callable:
        """Compiles `step(state, batch) -> (state, metrics)` for the plan's devices.

            plan = parallel.plan(step, init, batch)
            state = plan.init(jax.random.key(0))
            step = plan.jit(step)
            state, metrics = step(state, batch)

        The step is written for one device and receives the whole batch: means over it, including batch statistics, are
        over all devices, and the results are those of one device. The state keeps the plan's shardings and is donated.

        Args:
            step: the planned step.

        Returns:
            The compiled step, with the methods `lower` and `trace` of `jax.jit`. Batches may be NumPy arrays. It raises
            ValueError if the devices are not attached, if they do not divide the rows of the batch, and for an array
            that has another sharding than the plan's.
        """
        compiled = jax.jit(self.way.applied(step, self.mesh, self.axes), in_shardings=(self.state, self.batch),
                           out_shardings=(self.state, NamedSharding(self.mesh, P())), donate_argnums=0)

        def explained(call):
            def run(state, batch):
                try:
                    return call(state, batch)
                except (TypeError, ValueError) as error:
                    if reason := self.objection(state, batch):    # checked here, so that valid calls do not pay for it
                        raise ValueError(f"plan.jit: {reason}") from error
                    raise

            return run

        return Compiled(step, explained(compiled), explained(compiled.lower), explained(compiled.trace))

    def objection(self, state: Any, batch: Any) -> str | None:
        """What keeps the step from taking these, in a sentence."""
        return _check.call(self, state, batch)

    def explain(self) -> str:
        """A table of the candidates and the reasons; every number says how it is known."""
        return _explain.table(self)

    __str__ = explain


def rows_over(mesh) -> tuple[str, ...]:
    """The axes of a mesh that the rows of a batch are spread over."""
    return tuple(name for name in ("slice", "data") if name in mesh.shape)

"""Plan: the shardings of a step's arrays, and the strategies that were compared."""

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
from fnet.parallel._ledger import Ledger
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One strategy for running a step on many devices, with its estimated or compiled properties.

    Attributes:
        options: the strategy, a `Strategy` object. The property `strategy` is its name.
        persistent: bytes of the state in each chip's memory, including padding.
        arguments: bytes of the state and of the batch in each chip's memory.
        exact: True if `persistent` and `arguments` are exact, False if they are estimated.
        estimate: estimated peak memory and transfers.
        compiled: peak memory and transfers of the compiled program, or None if the candidate was not compiled.
        time: the times of a step at the chips' peak rates. `time.seconds` is the minimum time of the step.
        verdict: a text that begins with "chosen", or the reason why the candidate was not selected.

    >>> step = lambda state, batch: ({"w": state["w"] - 0.1 * batch.mean(0)}, {"mean": batch.mean()})
    >>> init = lambda key: {"w": jax.random.normal(key, (3,))}
    >>> plan = parallel.plan(step, init, jnp.ones((8, 3)), devices="v5e:2x2", compile=False)
    >>> [candidate.strategy for candidate in plan.candidates]
    ['data', 'zero1', 'fsdp', 'fsdp+pins']
    """

    options: Strategy
    persistent: int
    arguments: int
    exact: bool
    estimate: Estimate
    compiled: _compile.Compiled | None
    time: _cost.Time
    verdict: str = ""

    @property
    def strategy(self) -> str:
        return str(self.options)

    @property
    def peak(self) -> int:
        """Peak bytes on each chip: read from the compiled program if the candidate was compiled, otherwise
        estimated."""
        return self.compiled.peak if self.compiled and self.compiled.peak is not None else self.estimate.peak

    @property
    def ledger(self) -> Ledger:
        """The transfers: read from the compiled program if the candidate was compiled, otherwise estimated."""
        return self.compiled.ledger if self.compiled and self.compiled.ledger is not None else self.estimate.ledger


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shardings of a step's arrays. `print(plan)` shows the comparison of strategies.

    Attributes:
        target: the devices.
        mesh: the mesh of the devices, a `Mesh`, or an `AbstractMesh` if there are no devices to compile for.
        options: the selected strategy, a `Strategy` object. The property `strategy` is its name.
        state, batch: the shardings of the state and of the batch, trees of `NamedSharding`s.
        candidates: the compared strategies.
        replicated: a tuple (path, shape, reason) for each leaf of the state that cannot be split, although the strategy
            splits the state. Each chip has a complete copy of such a leaf.
        shapes: the tree of shapes and dtypes of the batch.
        axes: the mesh axes over which the rows of the batch are split.
        unused: paths of the batch's leaves that the step does not read.
        init_fn: the function `init` that was passed to `parallel.plan`.

    >>> step = lambda state, batch: ({"w": state["w"] - 0.1 * batch.mean(0)}, {"mean": batch.mean()})
    >>> init = lambda key: {"w": jax.random.normal(key, (3,))}
    >>> plan = parallel.plan(step, init, jnp.ones((8, 3)), devices="v5e:2x2", compile=False)
    >>> plan.attached, plan.chip.name, dict(plan.mesh.shape)
    (False, 'TPU v5e', {'data': 4})
    """

    target: Target
    mesh: Mesh | AbstractMesh
    options: Strategy
    state: Any
    batch: Any
    replicated: tuple[tuple[str, tuple[int, ...], str], ...]
    shapes: Any
    unused: tuple[str, ...]
    init_fn: Callable = dataclasses.field(repr=False)
    candidates: tuple[Candidate, ...] = ()
    _find_largest: Callable | None = dataclasses.field(default=None, repr=False)

    @property
    def strategy(self) -> str:
        return str(self.options)

    @property
    def pins(self) -> bool:
        return self.options.pins

    @property
    def chip(self) -> hardware.Chip:
        return self.target.chip

    @property
    def attached(self) -> bool:
        """Whether the devices are attached, so that the plan can run."""
        return self.target.attached

    @property
    def axes(self) -> tuple[str, ...]:
        return rows_over(self.mesh)

    @property
    def largest_batches(self) -> tuple[tuple[Strategy, int], ...]:
        """The estimated largest batches that fit on one chip: a tuple of pairs (strategy, number of rows).

        It is empty if the plan is for several chips.
        """
        return self._find_largest() if self._find_largest else ()

    @property
    def chosen(self) -> Candidate:
        return next(each for each in self.candidates if each.options == self.options)

    def init(self, key: jax.Array) -> Any:
        """Creates the state `init(key)` with its shardings. Each chip creates only its own part."""
        self._check_attached("init")
        return jax.jit(self.init_fn, out_shardings=self.state)(key)

    def place(self, state: Any) -> Any:
        """Copies an existing state, for example a state read from a file, to the devices, with the plan's shardings.
        The original arrays remain valid after a step, which donates only the copy."""
        self._check_attached("place")
        if jax.tree.structure(state) != jax.tree.structure(self.state):
            raise ValueError(f"plan.place: the state has another structure than in the plan: "
                             f"{jax.tree.structure(state)} and {jax.tree.structure(self.state)}")
        return jax.tree.map(lambda x, where: jax.device_put(jnp.array(x, copy=True), where), state, self.state)

    def _check_attached(self, what):
        if not self.attached:
            raise ValueError(f"plan.{what}: this plan is for {self.target}, which are not attached; use "
                             "devices='local' to run it")

    def jit(self, step: Callable) -> Callable:
        """Compiles the training step `step(state, batch) -> (state, metrics)` for the plan's devices.

            plan = parallel.plan(step, init, batch)
            state = plan.init(jax.random.key(0))
            step = plan.jit(step)
            state, metrics = step(state, batch)

        The step is written for one device and receives the whole batch. Means over the batch, including batch
        statistics, are computed over all devices, so the results are equal to those on one device, up to rounding. The
        step donates the state, and the new state has the plan's shardings.

        Args:
            step: the step that was passed to `parallel.plan`.

        Returns:
            The compiled step, with the methods `lower` and `trace` of `jax.jit`. Batches may be NumPy arrays. The step
            raises ValueError if the devices are not attached, if the number of rows is not a multiple of the number of
            devices, or if the sharding of an array differs from the plan's.
        """
        compiled = jax.jit(self.options.applied(step, self.mesh, self.axes), in_shardings=(self.state, self.batch),
                           out_shardings=(self.state, NamedSharding(self.mesh, P())), donate_argnums=0)

        def explained(call):
            def run(state, batch):
                try:
                    return call(state, batch)
                except (TypeError, ValueError) as error:
                    if reason := self.objection(state, batch):    # after an error only: valid calls have no overhead
                        raise ValueError(f"plan.jit: {reason}") from error
                    raise

            return run

        return Compiled(step, explained(compiled), explained(compiled.lower), explained(compiled.trace))

    def objection(self, state: Any, batch: Any) -> str | None:
        """Returns the reason why the step cannot be called with this state and batch, or None if it can."""
        return _check.call(self, state, batch)

    def explain(self) -> str:
        """Returns a table of the candidates, with the reason why each was selected or rejected. Every number is marked
        as exact, compiled or estimated."""
        return _explain.table(self)

    __str__ = explain


def rows_over(mesh) -> tuple[str, ...]:
    """The mesh axes over which the rows of a batch are split."""
    return tuple(name for name in ("slice", "data") if name in mesh.shape)

"""Plan: the shardings of a step's arrays, and the strategies that were compared."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import hardware, jaxpr
from fnet.cost import MFU
from fnet.jaxpr import Compiled, Form, misdivided, pack
from fnet.parallel import _check, _compile, _cost, _explain, _mesh
from fnet.parallel._combinations import Combination
from fnet.parallel._comparison import Comparison
from fnet.parallel._context._context import Context
from fnet.parallel._estimate import Estimate
from fnet.parallel._experts._experts import Experts, active, placed
from fnet.parallel._ledger import Ledger
from fnet.parallel._pins import Avoided
from fnet.parallel._pipeline import Pipelined
from fnet.parallel._strategies import Strategy
from fnet.parallel._targets import Target
from fnet.transforms._modules import ModuleStep, batch_names, items_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One strategy that `parallel.plan` compared, with its costs.

    Attributes:
        options: the strategy, a `Strategy`; the property `strategy` is its name.
        mesh: the lengths of the mesh's axes, {axis: length}.
        persistent: the bytes of the state in each chip's memory, padding included.
        arguments: the same for the state and the batch together.
        exact: whether `persistent` and `arguments` are exact, or else estimated.
        estimate: the peak memory and the transfers, estimated from the jaxpr of the step.
        compiled: the peak memory and the transfers of the compiled program, or None if the step was
            not compiled with this strategy.
        time: the times of a step at the chips' peak rates; `time.seconds` is a lower bound.
        mfu: the model FLOPs utilization in that time, a `cost.MFU`: an estimate of the most that
            the strategy can reach.
        verdict: why the strategy was not chosen, or a text that begins with "chosen".

    >>> step = lambda state, batch: ({"w": state["w"] - 0.1 * batch.mean(0)}, {"mean": batch.mean()})
    >>> init = lambda key: {"w": jax.random.normal(key, (3,))}
    >>> plan = parallel.plan(step, init, jnp.ones((8, 3)), devices="v5e:2x2", compile=False)
    >>> [candidate.strategy for candidate in plan.candidates]
    ['data', 'zero1', 'fsdp', 'fsdp+pins']
    """

    options: Strategy
    mesh: Mapping[str, int]
    persistent: int
    arguments: int
    exact: bool
    estimate: Estimate
    compiled: _compile.Compiled | None
    time: _cost.Time
    mfu: MFU
    verdict: str = ""

    @property
    def strategy(self) -> str:
        return str(self.options)

    @property
    def combination(self) -> Combination:
        return Combination(self.options, tuple(self.mesh.items()))

    @property
    def peak(self) -> int:
        """The peak memory of each chip in bytes: compiled, or else estimated."""
        return (
            self.compiled.peak
            if self.compiled and self.compiled.peak is not None
            else self.estimate.peak
        )

    @property
    def ledger(self) -> Ledger:
        """The transfers between chips: compiled, or else estimated."""
        return (
            self.compiled.ledger
            if self.compiled and self.compiled.ledger is not None
            else self.estimate.ledger
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a step is divided: the result of `parallel.plan`. `print(plan)` compares the strategies.

    Attributes:
        target: the devices, a `Target` with the kind of chip and the number of devices.
        mesh: their `Mesh`, or an `AbstractMesh` if programs cannot be compiled for them.
        options: the chosen strategy, a `Strategy`; the property `strategy` is its name.
        state, batch: the shardings of the state and of the batch, trees of `NamedSharding`s.
        candidates: a `Candidate` for each strategy that was compared.
        replicated: (path, shape, reason) for each leaf of the state that the strategy would split
            but cannot. Each chip has a complete copy of it.
        shapes: the shapes and dtypes of the batch, a tree of `jax.ShapeDtypeStruct`s.
        axes: the mesh axes over which the rows of the batch are split.
        unused: the paths of the batch's leaves that the step does not read.
        avoided: an `Avoided` for each equation of the step that XLA would divide wrongly on this
            mesh and that `plan.jit` makes right: the names of the faults, the scope, and the bytes
            of the arrays that each device holds unsplit for it.
        pipeline: a `Pipelined` for each scan over layers that runs as a pipeline, with its schedule.
        init_fn: the function `init` that was passed to `parallel.plan`.
        context: how the step is split along time, if the mesh has an axis "context".
        experts: how the experts of the step are divided, if the mesh has an axis "expert".
        form: what the state has beside its arrays, if it has modules of flax.nnx or Equinox, or
            None. `state` has nested dicts in their places.

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
    context: Context | None = dataclasses.field(default=None, repr=False)
    experts: Experts | None = dataclasses.field(default=None, repr=False)
    form: Form | None = dataclasses.field(default=None, repr=False)
    candidates: tuple[Candidate, ...] = ()
    avoided: tuple[Avoided, ...] = ()
    pipeline: tuple[Pipelined, ...] = ()
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
        """Estimates of the largest batches that fit on one chip, as pairs (strategy, number of
        rows). Empty if the plan is for several devices, or if the memory of the chip is unknown.
        """
        return self._find_largest() if self._find_largest else ()

    @property
    def chosen(self) -> Candidate:
        mine = Combination(self.options, tuple(self.mesh.shape.items()))
        return next(each for each in self.candidates if each.combination == mine)

    def init(self, key: jax.Array) -> Any:
        """Creates the state `init(key)`. Each device creates only its own part."""
        self._check_attached("init")

        def init(key):
            with _mesh.tracing(self.mesh, self._typed):
                return pack(self.init_fn(key))[0]

        arrays = jax.jit(init, out_shardings=self.state)(key)
        return arrays if self.form is None else self.form.unpack(arrays)

    def place(self, state: Any) -> Any:
        """Copies an existing state, such as one from a file, to the devices. A step donates only
        the copy, so the original arrays remain valid.
        """
        self._check_attached("place")
        arrays, form = pack(state)
        if jax.tree.structure(arrays) != jax.tree.structure(self.state):
            raise ValueError(
                f"plan.place: the state has another structure than in the plan: "
                f"{jax.tree.structure(arrays)} and {jax.tree.structure(self.state)}"
            )
        placed = jax.tree.map(
            lambda x, where: jax.device_put(jnp.array(x, copy=True), where), arrays, self.state
        )
        return placed if form is None else form.unpack(placed)

    def _check_attached(self, what):
        if not self.attached:
            raise ValueError(
                f"plan.{what}: this plan is for {self.target}, which are not attached; use "
                "devices='local' to run it"
            )

    def jit(self, step: Callable) -> Callable:
        """Compiles `step(state, batch) -> (state, metrics)` for the plan's devices.

            plan = parallel.plan(step, init, batch)
            state = plan.init(jax.random.key(0))
            step = plan.jit(step)
            state, metrics = step(state, batch)

        The step sees the whole batch, as on one device: means and batch statistics run over the
        rows of all devices, so that its results are equal up to rounding. The state that you pass
        is donated; the new one has the plan's shardings. A step of flax.nnx modules changes them in
        place, and a step whose arguments are the items of the state is called with them
        (docs/interop.md).

        Args:
            step: the step that was passed to `parallel.plan`.

        Returns:
            The compiled step, with the methods `lower` and `trace` of a `jax.jit` function. Its
            batches may be NumPy arrays. It raises ValueError if the devices are not attached, if
            the sharding of an array is not the plan's, or if the number of rows is not a multiple
            of the number of devices that share the batch.
        """
        items = items_of(step, self.state)
        if self.form is None and not items:
            return self._compiled(step)
        programs: dict[Form | None, tuple[ModuleStep, Compiled]] = {}

        def program(args):
            batch = args[items or 1 :]
            if len(batch) != 1 and len(batch) != len(batch_names(step, items)):
                raise TypeError(
                    f"plan.jit: expected the {items or 1} arguments of the state and the batch; "
                    f"got {len(args)} arguments"
                )
            state = args[:items] if items else args[0]
            arrays, form = pack(state)
            if form not in programs:
                module_step = ModuleStep("plan.jit", step, form, items)
                programs[form] = module_step, self._compiled(module_step.pure)
            return state, (arrays, batch[0] if len(batch) == 1 else batch), *programs[form]

        def call(*args):
            state, arguments, module_step, compiled = program(args)
            return module_step.result(state, *compiled(*arguments))

        def lower(*args):
            _, arguments, _, compiled = program(args)
            return compiled.lower(*arguments)

        def trace(*args):
            _, arguments, _, compiled = program(args)
            return compiled.trace(*arguments)

        return Compiled(step, call, lower, trace, direct=False)

    def _compiled(self, step: Callable) -> Compiled:
        """Compiles a step of arrays."""
        compiled = jax.jit(
            on_mesh(self, self._applied(step)),
            in_shardings=(self.state, self.batch),
            out_shardings=(self.state, NamedSharding(self.mesh, P())),
            donate_argnums=0,
        )

        def explained(call):
            def run(state, batch):
                try:
                    return call(state, batch)
                except (TypeError, ValueError) as error:
                    if reason := self.objection(
                        state, batch
                    ):  # after an error only: valid calls have no overhead
                        raise ValueError(f"plan.jit: {reason}") from error
                    raise

            return run

        return Compiled(
            step, explained(compiled), explained(compiled.lower), explained(compiled.trace)
        )

    @property
    def _typed(self) -> bool:
        """Whether the step states its own shardings."""
        return self.options.state == "explicit"

    def _applied(self, step: Callable) -> Callable:
        """Returns the step, rewritten for the strategy."""
        mesh = self.mesh if self._typed else misdivided.with_automatic_axes(self.mesh)

        def rewritten(step):
            step = step if self.experts is None else placed(step, mesh)
            step = self.options.applied(step, mesh, self.axes)
            return step if self.context is None else self.context.applied(step, mesh, self.axes)

        return _with_plain_arrays(step, rewritten)

    def objection(self, state: Any, batch: Any) -> str | None:
        """Why the step cannot be called with this state and batch, or None if it can."""
        return _check.call(self, state, batch)

    def explain(self) -> str:
        """Returns the table of the strategies that `print(plan)` shows, with the reason for each
        choice. Each cost is marked as "exact", "compiled" (read from the compiled program) or
        "estimated".
        """
        return _explain.table(self)

    __str__ = explain

    def compare(self) -> Comparison:
        """Returns the compared strategies as a table, which `plot` draws.

            print(plan.compare())                       # a line for each strategy and mesh
            plan.compare().plot("plan.png")             # their times and memory

        >>> step = lambda state, batch: ({"w": state["w"] - 0.1 * batch.mean(0)}, {})
        >>> init = lambda key: {"w": jax.random.normal(key, (3,))}
        >>> plan = parallel.plan(step, init, jnp.ones((8, 3)), devices="v5e:2x2", compile=False)
        >>> [row[:2] for row in plan.compare().table()[2:4]]
        [['data', 'data=4'], ['zero1', 'data=4']]
        """
        return Comparison(self)


def on_mesh(plan: Plan, step: Callable) -> Callable:
    """Returns a step that can be traced with arrays on the mesh of the plan, also if the mesh has
    explicit axes and the step is written for one device."""
    typed = plan.options.state == "explicit"
    if not _mesh.explicit(plan.mesh):

        @functools.wraps(step)
        def traced(state, batch):
            with _mesh.tracing(plan.mesh, typed):
                return step(state, batch)

        return traced

    places = jax.tree.map(_mesh.in_types, (plan.state, plan.batch))
    results = places[0], NamedSharding(plan.mesh, P())
    inner = step
    if not typed:  # XLA, and the constraints of the strategy, divide the step
        inner = jax.sharding.auto_axes(step, axes=plan.mesh.axis_names, out_sharding=results)

    @functools.wraps(step)
    def resharded(state, batch):
        with _mesh.tracing(plan.mesh, typed):
            # The types of arrays that were never placed, such as NumPy arrays, state nothing.
            state, batch = jax.sharding.reshard((state, batch), places)
            return jax.sharding.reshard(inner(state, batch), results)

    return resharded


def _with_plain_arrays(step: Callable, rewritten: Callable) -> Callable:
    """Returns `rewritten(step)`. A rewriting knows the arrays of the state and of the batch by
    their order, and the variables of an `nnx.State`, which the step may change, have none: for
    them, the rewritten function gets lists of arrays."""
    direct = rewritten(step)

    @jaxpr.wraps(step)
    def run(state, batch, **options):
        if not any(isinstance(x, jaxpr.mutable.kinds()) for x in _variables((state, batch))):
            return direct(state, batch, **options)
        arrays, structures = zip(*map(jax.tree.flatten, (state, batch)))

        def of_arrays(*arrays, **options):
            return step(*map(jax.tree.unflatten, structures, arrays), **options)

        return rewritten(of_arrays)(*arrays, **options)

    return run


def _variables(tree: Any) -> list:
    kinds = jaxpr.mutable.kinds()
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)) if kinds else []


def rows_over(mesh) -> tuple[str, ...]:
    """The mesh axes over which the rows of a batch are split, outside of the stages of a pipeline."""
    names = ("slice", "data", "stage", *["expert"] * active(mesh))
    return tuple(name for name in names if name in mesh.shape)

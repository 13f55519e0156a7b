"""plan: how a plain step is spread over chips, chosen by what was compiled, with the reasons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import _jax, hardware
from fnet.parallel._devices import devices_of
from fnet.parallel._ledger import Ledger, ledger
from fnet.parallel._shardings import layout, scanned_leaves
from fnet.transforms._parallel import parallel

# name -> (layout of the state, whether activations are pinned, in words); the simplest first
STRATEGIES = {
    "data": ("data", False, "every chip holds the whole state"),
    "zero1": ("zero1", False, "parameters whole, the optimiser's state split"),
    "fsdp": ("fsdp", False, "parameters and optimiser's state split"),
    "fsdp+pins": ("fsdp", True, "the same, activations pinned to the batch"),
}
ROOM = 0.92    # of a chip's memory that a program may take; the rest is the runtime's


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way of spreading a step.

    Attributes:
        strategy: a name of `parallel.STRATEGIES`.
        persistent: bytes of the state on each chip, exact.
        peak: bytes that a step needs on each chip, from the compiled program.
        ledger: what is sent, from the compiled program.
        verdict: "chosen" or why not.
    """

    strategy: str
    persistent: int
    peak: int
    ledger: Ledger
    verdict: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Where a step's arrays lie. `print(plan)` says what was compared.

    Attributes:
        mesh: the chips, with one axis "data".
        strategy, pins: what was chosen, and whether activations are pinned.
        state, batch: trees of `NamedSharding`s.
        candidates: what was compared.
        whole: (path, shape, why) of leaves that are on every chip although the strategy splits.
        shapes: the batch's tree of shapes. axes: the axes of the mesh that its rows are spread over.
        unused: paths of the batch's leaves that the step does not read.
        chip: what each device is.
        make: what makes a state of a key.
        here: whether the chips are; a plan may be for a slice that is not.
    """

    mesh: Mesh
    strategy: str
    pins: bool
    state: Any
    batch: Any
    candidates: tuple[Candidate, ...]
    whole: tuple[tuple[str, tuple[int, ...], str], ...]
    chip: hardware.Chip
    make: Callable = dataclasses.field(repr=False)
    here: bool
    shapes: Any = None
    axes: tuple[str, ...] = ("data",)
    unused: tuple[str, ...] = ()

    def init(self, key: jax.Array) -> Any:
        """The state that `init(key)` makes, born where it belongs: no chip ever holds more of it than its share."""
        self._check_here("init")
        return jax.jit(self.make, out_shardings=self.state)(key)

    def place(self, state: Any) -> Any:
        """A state that exists already, such as one read from a file, put where it belongs. It is copied: the step takes
        over the memory of what it is given."""
        self._check_here("place")
        return jax.tree.map(lambda x, where: jax.device_put(jnp.array(x, copy=True), where), state, self.state)

    def _check_here(self, what):
        if not self.here:
            raise ValueError(f"plan.{what}: this plan is for {self.mesh.size} x {self.chip.name} that are not here; "
                             "plan for devices='local' to run")

    def explain(self) -> str:
        """A table of the candidates and the reasons; every number says how it is known."""
        size = math.prod(self.mesh.shape.values())
        lines = [("strategy", "state MiB (exact)", "peak MiB (compiled)", "sent MiB (compiled)", "")]
        for each in self.candidates:
            lines.append((each.strategy, *(f"{n / 2 ** 20:,.2f}" for n in (each.persistent, each.peak,
                                                                          each.ledger.sent)), each.verdict))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        table = ["  ".join([f"{line[0]:<{widths[0]}}", *(f"{line[i]:>{widths[i]}}" for i in (1, 2, 3)),
                            line[4]]).rstrip() for line in lines]
        memory = _memory(self.chip)
        room = f"{memory / 2 ** 30:,.1f} GiB each" if memory else "of unknown memory"
        said = [f"{size} x {self.chip.name}, {room}: {self.strategy}, {STRATEGIES[self.strategy][2]}", "", *table]
        if self.whole:
            said += ["", "on every chip: " + "; ".join(f"{path} {list(shape)} ({why})" for path, shape, why
                                                       in self.whole[:8])
                     + (f"; and {len(self.whole) - 8} more" if len(self.whole) > 8 else "")]
        return "\n".join(said)

    __str__ = explain


def plan(step: Callable, init: Callable, batch: Any, *, devices: str | Sequence[jax.Device] = "local",
         strategy: str = "auto") -> Plan:
    """How a plain `step(state, batch) -> (state, metrics)` is best spread over chips.

        plan = parallel.plan(step, init, batch)
        print(plan)
        state = plan.init(jax.random.key(0))
        step = ft.parallel(step, plan)

    Each strategy is compiled for the devices; what it needs and what it sends is read from the program. Of those that
    fit into memory the one that sends least is chosen, of equals the simplest. Nothing is allocated.

    "data" is plain data parallelism; "zero1" splits the optimiser's state (Rajbhandari et al., 2020, ZeRO, stage 1);
    "fsdp" splits the parameters too and gathers them where they are used (stage 3; Zhao et al., 2023, PyTorch FSDP);
    "fsdp+pins" is the same with activations held to the batch, without which XLA may sum activations over all chips
    instead of gathering weights. Which of the two sends less depends on the model, so that both are compiled.

    Args:
        step: written for one device.
        init: `init(key) -> state`. The model's parameters are `state.params`, `state["params"]` or `state[0]`.
        batch: a batch, or its shapes: of each leaf the first axis is the rows.
        devices: "local", a list of devices, or a TPU slice that need not be there, such as "v5e:4x4": with libtpu
            installed, programs are compiled for it on any machine.
        strategy: one of `parallel.STRATEGIES`, to choose oneself; "fsdp" is with pins or without.

    Raises:
        ValueError: for an unknown strategy, rows that the devices do not divide, a step that does not return the state
            as it was given, or where nothing fits.
    """
    here = not isinstance(devices, str) or devices == "local"
    devices = devices_of(devices)
    if strategy != "auto" and strategy not in STRATEGIES:
        raise ValueError(f"plan: no strategy is called {strategy!r}; there are auto, {', '.join(STRATEGIES)}")
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    batch = jax.tree.map(_shape, batch)
    _check_rows(batch, len(devices))
    state = jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
    traced = jax.jit(step).trace(state, batch)
    _check_state(state, traced.out_info)
    paths = [path for path, _ in jax.tree.leaves_with_path(state)]
    scanned = scanned_leaves(traced.jaxpr.jaxpr, paths)
    unused = _unused(traced.jaxpr.jaxpr, len(paths), batch)
    chip = hardware.detect(devices[0])
    memory = _memory(chip)
    made = {}
    for name, (kind, pins, _) in STRATEGIES.items():
        if strategy not in ("auto", name, name.partition("+")[0]):
            continue
        found = layout(state, kind, len(devices), scanned)
        rows = jax.tree.map(lambda x: NamedSharding(mesh, P("data") if x.ndim else P()), batch)
        draft = Plan(mesh, name, pins, _placed(mesh, found.specs), rows, (), tuple(found.whole), chip, init, here,
                     batch, ("data",), unused)
        compiled = parallel(step, draft).lower(state, batch).compile()
        stats = compiled.memory_analysis()
        peak = (stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
                + stats.temp_size_in_bytes)
        made[name] = draft, Candidate(name, _bytes(state, draft.state), peak, ledger(compiled))
    fits = {name: not memory or each.peak <= ROOM * memory for name, (_, each) in made.items()}
    if not any(fits.values()):
        least = min((each for _, each in made.values()), key=lambda each: each.peak)
        raise ValueError(f"plan: nothing fits into {memory / 2 ** 30:.1f} GiB on each of {len(devices)} x {chip.name}; "
                         f"{least.strategy} comes nearest with {least.peak / 2 ** 30:.1f} GiB: use a smaller batch, "
                         "ft.microbatch, nn.Remat, or more devices")
    best = min((name for name in made if fits[name]), key=lambda name: made[name][1].ledger.sent)
    judged = tuple(dataclasses.replace(each, verdict=_verdict(name, best, made, fits, memory))
                   for name, (_, each) in made.items())
    return dataclasses.replace(made[best][0], candidates=judged)


def _verdict(name, best, made, fits, memory):
    if not fits[name]:
        return f"rejected: needs more than {ROOM:.0%} of {memory / 2 ** 30:.1f} GiB"
    if name == best:
        return "chosen" + (": it sends least of those that fit" if len(made) > 1 else ", as asked")
    sent, least = made[name][1].ledger.sent, made[best][1].ledger.sent
    return "as much is sent, and it is simpler to have less split" if sent == least else (
        f"sends {sent / least:.2f} times as much" if least else "sends more")


def _unused(jaxpr, leaves, batch) -> tuple[str, ...]:
    """Paths of the batch's leaves that nothing reads."""
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    read |= {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)}
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(batch)]
    return tuple(path for path, v in zip(paths, jaxpr.invars[leaves:]) if v not in read)


def _shape(x):
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype if hasattr(x, "dtype") else np.asarray(x).dtype)


def _check_rows(batch, chips):
    for path, x in jax.tree.leaves_with_path(batch):
        if x.ndim and x.shape[0] % chips:
            below = x.shape[0] // chips * chips
            raise ValueError(f"plan: batch{jax.tree_util.keystr(path)} of shape {x.shape} has {x.shape[0]} rows, which "
                             f"{chips} devices do not divide; nearest that do: "
                             f"{' or '.join(str(n) for n in (below, below + chips) if n)}")


def _check_state(state, out):
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError("plan: a step returns (state, metrics); this one returns "
                         f"{f'{len(out)} values' if isinstance(out, tuple) else type(out).__name__}")
    if jax.tree.structure(out[0]) != jax.tree.structure(state):
        raise ValueError(f"plan: the step returns a state of another structure than init makes: "
                         f"{jax.tree.structure(out[0])} and {jax.tree.structure(state)}")
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(out[0])):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(f"plan: init makes state{jax.tree_util.keystr(path)} {x.dtype}{list(x.shape)}, and the "
                             f"step returns it as {y.dtype}{list(y.shape)}")


def _placed(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def _bytes(state, shardings) -> int:
    """Of a state on each chip."""
    return sum(math.prod(where.shard_shape(x.shape)) * x.dtype.itemsize
               for x, where in zip(jax.tree.leaves(state), jax.tree.leaves(shardings)))


def _memory(chip):
    """Bytes of memory of each device."""
    return None if chip.memory_bytes is None else chip.per_device.memory_bytes

"""Measured time by path and phase, together with FLOPs, bytes and the time at the roofline."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from fnet import cost
from fnet import hardware as hw
from fnet._util._units import si
from fnet.cost import Bound, Cost
from fnet.introspect import _trace
from fnet.introspect._hlo import PHASES, Operation
from fnet.introspect._render import Table
from fnet.introspect._summary import _tree as tree_of
from fnet.introspect._trace import Trace
from fnet.jaxpr import check_function


@dataclasses.dataclass(frozen=True)
class TimedRow:
    """The measured time, cost and roofline time of a named scope, including all scopes inside it.

    Attributes:
        path: the path of the scope; "" for the whole step.
        seconds: measured seconds of a step by phase: "forward", "backward", "recomputed",
            "optimizer", "other".
        cost: FLOPs and bytes, or None if they are unknown.
        bound: the lower bound of the time in seconds on the chip (see `cost.roofline`), or None if
            it is unknown.

    >>> row = introspect.profile(lambda x: x @ x, jnp.ones((64, 64)), repeats=2).total
    >>> sum(row.seconds.values()) > 0
    True
    """

    path: str
    seconds: Mapping[str, float]
    cost: Cost | None
    bound: float | None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def depth(self) -> int:
        return self.path.count("/") + 1 if self.path else 0


@dataclasses.dataclass(frozen=True)
class Profile:
    """The result of `profile`; `str()` returns it as text, and Jupyter shows `html()`.

    Attributes:
        rows: a `TimedRow` for each path, outer paths first. Operations without a scope have the
            path "".
        total: the `TimedRow` of all operations.
        step_seconds: mean seconds of a step, from its call to its last result.
        steps: the number of steps in the means, the faster half of the calls.
        spanning: the fraction of the operations' time that is spent in fusions of several named
            scopes.
        operations: pairs (operation, seconds in a step), the longest first.
        chip: the chip of the roofline times (`TimedRow.bound`).
        trace: the recorded events; `trace.save(path)` writes them for ui.perfetto.dev.
        notes: the reasons why some figures are not exact.
        joules: the measured energy of a step, including what runs beside it on the same chips, or
            None if no counter can be read (`hardware.energy_meter`).

    >>> profile = introspect.profile(lambda x: x @ x, jnp.ones((64, 64)), repeats=2)
    >>> profile.total.cost.matmul == 2 * 64**3, 0 < profile.coverage <= 1
    (True, True)
    """

    rows: tuple[TimedRow, ...]
    total: TimedRow
    step_seconds: float
    steps: int
    spanning: float
    operations: tuple[tuple[Operation, float], ...]
    chip: hw.Chip
    trace: Trace = dataclasses.field(repr=False)
    notes: tuple[str, ...] = ()
    joules: float | None = None

    @property
    def coverage(self) -> float:
        """The fraction of the step's time in which at least one operation ran."""
        return self.total.total / self.step_seconds

    def __getitem__(self, path: str) -> TimedRow:
        """Returns the row of a path; "" is the whole step."""
        found = next((row for row in (self.total, *self.rows) if row.path == path), None)
        if found is None:
            raise KeyError(
                f"the profile has no path {path!r}; it has "
                f"{', '.join(repr(row.path) for row in self.rows)}"
            )
        return found

    def __str__(self) -> str:
        return self._table().text()

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        return self._table().markdown()

    def html(self) -> str:
        """Returns the table in HTML."""
        return self._table().html()

    _repr_html_ = html

    def data(self) -> list[dict]:
        """Returns the rows as dictionaries of numbers and strings, the totals last."""
        return [
            {
                "path": row.path,
                "seconds": row.total,
                **{phase: row.seconds.get(phase, 0.0) for phase in PHASES},
                "share": row.total / self.step_seconds,
                "flops": row.cost and row.cost.flops,
                "bytes": row.cost and row.cost.fused_bytes,
                "bound": row.bound,
            }
            for row in (*self.rows, self.total)
        ]

    def _table(self) -> Table:
        present = [phase for phase in PHASES if self.total.seconds.get(phase)]
        titles = (
            "path",
            *(f"{phase} ms" for phase in present),
            "total ms",
            "share",
            "FLOPs",
            "bytes",
            "bound ms",
        )
        rows = [(row.depth, self._cells(row, present)) for row in self.rows]
        rows.append((0, self._cells(self.total, present)))
        outside = self.step_seconds - self.total.total
        blank = ("",) * len(present)
        share = f"{outside / self.step_seconds:.1%}"
        rows.append((0, ("outside of operations", *blank, _ms(outside), share, "", "", "")))
        rows.append((0, ("step", *blank, _ms(self.step_seconds), "100.0%", "", "", "")))
        longest = ", ".join(
            f"{operation.name} {_ms(seconds)} ms" for operation, seconds in self.operations[:3]
        )
        footer = [
            f"mean of {self.steps} step{'s' if self.steps > 1 else ''}; {self.spanning:.1%} of the "
            "operations' time is in fusions of several paths, which count for the path of their "
            "root",
            f"longest operations: {longest}; bound: roofline of {self.chip.name}",
            *([] if self.joules is None else [f"measured energy: {self.joules:.3g} J a step"]),
            *(f"note: {note}" for note in self.notes),
        ]
        return Table(titles, 1, rows, footer)

    def _cells(self, row, present) -> tuple[str, ...]:
        name = row.path or ("all operations" if row is self.total else "(no scope)")
        phases = (_ms(row.seconds[phase]) if row.seconds.get(phase) else "" for phase in present)
        cost = (f"{si(row.cost.flops)}F", f"{si(row.cost.fused_bytes)}B") if row.cost else ("", "")
        return (
            name,
            *phases,
            _ms(row.total),
            f"{row.total / self.step_seconds:.1%}",
            *cost,
            "" if row.bound is None else _ms(row.bound),
        )


def profile(
    step: Callable,
    *args: Any,
    chip: Any = None,
    depth: int | None = None,
    repeats: int = 5,
    trace: str | os.PathLike | None = None,
) -> Profile:
    """Measures how much time a step spends in each named scope, and in each phase.

        print(introspect.profile(step, state, batch))
        introspect.profile(step, state, batch, trace="trace.json.gz")      # for ui.perfetto.dev

    The phases are forward, backward, recomputed (by `jax.checkpoint`), optimizer (what follows the
    backward pass), and other (what precedes the forward pass).

    JAX's profiler measures each operation of the compiled program, which is in the trace and tells
    its path and phase. A fusion counts for the path of its root operation. While several operations
    run at the same time, on threads of a CPU or streams of a GPU, they share the elapsed time
    equally, so that nothing is counted twice. With several devices, each time is their mean.

    Args:
        step: a function that `jax.jit` can compile, or a compiled one. It is called with copies of
            the arguments, so it may donate them.
        args: the arguments of the step, arrays.
        chip: the chip of the roofline times, as in `cost.roofline`. Default: the chip on which the
            arguments are stored.
        depth: the number of segments of a path to show. Default None: all.
        repeats: the number of measured calls, after a first one that compiles. The times are means
            over the faster half of them. Default 5.
        trace: a file (.json or .json.gz) for the operations as a Perfetto trace. Default: none.

    Returns:
        A `Profile`, as text, Markdown, HTML or data.

    Raises:
        TypeError: the function cannot be compiled, or an argument is a shape without values.
        ValueError: `repeats` is not positive.
        RuntimeError: a profiler is already running.

    >>> def f(x):
    ...     with jax.named_scope("square"):
    ...         return jnp.sum(x @ x)
    >>> profile(f, jnp.ones((256, 256)), repeats=2)["square"].cost.matmul == 2 * 256**3
    True
    """
    if repeats < 1:
        raise ValueError(f"profile: repeats counts calls, at least 1; got {repeats}")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args)):
        raise TypeError(
            "profile: expected arrays, got a jax.ShapeDtypeStruct, which has no values; "
            "introspect.summary takes shapes"
        )
    check_function("profile", step)
    run = step if hasattr(step, "lower") else jax.jit(step)
    copy = lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf
    fresh = lambda: jax.block_until_ready(jax.tree.map(copy, args))
    try:
        jax.block_until_ready(run(*fresh()))
    except TypeError as error:  # also JAX's errors for values that are unknown during tracing
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TypeError(
            f"profile: jax.jit cannot compile {getattr(step, '__name__', step)!s}: {first}"
        ) from error
    joules = []
    with _trace.folder() as folder:
        with _trace.recording(folder):
            for _ in range(repeats):
                mine = fresh()
                meter = hw.energy_meter()
                with jax.profiler.TraceAnnotation(_trace.STEP):
                    jax.block_until_ready(run(*mine))
                joules += [] if meter is None else [meter.joules()]
        recorded = _faster_half(_trace.read(folder))
    if trace is not None:
        recorded.save(trace)
    bounds = cost.roofline(step, *args, chip=chip, measure=False, depth=None)
    found = of_trace(recorded, bounds.scopes, bounds.chip, depth=depth, notes=bounds.count.notes)
    return dataclasses.replace(found, joules=sum(joules) / len(joules) if joules else None)


def of_trace(
    trace: Trace,
    bounds: Iterable[Bound],
    chip: hw.Chip,
    *,
    steps: int | None = None,
    depth: int | None = None,
    notes: Iterable[str] = (),
) -> Profile:
    """Returns the profile of a recorded trace.

    Args:
        bounds: a `Bound` for each named scope, with the cost (FLOPs and bytes) of the scope and a
            lower bound of the scope's time.
        steps: the number of steps (calls of the profiled function) in each time interval of the
            trace. The time intervals are the pairs (start, end) in `trace.steps`. None: each time
            interval contains one step.
    """
    windows = trace.steps
    if not windows:
        events = trace.events
        windows = ((min(event.start for event in events), max(event.end for event in events)),)
    count = len(windows) * (steps or 1)
    seconds = _seconds(trace, windows, count)
    spanning = sum(time for operation, time in seconds.items() if len(operation.paths) > 1)

    own: dict[str, dict[str, float]] = {}  # {path of a scope: {phase: seconds}}
    for operation, time in seconds.items():
        phases = own.setdefault(operation.path, {})
        phases[operation.phase] = phases.get(operation.phase, 0.0) + time
    costs = {bound.scope: bound for bound in bounds}
    every = {*own, *costs}

    rows = []
    for path in tree_of([*costs, *own]):
        if depth is None or path.count("/") < depth:
            inside = {other for other in every if other == path or other.startswith(path + "/")}
            rows.append(_row(path, inside, own, costs))
    if "" in own:
        rows.append(_row("", {""}, own, costs))
    total = _row("", every, own, costs)
    return Profile(
        tuple(row for row in rows if row.total or (row.cost and row.cost.flops)),
        total,
        sum(end - start for start, end in windows) * 1e-9 / count,
        count,
        spanning / total.total if total.total else 0.0,
        tuple(sorted(seconds.items(), key=lambda item: -item[1])),
        chip,
        trace,
        tuple(notes),
    )


def _seconds(
    trace: Trace, windows: Iterable[tuple[float, float]], count: int
) -> dict[Operation, float]:
    """Returns the time of each operation in one of `count` steps, the mean of all devices."""
    devices = sorted({event.device for event in trace.events})
    seconds: dict[Operation, float] = {}
    for device in devices:
        events = [event for event in trace.events if event.device == device]
        for operation, time in attributed(events, windows).items():
            share = time * 1e-9 / (count * len(devices))
            seconds[operation] = seconds.get(operation, 0.0) + share
    return seconds


def _row(
    path: str,
    inside: Collection[str],
    own: Mapping[str, Mapping[str, float]],
    costs: Mapping[str, Bound],
) -> TimedRow:
    """Returns the row `path` of a profile, the sums over the scopes `inside`."""
    phases = {}
    for phase in PHASES:
        time = sum(own[scope].get(phase, 0.0) for scope in own if scope in inside)
        if time:
            phases[phase] = time
    below = [bound for scope, bound in costs.items() if scope in inside]
    if not below:
        return TimedRow(path, phases, None, None)
    cost = sum((bound.cost for bound in below), Cost())
    times = [bound.seconds for bound in below if bound.seconds is not None]
    return TimedRow(path, phases, cost, sum(times) if len(times) == len(below) else None)


def _faster_half(trace: Trace) -> Trace:
    """Removes the steps that took longer than the median, because other programs may have
    interrupted them."""
    longest = sorted(end - start for start, end in trace.steps)[(len(trace.steps) - 1) // 2]
    kept = tuple((start, end) for start, end in trace.steps if end - start <= longest)
    return trace._replace(
        steps=kept,
        events=tuple(
            event
            for event in trace.events
            if any(event.start < end and event.end > start for start, end in kept)
        ),
    )


def attributed(
    events: Iterable[_trace.Event], windows: Iterable[tuple[float, float]]
) -> dict[Operation, float]:
    """Returns the running time of each operation, in nanoseconds, within the time intervals
    `windows`.

    While several operations run at the same time, the elapsed time is divided equally among them.
    An operation that contains other operations, such as a loop, gets only the time in which none of
    the contained operations runs.
    """
    marks = []
    for start, end in windows:
        for number, event in enumerate(events):
            a, b = max(event.start, start), min(event.end, end)
            if a < b:
                marks += [(a, 1, number, event.operation), (b, 0, number, event.operation)]
    marks.sort(key=lambda mark: mark[:2])
    seconds: dict[Operation, float] = {}
    running: dict[int, Operation] = {}
    last = 0.0
    for at, begins, number, operation in marks:
        if running and at > last:
            parts = [each for each in running.values() if not each.container] or list(
                running.values()
            )
            for each in parts:
                seconds[each] = seconds.get(each, 0.0) + (at - last) / len(parts)
        last = at
        if begins:
            running[number] = operation
        else:
            running.pop(number, None)
    return seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"

"""Roofline analysis: determines for each scope of a function whether compute or memory limits its
speed, and compares the measured time of the function with the resulting lower bound."""

from __future__ import annotations

import collections
import dataclasses
import textwrap
import time
from collections.abc import Callable
from typing import Any

import jax

from fnet._util._text_table import aligned
from fnet._util._units import si
from fnet.cost._count import Cost, Count, count, shortened
from fnet.cost._latency import expected_seconds, latency_seconds
from fnet.cost._mfu import MFU, mfu
from fnet.cost._tiles import Waste, rule, tile_waste
from fnet.hardware._chip import Chip
from fnet.hardware._detect import detect


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least time of one named scope at the peak rates of the chip.

    Attributes:
        scope: the scope path.
        cost: the FLOPs and bytes of the scope, a `Cost`.
        compute: the seconds of arithmetic at the peak rate, or None if the rate is unknown.
        memory: the seconds of memory traffic at the peak bandwidth, or None if it is unknown.
        latency: the seconds of its kernels and loops, which run one after another, however little
            they compute, or None if they are unknown. They are estimates (see
            `hardware.Latency.sources`) except for a chip of `hardware.measure`.
        bound: "compute", "memory" or "latency", whichever takes longest; "compute or memory" if
            only one of the two rates is known, "unknown" if neither is.
        seconds: the maximum of `compute`, `memory` and `latency`, or None if compute and memory are
            unknown.

    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> cost.roofline(jnp.matmul, x, x, chip="TPU v5 lite").scopes[0].bound
    'compute'
    """

    scope: str
    cost: Cost
    compute: float | None
    memory: float | None
    latency: float | None
    bound: str
    seconds: float | None

    @property
    def intensity(self) -> float | None:
        """The FLOPs per byte of memory traffic after fusion, or None if there is no traffic."""
        return self.cost.flops / self.cost.fused_bytes if self.cost.fused_bytes else None


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The roofline of a function on a chip, the result of `roofline`: a lower bound of the time of
    each named scope, and of the whole function.

    Attributes:
        chip: the `Chip` whose peak rates are used.
        devices: the number of JAX devices that share the work.
        scopes: a tuple with a `Bound` for each scope, whose path is `Bound.scope`.
        total: the `Bound` of the whole function. Its time is the sum of the times of all scopes,
            because scopes run one after another.
        count: the FLOPs and bytes of the function, a `Count`.
        ridge: the FLOPs per byte of memory traffic above which compute, not memory, limits the
            speed, or None if a rate is unknown.
        expected: the time that a call of a small program is expected to take in seconds, with the
            overhead of the call, if `chip` is a CPU that `hardware.measure` measured; or None.
        measured: the median time of a call on this machine in seconds, or None if it was not
            measured.
        mfu: the model FLOPs utilization for the measured time, an `MFU`.
        waste: a `Waste` for each matrix product that fills less than 90 % of its tiles (see
            `tile_waste`).
        rule: the size of the chip's tiles (blocks of a matrix product) and the source of this size,
            as text.
        notes: the reasons why the figures are not exact.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), "float32")
    >>> report = cost.roofline(lambda x: x @ x, x, chip="TPU v5e")
    >>> report.total.bound, f"{report.total.seconds:.1e} s"      # what limits it, and the lower bound
    ('compute', '1.1e-05 s')
    """

    chip: Chip
    devices: int
    scopes: tuple[Bound, ...]
    total: Bound
    count: Count
    ridge: float | None
    expected: float | None
    measured: float | None
    mfu: MFU
    waste: tuple[Waste, ...]
    rule: str
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return _text(self)


def roofline(
    step: Callable[..., Any],
    *args: Any,
    chip: Any = None,
    devices: int | None = None,
    measure: bool | None = None,
    depth: int | None = 2,
    repeats: int = 5,
) -> Roofline:
    """Computes the least time of a function on a chip and, where it can, measures the real one.

        print(cost.roofline(step, state, batch))                # arrays: the bound and the time
        print(cost.roofline(step, *shapes, chip="TPU v5e"))     # shapes: the bound; no chip needed

        time of a scope >= max(FLOPs / peak FLOP/s, bytes / bandwidth, steps x latency)

    A scope is a `jax.named_scope`, such as a layer. Its FLOPs are counted from the jaxpr (see
    `count`); its bytes are estimated as if elementwise operations were fused. Its steps are the
    kernels and the turns of loops that run one after another, which decide for a recurrent network:
    each of its 500 steps needs the one before. The result says how each peak is known, for example
    published or measured. Only the whole function is timed, because XLA fuses operations across
    scopes.

    Args:
        step: a JAX function. A jitted one gets copies of the arguments, which it may donate.
        *args: its arguments. With a `jax.ShapeDtypeStruct` among them, `step` is only traced.
        chip: a `Chip`, a device or a device kind. Default None: the one on which the arguments are.
        devices: the number of JAX devices that share the work. Default None: of those on which the
            arguments are.
        measure: whether to run and time the function. Default None: if its arguments are arrays on
            `chip`.
        depth: the number of segments of a scope path to show, or None for all. Scopes with the same
            first segments are added up. Default 2.
        repeats: the number of timed calls, after one that compiles. Default 5.

    Returns:
        A `Roofline`, which prints as a table.

    Raises:
        ValueError: `measure=True`, but an argument is a `jax.ShapeDtypeStruct`, which has no
            values.

    Source: Williams, Waterman and Patterson, Roofline, CACM 2009.

    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> report = cost.roofline(lambda x: x @ x, x, chip="TPU v5e")
    >>> "TPU v5e" in str(report)
    True
    """
    leaves = jax.tree.leaves(args)
    concrete = not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    held = [leaf.sharding.device_set for leaf in leaves if _on_devices(leaf)]

    here = detect(next(iter(held[0])) if held else None)
    target = here if chip is None else detect(chip)
    if devices is None:
        devices = max(map(len, held), default=1)

    if measure and not concrete:
        raise ValueError(
            "roofline: measure=True needs arrays, got jax.ShapeDtypeStructs, which have no values; "
            "pass arrays, or measure=False for the bound alone"
        )
    if measure is None:
        measure = concrete and _same_chip(target, here)

    counted = count(step, *args)
    scopes, total = _bounds(counted, target, devices, depth)
    seconds = _time(step, args, repeats) if measure else None
    return Roofline(
        chip=target,
        devices=devices,
        scopes=scopes,
        total=total,
        count=counted,
        ridge=_ridge(counted, target),
        expected=expected_seconds(counted, target, len(leaves), counted.results),
        measured=seconds,
        mfu=_utilization(counted, seconds, target, here, devices),
        waste=tile_waste(counted.matmuls, target),
        rule=rule(target),
        notes=(*counted.notes, *_missing(target)),
    )


def _on_devices(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def _same_chip(a: Chip, b: Chip) -> bool:
    return (a.name, a.kind) == (b.name, b.kind)


def _bounds(
    counted: Count, chip: Chip, devices: int, depth: int | None
) -> tuple[tuple[Bound, ...], Bound]:
    """Returns the bound of each scope that does any work, and the bound of the whole function."""
    share = chip.chips_of(devices)
    compute = compute_seconds(counted, chip, share, depth)

    def memory_seconds(cost: Cost) -> float | None:
        return cost.fused_bytes / (chip.bandwidth * share) if chip.bandwidth else None

    scopes = []
    for scope, cost in counted.by_depth(depth).items():
        if cost.flops or cost.transcendental or cost.fused_bytes:
            arithmetic = None if compute is None else compute.get(scope, 0.0)
            steps = latency_seconds(cost, chip)
            scopes.append(_bound(scope, cost, arithmetic, memory_seconds(cost), steps))

    arithmetic = None if compute is None else sum(compute.values())
    steps = latency_seconds(counted.total, chip)
    total = _bound("total", counted.total, arithmetic, memory_seconds(counted.total), steps)
    # Scopes run one after another, so the sum of their bounds is higher, and still a lower bound.
    times = [bound.seconds for bound in scopes if bound.seconds is not None]
    if len(times) == len(scopes):
        total = dataclasses.replace(total, seconds=sum(times))
    return tuple(scopes), total


def _ridge(counted: Count, chip: Chip) -> float | None:
    peak = chip.peak(counted.dtype) if counted.dtype else None
    return peak.flops / chip.bandwidth if peak and chip.bandwidth else None


def _utilization(
    counted: Count, seconds: float | None, chip: Chip, here: Chip, devices: int
) -> MFU:
    """Returns the MFU on `chip` for a time that was measured on the chip `here`."""
    local = _same_chip(chip, here)
    if seconds is None and local:
        return MFU(None, "nothing was measured")
    if seconds is None:
        return MFU(None, f"nothing was measured: this is {here.name}, not {chip.name}")
    if not local:
        return MFU(None, f"the time was measured on {here.name}, not on {chip.name}")
    if not counted.model_flops:
        return MFU(None, "the function has no matrix products")
    return mfu(counted.model_flops, seconds, chip, counted.dtype, devices)


def _missing(chip: Chip) -> list[str]:
    """Returns a note if the catalog lacks figures of the chip."""
    if not chip.known:
        return [
            f"{chip.name} is not in the catalog, so there are no bounds; call hardware.measure()"
        ]
    if chip.bandwidth is None:
        return [
            f"the memory bandwidth of {chip.name} is unknown: only compute bounds; call "
            f"hardware.measure()"
        ]
    return []


def compute_seconds(
    counted: Count, chip: Chip, share: float, depth: int | None
) -> dict[str, float] | None:
    """Returns the seconds of arithmetic in each scope, or None if a peak is unknown. Matrix
    products are assumed to run at the peak rate of their dtype, and other operations at the float32
    peak rate."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for matmul in counted.matmuls:
        peak = chip.peak(matmul.dtype, precision=matmul.precision)
        if peak is None:
            return None
        seconds[shortened(matmul.scope, depth)] += matmul.flops / (peak.flops * share)

    vector = chip.peaks.get("fp32")
    if vector is not None:
        for path, each in counted.scopes.items():
            work = each.elementwise + each.reduction + each.transcendental
            seconds[shortened(path, depth)] += work / (vector * share)
    elif not counted.matmuls:
        return None
    return seconds


def _bound(
    scope: str, cost: Cost, compute: float | None, memory: float | None, latency: float | None
) -> Bound:
    times = {"compute": compute, "memory": memory, "latency": latency}
    known = {name: seconds for name, seconds in times.items() if seconds is not None}
    if compute is None and memory is None:
        return Bound(scope, cost, None, None, latency, "unknown", None)
    name = max(known, key=known.__getitem__)
    if name != "latency" and (compute is None or memory is None):
        return Bound(scope, cost, compute, memory, latency, "compute or memory", known[name])
    return Bound(scope, cost, compute, memory, latency, name, known[name])


def _time(step: Callable[..., Any], args: tuple, repeats: int) -> float:
    """Returns the median seconds of a call, without the first call, which compiles."""
    jitted = hasattr(step, "lower")
    run = step if jitted else jax.jit(step)

    def arguments() -> tuple:
        if not jitted:
            return args
        # The call may donate its arguments, so each call gets its own.
        return jax.block_until_ready(jax.tree.map(_copied, args))

    jax.block_until_ready(run(*arguments()))
    times = []
    for _ in range(repeats):
        mine = arguments()
        start = time.perf_counter()
        jax.block_until_ready(run(*mine))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _text(report: Roofline) -> str:
    lines = [_headline(report), ""]
    lines += aligned(_rows(report), left=(0, 4))
    lines.append("")
    if report.measured is not None:
        took = f"measured {seconds_text(report.measured)} per call (median, whole function)"
        if report.total.seconds:
            took += f", {report.measured / report.total.seconds:.1f} times the bound"
        lines.append(took)
    if report.expected is not None:
        lines.append(f"expected {seconds_text(report.expected)} per call, from measured latencies")
    if report.total.latency is not None and report.total.cost.kernels:
        lines.append(_steps(report))
    lines.append(str(report.mfu))
    if report.waste:
        lines.append("sizes that do not fill the tiles:")
        lines += [f"  {waste}" for waste in report.waste[:5]]
        if len(report.waste) > 5:
            lines.append(f"  and {len(report.waste) - 5} more")
        lines.append(textwrap.fill(report.rule, 98, initial_indent="  ", subsequent_indent="  "))
    lines += [
        "FLOPs are exact (convolutions: padding included); bytes are estimated after fusion and "
        "are",
        f"between {si(report.count.io_bytes)}B (arguments and outputs) and "
        f"{si(report.count.total.bytes)}B (unfused)",
    ]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(lines)


def _steps(report: Roofline) -> str:
    cost, chip = report.total.cost, report.chip
    turns = f" and {cost.turns:,} turns of loops" if cost.turns else ""
    return (
        f"latency: {cost.kernels:,} kernels{turns} one after another, "
        f"{seconds_text(report.total.latency)} ({chip.basis('latency')})"
    )


def _headline(report: Roofline) -> str:
    chip = report.chip
    name = chip.name
    if report.devices > 1:
        name += f", {report.devices} JAX devices"

    peak = chip.peak(report.count.dtype) if report.count.dtype else None
    rate = "no peak known"
    if peak:
        rate = f"{si(peak.flops)}FLOP/s {peak.dtype} ({peak.basis})"

    bandwidth = "bandwidth unknown"
    if chip.bandwidth:
        bandwidth = f"{si(chip.bandwidth)}B/s ({chip.basis('bandwidth')})"

    line = f"{name}: {rate}, {bandwidth}"
    if report.ridge:
        line += f"; bound by compute above {report.ridge:.3g} FLOP/byte"
    return line


def _rows(report: Roofline) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("scope", "FLOPs", "bytes", "FLOP/byte", "bound", "at the bound")
    ]
    for bound in (*report.scopes, report.total):
        scope = bound.scope or "(no scope)"
        flops = f"{si(bound.cost.flops)}F"
        moved = f"{si(bound.cost.fused_bytes)}B"
        intensity = "-" if bound.intensity is None else f"{bound.intensity:.3g}"
        rows.append((scope, flops, moved, intensity, bound.bound, seconds_text(bound.seconds)))
    return rows


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"

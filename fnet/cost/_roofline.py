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
from fnet.cost._count import Cost, Count, count
from fnet.cost._mfu import MFU, mfu
from fnet.cost._tiles import Waste, rule, tile_waste
from fnet.hardware._chip import Chip
from fnet.hardware._detect import detect


@dataclasses.dataclass(frozen=True)
class Bound:
    """The lower bound of the time of one named scope, at the peak rates of the chip.

    Attributes:
        scope: the scope path.
        cost: the FLOPs and bytes of the scope, a `Cost`.
        compute: the time in seconds that the arithmetic takes at the peak rate, or None if the rate
            is unknown.
        memory: the time in seconds that the memory traffic takes at the peak bandwidth, or None if
            the bandwidth is unknown.
        bound: "compute" or "memory", whichever takes longer. If only one of the peak rate and the
            bandwidth is known, `bound` is "compute or memory". If neither the peak rate nor the
            bandwidth is known, `bound` is "unknown".
        seconds: the maximum of `compute` and `memory`, or None if both are unknown.

    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> cost.roofline(jnp.matmul, x, x, chip="TPU v5 lite").scopes[0].bound
    'compute'
    """

    scope: str
    cost: Cost
    compute: float | None
    memory: float | None
    bound: str
    seconds: float | None

    @property
    def intensity(self) -> float | None:
        """The FLOPs per byte of memory traffic after fusion, or None if there is no memory traffic."""
        return self.cost.flops / self.cost.fused_bytes if self.cost.fused_bytes else None


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The roofline of a function on a chip: the lower bound of the time of each named scope.

    Attributes:
        chip: the `Chip` for which the bounds are computed.
        devices: the number of JAX devices that share the work.
        scopes: a `Bound` for each scope.
        total: the `Bound` of the whole function. The time in this `Bound` is the sum of the times
            of all scopes, because scopes run one after another.
        count: the FLOPs and bytes of the function, a `Count`.
        ridge: the FLOPs per byte of memory traffic above which compute is the bound, or None if a
            rate is unknown.
        measured: the median time of a call on this machine in seconds, or None if it was not
            measured.
        mfu: the model FLOPs utilization for the measured time, an `MFU`.
        waste: a `Waste` object for each matrix product that fills less than 90 % of its tiles (see
            `tile_waste`).
        rule: the size of the chip's tiles (blocks of a matrix product) and the source of this size,
            as text.
        notes: the reasons why the figures are not exact.

    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> cost.roofline(lambda x: x @ x, x, chip="TPU v5e").total.bound
    'memory'
    """

    chip: Chip
    devices: int
    scopes: tuple[Bound, ...]
    total: Bound
    count: Count
    ridge: float | None
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
    """Computes a lower bound of a function's time from the chip's peaks, and measures the time for
    comparison.

        lower bound of the time of a scope = max(FLOPs / peak FLOP/s, bytes / bandwidth)

    A scope is a `jax.named_scope`, such as a layer. The FLOPs are counted from the jaxpr (see
    `count`). The bytes are estimated under the assumption that elementwise operations are fused.
    The result of `roofline` states how each peak of the chip is known, for example published or
    measured. The time is measured only for the whole function, because XLA fuses operations across
    scopes.

    Args:
        step: a JAX function. A jitted function is called with copies of the arguments, because the
            call may donate the arguments.
        *args: the arguments of `step`. If an argument contains a `jax.ShapeDtypeStruct`, `step` is
            traced, but neither run nor timed.
        chip: a `Chip`, a device or a device kind. Default None: the chip on which the arguments
            are.
        devices: the number of JAX devices that share the work. Default None: the number of devices
            on which the arguments are.
        measure: whether to run and time the function. By default (None), the function is run and
            timed only if its arguments are arrays on `chip`.
        depth: the number of segments of a scope path to show, or None for all segments. Scopes
            whose paths have the same first `depth` segments are added up. Default 2.
        repeats: the number of timed calls. An additional first call, which compiles the function,
            is not timed. Default 5.

    Returns:
        A `Roofline`, which `print` shows as a table.

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
    held = [
        leaf.sharding.device_set
        for leaf in leaves
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    ]
    here = detect(next(iter(held[0])) if held else None)
    chip = here if chip is None else detect(chip)
    if devices is None:
        devices = max(map(len, held), default=1)
    local = (chip.name, chip.kind) == (here.name, here.kind)
    if measure and not concrete:
        raise ValueError(
            "roofline: measure=True needs arrays, got jax.ShapeDtypeStructs, which have no values; "
            "pass arrays, or measure=False for the bound alone"
        )
    if measure is None:
        measure = concrete and local
    counted = count(step, *args)
    share = chip.chips_of(devices)
    compute = compute_seconds(counted, chip, share, depth)
    memory = lambda each: each.fused_bytes / (chip.bandwidth * share) if chip.bandwidth else None
    rows = [
        _bound(scope, each, None if compute is None else compute.get(scope, 0.0), memory(each))
        for scope, each in counted.by_depth(depth).items()
        if each.flops or each.transcendental or each.fused_bytes
    ]
    seconds = _time(step, args, repeats) if measure else None
    total = _bound(
        "total",
        counted.total,
        sum(compute.values()) if compute is not None else None,
        memory(counted.total),
    )
    if all(row.seconds is not None for row in rows):
        total = dataclasses.replace(total, seconds=sum(row.seconds for row in rows))
    if seconds is None:
        why = (
            "nothing was measured"
            if local
            else f"nothing was measured: this is {here.name}, not {chip.name}"
        )
        utilization = MFU(None, why)
    elif not local:
        utilization = MFU(None, f"the time was measured on {here.name}, not on {chip.name}")
    elif not counted.model_flops:
        utilization = MFU(None, "the function has no matrix products")
    else:
        utilization = mfu(counted.model_flops, seconds, chip, counted.dtype, devices)
    notes = list(counted.notes)
    if not chip.known:
        notes.append(
            f"{chip.name} is not in the catalog, so there are no bounds; call hardware.measure()"
        )
    elif chip.bandwidth is None:
        notes.append(
            f"the memory bandwidth of {chip.name} is unknown: only compute bounds; call "
            f"hardware.measure()"
        )
    peak = chip.peak(counted.dtype) if counted.dtype else None
    ridge = peak.flops / chip.bandwidth if peak and chip.bandwidth else None
    return Roofline(
        chip,
        devices,
        tuple(rows),
        total,
        counted,
        ridge,
        seconds,
        utilization,
        tile_waste(counted.matmuls, chip),
        rule(chip),
        tuple(notes),
    )


def compute_seconds(
    counted: Count, chip: Chip, share: float, depth: int | None
) -> dict[str, float] | None:
    """Returns the seconds of arithmetic in each scope, or None if a peak is unknown. Matrix
    products are assumed to run at the peak rate of their dtype, and other operations at the float32
    peak rate."""
    seconds: dict[str, float] = collections.defaultdict(float)
    key = lambda path: path if depth is None else "/".join(path.split("/")[:depth])
    for matmul in counted.matmuls:
        peak = chip.peak(matmul.dtype, precision=matmul.precision)
        if peak is None:
            return None
        seconds[key(matmul.scope)] += matmul.flops / (peak.flops * share)
    vector = chip.peaks.get("fp32")
    if vector is None and not counted.matmuls:
        return None
    if vector is not None:
        for path, each in counted.scopes.items():
            work = each.elementwise + each.reduction + each.transcendental
            seconds[key(path)] += work / (vector * share)
    return seconds


def _bound(scope: str, each: Cost, compute: float | None, memory: float | None) -> Bound:
    known = [seconds for seconds in (compute, memory) if seconds is not None]
    bound = (
        "unknown"
        if not known
        else "compute or memory"
        if len(known) == 1
        else "compute"
        if known[0] >= known[1]
        else "memory"
    )
    return Bound(scope, each, compute, memory, bound, max(known, default=None))


def _time(step: Callable[..., Any], args: tuple, repeats: int) -> float:
    """Returns the median seconds of a call, without the first call, which compiles."""
    jitted = hasattr(step, "lower")
    run = step if jitted else jax.jit(step)
    fresh = (
        (
            lambda: jax.block_until_ready(
                jax.tree.map(
                    lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, args
                )
            )
        )
        if jitted
        else (lambda: args)
    )
    jax.block_until_ready(run(*fresh()))
    times = []
    for _ in range(repeats):
        mine = fresh()
        start = time.perf_counter()
        jax.block_until_ready(run(*mine))
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _text(report: Roofline) -> str:
    chip = report.chip
    peak = chip.peak(report.count.dtype) if report.count.dtype else None
    rate = f"{si(peak.flops)}FLOP/s {peak.dtype} ({peak.basis})" if peak else "no peak known"
    band = (
        f"{si(chip.bandwidth)}B/s ({chip.basis('bandwidth')})"
        if chip.bandwidth
        else "bandwidth unknown"
    )
    ridge = f"; bound by compute above {report.ridge:.3g} FLOP/byte" if report.ridge else ""
    many = f", {report.devices} JAX devices" if report.devices > 1 else ""
    lines = [f"{chip.name}{many}: {rate}, {band}{ridge}", ""]
    rows = [("scope", "FLOPs", "bytes", "FLOP/byte", "bound", "at the bound")]
    for row in (*report.scopes, report.total):
        intensity = "-" if row.intensity is None else f"{row.intensity:.3g}"
        rows.append(
            (
                row.scope or "(no scope)",
                f"{si(row.cost.flops)}F",
                f"{si(row.cost.fused_bytes)}B",
                intensity,
                row.bound,
                seconds_text(row.seconds),
            )
        )
    lines += [*aligned(rows, left=(0, 4)), ""]
    if report.measured is not None:
        ratio = (
            f", {report.measured / report.total.seconds:.1f} times the bound"
            if report.total.seconds
            else ""
        )
        lines.append(
            f"measured {seconds_text(report.measured)} per call (median, whole function){ratio}"
        )
    lines.append(str(report.mfu))
    if report.waste:
        lines.append("sizes that do not fill the tiles:")
        lines += [f"  {waste}" for waste in report.waste[:5]]
        if len(report.waste) > 5:
            lines.append(f"  and {len(report.waste) - 5} more")
        lines.append(textwrap.fill(report.rule, 98, initial_indent="  ", subsequent_indent="  "))
    lines.append(
        "FLOPs are exact (convolutions: padding included); bytes are estimated after fusion and "
        "are "
        f"\nbetween {si(report.count.io_bytes)}B (arguments and outputs) and "
        f"{si(report.count.total.bytes)}B (unfused)"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    factor, unit = next((pair for pair in units if seconds >= pair[0]), units[-1])
    return f"{seconds / factor:.3g} {unit}"

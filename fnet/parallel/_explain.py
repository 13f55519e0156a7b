"""The report of a plan: the compared strategies, the selected strategy, the reasons and the costs."""

from __future__ import annotations

import jax

from fnet.cost._roofline import seconds_text
from fnet.parallel import _comparison, _cost
from fnet.parallel._comparison import mib
from fnet.parallel._pipeline import described


def table(plan) -> str:
    """Returns a table of the compared strategies, with the reason why each strategy was selected or
    rejected. Every number in the table is marked as exact, compiled or estimated."""
    memory = plan.chip.memory_bytes and plan.chip.per_device.memory_bytes
    room = f"{memory / 2**30:,.1f} GiB each" if memory else "of unknown memory"
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    said = [f"{plan.target}, {room}: {plan.strategy}, {plan.options.words}", f"mesh: {mesh}", ""]
    said += _comparison.lines(plan.candidates)
    said += ["", *_sent(plan)]
    if plan.replicated:
        more = f"; and {len(plan.replicated) - 3} more" if len(plan.replicated) > 3 else ""
        said += [
            "replicated: "
            + "; ".join(f"{path} {list(shape)} ({why})" for path, shape, why in plan.replicated[:3])
            + more
        ]
    working = {*plan.axes, "context"}
    for where in jax.tree.leaves(plan.state):
        for names in where.spec:
            working |= set(names if isinstance(names, tuple) else (names,))
    for name, size in plan.mesh.shape.items():
        # Which axes the activations of a step that states its own shardings use is unknown here.
        if name not in working and size > 1 and plan.options.state != "explicit":
            said += [
                f"no rule uses the mesh axis {name}, so the {size} devices along it do the same "
                f"work"
            ]
    said += described(plan.pipeline)
    said += _avoided(plan)
    if plan.context is not None:
        said += plan.context.lines(plan.shapes)
    if plan.experts is not None:
        said += plan.experts.lines(plan.chosen.estimate.ledger)
    if plan.unused:
        said += [f"leaves of the batch that the step does not read: {', '.join(plan.unused)}"]
    said += _costs(plan)
    for option, rows in plan.largest_batches:
        more = (
            ", with activations recomputed" * option.remat
            + f", in {option.microbatches} microbatches" * (option.microbatches > 1)
        )
        said.append(f"largest batch that fits{more}: {rows:,} rows (estimated)")
    if not any(each.compiled for each in plan.candidates):
        said += [f"This is an estimate: {plan.target.why or 'nothing was compiled, as requested'}."]
    elif not plan.attached and plan.chip.kind == "gpu":
        said += [
            "Compiled without a GPU: this shows the partitioning and the memory of the program, "
            "but not which cuDNN kernels it would use."
        ]
    return "\n".join(said)


def _sent(plan) -> list[str]:
    """Returns one line for each strategy that fits into memory, with the bytes that each kind of
    collective sends. The selected strategy is first."""
    each = plan.chosen
    lines = []
    for one in sorted(plan.candidates, key=lambda one: one is not each):
        if one.verdict.startswith(("rejected", "not compiled", "unknown")):
            continue
        how = "compiled" if one.compiled and one.compiled.ledger is not None else "estimated"
        by_kind: dict[str, float] = {}
        for transfer in one.ledger.transfers:
            by_kind[transfer.collective] = by_kind.get(transfer.collective, 0.0) + transfer.sent
        said = [
            f"{name} {mib(sent)}"
            for name, sent in sorted(by_kind.items(), key=lambda item: -item[1])
        ]
        lines.append(
            f"MiB sent by each chip per step with {one.strategy} ({how}): "
            + (", ".join(said) or "nothing")
        )
    if each.estimate.between.sent:
        among = "of these" if each.compiled and each.compiled.ledger is not None else "and"
        lines.append(
            f"{among} between {'slices' if plan.chip.kind == 'tpu' else 'machines'}: "
            f"{mib(each.estimate.between.sent)} (estimated)"
        )
    if each.compiled and each.compiled.peak:
        off = each.estimate.peak / each.compiled.peak - 1
        lines.append(
            f"peak memory of each chip: {mib(each.compiled.peak)} MiB (compiled), "
            f"{mib(each.estimate.peak)} (estimated, {off:+.0%})"
        )
    if each.compiled and each.compiled.arguments:
        same = (
            "as predicted"
            if each.compiled.arguments == each.arguments
            else (f"{each.compiled.arguments - each.arguments:+,} bytes from the prediction")
        )
        lines.append(
            f"state and its part of the batch on each chip: {mib(each.compiled.arguments)} MiB "
            f"(compiled), {same}"
        )
    return lines


def _avoided(plan) -> list[str]:
    """Returns a line for each kind of operation that XLA would divide wrongly over the mesh of the
    plan."""
    lines = []
    for rows in dict.fromkeys(each.rows for each in plan.avoided):
        sizes = [each.nbytes for each in plan.avoided if each.rows == rows]
        names, wrong = (
            ", ".join(row.name for row in rows),
            "; ".join(f"{row.operation}, wrong where {row.sharding}" for row in rows),
        )
        count = f"{len(sizes)} equation{'s' * (len(sizes) > 1)}"
        lines.append(
            f"not left to XLA ({names}): {wrong}: {count}, {sum(sizes):,} bytes held unsplit by "
            f"each chip"
        )
    return lines


def _costs(plan) -> list[str]:
    time, units = plan.chosen.time, _cost.units(plan.shapes)
    if not time.seconds:  # unknown, or a step that reads nothing
        return []
    parts = [f"{name} {seconds_text(each)}" for name, each in time._asdict().items()]
    said = [
        f"a step at the chips' peak rates (estimated): {seconds_text(time.seconds)}, bound by "
        f"{time.bound} ({', '.join(parts)}), {units.count / time.seconds:,.0f} {units.name}/s at "
        f"most, {plan.chosen.mfu}"
    ]
    return said + [
        "at that speed (estimated): " + each.replace("UNITS", units.name)
        for each in _cost.price(plan.target, time.seconds, units.count)
    ]


def nothing_fits(target, judged, room, most) -> str:
    """Returns the error message for the case that no strategy fits into memory."""
    least = min(judged, key=lambda each: each.peak)
    memory = target.chip.memory_bytes and target.chip.per_device.memory_bytes
    if not memory:  # only the compiler's message is available
        return f"plan: nothing fits on {target}: {judged[-1].verdict}"
    how = "compiled" if least.compiled and least.compiled.peak is not None else "estimated"
    largest = "; ".join(map(str, least.estimate.largest[:4]))
    rows = next((rows for option, rows in reversed(most)), None)
    smaller = f" of at most {rows:,} rows (estimated)" if rows else ""
    return (
        f"plan: nothing fits into {memory / 2**30:.1f} GiB on each of {target}; {least.strategy} "
        f"needs least, {least.peak / 2**30:.1f} GiB ({how}); use a smaller batch{smaller}, "
        "ft.microbatch with a keyword microbatches of the step, or more devices. Its largest "
        f"arrays (estimated): {largest}"
    )

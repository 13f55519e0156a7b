"""A plan in words: what was compared, what was chosen, why, and what it costs."""

from __future__ import annotations

import jax

from fnet.hardware._roofline import seconds_text
from fnet.parallel import _cost


def table(plan) -> str:
    """A table of the candidates and the reasons; every number says how it is known."""
    memory = plan.chip.memory_bytes and plan.chip.per_device.memory_bytes
    room = f"{memory / 2 ** 30:,.1f} GiB each" if memory else "of unknown memory"
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    said = [f"{plan.target}, {room}: {plan.strategy}, {plan.way.words}", f"mesh: {mesh}", ""]
    said += _rows(plan)
    said += ["", *_sent(plan)]
    if plan.whole:
        more = f"; and {len(plan.whole) - 8} more" if len(plan.whole) > 8 else ""
        said += ["on every chip: " + "; ".join(f"{path} {list(shape)} ({why})" for path, shape, why in plan.whole[:8])
                 + more]
    working = {name for where in jax.tree.leaves(plan.state) for name in where.spec} | {"slice", "data"}
    for name, size in plan.mesh.shape.items():
        if name not in working and size > 1:
            said += [f"no rule names the mesh's axis {name}: the {size} devices along it do the same work"]
    if plan.unused:
        said += [f"of the batch the step does not read {', '.join(plan.unused)}"]
    said += _costs(plan)
    for way, rows in plan.most:
        more = ", activations computed again" * way.remat + f", in {way.microbatches} microbatches" * (
            way.microbatches > 1)
        said.append(f"largest batch that fits{more}: {rows:,} rows (estimated)")
    if not any(each.compiled for each in plan.candidates):
        said += [f"This is an estimate: {plan.target.why or 'nothing was compiled, as asked'}."]
    elif not plan.here and plan.chip.kind == "gpu":
        said += ["Compiled without a GPU: how the program is divided and what memory it needs, not which kernels cuDNN "
                 "would give it."]
    return "\n".join(said)


def _rows(plan) -> list[str]:
    lines = [("strategy", "state MiB", "peak MiB", "sent MiB", "step at best", "bound", "")]
    for each in plan.candidates:
        compiled = each.compiled
        peak = "compiled" if compiled and compiled.peak is not None else "estimated"
        sent = "compiled" if compiled and compiled.ledger is not None else "estimated"
        total = each.ledger.sent + (0 if sent == "compiled" else each.estimate.between.sent)
        state = "exact" if each.exact else "estimated"
        lines.append((each.strategy, f"{each.persistent / 2 ** 20:,.2f} {state}", f"{each.peak / 2 ** 20:,.2f} {peak}",
                      f"{total / 2 ** 20:,.2f} {sent}", f"{seconds_text(each.time.seconds)} estimated", each.time.bound,
                      each.verdict))
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    return ["  ".join([f"{line[0]:<{widths[0]}}", *(f"{line[i]:>{widths[i]}}" for i in (1, 2, 3, 4)),
                       f"{line[5]:<{widths[5]}}", line[6]]).rstrip() for line in lines]


def _sent(plan) -> list[str]:
    """By collective, of those that fit, the chosen one first."""
    each = plan.chosen
    lines = []
    for one in sorted(plan.candidates, key=lambda one: one.way != plan.way):
        if one.verdict.startswith(("rejected", "not compiled", "unknown")):
            continue
        how = "compiled" if one.compiled and one.compiled.ledger is not None else "estimated"
        by_kind: dict[str, float] = {}
        for transfer in one.ledger.transfers:
            by_kind[transfer.collective] = by_kind.get(transfer.collective, 0.0) + transfer.sent
        said = [f"{name} {sent / 2 ** 20:,.2f}" for name, sent in sorted(by_kind.items(), key=lambda item: -item[1])]
        lines.append(f"sent by each chip in a step by {one.strategy}, MiB ({how}): " + (", ".join(said) or "nothing"))
    if each.estimate.between.sent:
        among = "of it" if each.compiled and each.compiled.ledger is not None else "and"
        lines.append(f"{among} between {'slices' if plan.chip.kind == 'tpu' else 'machines'}: "
                     f"{each.estimate.between.sent / 2 ** 20:,.2f} (estimated)")
    if each.compiled and each.compiled.arguments:
        same = "as predicted" if each.compiled.arguments == each.arguments else (
            f"{each.compiled.arguments - each.arguments:+,} bytes from the prediction")
        lines.append(f"state and part of the batch on each chip: {each.compiled.arguments / 2 ** 20:,.2f} MiB "
                     f"(compiled), {same}")
    return lines


def _costs(plan) -> list[str]:
    time, units = plan.chosen.time, _cost.units(plan.shapes)
    if not time.seconds:    # unknown, or a step that reads nothing
        return []
    parts = [f"{name} {seconds_text(each)}" for name, each in zip(("compute", "memory", "links"), time)]
    said = [f"a step at the chips' peaks (estimated): {seconds_text(time.seconds)}, bound by {time.bound} "
            f"({', '.join(parts)}), {units.count / time.seconds:,.0f} {units.name}/s at most"]
    return said + ["at that speed (estimated): " + each.replace("UNITS", units.name)
                   for each in _cost.price(plan.target, time.seconds, units.count)]


def nothing_fits(target, judged, room, most) -> str:
    """What to say where no way fits."""
    least = min(judged, key=lambda each: each.peak)
    memory = target.chip.memory_bytes and target.chip.per_device.memory_bytes
    if not memory:    # the compiler's word alone
        return f"plan: nothing fits on {target}: {judged[-1].verdict}"
    how = "compiled" if least.compiled and least.compiled.peak is not None else "estimated"
    largest = "; ".join(map(str, least.estimate.largest[:4]))
    rows = next((rows for way, rows in reversed(most)), None)
    smaller = f" of at most {rows:,} rows (estimated)" if rows else ""
    return (f"plan: nothing fits into {memory / 2 ** 30:.1f} GiB on each of {target}; {least.strategy} comes nearest "
            f"with {least.peak / 2 ** 30:.1f} GiB ({how}): use a smaller batch{smaller}, ft.microbatch with the step's "
            f"keyword microbatches, or more devices. What takes most there (estimated): {largest}")


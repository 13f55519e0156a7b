"""`fnet chips`: shows the catalog of chips, or one chip, or plots them."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any

from fnet._util._nearest import similarity
from fnet._util._units import si
from fnet.cli._console import console, facts, table
from fnet.hardware._chip import Chip


def define(commands: Any) -> None:
    """Adds the command `chips` to the parser of `fnet`."""
    chips = commands.add_parser("chips", help="show the catalog of chips, or one chip")
    chips.add_argument(
        "name",
        nargs="*",
        help='name of a chip, a system or a device kind, such as "TPU v5e" or DGX-1',
    )
    chips.add_argument(
        "--plot",
        metavar="FILE",
        help="draw FLOP per dollar and per watt over the years, to a PNG, SVG or PDF file",
    )


def run(args: argparse.Namespace) -> int:
    """Shows the catalog or a chip."""
    if args.plot:
        from fnet.hardware import plot

        plot(args.plot)
        print(args.plot)
        return 0
    return _row(" ".join(args.name)) if args.name else _catalog()


def _catalog() -> int:
    from fnet import hardware as hw

    out = console()
    rows = []
    for chip in hw.chips.values():
        rates = [_tera(chip, name) for name in ("fp32", "fp16", "bf16", "fp8", "int8")]
        rows.append(
            (
                re.sub(r" \(.*\)", "", chip.name),
                str(chip.year),
                *rates,
                f"{chip.memory_bytes / 2**30:g}" if chip.memory_bytes else "-",
                f"{chip.bandwidth / 1e9:.0f}" if chip.bandwidth else "-",
                f"{chip.power_watts:g}" if chip.power_watts else "-",
            )
        )
    heads = ("chip", "year", "fp32", "fp16", "bf16", "fp8", "int8", "GiB", "GB/s", "watt")
    table(
        out,
        heads,
        rows,
        "TFLOP/s per chip, dense, FP32 accumulate; ~ computed from units and clock, ? unverified",
    )
    systems = []
    for system in hw.systems.values():
        quote = system.quoted[0]
        systems.append(
            (
                system.name,
                f"{system.count} x {system.chip.name}",
                quote.dtype,
                f"{system.chip.peaks[quote.dtype] * system.count / 1e12:,.0f}",
                f"{quote.flops / 1e12:,.0f}",
            )
        )
    table(out, ("system", "chips", "type", "TFLOP/s", "quoted"), systems)
    out.print(
        "fnet chips NAME shows one: computed and published peaks, prices, FLOP per dollar, power, "
        "sources",
        highlight=False,
        markup=False,
    )
    return 0


def _row(name: str) -> int:
    from fnet import hardware as hw

    if name in hw.chips:
        item: Any = hw.chips[name]
    elif name in hw.systems:
        item = hw.systems[name]
    else:
        try:
            item = hw.chips.find(name)  # slices of a chip
        except KeyError as error:
            near = hw.systems.nearest(name, 1)[0]
            like = lambda key: similarity(name, key.split(" (")[0])
            extra = (
                f"; the most similar system is {near!r}"
                if like(near) > like(hw.chips.nearest(name, 1)[0])
                else ""
            )
            print(f"fnet chips: {error.args[0]}{extra}", file=sys.stderr)
            return 2
    out = console()
    out.print(item.name, style="bold", highlight=False)
    if isinstance(item, Chip):
        parts = (item.kind, item.vendor, item.architecture, item.year)
        first = [("kind", ", ".join(str(part) for part in parts if part))]
        if item.device_kinds:
            first.append(("device kinds", ", ".join(repr(kind) for kind in item.device_kinds)))
        if item.jax_devices_per_chip > 1:
            first.append(
                (
                    "JAX devices",
                    f"{item.jax_devices_per_chip} per chip; the following values are per chip",
                )
            )
        rows = first + figures(item)
    else:
        rows = [("chips", f"{item.count} x {item.chip.name}"), ("year", str(item.year))]
        rows += [
            (f"peak {name}", f"{si(rate * item.count)}FLOP/s ({item.chip.basis(name)} per chip)")
            for name, rate in item.chip.peaks.items()
        ]
        if item.chip.memory_bytes:
            rows.append(("memory", f"{item.chip.memory_bytes * item.count / 2**30:g} GiB"))
    if item.power_watts:
        rows.append(("power", f"{item.power_watts:g} W ({item.power_source})"))
    if isinstance(item, Chip) and item.notes:
        rows.append(("note", item.notes))
    facts(out, rows)
    out.print("computed and published peaks", style="bold")
    facts(out, _comparison(item) or [("", "the units or the clock are unknown")])
    out.print("prices", style="bold")
    values = [
        (
            f"${v.price.usd:,.6g} / {v.price.per}",
            f"{v.price.date}, {v.price.source}"
            + (f" ({v.price.note})" if v.price.note else "")
            + f"\n{v.flop_per_dollar:.3g} FLOP per dollar at the {v.dtype} peak, {v.assumption}",
        )
        for v in hw.flop_per_dollar(item)
    ]
    facts(out, values or [("", "no price is known")])
    sources = (
        item.sources if isinstance(item, Chip) else tuple(quote.source for quote in item.quoted)
    )
    out.print("sources", style="bold")
    for source in sources:
        out.print(f"  {source}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _comparison(item: Any) -> list[tuple[str, str]]:
    """Returns rows (dtype, text). The text of a row states the formula, the computed peak and the
    published peaks of a chip, and why the peaks differ."""
    from fnet import hardware as hw

    formulas = {(c.dtype, c.formula): c.flops for c in hw.computed(item)}
    checks = hw.checks(item)
    # Some published peaks refer to another clock.
    formulas |= {(c.dtype, c.formula): c.computed for c in checks}
    rows = []
    for (dtype, formula), flops in formulas.items():
        text = [f"{formula} = {si(flops)}FLOP/s"]
        for check in checks:
            if (check.dtype, check.formula) == (dtype, formula):
                text.append(
                    f"published {si(check.quoted)}FLOP/s ({check.deviation:+.1%}) by {check.source}"
                    + (f": {check.explanation}" if check.explanation else "")
                )
        rows.append((dtype, "\n".join(text)))
    return rows


def figures(chip: Chip) -> list[tuple[str, str]]:
    """Returns the peak rates, memory and links of a chip as text, and whether each number is
    measured or published."""
    rows = [
        (
            f"peak {name}",
            f"{si(rate)}{'OP' if name.startswith('int') else 'FLOP'}/s ({chip.basis(name)})",
        )
        for name, rate in chip.peaks.items()
    ]
    tops, links = chip.units.get("npu_tops"), chip.links
    parts = links and [
        links.count and f"{links.count} links",
        links.each_way and f"{si(links.each_way)}B/s each way",
        links.total and f"{si(links.total)}B/s in total",
        links.topology,
        links.network and f"{si(links.network)}B/s to other slices or machines",
    ]
    sizes = ", ".join(f"{name} {size / 2**20:g} MiB" for name, size in chip.caches.items())
    facts = {
        "cores": chip.cores and f"{chip.cores:,}",
        "memory": chip.memory_bytes
        and f"{chip.memory_bytes / 2**30:.4g} GiB ({chip.basis('memory_bytes')})",
        "memory kind": chip.memory_kind and f"{chip.memory_kind} ({chip.basis('memory_kind')})",
        "caches": sizes and f"{sizes} ({chip.basis('caches')})",
        "neural engine": tops and f"{tops:g} TOP/s (published; JAX cannot use it)",
        "bandwidth": f"{si(chip.bandwidth)}B/s ({chip.basis('bandwidth')})"
        if chip.bandwidth
        else "unknown",
        "links": links
        and f"{links.type}: {', '.join(filter(None, parts))} ({chip.basis('links')})",
    }
    rows = rows or [("peak", "unknown, because the chip is not in the catalog")]
    return rows + [(label, text) for label, text in facts.items() if text]


def _tera(chip: Chip, name: str) -> str:
    if name not in chip.peaks:
        return "-"
    mark = {"derived": "~", "estimated": "~", "unverified": "?"}.get(chip.basis(name), "")
    value = chip.peaks[name] / 1e12
    return f"{mark}{value:.4g}"

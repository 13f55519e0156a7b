"""The `fnet` command.

fnet devices            shows the chips of this machine and the dtypes that fnet selects for them; if JAX computes
                        on a CPU, the first call also measures the CPU
fnet chips              shows the catalog of chips
fnet chips "TPU v5e"    shows computed and published peaks, prices, FLOP per dollar, power and sources of a chip
fnet chips --plot FILE  plots FLOP per dollar and per watt over the years
fnet export runs/digits --to=bundle,onnx,litert         writes the trained model of a run as files
fnet bundle show FILE   describes an exported model
fnet bundle check FILE  compares the outputs of an exported model with the outputs that are stored in the file
fnet bundle renew FILE  writes the programs of an exported model again, with the installed version of JAX
fnet serve FILE         serves exported models over HTTP
fnet report runs/digits                                 writes an HTML report of a run
fnet plan module:function --devices v5e:16x16           selects the sharding of a training step
fnet sweep SCRIPT --space space.json --budget 30m       searches for hyperparameters
fnet compare resnet50 --chips "RTX 2080 Ti,TPU v2-8"    compares a training step on several chips
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from fnet import (
    _cli_bundle,
    _cli_compare,
    _cli_export,
    _cli_plan,
    _cli_report,
    _cli_serve,
    _cli_sweep,
)
from fnet._util._units import si
from fnet.hardware._chip import Chip

_COMMANDS = {
    "plan": _cli_plan,
    "bundle": _cli_bundle,
    "export": _cli_export,
    "serve": _cli_serve,
    "compare": _cli_compare,
    "report": _cli_report,
    "sweep": _cli_sweep,
}
_WIDTH = 100  # columns of output to a pipe or a file


class _Parser(argparse.ArgumentParser):
    """An argparse parser that reports a wrong command line in one line."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command of `fnet` and returns its exit code.

    The exit code is 0 for success, 2 for an invalid argument, an unreadable file or a missing
    device, and 1 for other errors. Errors are printed to standard error in one line, or as a
    traceback with --debug.
    """
    parser = _Parser(prog="fnet", description="fnet: neural networks as pure functions on JAX.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="<command>")
    devices = commands.add_parser(
        "devices",
        help="show the chips of this machine and the policy with its reason; a "
        "CPU is probed for about a second, once (not with FNET_PROBE=0)",
    )
    devices.add_argument(
        "--measure",
        action="store_true",
        help="measure the rates of matrix products and of a copy, for a few seconds",
    )
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
    for module in _COMMANDS.values():
        module.define(commands)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as in fnet chips >&-
            setattr(sys, name, open(os.devnull, "w"))
    argv, flags = _cli_sweep.separate(sys.argv[1:] if argv is None else argv)
    try:
        args = parser.parse_args(argv)
        args.flags = flags
        code = _run(parser, args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in fnet chips | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "Unable to initialize backend" in first:
            print(f"fnet {args.command}: {no_device(error)}", file=sys.stderr)
            return 2
        print(
            f"fnet {args.command}: {first} (use fnet --debug {args.command} for a traceback)",
            file=sys.stderr,
        )
        return 2 if isinstance(error, ValueError | OSError) else 1


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.command == "devices":
        return _devices(args.measure)
    if args.command == "chips" and args.plot:
        from fnet.hardware import plot

        plot(args.plot)
        print(args.plot)
        return 0
    if args.command == "chips":
        return _row(" ".join(args.name)) if args.name else _catalog()
    if args.command in _COMMANDS:
        return _COMMANDS[args.command].run(args)
    parser.print_help()
    return 0


def no_device(error: Exception) -> str:
    """Returns the message for the error that `jax.devices` raises when no backend starts."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    why = (str(error).splitlines() or [f"no backend of JAX_PLATFORMS={platforms!r} starts"])[0]
    return f"JAX finds no device: {why}"


def _devices(measure: bool) -> int:
    import jax

    from fnet import hardware as hw

    try:
        found = jax.local_devices()
    except (RuntimeError, AssertionError) as error:
        print(f"fnet devices: {no_device(error)}", file=sys.stderr)
        return 2
    console = _console()
    groups: dict[Chip, list[Any]] = {}
    for device in found:
        groups.setdefault(hw.detect(device), []).append(device)
    for chip, devices in groups.items():
        chips = max(1, len(devices) // chip.jax_devices_per_chip)
        console.print(
            f"{chips} x {chip.name}" if chips > 1 else chip.name, style="bold", highlight=False
        )
        facts = [
            (
                "kind",
                f"{chip.kind}, {chip.vendor}"
                + (f", {chip.architecture}" if chip.architecture else ""),
            )
        ]
        if measure:
            chip = hw.measure(devices[0])
        each = f", {chip.jax_devices_per_chip} to a chip" if chip.jax_devices_per_chip > 1 else ""
        facts.append(
            (
                "JAX devices",
                f"{len(devices)}{each} ({devices[0].platform}: {devices[0].device_kind})",
            )
        )
        facts += _figures(chip)
        if chip.notes:
            facts.append(("note", chip.notes))
        for mode in ("train", "inference"):
            policy = hw.policy(devices[0], mode)  # a CPU is probed once, as the reason states
            scaling = f", loss scaling from {policy.loss_scale:g}" if policy.loss_scale else ""
            operands = str(policy).partition(", sums ")[
                0
            ]  # also of convolutions and of the residual stream
            facts.append(
                (
                    f"policy, {mode}",
                    f"{operands}, sums {policy.accum}{scaling}\nbecause {policy.reason}",
                )
            )
        _facts(console, facts)
    console.print(
        f"jax {jax.__version__}, {jax.process_count()} process(es), default backend "
        f"{jax.default_backend()}",
        highlight=False,
    )
    return 0


def _catalog() -> int:
    from fnet import hardware as hw

    console = _console()
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
    _table(
        console,
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
    _table(console, ("system", "chips", "type", "TFLOP/s", "quoted"), systems)
    console.print(
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
            like = lambda key: SequenceMatcher(None, name, key.split(" (")[0]).ratio()
            extra = (
                f"; the most similar system is {near!r}"
                if like(near) > like(hw.chips.nearest(name, 1)[0])
                else ""
            )
            print(f"fnet chips: {error.args[0]}{extra}", file=sys.stderr)
            return 2
    console = _console()
    console.print(item.name, style="bold", highlight=False)
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
        facts = first + _figures(item)
    else:
        facts = [("chips", f"{item.count} x {item.chip.name}"), ("year", str(item.year))]
        facts += [
            (f"peak {name}", f"{si(rate * item.count)}FLOP/s ({item.chip.basis(name)} per chip)")
            for name, rate in item.chip.peaks.items()
        ]
        if item.chip.memory_bytes:
            facts.append(("memory", f"{item.chip.memory_bytes * item.count / 2**30:g} GiB"))
    if item.power_watts:
        facts.append(("power", f"{item.power_watts:g} W ({item.power_source})"))
    if isinstance(item, Chip) and item.notes:
        facts.append(("note", item.notes))
    _facts(console, facts)
    console.print("computed and published peaks", style="bold")
    _facts(console, _comparison(item) or [("", "the units or the clock are unknown")])
    console.print("prices", style="bold")
    values = [
        (
            f"${v.price.usd:,.6g} / {v.price.per}",
            f"{v.price.date}, {v.price.source}"
            + (f" ({v.price.note})" if v.price.note else "")
            + f"\n{v.flop_per_dollar:.3g} FLOP per dollar at the {v.dtype} peak, {v.assumption}",
        )
        for v in hw.flop_per_dollar(item)
    ]
    _facts(console, values or [("", "no price is known")])
    sources = (
        item.sources if isinstance(item, Chip) else tuple(quote.source for quote in item.quoted)
    )
    console.print("sources", style="bold")
    for source in sources:
        console.print(f"  {source}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _comparison(item: Any) -> list[tuple[str, str]]:
    """Returns rows (dtype, text). The text of a row states the formula, the computed peak and the
    published peaks of a chip, and why the peaks differ."""
    from fnet import hardware as hw

    formulas = {(c.dtype, c.formula): c.flops for c in hw.computed(item)}
    checks = hw.checks(item)
    formulas |= {
        (c.dtype, c.formula): c.computed for c in checks
    }  # some published peaks refer to another clock
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


def _figures(chip: Chip) -> list[tuple[str, str]]:
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


def _console() -> Any:
    from rich import console

    class Console(console.Console):
        def on_broken_pipe(self) -> None:  # rich's version ends the process with exit code 1
            raise BrokenPipeError

    if sys.stdout.isatty():
        return Console(file=sys.stdout, highlight=False)
    return Console(file=_Plain(), width=_WIDTH, no_color=True, highlight=False)


class _Plain:
    """A stream that removes the spaces at the ends of lines, and writes the text to standard
    output. `_console`
    uses this stream if standard output is not a terminal."""

    def write(self, text: str) -> None:
        sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def _facts(console: Any, rows: Sequence[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(f"  {label}", _plain(text))
    console.print(table)
    console.print()


def _table(
    console: Any, heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = ""
) -> None:
    from rich import box
    from rich.table import Table

    if title:
        console.print(title, style="italic", highlight=False, markup=False)
    table = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        padding=(0, 1),
        pad_edge=console.is_terminal,
    )
    for i, head in enumerate(heads):
        number = all(
            row[i][:1].lstrip("~?+-$").isdigit()
            or row[i] in ("-", "")
            or row[i][:2].lstrip("~?+-$").isdigit()
            for row in rows
        ) and head not in ("formula", "chips", "chip", "date")
        table.add_column(
            head, justify="right" if number else "left", no_wrap=number or i == 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(_plain, row))
    console.print(table)
    console.print()


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


if __name__ == "__main__":
    sys.exit(main())

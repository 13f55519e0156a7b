"""The compared strategies of a plan, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fnet._util import _missing
from fnet._util._text_table import aligned
from fnet.cost._roofline import seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_NUMBERS = ("state", "peak", "sent", "best time", "MFU")
_COLORS = {
    "compute": "tab:blue",
    "memory": "tab:green",
    "links": "tab:orange",
    "latency": "tab:red",
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The strategies that a plan compared, the result of `plan.compare()`. It prints as a table
    with a line for each strategy and mesh.

    Attributes:
        plan: the `Plan`; `plan.candidates` has the figures as numbers.

    >>> step = lambda state, batch: ({"w": state["w"] - 0.1 * batch.mean(0)}, {})
    >>> init = lambda key: {"w": jax.random.normal(key, (3,))}
    >>> plan = parallel.plan(step, init, jnp.ones((8, 3)), devices="v5e:2x2", compile=False)
    >>> print(plan.compare().markdown().splitlines()[0])
    | strategy | mesh | state | peak | sent | best time | MFU | bound |  |
    """

    plan: Any = dataclasses.field(repr=False)

    def table(self) -> list[list[str]]:
        """Returns the rows of the table as lists of text. The first row is the heading, the second
        says in which unit a number is and how it is known: exact, compiled or estimated. The last
        column is the verdict.
        """
        return _table(self.plan.candidates, meshes=True)

    def __str__(self) -> str:
        return "\n".join(lines(self.plan.candidates, meshes=True))

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        head, *rows = self.table()
        made = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
        return "\n".join([*made, *("| " + " | ".join(row) + " |" for row in rows)])

    def plot(self, path: str | os.PathLike | None = None) -> Figure:
        """Draws the best time of each strategy, by what it is spent on, and its peak memory beside
        that of a chip. The chosen strategy is bold, and what was rejected is gray.

        Args:
            path: the file to write (.png, .svg or .pdf). Default None: no file.

        Returns:
            The Matplotlib figure.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: matplotlib cannot write files of the type of `path`.
        """
        return _plot(self.plan, path)


def lines(candidates: Sequence, *, meshes: bool = False) -> list[str]:
    """Returns the lines of the table. A column for the meshes is left out unless they differ or
    `meshes` is True."""
    several = len({tuple(each.mesh.items()) for each in candidates}) > 1
    rows = _table(candidates, meshes=meshes or several)
    end = len(rows[0])
    left = (0, end - 2, end - 1) if len(rows[0]) == 8 else (0, 1, end - 2, end - 1)
    return aligned(rows, left=left)


def _table(candidates: Sequence, *, meshes: bool) -> list[list[str]]:
    """How a column's numbers are known stands in its head; where that differs from row to row,
    estimates carry a `~`."""
    known = [_known(each) for each in candidates]  # [candidate][column]
    bases = [{row[column][1] for row in known} for column in range(len(_NUMBERS))]
    mesh = lambda text: [text] * meshes
    rows = [
        ["strategy", *mesh("mesh"), *_NUMBERS, "bound", ""],
        ["MiB on a chip", *mesh(""), *map(_basis, bases), "", ""],
    ]
    for each, row in zip(candidates, known):
        cells = [
            f"~{text}" if basis == "estimated" and len(all_bases) > 1 else text
            for (text, basis), all_bases in zip(row, bases)
        ]
        axes = " ".join(f"{name}={size}" for name, size in each.mesh.items())
        rows.append([each.strategy, *mesh(axes), *cells, each.time.bound, each.verdict])
    return rows


def _basis(bases: set[str]) -> str:
    """How a column's numbers are known."""
    others = bases - {"estimated"}
    if not others:
        return "estimated"
    return ", ".join(sorted(others)) + ", ~est." * ("estimated" in bases)


def _known(candidate: Any) -> list[tuple[str, str]]:
    """A row's numbers, each with how it is known: "exact", "compiled" or "estimated"."""
    compiled = candidate.compiled
    peak = "compiled" if compiled and compiled.peak is not None else "estimated"
    sent = "compiled" if compiled and compiled.ledger is not None else "estimated"
    total = candidate.ledger.sent
    if sent == "estimated":
        total += candidate.estimate.between.sent
    utilization = candidate.mfu.value
    return [
        (mib(candidate.persistent), "exact" if candidate.exact else "estimated"),
        (mib(candidate.peak), peak),
        (mib(total), sent),
        (seconds_text(candidate.time.seconds), "estimated"),
        ("unknown" if utilization is None else f"{utilization:.1%}", "estimated"),
    ]


def mib(nbytes: float) -> str:
    mebibytes = nbytes / 2**20
    return f"{mebibytes:,.0f}" if mebibytes >= 100 else f"{mebibytes:,.2f}"


def _plot(plan: Any, path: str | os.PathLike | None) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(_missing.message("plots need", "matplotlib")) from None
    candidates = plan.candidates
    figure = Figure(layout="constrained", figsize=(13, 1.6 + 0.55 * len(candidates)))
    times, memory = figure.subplots(1, 2, sharey=True)
    for place, each in enumerate(candidates):
        _draw_times(times, place, each)
        _draw_peak(memory, place, each)
    room = plan.chip.memory_bytes and plan.chip.per_device.memory_bytes
    if room:
        memory.axvline(room / 2**30, color="black", label="memory of a device")
    times.set_yticks(range(len(candidates)), [_label(each, candidates) for each in candidates])
    for label, each in zip(times.get_yticklabels(), candidates):
        label.set_fontweight("bold" if each.verdict.startswith("chosen") else "normal")
    times.invert_yaxis()
    times.set(title="time of a step at the peak rates (estimated)", xlabel="ms")
    memory.set(title="peak memory of a device", xlabel="GiB")
    for axis in (times, memory):
        axis.grid(alpha=0.3, axis="x")
        axis.set_xlim(left=0)
    times.legend(handles=_legend(), fontsize="small")
    memory.legend(fontsize="small") if room else None
    figure.suptitle(str(plan.target))
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _label(each: Any, candidates: Sequence) -> str:
    if len({tuple(other.mesh.items()) for other in candidates}) == 1:
        return each.strategy
    return each.strategy + "\n" + " ".join(f"{name}={size}" for name, size in each.mesh.items())


def _draw_times(axis: Any, place: int, each: Any) -> None:
    """Thin bars below each other, since the longest of the times decides."""
    for at, (name, color) in enumerate(_COLORS.items()):
        seconds = getattr(each.time, name)
        if seconds is not None:
            at_height = place + 0.2 * (at - (len(_COLORS) - 1) / 2)
            axis.barh(at_height, seconds * 1e3, 0.17, color=color, alpha=_strength(each))


def _draw_peak(axis: Any, place: int, each: Any) -> None:
    how = "compiled" if each.compiled and each.compiled.peak is not None else "estimated"
    gibibytes = each.peak / 2**30
    axis.barh(place, gibibytes, 0.6, color="tab:purple", alpha=_strength(each))
    text = {"xytext": (4, -3), "textcoords": "offset points", "fontsize": 8}
    axis.annotate(f"{gibibytes:.3g} ({how})", (gibibytes, place), **text)
    axis.margins(x=0.2)


def _strength(each: Any) -> float:
    return 0.3 if each.verdict.startswith("rejected") else 1.0


def _legend() -> list:
    from matplotlib.patches import Patch

    return [Patch(color=color, label=name) for name, color in _COLORS.items()]

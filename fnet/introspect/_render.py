"""Formats tables as text, Markdown and HTML, and returns a summary as a table or as data."""

from __future__ import annotations

import html as _html
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fnet._util._text_table import aligned
from fnet._util._units import si


class Table(NamedTuple):
    """A table whose first column is a path.

    Attributes:
        titles: the titles of the columns.
        left: the number of columns that are aligned to the left.
        rows: a tuple (depth, cells) for each row. If the depth of a row is 0, the method `text`
            shows the whole first cell, for example "total". If the depth of a row is 1 or more, the
            first cell is a path, and the method `text` shows only the last segment of the path,
            indented by 2 * (depth - 1) spaces.
        footer: the lines below the table.
    """

    titles: Sequence[str]
    left: int
    rows: Sequence[tuple[int, tuple[str, ...]]]
    footer: Sequence[str]

    def text(self) -> str:
        # Paths are indented, and only their last segment is shown.
        shown = [
            ("  " * (depth - 1) + cells[0].rpartition("/")[2], *cells[1:]) if depth else cells
            for depth, cells in self.rows
        ]
        table = [tuple(self.titles), *shown]
        return "\n".join([*aligned(table, left=range(self.left)), *self.footer])

    def markdown(self) -> str:
        escape = lambda cell: cell.replace("|", "\\|")
        rule = (
            "| "
            + " | ".join(["---"] * self.left + ["---:"] * (len(self.titles) - self.left))
            + " |"
        )
        lines = ["| " + " | ".join(self.titles) + " |", rule]
        lines += ["| " + " | ".join(map(escape, cells)) + " |" for _, cells in self.rows]
        return "\n".join([*lines, "", *self.footer])

    def html(self) -> str:
        row_of = lambda cells, tag: (
            "<tr>" + "".join(f"<{tag}>{_html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
        )
        rows = [row_of(cells, "td") for _, cells in self.rows]
        footer = [f"<p>{_html.escape(line)}</p>" for line in self.footer]
        return "\n".join(["<table>", row_of(self.titles, "th"), *rows, "</table>", *footer])


_TITLES = (
    "path",
    "output",
    "parameters",
    "forward FLOPs",
    "backward FLOPs",
    "kept",
    "share of time",
)


def _cells(row) -> tuple[str, ...]:
    calls = f" (x{len(row.output)})" if len(row.output) > 1 else ""
    output = (
        ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(row.output[:1]))
        + calls
    )
    parameters = f"{row.parameters:,} ({_number(row.parameter_bytes)}B)" if row.parameters else ""
    share = "" if row.share is None else f"{100 * row.share:.1f} %"
    return (
        row.path or "total",
        output,
        parameters,
        f"{_number(row.forward.flops)}F",
        f"{_number(row.backward.flops)}F",
        f"{_number(row.kept_bytes)}B" if row.kept else "",
        share,
    )


def _number(value) -> str:
    # A symbolic size has no unit prefix.
    return si(value) if isinstance(value, (int, float)) else f"({value}) "


def _table(summary, *, notes: bool) -> Table:
    rows = [(row.depth, _cells(row)) for row in (*summary.rows, summary.total)]
    footer = [_footer(summary)]
    if summary.temporary_bytes is not None:
        footer.append(
            "temporary memory of the compiled forward and backward pass: "
            f"{si(summary.temporary_bytes)}B; kept activations: {si(summary.total.kept_bytes)}B"
        )
    footer += (f"note: {note}" for note in summary.notes if notes)
    return Table(_TITLES, 2, rows, footer)


def _footer(summary) -> str:
    if summary.total.share is None:
        return f"no share of time: the sizes are symbolic, or the peaks of {summary.chip.name} are unknown"
    return f"share of time: of a forward and backward pass at the roofline of {summary.chip.name}"


def text(summary: Any) -> str:
    return _table(summary, notes=True).text()


def markdown(summary: Any) -> str:
    return _table(summary, notes=False).markdown()


def html(summary: Any) -> str:
    return _table(summary, notes=False).html()


def data(summary: Any) -> list[dict]:
    return [
        {
            "path": row.path,
            "output": [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(row.output)],
            "parameters": row.parameters,
            "parameter_bytes": row.parameter_bytes,
            "forward_flops": row.forward.flops,
            "backward_flops": row.backward.flops,
            "kept_bytes": row.kept_bytes,
            "share": row.share,
        }
        for row in (*summary.rows, summary.total)
    ]

"""A summary as text, Markdown, HTML and data."""

from __future__ import annotations

import html as _html
from typing import Any

import jax

from fnet.hardware._chip import si

_TITLES = ("path", "output", "parameters", "forward FLOPs", "backward FLOPs", "kept", "share of time")


def _cells(row) -> tuple[str, ...]:
    calls = f" (x{len(row.output)})" if len(row.output) > 1 else ""
    output = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(row.output[:1])) + calls
    parameters = f"{row.parameters:,} ({_number(row.parameter_bytes)}B)" if row.parameters else ""
    share = "" if row.share is None else f"{100 * row.share:.1f} %"
    return (row.path or "total", output, parameters, f"{_number(row.forward.flops)}F",
            f"{_number(row.backward.flops)}F", f"{_number(row.kept_bytes)}B" if row.kept else "", share)


def _number(value) -> str:
    return si(value) if isinstance(value, (int, float)) else f"({value}) "    # a symbolic size is in no multiple


def text(summary: Any) -> str:
    rows = [_cells(row) for row in (*summary.rows, summary.total)]
    # Indented, with the last segment alone.
    shown = [("  " * (row.depth - 1) + row.path.rpartition("/")[2], *cells[1:])
             for row, cells in zip(summary.rows, rows)]
    table = [_TITLES, *shown, rows[-1]]
    widths = [max(len(row[i]) for row in table) for i in range(len(_TITLES))]
    lines = ["  ".join(cell.ljust(width) if i < 2 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in table]
    return "\n".join([*lines, _footer(summary), *(f"note: {note}" for note in summary.notes)])


def _footer(summary) -> str:
    if summary.total.share is None:
        return f"no share of time: the sizes are symbolic, or the peaks of {summary.chip.name} are unknown"
    return f"share of time: of a forward and backward pass at the roofline of {summary.chip.name}"


def markdown(summary: Any) -> str:
    escape = lambda cell: cell.replace("|", "\\|")
    lines = ["| " + " | ".join(_TITLES) + " |", "| --- | --- |" + " ---: |" * (len(_TITLES) - 2)]
    lines += ["| " + " | ".join(map(escape, _cells(row))) + " |" for row in (*summary.rows, summary.total)]
    return "\n".join([*lines, "", _footer(summary)])


def html(summary: Any) -> str:
    row_of = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{_html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
    rows = [row_of(_cells(row), "td") for row in (*summary.rows, summary.total)]
    return "\n".join(["<table>", row_of(_TITLES, "th"), *rows, "</table>", f"<p>{_html.escape(_footer(summary))}</p>"])


def data(summary: Any) -> list[dict]:
    return [{"path": row.path, "output": [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(row.output)],
             "parameters": row.parameters, "parameter_bytes": row.parameter_bytes, "forward_flops": row.forward.flops,
             "backward_flops": row.backward.flops, "kept_bytes": row.kept_bytes, "share": row.share}
            for row in (*summary.rows, summary.total)]

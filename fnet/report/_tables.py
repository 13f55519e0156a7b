"""The tables of a report: configurations, environment, model, profiles, checkpoints, log."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from html import escape
from typing import Any

from fnet._util._units import si
from fnet.report._read import Run

_TEXT = 4000  # largest number of characters of a value


def configuration(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Returns a table of the configurations of the runs, with a row for each field. Fields that
    differ between runs come first."""
    fields = list(dict.fromkeys(name for run in runs for name in run.config))
    if not fields:
        return ""
    cells = {
        field: [show(run.config[field]) if field in run.config else "" for run in runs]
        for field in fields
    }
    differ = [field for field in fields if len(set(cells[field])) > 1]
    rows = [_row(["field", *names], "th")]
    for field in [*differ, *(field for field in fields if field not in differ)]:
        rows.append(_row([field, *cells[field]], "td", "differs" if field in differ else ""))
    lead = (
        ""
        if len(runs) == 1
        else (
            f"<p>{len(differ)} of {len(fields)} fields differ: "
            f"{escape(', '.join(differ[:20]))}.</p>"
            if differ
            else "<p>The configurations are equal.</p>"
        )
    )
    return f'{lead}<div class="scroll card"><table class="first">{"".join(rows)}</table></div>'


def environment(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Returns a table of the facts about each run, such as the chip, the precision policy, the
    sharding plan and the versions of libraries."""
    order = [
        "chip",
        "kind",
        "devices",
        "processes",
        "jaxlib",
        "policy",
        "weights",
        "weights_revision",
        "tune",
        "plan",
    ]
    hidden = {"fit", "evaluated", "position", "unlogged", "regular", "rollbacks", "checked"}
    facts = []
    for run in runs:
        fit = run.facts.get("fit")
        extra = (
            {
                f"fit: {key}": value
                for key, value in fit.items()
                if key in ("steps", "best", "early_stop", "data") and value is not None
            }
            if isinstance(fit, dict)
            else {}
        )
        compiled = run.metrics.get("time/compile_seconds", ([], []))[1]
        if compiled and compiled[-1] is not None:
            extra["seconds to compile"] = float(f"{compiled[-1]:.3g}")
        facts.append({key: value for key, value in run.facts.items() if key not in hidden} | extra)
    fields = list(
        dict.fromkeys(
            [
                *(key for key in order if any(key in each for each in facts)),
                *(str(key) for each in facts for key in each),
            ]
        )
    )
    if not fields:
        return ""
    rows = [_row(["", *names], "th")]
    for field in fields[:200]:
        values = [show(each[field]) if field in each else "" for each in facts]
        if len(set(values)) == 1:  # once, across the columns of all runs
            rows.append(
                f'<tr><td>{escape(field)}</td><td colspan="{len(runs)}">{escape(values[0])}</td></tr>'
            )
        else:
            rows.append(_row([field, *values], "td", "differs"))
    return f'<div class="scroll card"><table class="first">{"".join(rows)}</table></div>'


def summary(run: Run, name: str) -> str:
    """Returns a table of the model of a run, with a row for each path in the model."""
    if not run.summary:
        return ""
    heads = (
        "path",
        "output",
        "parameters",
        "forward FLOPs",
        "backward FLOPs",
        "kept",
        "share of time",
    )
    rows = [
        "<tr>"
        + "".join(
            f"<th{' class=number' if i > 1 else ''}>{head}</th>" for i, head in enumerate(heads)
        )
        + "</tr>"
    ]
    for row in run.summary:
        path = show(row.get("path", "")) or "total"
        output = row.get("output")
        output = ", ".join(map(show, output[:4])) if isinstance(output, list) else ""
        cells = [
            path,
            output,
            *(
                _number(row.get(key), unit)
                for key, unit in (
                    ("parameters", ""),
                    ("forward_flops", "FLOP"),
                    ("backward_flops", "FLOP"),
                    ("kept_bytes", "B"),
                )
            ),
        ]
        share = row.get("share")
        cells.append(
            f"{100 * share:.1f} %" if isinstance(share, int | float) and 0 <= share <= 1 else ""
        )
        depth = 0 if path == "total" else min(path.count("/"), 20)
        label = path.rpartition("/")[2] if path != "total" else path
        rows.append(
            f'<tr{" class=total" if path == "total" else ""}><td title="{escape(path)}">{"&emsp;" * depth}'
            f"{escape(label)}</td>"
            + "".join(
                f"<td{' class=number' if i else ''}>{escape(cell)}</td>"
                for i, cell in enumerate(cells[1:])
            )
            + "</tr>"
        )
    return (
        f'<details class="card"{" open" if len(run.summary) <= 40 else ""}><summary>{escape(name)}</summary>'
        f'<div class="scroll"><table class="tight">{"".join(rows)}</table></div></details>'
    )


def profiles(run: Run, name: str) -> str:
    """Returns one table for each profile of a run. A table of a profile lists the time of each path
    of the model in each phase, such as forward and backward."""
    parts = []
    for steps, rows in run.profiles.items():
        present = [
            key
            for key in ("forward", "backward", "recomputed", "optimizer", "other")
            if any(_time_of(row, key) for row in rows)
        ]
        table = [
            "<tr><th>path</th>"
            + "".join(
                f"<th class=number>{head}</th>"
                for head in (
                    *(f"{key} ms" for key in present),
                    "total ms",
                    "share",
                    "FLOPs",
                    "bytes",
                    "bound ms",
                )
            )
            + "</tr>"
        ]
        for row in rows:
            path, share = show(row.get("path", "")) or "total", row.get("share")
            depth = 0 if path == "total" else min(path.count("/"), 20)
            cells = [
                *(_time_of(row, key) for key in (*present, "seconds")),
                f"{100 * share:.1f} %"
                if isinstance(share, int | float) and 0 <= share <= 1
                else "",
                _number(row.get("flops"), "FLOP"),
                _number(row.get("bytes"), "B"),
                _time_of(row, "bound"),
            ]
            table.append(
                f'<tr{" class=total" if path == "total" else ""}><td title="{escape(path)}">{"&emsp;" * depth}'
                f"{escape(path if path == 'total' else path.rpartition('/')[2])}</td>"
                + "".join(f"<td class=number>{escape(cell)}</td>" for cell in cells)
                + "</tr>"
            )
        first, end = map(int, steps.split("-"))
        parts.append(
            f'<details class="card"{" open" if len(rows) <= 40 else ""}><summary>{escape(name)}: steps '
            f'{first:,} to {end:,}</summary><div class="scroll"><table class="tight">{"".join(table)}</table>'
            "</div></details>"
        )
    return "".join(parts)


def checkpoints(run: Run, name: str) -> str:
    if not run.checkpoints and not run.damaged:
        return ""
    metrics = list(dict.fromkeys(key for _, values, _ in run.checkpoints for key in values))[:12]
    rows = [_row(["step", "size", *metrics], "th")]
    for step, values, size in run.checkpoints[-200:]:
        rows.append(
            _row(
                [
                    f"{step:,}",
                    f"{si(size, digits=3)}B",
                    *(f"{values[key]:.5g}" if key in values else "" for key in metrics),
                ],
                "td",
            )
        )
    damaged = (
        f'<p class="note">damaged, set aside: {escape(", ".join(run.damaged[:20]))}</p>'
        if run.damaged
        else ""
    )
    return (
        f'<article class="card"><h3>{escape(name)}</h3><div class="scroll"><table class="numbers">{"".join(rows)}'
        f"</table></div>{damaged}</article>"
    )


_WARNINGS = ("is compiled again", "not finite", "rolled back", "skipped", "ended by", "damaged")


def events(run: Run, name: str) -> str:
    """Returns a table of the events of a run. Unusual events are marked."""
    if not run.events:
        return ""
    rows = [_row(["step", "time", "event"], "th")]
    for step, when, text in run.events[-500:]:
        unusual = any(word in text for word in _WARNINGS) and not text.startswith(
            "ended by Interrupted"
        )
        rows.append(
            _row(
                [f"{step:,}", _time(when), ("⚠ " if unusual else "") + text],
                "td",
                "warning" if unusual else "",
            )
        )
    count = sum("warning" in row for row in rows)
    lead = f" · {count} unusual" if count else ""
    return (
        f'<details class="card"{" open" if len(rows) < 30 or count else ""}><summary>{escape(name)}: '
        f"{len(run.events)} events{lead}</summary>"
        f'<div class="scroll"><table>{"".join(rows)}</table></div></details>'
    )


def show(value: Any) -> str:
    """Returns a value of a configuration as text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= _TEXT else text[:_TEXT] + f" … ({len(text):,} characters)"


def _number(value, unit) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return ""
    return f"{si(value, digits=3)}{unit}".strip() if value else ""


def _time_of(row, key) -> str:
    value = row.get(key)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
    return f"{1e3 * value:.3g}" if usable else ""


def _time(when) -> str:
    try:
        return (
            ""
            if when is None
            else f"{datetime.datetime.fromtimestamp(when).astimezone():%Y-%m-%d %H:%M:%S}"
        )
    except (ValueError, OverflowError, OSError):
        return ""


def _row(cells, tag, kind="") -> str:
    inside = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return f"<tr{f' class={kind}' if kind else ''}>{inside}</tr>"

"""The page of a sweep: table, parallel coordinates and importance, in one HTML file without
scripts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fnet._util import _page
from fnet._util._files import write as write_file
from fnet.search.sweep._importance import Importance, importance

_SIGNIFICANT = 0.05
_FEW = 20  # trials below which the page warns about its percentages
_LETTER = 0.6  # mean width of a letter, relative to the font size


def best(trials: Sequence[Any]) -> Any:
    """The finished trial with the best value of the metric, or None if no trial has finished."""
    ended = finished(trials)
    sign = lambda trial: -1 if trial.result["mode"] == "min" else 1
    return max(
        ended, key=lambda trial: (sign(trial) * trial.result["value"], -trial.index), default=None
    )


def finished(trials: Sequence[Any]) -> list[Any]:
    """The finished trials with the metric of the first of them. Values of different metrics cannot
    be compared."""
    ended = [trial for trial in trials if trial.result and trial.result["status"] == "finished"]
    return [trial for trial in ended if trial.result["metric"] == ended[0].result["metric"]]


def write(sweep: Any) -> Path:
    """Writes index.html in the folder of the sweep."""
    path = sweep.folder / "index.html"
    write_file(path, page(sweep.trials(), sweep.space, sweep.settings))
    return path


def page(trials: Sequence[Any], space: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Returns the page of a sweep as HTML."""
    ended = finished(trials)
    top, names = best(trials), list(space)
    metric = ended[0].result["metric"] if ended else settings["metric"] or "value"
    parts = [
        f"<h1>Sweep of {escape(Path(settings['script']).name)}</h1>",
        f"<p>{len(trials)} trials, {len(ended)} finished; {escape(metric)}; sampler "
        f"{escape(settings['sampler'])}.</p>",
    ]
    if top is not None:
        parts.append(
            f"<p>Best: trial {top.index} with {escape(metric)} {top.result['value']:.6g}.</p>"
        )
    if len(ended) > 1:
        parts += ["<h2>Parallel coordinates</h2>", _coordinates(ended, space, metric)]
        told = importance([t.params for t in ended], [t.result["value"] for t in ended], space)
        parts += ["<h2>Importance</h2>", _importance(told)]
    parts.append(
        "<h2>Trials</h2><div class=scroll><table><tr>"
        + "".join(
            f"<th>{escape(name)}</th>" for name in ("trial", metric, *names, "seconds", "status")
        )
        + "</tr>"
    )
    order = lambda t: (t is not top, not (t.result and t.result["status"] == "finished"), t.index)
    for trial in sorted(trials, key=order):
        result = trial.result or {"status": "open", "value": None, "seconds": None}
        number = lambda x: "" if x is None else f"{x:.5g}" if isinstance(x, float) else str(x)
        status = result["status"] + (f": {result['reason']}" if "reason" in result else "")
        cells = [
            trial.index,
            number(result["value"]),
            *(number(trial.params[name]) for name in names),
            number(result["seconds"]),
            status,
        ]
        kind = "best" if trial is top else "failed" if result["status"] == "failed" else ""
        parts.append(
            f"<tr class='{kind}'>"
            + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
            + "</tr>"
        )
    parts.append("</table></div>")
    style = "fnet._util/document.css fnet.search.sweep/sweep.css"
    return _page.page("fnet sweep", "\n".join(parts), style=style)


def _importance(told: Importance) -> str:
    """Returns the section on importance."""
    unseen = "trials that it has not seen"
    if told.explained <= 0 or told.p > _SIGNIFICANT:
        found = f"it explains {told.explained:.0%} of their variance"
        if told.explained > 0:
            found += f", which chance alone reaches with a probability of {told.p:.2g}"
        return (
            f"<p>No importance can be told from {told.trials} trials: a model of the "
            f"hyperparameters does not predict the metric of {unseen} ({found}). Either the metric "
            "does not depend on them, or noise hides it; more trials may tell.</p>"
        )
    few = ""
    if told.trials < _FEW:
        few = (
            f" With {told.trials} trials, fewer than {_FEW}, the percentages are rough: other trials "
            "may give quite different ones."
        )
    return (
        f"<p>A model of the hyperparameters explains {told.explained:.0%} of the metric's variance "
        f"for {unseen}. The importance of a hyperparameter is what the model loses without it. A "
        f"gray one is not significant: chance reaches it with a probability of p &gt; "
        f"{_SIGNIFICANT}.{few}</p>{_bars(told.shares)}"
    )


def _coordinates(trials, space, metric) -> str:
    height, names = 320, [*space, metric]
    values = np.array([t.result["value"] for t in trials], float)
    spread = np.ptp(values) or 1.0
    sign = -1 if trials[0].result["mode"] == "min" else 1
    ranges = {name: (kind.at(0.0), kind.at(1 - 1e-12)) for name, kind in space.items()}
    ranges[metric] = float(values.min()), float(values.max())
    label = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)
    room = [
        16 + max(_width(name, 13), *(_width(label(value), 11) for value in ranges[name]))
        for name in names
    ]
    apart = max(780 / len(space), *(sum(pair) / 2 for pair in itertools.pairwise(room)))
    xs = max(60, room[0] / 2) + apart * np.arange(len(names))
    width = xs[-1] + max(60, room[-1] / 2)
    lines = []
    for trial, value in sorted(zip(trials, values), key=lambda pair: sign * pair[1]):
        share = (value - values.min()) / spread
        good = share if sign > 0 else 1 - share
        ys = [
            height - 40 - (height - 80) * place
            for place in (*(space[name].where(trial.params[name]) for name in space), share)
        ]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys))
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="hsl({240 * (1 - good):.0f},70%,45%)" '
            f'stroke-opacity="0.7"><title>trial {trial.index}: {value:.5g}</title></polyline>'
        )
    for x, name in zip(xs, names):
        low, high = (escape(label(value)) for value in ranges[name])
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="40" y2="{height - 40}" stroke="#666"/>'
            f'<text x="{x:.1f}" y="16" text-anchor="middle" font-size="13">{escape(name)}</text>'
            f'<text x="{x:.1f}" y="33" text-anchor="middle" font-size="11">{high}</text>'
            f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle" font-size="11">{low}</text>'
        )
    return _svg(width, height, "parallel coordinates", lines)


def _bars(shares) -> str:
    rows = sorted(shares.items(), key=lambda pair: (pair[1][1] > _SIGNIFICANT, -pair[1][0]))
    left = max(150, *(_width(name, 13) for name in shares))
    marks = []
    for i, (name, (share, p)) in enumerate(rows):
        color, note = (
            ("#4a7ab5", "") if p <= _SIGNIFICANT else ("#ccc", f" not significant, p = {p:.2g}")
        )
        marks.append(
            f'<text x="{left:.0f}" y="{22 * i + 15}" text-anchor="end" font-size="13">{escape(name)}</text>'
            f'<rect x="{left + 10:.0f}" y="{22 * i + 3}" width="{500 * share:.1f}" height="15" fill="{color}"/>'
            f'<text x="{left + 15 + 500 * share:.1f}" y="{22 * i + 15}" font-size="12">{share:.0%}{note}</text>'
        )
    return _svg(left + 750, 22 * len(rows) + 4, "importance", marks)


def _svg(width: float, height: float, label: str, marks: Sequence[str]) -> str:
    box = f"0 0 {width:.0f} {height:.0f}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(marks)}</svg>'


def _width(text: str, size: int) -> float:
    """Returns about the width of a text, in the unit of the font size."""
    return _LETTER * size * len(text)

"""The page of a sweep: table, parallel coordinates and importance, in one HTML file without
scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fnet._util import _page
from fnet._util._files import write as write_file

_PERMUTATIONS = 999
_SIGNIFICANT = 0.05


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


def importance(
    points: Sequence[Mapping[str, Any]], values: Sequence[float], space: Mapping[str, Any]
) -> dict[str, tuple[float, float]]:
    """Returns (importance, p-value) for each hyperparameter.

    The importance of a hyperparameter is the share of the metric's variance that this
    hyperparameter alone explains. The trials are divided into up to four groups by the value of the
    hyperparameter. The importance is the adjusted R^2 of a one-way analysis of variance over the
    groups of trials, or 0 if the adjusted R^2 is negative.

    With few trials, noise alone explains a large share. The p-value is the probability that a
    metric which does not depend on any hyperparameter would explain such a share of at least one of
    them. It is estimated from random permutations of the values, and multiplied by the number of
    hyperparameters (Bonferroni).
    """
    values = np.asarray(values, float)
    shuffled = np.random.default_rng(0).permuted(np.tile(values, (_PERMUTATIONS, 1)), axis=1)
    found = {}
    for name, kind in space.items():
        places = np.array([kind.where(point[name]) for point in points])
        if len(set(places)) <= 4:
            groups = np.unique(places, return_inverse=True)[1]
        else:
            ranks = np.argsort(np.argsort(places, kind="stable"))
            groups = ranks * 4 // len(ranks)
        share, chance = (_explained(each, groups) for each in (values[None], shuffled))
        p = (1 + (chance >= share - 1e-12).sum()) / (1 + _PERMUTATIONS)
        found[name] = float(max(share[0], 0.0)), float(min(p * len(space), 1.0))
    return found


def _explained(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Returns the adjusted R^2 of the groups for each row of `values`, an array [rows, trials]."""
    trials, count = values.shape[1], len(set(groups.tolist()))
    total = ((values - values.mean(1, keepdims=True)) ** 2).sum(1)
    if count < 2 or trials <= count or not total[0] > 0:
        return np.zeros(len(values))
    one_hot = (groups[:, None] == np.arange(groups.max() + 1)).astype(float)  # [trials, groups]
    means = values @ one_hot / np.maximum(one_hot.sum(0), 1)
    within = ((values - means[:, groups]) ** 2).sum(1)
    return 1 - within / (trials - count) / (total / (trials - 1))


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
        shares = importance([t.params for t in ended], [t.result["value"] for t in ended], space)
        parts += [
            "<h2>Importance</h2><p>The share of the variance that each hyperparameter explains "
            "alone. A gray "
            "share is not significant: noise would explain as much with a probability of p &gt; "
            "0.05.</p>",
            _bars(shares),
        ]
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


def _coordinates(trials, space, metric) -> str:
    width, height, names = 900, 320, [*space, metric]
    values = np.array([t.result["value"] for t in trials], float)
    spread = np.ptp(values) or 1.0
    sign = -1 if trials[0].result["mode"] == "min" else 1
    xs = np.linspace(60, width - 60, len(names))
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
        if name in space:
            low, high = space[name].at(0.0), space[name].at(1 - 1e-12)
        else:
            low, high = float(values.min()), float(values.max())
        label = lambda v: escape(f"{v:.4g}" if isinstance(v, float) else str(v))
        lines.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="40" y2="{height - 40}" stroke="#666"/>'
            f'<text x="{x:.1f}" y="16" text-anchor="middle" font-size="13">{escape(name)}</text>'
            f'<text x="{x:.1f}" y="33" text-anchor="middle" font-size="11">{label(high)}</text>'
            f'<text x="{x:.1f}" y="{height - 22}" text-anchor="middle" font-size="11">{label(low)}</text>'
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="parallel coordinates">{"".join(lines)}</svg>'


def _bars(shares) -> str:
    rows = sorted(shares.items(), key=lambda pair: (pair[1][1] > _SIGNIFICANT, -pair[1][0]))
    marks = []
    for i, (name, (share, p)) in enumerate(rows):
        color, note = (
            ("#4a7ab5", "") if p <= _SIGNIFICANT else ("#ccc", f" not significant, p = {p:.2g}")
        )
        marks.append(
            f'<text x="150" y="{22 * i + 15}" text-anchor="end" font-size="13">{escape(name)}</text>'
            f'<rect x="160" y="{22 * i + 3}" width="{500 * share:.1f}" height="15" fill="{color}"/>'
            f'<text x="{165 + 500 * share:.1f}" y="{22 * i + 15}" font-size="12">{share:.0%}{note}</text>'
        )
    return f'<svg viewBox="0 0 900 {22 * len(rows) + 4}" role="img" aria-label="importance">{"".join(marks)}</svg>'

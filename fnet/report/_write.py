"""Writes the HTML page of a report."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import fnet
from fnet._util import _page
from fnet._util._files import write as write_file
from fnet._util._units import si
from fnet.report import _predictions, _tables
from fnet.report._read import Run, read
from fnet.training import duration
from fnet.training._direction import direction

_CHARTS = 80  # the largest number of charts in one report
_FIRST = ("loss", "accuracy")  # metrics that are shown first


def write(
    folders: str | os.PathLike | Iterable[str | os.PathLike], path: str | os.PathLike | None = None
) -> Path:
    """Writes a report of one or several training runs.

        report.write(["runs/a", "runs/b"], "runs.html")

    The report is a single HTML file that loads no other files and executes nothing from the runs.
    It shows learning curves, speed, predictions, text samples, the model, profiles, differences
    between configurations, the environment, the sharding plan, checkpoints and events, as far as
    the runs recorded them, and lists files that could not be used. Runs that differ in their seed
    alone are drawn as one band.

    Args:
        folders: the folder, or the folders, of the runs, as they were passed to
            `training.fit(workdir=)`.
        path: the file to write. Default None: report.html in the folder of the first run.

    Returns:
        The path of the file.

    Raises:
        ValueError: `folders` is empty, or a folder does not exist or is not local.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(folder).name
    'report.html'
    """
    folders = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
    if not folders:
        raise ValueError("report: expected the folder of at least one run")
    runs = [read(folder) for folder in folders]
    path = Path(folders[0]) / "report.html" if path is None else Path(path)
    if path.is_dir():
        path = path / "report.html"
    write_file(path, page(runs))
    return path


def page(runs: Sequence[Run]) -> str:
    """Returns the HTML of a report."""
    names = unique_names(runs)
    charts, left_out = _charts(runs)
    sections = [
        ("overview", "Overview", _overview(runs, names)),
        ("curves", "Curves", _holders(charts, "curves")),
        ("speed", "Speed", _holders(charts, "speed")),
        (
            "predictions",
            "Predictions",
            "".join(_predictions.html(run, name, len(runs) > 1) for run, name in zip(runs, names)),
        ),
        ("samples", "Text samples", "".join(_samples(run, name) for run, name in zip(runs, names))),
        ("model", "Model", _models(runs, names)),
        (
            "profile",
            "Profile",
            "".join(_tables.profiles(run, name) for run, name in zip(runs, names)),
        ),
        ("configuration", "Configuration", _tables.configuration(runs, names)),
        ("environment", "Environment", _tables.environment(runs, names)),
        (
            "plan",
            "Plan",
            "".join(
                _preformatted(name, run.plan, "wide") for run, name in zip(runs, names) if run.plan
            ),
        ),
        (
            "checkpoints",
            "Checkpoints",
            "".join(_tables.checkpoints(run, name) for run, name in zip(runs, names)),
        ),
        ("log", "Log", "".join(_tables.events(run, name) for run, name in zip(runs, names))),
    ]
    sections = [section for section in sections if section[2]]
    if left_out:
        sections[0] = (
            *sections[0][:2],
            sections[0][2] + f'<p class="note">{left_out} charts more than {_CHARTS} are '
            "left out.</p>",
        )
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = _page.fill(
        "fnet.report/report.html",
        title=escape(title(names)),
        links=links,
        facts=escape(_date()),
        sections="".join(
            f'<section id="{key}"><h2>{escape(heading)}</h2>{tools(key)}{text}</section>'
            for key, heading, text in sections
        ),
    )
    groups = seed_groups(runs)
    data = {
        "runs": [{"name": name, "group": group} for name, group in zip(names, groups)],
        "charts": charts,
    }
    return _page.page(
        f"{title(names)}: report",
        body,
        style="fnet._util/page.css fnet.report/report.css",
        script="fnet.report/chart.js fnet.report/report.js",
        data=data,
    )


def title(names: Sequence[str]) -> str:
    return (
        names[0]
        if len(names) == 1
        else f"{len(names)} runs: {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"
    )


def tools(key: str) -> str:
    """Returns the HTML of the controls for the report section "curves", and "" for other sections."""
    if key != "curves":
        return ""
    return (
        '<div class="tools"><label>Smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" '
        'value="0"> <output id="smoothed" class="number">0</output></label>'
        '<div class="group" role="group" aria-label="Scale"><button data-scale="linear">Linear</button>'
        '<button data-scale="log">Log</button></div><label id="bands-label" hidden><input type="checkbox" '
        'id="bands" checked> Seeds as bands</label></div><div id="runs" class="runs"></div>'
    )


def unique_names(runs: Sequence[Run]) -> list[str]:
    """Returns the names of the runs' folders, with as many parent folders as are necessary to
    distinguish them."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, 6):
        names = ["/".join(part[-depth:]) or "/" for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i})" for i, name in enumerate(names, 1)]


def seed_groups(runs: Sequence[Run]) -> list[int]:
    """Returns a group number for each run, to combine the curves of runs with different seeds. Runs
    whose configurations differ only in seed, data_dir or workdir are in the same group."""
    keys: dict[Any, int] = {}
    found = []
    for i, run in enumerate(runs):
        rest = {
            name: value
            for name, value in run.config.items()
            if name not in ("seed", "data_dir", "workdir")
        }
        key: Any = (
            json.dumps(rest, sort_keys=True, default=str) if rest and "seed" in run.config else i
        )
        found.append(keys.setdefault(key, len(keys)))
    return found


def _charts(runs) -> tuple[list[dict], int]:
    """Returns (charts, number of omitted charts). A chart shows all metrics whose names have the
    same last part, such as train/loss and validation/loss."""
    found: dict[tuple[bool, str], list[dict]] = {}
    for i, run in enumerate(runs):
        for name, (steps, values) in run.metrics.items():
            if len(steps) < 2 and name == "time/compile_seconds":
                continue
            split, _, metric = name.rpartition("/")
            speed = split == "time"
            if name == "time/compile_seconds":
                continue
            values = [None if value is None else float(f"{value:.6g}") for value in values]
            found.setdefault((speed, metric), []).append(
                {"run": i, "split": "" if speed else split, "steps": steps, "values": values}
            )
    order = lambda key: (key[0], _FIRST.index(key[1]) if key[1] in _FIRST else len(_FIRST), key[1])
    titles = {
        "steps_per_second": "steps per second",
        "mfu": "MFU, model FLOPs utilization",
        "data": "time waited for data, fraction",
    }
    charts = [
        {
            "title": titles.get(metric, metric.replace("_", " ")) if speed else metric,
            "section": "speed" if speed else "curves",
            "zero": speed,
            "series": series,
        }
        for (speed, metric), series in sorted(found.items(), key=lambda item: order(item[0]))
    ]
    return charts[:_CHARTS], max(0, len(charts) - _CHARTS)


def _holders(charts, section) -> str:
    boxes = "".join(
        f'<figure class="card" data-chart="{i}"><figcaption>{escape(chart["title"])}</figcaption>'
        f'<div class="plot" tabindex="0" role="img" aria-label="{escape(_spoken(chart))}"></div></figure>'
        for i, chart in enumerate(charts)
        if chart["section"] == section
    )
    return f'<div class="charts">{boxes}</div>' if boxes else ""


def _spoken(chart) -> str:
    """Returns a text that describes a chart, for screen readers."""
    parts = []
    for series in chart["series"][:6]:
        finite = [value for value in series["values"] if value is not None]
        if finite:
            parts.append(
                f"{series['split'] or 'run'} from {finite[0]:.4g} to {finite[-1]:.4g}, "
                f"least {min(finite):.4g}, largest {max(finite):.4g}"
            )
    return f"{chart['title']} by step: {'; '.join(parts) or 'no finite values'}"


def _overview(runs, names) -> str:
    cards = "".join(_card(run, name, i) for i, (run, name) in enumerate(zip(runs, names)))
    notes = "".join(
        f"<li><b>{escape(name)}</b>: {escape(note)}</li>"
        if len(runs) > 1
        else f"<li>{escape(note)}</li>"
        for run, name in zip(runs, names)
        for note in run.notes
    )
    return f'<div class="cards">{cards}</div>' + (f'<ul class="note">{notes}</ul>' if notes else "")


def _card(run, name, i) -> str:
    state, kind = status(run)
    facts = [("steps", f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else ""))]
    for metric in _shown(run):
        steps, values = run.metrics[metric]
        finite = [(value, step) for step, value in zip(steps, values) if value is not None]
        if not finite:
            continue
        choose = max if direction(metric, None, "mode=") == "max" else min
        best = choose(finite, key=lambda pair: pair[0])
        facts.append(
            (
                metric,
                f"{finite[-1][0]:.4g}"
                + (f" (best {best[0]:.4g} at {best[1]:,})" if best[0] != finite[-1][0] else ""),
            )
        )
    if speeds := [
        value for value in run.metrics.get("time/steps_per_second", ([], []))[1] if value
    ]:
        facts.append(("speed", f"{sorted(speeds)[len(speeds) // 2]:.4g} steps/s"))
    times = [when for _, when, _ in run.events if when is not None]
    if len(times) > 1 and 0 <= max(times) - min(times) < 1e9:
        facts.append(("first to last event", duration(max(times) - min(times))))
    chip = run.facts.get("chip")
    if isinstance(chip, str):
        facts.append(("chip", chip[:120]))
    rows = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in facts)
    return (
        f'<article class="card run p{i % 8}"><h3><i class="dot"></i>{escape(name)}</h3>'
        f'<p class="state {kind}">{escape(state)}</p><dl>{rows}</dl></article>'
    )


def _shown(run) -> list[str]:
    """Returns the names of up to four metrics for the summary card of a run: losses and accuracies,
    first those of evaluations, then those of training."""
    names = [name for name in run.metrics if name.rpartition("/")[2] in _FIRST]
    return sorted(
        names,
        key=lambda name: (name.startswith("train/"), _FIRST.index(name.rpartition("/")[2]), name),
    )[:4]


def status(run: Run) -> tuple[str, str]:
    """Returns a text that describes the state of a run, and the category of this state: "good",
    "open" or "bad"."""
    turns = [
        text
        for _, _, text in run.events
        if text.startswith(("began at step", "finished", "ended by "))
    ]
    last = turns[-1] if turns else ""
    if last.startswith("ended by Interrupted"):
        return "interrupted; the same command resumes it", "open"
    if last.startswith("ended by "):
        return last, "bad"
    if last.startswith("finished") or (run.steps is not None and run.step >= run.steps):
        stopped = any(text.startswith("stopped early") for _, _, text in run.events)
        return "finished, stopped early" if stopped else "finished", "good"
    return ("in progress, or killed" if run.step else "nothing recorded yet"), "open"


def _models(runs, names) -> str:
    """Returns the summaries of the models. A summary that is the same for several runs is shown
    once."""
    of: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        of.setdefault(json.dumps(run.summary), []).append(i)
    return "".join(
        _tables.summary(runs[group[0]], ", ".join(names[i] for i in group)) for group in of.values()
    )


def _samples(run, name) -> str:
    return "".join(_preformatted(f"{name}: {file}", text) for file, text in run.samples.items())


def _preformatted(heading, text, kind="") -> str:
    return f'<article class="card"><h3>{escape(heading)}</h3><pre class="{kind}">{escape(text)}</pre></article>'


def _date() -> str:
    return f"fnet {fnet.__version__}, {datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"


def size(value: Any) -> str:
    return f"{si(value, digits=3)}B"

"""Draws the FLOP per dollar and the FLOP/s per watt of the catalog's chips over the years."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from fnet._util import _missing
from fnet.hardware._chips import chips, systems
from fnet.hardware._formula import flop_per_dollar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"cpu": "tab:gray", "gpu": "tab:green", "tpu": "tab:orange"}
_MARKS = {"fp32": "o", "fp16": "s", "bf16": "s"}
_TITLES = {"dollar": "FLOP per dollar at the peak rate", "watt": "FLOP/s per watt at the peak rate"}


class Point(NamedTuple):
    """The FLOP per dollar or the FLOP/s per watt (`value`) of one chip or system for one dtype.

    `rented` is True if `value` was computed from a rental price.
    """

    name: str
    kind: str
    year: int
    dtype: str
    value: float
    rented: bool


def history(per: str, dtypes: tuple[str, ...] = ("fp32", "best")) -> list[Point]:
    """Returns the points that `plot` draws: the chips and systems with a known price or power, by
    year.

    Args:
        per: "dollar" for FLOP per dollar, at the first price in the catalog (an hour of rent, or a
            purchase that is used for three years); "watt" for FLOP/s per watt of the thermal design
            power.
        dtypes: a tuple of "fp32", "bf16", "fp16" and "best", the faster of bf16 and fp16. Default
            ("fp32", "best").

    Returns:
        A list of named tuples (name, kind, year, dtype, value, rented). `rented` says whether
        `value` is from a rental price.

    >>> [point.name for point in history("watt", ("fp32",))][:2]
    ['K80', 'Titan X (Maxwell)']
    """
    points = []
    for item in (*chips.values(), *systems.values()):
        one = getattr(item, "chip", item)
        fastest = max(("bf16", "fp16"), key=lambda name: one.peaks.get(name, 0.0))
        for dtype in dtypes:
            dtype = fastest if dtype == "best" else dtype
            if dtype not in one.peaks or item.year is None:
                continue
            values = flop_per_dollar(item, dtype)
            if per == "dollar" and values:
                value, rented = values[0].flop_per_dollar, values[0].price.per == "hour"
            elif per == "watt" and item.power_watts:
                value, rented = (
                    one.peaks[dtype] * getattr(item, "count", 1) / item.power_watts,
                    False,
                )
            else:
                continue
            points.append(Point(item.name, one.kind, item.year, dtype, value, rented))
    return sorted(points, key=lambda point: (point.year, point.value))


def plot(path: str | os.PathLike | None = None) -> Figure:
    """Draws FLOP per dollar and FLOP/s per watt of the catalog's chips over the years.

    Circles are float32, squares the faster of bfloat16 and float16. In the plot of FLOP per dollar,
    filled markers are a purchase with three years of use, empty ones an hourly rent. The prices are
    from different dates, which the catalog has, and not adjusted for inflation.

    Args:
        path: the file to write (.png, .svg or .pdf). Default None: no file.

    Returns:
        The Matplotlib figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib cannot write files of the type of `path`.

    >>> figure = hw.plot()
    >>> len(figure.axes)
    2
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        raise ModuleNotFoundError(_missing.message("plots need", "matplotlib")) from None
    figure = Figure(layout="constrained", figsize=(15, 8))
    for axis, per in zip(figure.subplots(1, 2), _TITLES):
        points = history(per)
        for point in points:
            axis.plot(
                point.year,
                point.value,
                _MARKS[point.dtype],
                markersize=5,
                color=_COLORS[point.kind],
                markerfacecolor="none" if point.rented else _COLORS[point.kind],
            )
        _label(axis, points)
        axis.set(yscale="log", title=_TITLES[per], xlabel="year")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.margins(x=0.15)
        axis.grid(alpha=0.3)
    axis.legend(handles=_legend(), loc="upper left", fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _label(axis: Any, points: list[Point]) -> None:
    """Writes the name of each chip or system beside its highest point in the plot. Higher points
    are labeled first. A name is omitted if its point is too close to a point that has a name: the
    years differ by at most 1, and the values by at most a factor of 1.25."""
    taken: dict[int, list[float]] = {}
    best: dict[str, Point] = {}
    for point in points:
        if point.name not in best or point.value > best[point.name].value:
            best[point.name] = point
    for point in sorted(best.values(), key=lambda point: -point.value):
        near = [
            value
            for year in (point.year - 1, point.year, point.year + 1)
            for value in taken.get(year, ())
        ]
        if all(max(point.value / value, value / point.value) > 1.25 for value in near):
            taken.setdefault(point.year, []).append(point.value)
            axis.annotate(
                point.name,
                (point.year, point.value),
                xytext=(5, -2),
                textcoords="offset points",
                fontsize=7,
            )


def _legend() -> list:
    from matplotlib.lines import Line2D

    mark = lambda label, marker, color, fill: Line2D(
        [],
        [],
        linestyle="",
        marker=marker,
        color=color,
        label=label,
        markerfacecolor=color if fill else "none",
    )
    return [
        *(mark(kind.upper(), "o", color, True) for kind, color in _COLORS.items()),
        mark("float32", "o", "black", True),
        mark("bfloat16 or float16", "s", "black", True),
        mark("rented by the hour", "o", "black", False),
    ]

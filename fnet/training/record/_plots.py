"""Plots of a run. matplotlib is imported when the first plot is drawn, and its global state is not
changed."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fnet._util import _missing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _figure(**options) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(_missing.message("plots need", "matplotlib")) from None
    return Figure(layout="constrained", **options)


def curves(
    rows: Sequence[Mapping[str, Any]], path: str | os.PathLike | None = None, *, title: str = ""
) -> Figure:
    """Plots the learning curves of a run: the loss by step, and the error rate if the accuracy was
    logged, with one curve for training and one for each evaluation.

    Args:
      rows: the logged metrics, from `read_metrics`.
      path: the PNG file to write. Default None.
      title: the title above the plot. Default "".

    Returns:
      The matplotlib figure, which a notebook displays.

    Raises:
      ModuleNotFoundError: matplotlib is missing.

    Example:
      >>> figure = curves(read_metrics("runs/digits"), "curves.png")       # doctest: +SKIP
    """
    names = sorted({k.split("/")[0] for row in rows for k in row if k.endswith("/loss")})
    names.sort(key=lambda name: name != "train")
    labels = {"loss": "loss", "accuracy": "error rate, %"}
    labels = {
        k: label
        for k, label in labels.items()
        if any(f"{n}/{k}" in row for row in rows for n in names)
    }
    figure = _figure(figsize=(5 * max(len(labels), 1), 4))
    from matplotlib import ticker

    axes = figure.subplots(1, max(len(labels), 1), squeeze=False)
    for axis, (metric, label) in zip(axes[0], labels.items()):
        for name, color in zip(names, ("tab:gray", "tab:blue", "tab:orange")):
            points = [(r["step"], r[k]) for r in rows if r.get(k := f"{name}/{metric}") is not None]
            if not points:
                continue
            steps, values = np.array(points).T
            values = 100 * (1 - values) if metric == "accuracy" else values
            axis.plot(
                steps, values, marker=".", color=color, label=f"{name}, last {values[-1]:.3g}"
            )
        axis.set(xlabel="step", ylabel=label, yscale="log" if metric == "loss" else "linear")
        if metric == "loss":
            axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        else:
            shown = [line.get_ydata() for line in axis.lines]
            top = max((np.percentile(values, 90) for values in shown), default=1)
            # Otherwise, the first points would flatten the rest.
            axis.set_ylim(0, max(1.2 * top, 0.5))
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(title)
    return _saved(figure, path)


def confusion_matrix(
    counts: Any, classes: Sequence[str], path: str | os.PathLike | None = None, *, title: str = ""
) -> Figure:
    """Plots a confusion matrix with its counts. Off the diagonal, the color is the count divided by
    the sum of its row.

    Args:
      counts: the matrix, [classes, classes], whose rows are the true classes.
      classes: the names of the classes.
      path: the PNG file to write. Default None.
      title: the title above the plot. Default "".

    Returns:
      The matplotlib figure, which a notebook displays.

    Raises:
      ModuleNotFoundError: matplotlib is missing.

    >>> figure = tr.plots.confusion_matrix([[5, 1], [0, 4]], ["cat", "dog"])
    """
    figure = _figure(figsize=(7.5, 6.5))
    from matplotlib import colormaps

    axis = figure.subplots()
    counts = np.asarray(counts)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    # Mistakes are typically 1 % to 2 %: with a color scale up to 1, only the diagonal would be
    # visible.
    mistakes = np.where(np.eye(len(counts), dtype=bool), np.nan, share)
    limit = max(np.nanmax(mistakes), 0.05)
    colors = colormaps["Reds"].with_extremes(bad="0.92")
    image = axis.imshow(mistakes, cmap=colors, vmin=0, vmax=limit)
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count or i == j:
                dark = i != j and share[i, j] > 0.6 * limit
                axis.text(
                    j,
                    i,
                    f"{count:.0f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if dark else "black",
                    fontweight="bold" if i == j else "normal",
                )
    ticks = np.arange(len(classes))
    long = max(map(len, classes)) > 3
    axis.set_xticks(ticks, classes, rotation=40 if long else 0, ha="right" if long else "center")
    axis.set_yticks(ticks, classes)
    axis.set(xlabel="predicted", ylabel="true", title=textwrap.fill(title, 60))
    bar = figure.colorbar(image, ax=axis, shrink=0.8, label="mistakes, share of the true class")
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    return _saved(figure, path)


def _saved(figure: Figure, path: str | os.PathLike | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure

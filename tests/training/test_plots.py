"""Plots: what is drawn, no global state of matplotlib, and one error without it."""

import sys

import numpy as np
import pytest

from fnet import training as tr

pytest.importorskip("matplotlib")
ROWS = [
    {"step": 10 * i, "train/loss": 3.0 - i / 2, "validation/loss": 3.5 - i / 2} for i in range(1, 4)
]


def test_curves_without_an_accuracy(tmp_path):
    figure = tr.plots.curves(ROWS, tmp_path / "curves.png", title="a")
    (axis,) = figure.axes
    drawn = {line.get_label().split(",")[0]: line.get_ydata().tolist() for line in axis.lines}
    assert (
        drawn == {"train": [2.5, 2.0, 1.5], "validation": [3.0, 2.5, 2.0]}
        and axis.get_ylabel() == "loss"
    )
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    figure = tr.plots.curves([row | {"train/accuracy": 0.5} for row in ROWS])
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss", "error rate, %"]
    assert len(tr.plots.curves([]).axes) == 1


def test_a_confusion_matrix(tmp_path):
    counts = np.array([[8, 2, 0], [0, 10, 0], [1, 0, 9]])
    figure = tr.plots.confusion_matrix(
        counts, ("cat", "dog", "owl"), tmp_path / "confusion.png", title="a"
    )
    written = {(text.get_position(), text.get_text()) for text in figure.axes[0].texts}
    assert written == {
        ((j, i), str(counts[i, j])) for i in range(3) for j in range(3) if counts[i, j]
    }
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["cat", "dog", "owl"]
    assert (tmp_path / "confusion.png").exists()


def test_matplotlib_is_left_as_it_is():
    import matplotlib
    from matplotlib import pyplot

    backend = matplotlib.get_backend()
    tr.plots.curves(ROWS)
    assert matplotlib.get_backend() == backend and not pyplot.get_fignums()


@pytest.mark.parametrize(
    "draw",
    [lambda: tr.plots.curves(ROWS), lambda: tr.plots.confusion_matrix([[1]], ["a"])],
    ids=["curves", "confusion_matrix"],
)
def test_without_matplotlib(monkeypatch, draw):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"matplotlib, which is not installed: pip install matplotlib$"
    ):
        draw()

"""Draws the picture of the README: the estimates of `parallel.plan` for a GPT on four TPU v5e that
are not attached.

    python -m benchmarks.picture [--path=docs/_static/plan.png]

Nothing is compiled or measured, so the picture is the same on every machine, and takes a few
seconds.
"""

import matplotlib
from absl import app, flags
from matplotlib.figure import Figure

from benchmarks.pods import CASES, planned
from fnet import parallel

PATH = flags.DEFINE_string("path", "docs/_static/plan.png", "the file to write")
GREY, BLUE, RED = "#b8c0cc", "#2f6fdb", "#c8453b"


def draw(plan: parallel.Plan) -> Figure:
    """Draws bars for each strategy: the memory of each chip with its limit, and the bytes that each
    chip sends in a step."""
    rows = plan.candidates[::-1]
    names = [row.strategy for row in rows]
    limit = plan.chip.memory_bytes / 2**30
    colors = [BLUE if row.options == plan.options else GREY for row in rows]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    memory, sent = figure.subplots(1, 2, sharey=True)
    peaks = [row.peak / 2**30 for row in rows]
    memory.barh(names, peaks, color=colors)
    memory.axvline(limit, color=RED, linewidth=1.5)
    memory.text(
        limit * 1.04,
        len(rows) - 0.45,
        f"{limit:.0f} GiB of a TPU v5e",
        color=RED,
        fontsize=9,
        va="bottom",
    )
    memory.set(xlabel="peak memory of each chip, GiB (estimated)", title=" ")
    sent.barh(names, [row.ledger.sent / 2**30 for row in rows], color=colors)
    sent.set(xlabel="sent by each chip in a step, GiB (estimated)", title=" ")
    for axis in (memory, sent):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(length=0)
        for tick in axis.get_yticklabels():
            tick.set_fontweight("bold" if tick.get_text() == plan.strategy else "normal")
    return figure


def main(argv):
    del argv
    matplotlib.rcParams["font.size"] = 10
    draw(planned(*CASES["872M"], compile=False)[1]).savefig(
        PATH.value, dpi=110, metadata={"Software": None}
    )
    print(f"wrote {PATH.value}")


if __name__ == "__main__":
    app.run(main)

"""Which candidates are compiled, in which order, which one is chosen, and what compare() shows."""

import dataclasses
import re

import pytest
from plan_cases import mlp, narrow

from fnet import parallel
from fnet.cost import MFU
from fnet.parallel import _compile, _ranking
from fnet.parallel._cost import Time
from fnet.parallel._estimate import Estimate

GIB = 2**30


def candidate(name, seconds, sent, peak, *, links=0.0, compiled=None):
    transfer = parallel.Transfer("collective-permute", "", sent, 2, 1)
    state, *more = name.split("+")
    return parallel.Candidate(
        parallel.Strategy(state, "pins" in more, "remat" in more),
        {"data": 2},
        0,
        0,
        True,
        Estimate(peak, parallel.Ledger((transfer,)), parallel.Ledger(()), ()),
        compiled,
        Time(seconds, 0.0, links),
        MFU(None),
    )


def names(candidates):
    return [each.strategy for each in candidates]


@pytest.mark.parametrize(
    ("figures", "order"),
    [
        # Time decides first,
        ({"data": (1.0, 9, 1), "zero1": (0.9, 9, 1)}, ["zero1", "data"]),
        # times within 5 % are equal, so the bytes decide,
        ({"data": (1.0, 9, 1), "zero1": (0.98, 10, 1)}, ["data", "zero1"]),
        ({"data": (1.0, 10, 1), "zero1": (1.0, 9, 1)}, ["zero1", "data"]),
        # then simplicity, if half of the memory stays free, else memory.
        ({"data": (1.0, 9, 4), "zero1": (1.0, 9, 1)}, ["data", "zero1"]),
        ({"data": (1.0, 9, 6), "zero1": (1.0, 9, 5)}, ["zero1", "data"]),
        # What may not fit comes last, even if it is the fastest.
        ({"data": (0.1, 1, 11), "fsdp": (9.0, 9, 1)}, ["fsdp", "data"]),
        # An estimate says more of pinned activations than of others.
        ({"fsdp": (1.0, 9, 1), "fsdp+pins": (1.0, 9, 1)}, ["fsdp+pins", "fsdp"]),
        # Without the rate of the links, the bytes decide first.
        ({"data": (1.0, 9, 1, None), "zero1": (0.5, 10, 1, None)}, ["data", "zero1"]),
    ],
)
def test_the_order(figures, order):
    made = [
        candidate(name, seconds, sent, peak * GIB, links=links[0] if links else 0.0)
        for name, (seconds, sent, peak, *links) in figures.items()
    ]
    assert names(_ranking.ranked(made, 10 * GIB, 0.92)) == order


def test_verdicts_state_what_decided():
    fast, slow = candidate("zero1", 1.0, 9, GIB), candidate("data", 2.0, 9, GIB)
    both = [slow, fast]
    assert _ranking.verdict(fast, fast, both) == "chosen: fastest of what fits"
    assert _ranking.verdict(slow, fast, both) == "takes 2.00 times as long"
    same, more = candidate("data", 1.0, 9, GIB), candidate("zero1", 1.0, 18, GIB)
    assert _ranking.verdict(same, same, [same, more]) == "chosen: about the fastest, and sends less"
    assert _ranking.verdict(more, same, [same, more]) == "sends 2.00 times as much"
    large = candidate("fsdp", 1.0, 9, 2 * GIB)
    assert _ranking.verdict(large, same, [same, large]) == "is as fast; data needs less memory"
    assert _ranking.not_compiled(slow, 3, fast) == (
        "not compiled: ranked 3 by its estimate (takes 2.00 times as long)"
    )


def compiling(monkeypatch, figures):
    """Replaces the compiler by one that reports, in turn, the peak and the bytes sent."""
    made = iter(figures)

    def compiled(step, state, batch):
        peak, sent = next(made)
        if peak is None:
            return _compile.Compiled(0, None, None, "RESOURCE_EXHAUSTED: Ran out of memory")
        ledger = parallel.Ledger((parallel.Transfer("collective-permute", "", sent, 2, 1),))
        return _compile.Compiled(1, peak, ledger)

    monkeypatch.setattr(_compile, "compiled", compiled)


def planned():
    stages = []
    plan = parallel.plan(*mlp(), announce=stages.append)
    return plan, [stage for stage in stages if stage.startswith("compiling")]


def test_two_are_compiled(monkeypatch):
    compiling(monkeypatch, [(1000, 1)] * 2)
    plan, stages = planned()
    assert len(stages) == 2 and [re.search(r"\(.*\)", stage)[0] for stage in stages] == [
        "(1 of 2)",
        "(2 of 2)",
    ]
    assert sum(each.compiled is not None for each in plan.candidates) == 2
    later = [each for each in plan.candidates if each.compiled is None]
    assert all(each.verdict.startswith("not compiled: ranked ") for each in later)
    assert plan.chosen.compiled is not None


def test_a_third_is_compiled_where_two_do_not_fit(monkeypatch):
    compiling(monkeypatch, [(None, 0), (None, 0), (1000, 1)])
    plan, stages = planned()
    assert len(stages) == 3 and stages[2].endswith("(nothing compiled so far fits)")
    assert plan.chosen.compiled.peak == 1000
    assert sum(each.verdict.startswith("rejected by the compiler") for each in plan.candidates) == 2


def test_a_third_is_compiled_where_two_send_far_more_than_estimated(monkeypatch):
    compiling(monkeypatch, [(1000, 10**12), (1000, 10**12), (1000, 1)])
    plan, stages = planned()
    assert len(stages) == 3 and stages[2].endswith(
        "(the compiled programs are worse than estimated)"
    )
    assert plan.chosen.ledger.sent == 1


def test_the_comparison_has_every_candidate():
    plan = parallel.plan(*narrow(), devices="v5e:4x4", compile=False)
    head, bases, *rows = plan.compare().table()
    assert head[:2] == ["strategy", "mesh"] and {"peak", "best time", "MFU"} <= set(head)
    assert bases[head.index("MFU")] == bases[head.index("peak")] == "estimated"
    assert [row[0] for row in rows] == names(plan.candidates)
    assert {row[1] for row in rows} == {"data=16"}
    for row, each in zip(rows, plan.candidates):
        assert row[-1] == each.verdict and row[head.index("MFU")] == f"{each.mfu.value:.1%}"
        # A twelfth of a product's FLOPs is missing: the first layer's input has no gradient.
        flops = 11 * 2 * 64 * 512 * 512
        assert each.mfu.value == pytest.approx(flops / each.time.seconds / (16 * 197e12), rel=1e-6)
    text = str(plan.compare()).splitlines()
    assert text[0].split()[:2] == ["strategy", "mesh"] and len(text) == 2 + len(rows)
    assert plan.compare().markdown().count("\n") == len(rows) + 2
    assert "mesh" not in plan.explain().splitlines()[3]


def test_a_mesh_of_its_own_is_shown():
    plan = parallel.plan(*narrow(), devices="v5e:4x4", compile=False)
    other = dataclasses.replace(plan.chosen, mesh={"data": 4, "tensor": 4})
    two = dataclasses.replace(plan, candidates=(*plan.candidates, other))
    assert two.explain().splitlines()[3].split()[:2] == ["strategy", "mesh"]
    assert two.chosen.mesh == {"data": 16}


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plan = parallel.plan(*narrow(), devices="v5e:4x4", compile=False)
    figure = plan.compare().plot(tmp_path / "plan.png")
    times, memory = figure.axes
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    assert [label.get_text() for label in times.get_yticklabels()] == names(plan.candidates)
    known = sum(value is not None for each in plan.candidates for value in each.time)
    assert len(times.patches) == known and len(memory.patches) == len(plan.candidates)
    chosen = [
        label.get_text() for label in times.get_yticklabels() if label.get_fontweight() == "bold"
    ]
    assert chosen == [plan.strategy]

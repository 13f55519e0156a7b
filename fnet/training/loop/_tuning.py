"""Selects the rewrite rules of `transforms.tune` for a run. A resumed run keeps its rewrite rules.
For a long run on a CPU, fnet times the step with several sets of rewrite rules, and selects the set
with which the step is fastest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fnet import transforms
from fnet.training.loop import _provenance

_LONG = 600  # seconds; for runs of at least this time, a minute of measurements is worthwhile


def tuned(run: Any, advance: Callable) -> Callable:
    """Applies `transforms.tune` to the step `advance`, and records the selected rewrite rules in
    `run.facts`."""
    if isinstance(run.tune, dict):
        made = transforms.tune(advance, rules=run.tune)
    else:
        made = transforms.tune(advance, measure=_is_long(run))
    measured = made.measured(run.state, run.loop["metrics"], run.watch, run.example)
    if measured is not None:
        run.say(f"tune: {measured}")
    run.facts["tune"] = _provenance.chosen(made) if measured is None else sorted(measured.rules)
    return made


def _is_long(run) -> bool:
    """Whether the run is on a CPU and takes at least 600 seconds (`_LONG`) at the CPU's peak rate."""
    if (
        run.use is None
        or run.facts["kind"] != "cpu"
        or run.spread.plan is not None
        or not run.alone
    ):
        return False
    share = run.use(1e-6).value  # share of the peak rate if a step took a million seconds
    return share is not None and 1e6 * share * (run.steps - run.at) >= _LONG

"""Selects the rewrite rules of `transforms.tune` for a run. A resumed run keeps its rewrite rules.
For a long run on a CPU, fnet times the step with several sets of rewrite rules, and selects the set
with which the step is fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fnet import cost, transforms
from fnet.training.loop import _provenance

_LONG = 600  # seconds; for runs of at least this time, a minute of measurements is worthwhile


def tuned(
    advance: Callable, arguments: tuple, *, rules: Mapping[str, bool] | None, measure: bool
) -> tuple[Callable, str | None, list[str]]:
    """Applies `transforms.tune` to a step.

    Args:
      advance: the step.
      arguments: the arguments of the first call of `advance`. They are not donated.
      rules: the rewrite rules of an earlier process of the run. Default None: they are selected.
      measure: whether to select the rules by timing.

    Returns:
      The faster step, a description of the measurements if there were any, and the names of the
      rewrite rules.
    """
    if rules is not None:
        fast = transforms.tune(advance, rules=rules)
    else:
        fast = transforms.tune(advance, measure=measure)
    measured = fast.measured(*arguments)
    if measured is None:
        return fast, None, _provenance.chosen(fast)
    return fast, f"tune: {measured}", sorted(measured.rules)


def is_long(
    utilization: Callable[[float], cost.MFU] | None, facts: Mapping[str, Any], steps: int
) -> bool:
    """Whether the run is on a CPU and takes at least 600 seconds (`_LONG`) for `steps` steps at the
    CPU's peak rate."""
    if utilization is None or facts["kind"] != "cpu":
        return False
    share = utilization(1e-6).value  # share of the peak rate if a step took a million seconds
    return share is not None and 1e6 * share * steps >= _LONG

"""Judges the results of evaluations: the best value so far, and early stopping.

The best values are part of the dict `RunState.loop`, so that a checkpoint holds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fnet.training.loop._early_stop import better
from fnet.training.loop._options import Options


def start() -> dict[str, Any]:
    """Returns the best values before the first evaluation."""
    return {
        "best": np.array(math.nan),  # the best value of the metric of early stopping
        "stale": np.array(0),  # the evaluations since then
        "stopped": np.array(False),
        "top": np.array(math.nan),  # the best value of the metric that `best` names
    }


def update(loop: dict[str, Any], values: Mapping[str, Any], options: Options) -> bool:
    """Updates the best value of the metric that `best` names. Returns whether `values` contain a
    new best value."""
    if options.best is None:
        return False
    name, mode = options.best
    value = float(values[name])
    improved = better(value, float(loop["top"]), mode)
    if improved:
        loop["top"] = np.array(value)
    return improved


def stop_early(loop: dict[str, Any], values: Mapping[str, Any], options: Options) -> str | None:
    """Updates the counter of early stopping. If the run is to stop, `stop_early` records this and
    returns the reason."""
    rule = options.early_stop
    if rule is None:
        return None
    best, stale = rule.update(float(loop["best"]), int(loop["stale"]), float(values[rule.metric]))
    loop |= {"best": np.array(best), "stale": np.array(stale)}
    if stale < rule.patience:
        return None
    loop["stopped"] = np.array(True)
    return (
        f"stopped early: {rule.metric} has not been better than {best:.4g} for {stale} evaluations"
    )


def forget_others(loop: dict[str, Any], before: Mapping[str, Any], options: Options) -> None:
    """Forgets the best values of other metrics than now, because values of two metrics cannot be
    compared.

    Args:
      before: the result of `Options.criteria` in the checkpoint from which the run is resumed. It
        may be empty.
    """
    now = options.criteria()
    if before.get("best", now["best"]) != now["best"]:
        loop["top"] = np.array(math.nan)
    if before.get("early_stop", now["early_stop"]) != now["early_stop"]:
        loop |= {"best": np.array(math.nan), "stale": np.array(0)}

"""Checks that the user's functions meet the requirements of `fit`, if possible before the first
step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from fnet._util._nearest import did_you_mean
from fnet.training.checkpoints import _leaves
from fnet.training.record import _metrics
from fnet.training.record._media import MEDIA


def traced(step: Callable) -> Callable:
    """Returns a function that runs the step and converts the metrics of the step with `as_metrics`
    (scalars become `Mean`s). JAX traces the returned function only once, even if several functions
    call it.

    Raises:
      TypeError: raised by the returned function if the step does not return a tuple (state,
          metrics).
    """

    def outputs(state, batch):
        result = step(state, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"step(state, batch) must return (state, metrics); got a {type(result).__name__}"
            )
        return result[0], _metrics.as_metrics(result[1])

    return jax.jit(outputs, inline=True)


def metrics_of(step: Callable, state: Any, batch: Any) -> Any:
    """Checks the leaves of the batch, and the state that the step returns. Returns the shapes and
    dtypes of the metrics.

    Args:
      step: the result of `traced`.

    Raises:
      TypeError: the step changes the structure, a shape or a dtype of the state; a run with such a
        step could not be resumed. A TypeError is also raised if a leaf of the batch is neither an
        array nor a number.
    """
    leaves = (
        [((), batch)] if isinstance(batch, Iterator) else jax.tree_util.tree_leaves_with_path(batch)
    )
    for path, leaf in leaves:
        if not (isinstance(leaf, jax.Array) or _metrics.real(leaf) or np.iscomplexobj(leaf)):
            where = (
                f" as '{jax.tree_util.keystr(path, simple=True, separator='/')}'" if path else ""
            )
            raise TypeError(
                f"batches(i) returned {_metrics.described(leaf)}{where}: a batch is a tree of "
                "arrays and numbers"
            )

    new, metrics = jax.eval_shape(step, state, batch)
    check_state(state, new)
    return metrics


def check_state(state: Any, new: Any) -> None:
    """Raises an error if a step changes the structure, a shape or a dtype of the state.

    `check_state` runs whenever the step is traced, for example for a batch of another shape.

    Raises:
      TypeError: the step changes the structure, a shape or a dtype of the state; a run with such a
        step could not be resumed.
    """
    took, returned = (
        {
            path: _leaves.describe(_leaves.entry(path, leaf))
            for path, leaf in _leaves.paths(tree).items()
        }
        for tree in (state, new)
    )
    lines = [
        f"'{path}': {took.get(path, 'nothing')} became {returned.get(path, 'nothing')}"
        for path in sorted(took.keys() | returned.keys())
        if took.get(path) != returned.get(path)
    ]
    if not lines and jax.tree.structure(new) != jax.tree.structure(state):
        lines = [f"{jax.tree.structure(state)} became {jax.tree.structure(new)}"]
    if lines:
        raise TypeError(
            "fit: step(state, batch) must return a state with the structure, shapes and dtypes of "
            "the one it takes, or the run could not be resumed:\n  " + "\n  ".join(lines)
        )


def evaluated(name: str, metrics: Any) -> Mapping[str, Any]:
    """Returns the result of an evaluation. Raises an error if an evaluation does not return a dict
    of metrics.

    Raises:
      TypeError: the evaluation does not return a dict, or a value in the dict is not a number,
        array, `Histogram`, `Image` or `Text`.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"the evaluation '{name}' must return a dict of metrics, such as {{'accuracy': 0.97}}; "
            f"got a {type(metrics).__name__}"
        )
    for metric, value in metrics.items():
        if not (isinstance(value, MEDIA) or _metrics.real(value)):
            raise TypeError(
                f"the evaluation '{name}' returned {_metrics.described(value)} as '{metric}': "
                "expected a number, an array of numbers, tr.Histogram, tr.Image or tr.Text"
            )
    return metrics


def check_watched(
    watched: Collection[str],
    evaluate: Mapping[str, Callable],
    *,
    state: Any = None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Checks that the evaluations return the metrics that `best` and `early_stop` name.

    Args:
      watched: the names of the metrics that `best` and `early_stop` name.
      evaluate: the evaluation functions. An `evaluator` knows the names of its metrics before it
          runs.
      state: the state, from which an `evaluator` determines the names of its metrics. If `values`
        is given, `state` is not used and may be None. Default None.
      values: the results of the evaluations. Default None: no evaluation has been run yet.

    Raises:
      ValueError: a metric or an evaluation that `watched` names does not exist, or the metric is
          not a single number.
    """
    for metric in watched:
        name = metric.partition("/")[0]
        if name not in evaluate:
            raise ValueError(
                f"'{metric}' is the monitored metric, but evaluate= has {sorted(evaluate)}: a "
                "metric is called 'evaluation/metric', as in 'validation/accuracy'"
            )
        if values is not None:
            known = sorted(values)
        elif hasattr(evaluate[name], "names"):
            known = [f"{name}/{one}" for one in evaluate[name].names(state)]
        else:
            continue
        if metric not in known:
            meant = did_you_mean(metric, known)
            raise ValueError(
                f"'{metric}' is the monitored metric, but the evaluations return {known}"
                + (f": {meant}" if meant else "")
            )
        if values is not None and (isinstance(values[metric], MEDIA) or np.ndim(values[metric])):
            raise ValueError(
                f"'{metric}' is the monitored metric, but it is "
                f"{_metrics.described(values[metric])}: expected a single number"
            )

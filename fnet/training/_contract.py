"""What `fit` requires of the functions it is given, checked before the first step as far as possible."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from fnet.training import _leaves, _metrics


def metrics_of(step: Callable, state: Any, batch: Any) -> Any:
    """The shapes of the metrics, once the step is known to return a state like the one it takes.

    Raises:
      TypeError: it returns another structure, or leaves of other shapes or dtypes: it could not be resumed.
    """
    def outputs(state, batch):
        result = step(state, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"step(state, batch) must return (state, metrics); got a {type(result).__name__}")
        return result[0], _metrics.as_metrics(result[1])

    new, metrics = jax.eval_shape(outputs, state, batch)
    took, returned = ({path: _leaves.entry(path, leaf) for path, leaf in _leaves.paths(tree).items()}
                      for tree in (state, new))
    lines = [f"'{path}': {_leaves.describe(took[path]) if path in took else 'nothing'} became "
             f"{_leaves.describe(returned[path]) if path in returned else 'nothing'}"
             for path in sorted(took.keys() | returned.keys())
             if path not in took or path not in returned
             or _leaves.describe(took[path]) != _leaves.describe(returned[path])]
    if not lines and jax.tree.structure(new) != jax.tree.structure(state):
        lines = [f"{jax.tree.structure(state)} became {jax.tree.structure(new)}"]
    if lines:
        raise TypeError("fit: step(state, batch) must return a state with the structure, shapes and dtypes of the one "
                        "it takes, or the run could not be resumed:\n  " + "\n  ".join(lines))
    return metrics


def evaluated(name: str, metrics: Any) -> Mapping[str, Any]:
    """Returns the result of an evaluation. Raises an error if it is not a dict of metrics.

    Raises:
      TypeError: it is something else.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"the evaluation '{name}' must return a dict of metrics, such as {{'accuracy': 0.97}}; got a "
                        f"{type(metrics).__name__}")
    return metrics


def check_watched(watched: Collection[str], evaluate: Mapping[str, Callable], *, state: Any = None,
                  values: Mapping[str, Any] | None = None) -> None:
    """Holds the metrics that decide (`best`, early stopping) to those that the evaluations return.

    Args:
      watched: their names.
      evaluate: the evaluations. An `evaluator` knows its metrics beforehand.
      state: what it is asked with, before the first step.
      values: what the evaluations have returned.

    Raises:
      ValueError: there is no such metric, or no such evaluation.
    """
    for metric in watched:
        name = metric.partition("/")[0]
        if name not in evaluate:
            raise ValueError(f"'{metric}' is to be watched, but evaluate= has {sorted(evaluate)}: a metric is called "
                             "'evaluation/metric', as in 'validation/accuracy'")
        if values is not None:
            known = sorted(values)
        elif hasattr(evaluate[name], "names"):
            known = [f"{name}/{one}" for one in evaluate[name].names(state)]
        else:
            continue
        if metric not in known:
            near = difflib.get_close_matches(metric, known, 1)
            raise ValueError(f"'{metric}' is to be watched, but the evaluations return {known}"
                             + (f": did you mean '{near[0]}'?" if near else ""))

"""The importance of hyperparameters: what a model of the metric loses on unseen trials without one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fnet.search._space import Choice

_PERMUTATIONS = 199
_TRIALS = 300  # of more trials, a random part is used: the time grows with the third power
_WIDTHS = (0.25, 1.0)  # of a kernel, relative to the range of a hyperparameter
_INTERACTIONS = (0.1, 1.0)  # weight of each further hyperparameter of an interaction
_RIDGES = (0.01, 0.1, 1.0, 10.0)
_CONSTANT = 1e4  # variance of the mean of the metric, in the unit of the kernel


@dataclasses.dataclass(frozen=True)
class Importance:
    """What can be told about the influence of hyperparameters on a metric.

    Attributes:
      trials: the number of trials.
      explained: the share of the metric's variance that a model of all hyperparameters explains for
        trials which it has not seen. It is negative if the model predicts worse than their mean.
      p: the probability of such an `explained` if the metric depends on no hyperparameter.
      shares: for each hyperparameter (share, p): what `explained` loses without it, and the
        probability of such a loss of any hyperparameter if the metric does not depend on it.
    """

    trials: int
    explained: float
    p: float
    shares: dict[str, tuple[float, float]]


def importance(
    points: Sequence[Mapping[str, Any]], values: Sequence[float], space: Mapping[str, Any]
) -> Importance:
    """Returns the importance of each hyperparameter.

    Each value is predicted from all other trials by kernel ridge regression, whose kernel is a
    product over the hyperparameters and contains their single effects and their interactions. The
    widths, the weight of interactions and the ridge of each prediction are those with the smallest
    errors for the other trials. The probabilities come from random permutations: of the values, and
    for a share of what the other hyperparameters do not explain, times the number of
    hyperparameters (Bonferroni).

    Sources: for the errors without one trial, Rasmussen and Williams (2006), Gaussian Processes for
    Machine Learning, 5.12; for permutations given other variables, Freedman and Lane (1983).
    """
    values = np.asarray(values, float)
    trials = len(values)
    rng = np.random.default_rng(0)
    if trials > _TRIALS:
        part = rng.permutation(trials)[:_TRIALS]
        points, values = [points[i] for i in part], values[part]
    if len(values) < 3 or not np.ptp(values) > 0:
        return Importance(trials, 0.0, 1.0, dict.fromkeys(space, (0.0, 1.0)))
    values = (values - values.mean()) / values.std()
    similar = {name: _similarities(kind, name, points) for name, kind in space.items()}
    explained, _ = _explained(similar, _with_permuted(values, rng))
    shares = {}
    for name in space:
        others = {each: kernel for each, kernel in similar.items() if each != name}
        (without,), (errors,) = _explained(others, values[None])
        rows = values - errors + _with_permuted(errors, rng)  # [1 + permutations, trials]
        losses = _explained(similar, rows)[0] - _explained(others, rows)[0]
        share = max(min(explained[0] - without, explained[0]), 0.0)
        shares[name] = float(share), min(_p(losses) * len(space), 1.0)
    return Importance(trials, float(explained[0]), _p(explained), shares)


def _with_permuted(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns values [trials] and their random permutations, [1 + permutations, trials]."""
    shuffled = rng.permuted(np.tile(values, (_PERMUTATIONS, 1)), axis=1)
    return np.concatenate([values[None], shuffled])


def _p(statistics: np.ndarray) -> float:
    """Returns the share of statistics that are at least as large as the first."""
    return float((statistics >= statistics[0] - 1e-12).mean())


def _similarities(kind, name, points) -> np.ndarray:
    """Returns the kernel of one hyperparameter, [widths, trials, trials]."""
    places = np.array([kind.where(point[name]) for point in points])
    distance = places[:, None] - places
    if isinstance(kind, Choice):
        return np.stack([(distance == 0).astype(float)] * len(_WIDTHS))
    return np.stack([np.exp(-0.5 * (distance / width) ** 2) for width in _WIDTHS])


def _explained(
    similar: Mapping[str, np.ndarray], rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (explained variance of unseen trials [rows], errors [rows, trials]) for rows of values,
    [rows, trials]."""
    trials = rows.shape[1]
    of_mean = (rows - rows.mean(1, keepdims=True)) * trials / (trials - 1)
    errors = [_errors(kernel, ridge, rows) for kernel in _kernels(similar) for ridge in _RIDGES]
    errors = np.stack([*errors, of_mean])  # [settings, rows, trials]
    of_others = (errors**2).sum(2, keepdims=True) - errors**2
    best = of_others.argmin(0)[None]
    chosen = np.take_along_axis(errors, best, 0)[0]
    return 1 - (chosen**2).sum(1) / (of_mean**2).sum(1), chosen


def _kernels(similar):
    if not similar:
        return
    for width in range(len(_WIDTHS)):
        for weight in _INTERACTIONS:
            product = functools.reduce(
                np.multiply, (1 + weight * each[width] for each in similar.values())
            )
            yield product / product.mean()


def _errors(kernel, ridge, rows) -> np.ndarray:
    """Returns the error of the prediction of each value from the others, [rows, trials]."""
    inverse = np.linalg.inv(kernel + _CONSTANT + ridge * np.eye(len(kernel)))
    return rows @ inverse / np.diag(inverse)

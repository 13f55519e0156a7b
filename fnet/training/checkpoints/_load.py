"""Reads the saved states of a run. `load` returns a `Snapshot` and does not need the code of the
run. `restore` returns the full state."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Mapping
from typing import Any

from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._reading import CheckpointError
from fnet.training.checkpoints._storage import location
from fnet.training.checkpoints._workdir import CHECKPOINTS
from fnet.training.optim._averaging import narrowed


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The result of `load`: a saved state of a run.

    Fields:
      step: the step at which the state was saved.
      params: the parameters, a tree with the same dicts, lists and tuples as in the run.
      state: the model's other arrays, such as batch statistics; {} if the model has none.
      config: the `config` that was passed to `fit`, as a dict, or None if no `config` was passed.
      metrics: the metrics of the evaluations at `step`, such as {"validation/accuracy": 0.97}; {}
        if there was no evaluation.
      ema: the moving average of the parameters, or None.

    >>> snapshot = tr.Snapshot(step=10, params={"w": jnp.ones(3)}, state={}, config=None, metrics={})
    >>> snapshot.averaged["w"].shape
    (3,)
    """

    step: int
    params: Any
    state: Any
    config: dict[str, Any] | None
    metrics: dict[str, float]
    ema: Any = None

    @property
    def averaged(self) -> Any:
        """The parameters for evaluation: the moving average in the dtypes of `params` if there is
        one, otherwise `params`."""
        return self.params if self.ema is None else narrowed(self.ema, self.params)


def load(workdir: str | os.PathLike, which: str | int = "last") -> Snapshot:
    """Loads the best state of a run, the last state, or the state of a given step.

    `load` does not need the code that created the state. `load` verifies every byte of the
    checkpoint. The files of a checkpoint contain only JSON and arrays, and `load` executes nothing
    in them.

    Args:
      workdir: the folder or URL that was passed to `fit(workdir=)`.
      which: "best", "last" or the number of a step. "best" is the state with the best value of the
        metric that was passed to `fit(best=)` or `fit(early_stop=)`. Default "last".

    Returns:
      A `Snapshot`. If the saved state has a part "params", as a `TrainState` has, `Snapshot.params`
      is this part.
      If the saved state has no part "params", `Snapshot.params` is the complete state.

    Raises:
      FileNotFoundError: `workdir` contains no run, or the step was not saved.
      CheckpointError: the checkpoint is damaged, or `which` is "best" and there is no best state. A
        run has a best state only if a metric was passed to `fit(best=)` or `fit(early_stop=)`, and
        this metric is finite in at least one checkpoint.
      ValueError: `which` is neither "best" nor "last" nor a number.

    Example:
      >>> snapshot = load("runs/digits", which="best")                     # doctest: +SKIP
      >>> logits = model(snapshot.params, x)                               # doctest: +SKIP
    """
    with Checkpoints(location(workdir) / CHECKPOINTS) as checkpoints:
        manifest, tree = checkpoints.read(_step(checkpoints, which))
    notes = manifest["notes"]
    state = tree["state"] if isinstance(tree, Mapping) and "state" in tree else tree
    found = state if isinstance(state, Mapping) else {}
    return Snapshot(
        step=manifest["step"],
        params=found.get("params", state),
        state=found.get("state") or {},
        config=notes.get("fit", {}).get("config"),
        metrics=manifest["metrics"],
        ema=found.get("ema"),
    )


def restore(
    workdir: str | os.PathLike, like: Any, which: str | int = "last", *, cast: bool = False
) -> Any:
    """Returns the full saved state of a run, with the structure and the shardings of `like`.

    The full state includes the parameters, the optimizer state and the step counter.

    Args:
      workdir: the folder or URL that was passed to `fit(workdir=)`.
      like: a state with the structure of the saved state, such as `TrainState.create(...)`. The
          leaves of `like` may be `jax.ShapeDtypeStruct`s instead of arrays.
      which: "best", "last" or the number of a step, as for `load`. Default "last".
      cast: whether to convert the saved leaves to the dtypes of the leaves of `like`. Default
        False: a different dtype raises an error.

    Returns:
      The saved state. To continue the training in another workdir, pass the saved state to
      `fit(step, state, ...)`.

    Raises:
      FileNotFoundError, ValueError: as for `load`.
      CheckpointError: as for `load`. A CheckpointError is also raised if saved leaves differ from
        `like` in name, shape or dtype. The error message lists the leaves that differ.

    >>> import tempfile
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = tr.fit(step, state, lambda i: jnp.ones(3), steps=2, workdir=folder, config={}, tensorboard=False)
    ...     int(tr.restore(folder, like=state).step)
    2
    """
    with Checkpoints(location(workdir) / CHECKPOINTS) as checkpoints:
        return checkpoints.restore(like, _step(checkpoints, which), cast=cast, part="state")


def _step(checkpoints: Checkpoints, which: str | int) -> int | None:
    """Returns the number of the step that `which` selects, or None for the newest undamaged step."""
    if not isinstance(which, (str, bool)):
        with contextlib.suppress(TypeError):  # `which` is not an integer
            return operator.index(which)
    if which not in ("best", "last"):
        raise ValueError(f"which={which!r}: use 'best', 'last' or the number of a step")
    if which == "last":
        return None
    best = None
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(CheckpointError):  # damaged; the others contain the same note
            best = checkpoints.notes(step).get("fit", {}).get("best")
            break
    if not checkpoints.steps():
        checkpoints.notes()  # raises an error that lists the existing steps
    if not best:
        raise CheckpointError(
            f"{checkpoints.folder}: no metric says which state of this run is the best: train with "
            "fit(..., best='validation/accuracy') or early_stop=, or load which='last'"
        )
    found = Checkpoints(checkpoints.folder, best=best[0], mode=best[1]).best()
    if found is None:
        raise CheckpointError(
            f"{checkpoints.folder}: no checkpoint has a finite value of '{best[0]}' yet; load "
            "which='last'"
        )
    return found

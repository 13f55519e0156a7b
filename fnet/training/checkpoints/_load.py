"""Reads the saved states of a run. `load` returns a `Snapshot` and does not need the code of the
run. `restore` returns the full state."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Mapping
from typing import Any

from fnet.jaxpr import pack
from fnet.training._carried import counted
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._reading import CheckpointError
from fnet.training.checkpoints._storage import location
from fnet.training.checkpoints._workdir import CHECKPOINTS
from fnet.training.optim._averaging import narrowed


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The result of `load`: a saved state of a run.

    Fields:
      step: the step at which it was saved.
      params: the parameters, in the same dicts, lists and tuples as in the run.
      state: the model's other arrays, such as batch statistics; {} if it has none.
      config: the `config` of `fit` as a dict, or None.
      metrics: the metrics of the evaluations at `step`, such as {"validation/accuracy": 0.97}; {}
        if there was none.
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
    """Loads the last or the best state of a run, or that of a step, without the code of the run.

    The files contain only JSON and arrays. Every byte is verified, and nothing is executed.

    Args:
      workdir: the folder or URL that was passed to `fit(workdir=)`.
      which: "last", "best" (by the metric of `fit(best=)` or `fit(early_stop=)`) or the number of a
        step. Default "last".

    Returns:
      A `Snapshot`. Its `params` are the part "params" of the saved state, as in a `TrainState`, or
      all of it if there is no such part.

    Raises:
      FileNotFoundError: `workdir` contains no run, or the step was not saved.
      CheckpointError: the checkpoint is damaged, or there is no best state: the run named no metric
        for it, or its value is finite in no checkpoint.
      ValueError: `which` is neither "best" nor "last" nor a number.

    Example:
      >>> snapshot = load("runs/digits", which="best")                     # doctest: +SKIP
      >>> logits = model(snapshot.params, x)                               # doctest: +SKIP
    """
    with Checkpoints(location(workdir) / CHECKPOINTS) as checkpoints:
        manifest, tree = checkpoints.read(_step(checkpoints, which))
    notes = manifest["notes"]
    state = tree["state"] if isinstance(tree, Mapping) and "state" in tree else tree
    if isinstance(state, Mapping) and state.keys() == {"step", "carry"}:  # `Counted`
        state = state["carry"]
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
    """Returns the whole saved state of a run, optimizer and step counter included, to go on
    training.

    Args:
      workdir: the folder or URL that was passed to `fit(workdir=)`.
      like: a state with the structure of the saved one, such as `TrainState.create(...)`, also of
        `jax.ShapeDtypeStruct`s, or modules of flax.nnx or Equinox. The result has its structure and
        its shardings; modules are new ones.
      which: "best", "last" or the number of a step, as for `load`. Default "last".
      cast: convert saved leaves to the dtypes of `like`. Default False: another dtype is an error.

    Returns:
      The saved state. To continue the training in another workdir, pass it to
      `fit(step, state, ...)`.

    Raises:
      FileNotFoundError, ValueError: as for `load`.
      CheckpointError: as for `load`, or saved leaves differ from `like` in name, shape or dtype.
        The message lists them.

    >>> import tempfile
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = tr.fit(step, state, lambda i: jnp.ones(3), steps=2, workdir=folder, config={}, tensorboard=False)
    ...     int(tr.restore(folder, like=state).step)
    2
    """
    with Checkpoints(location(workdir) / CHECKPOINTS) as checkpoints:
        arrays, form = pack(like)
        wanted = counted(arrays)
        found = checkpoints.restore(wanted, _step(checkpoints, which), cast=cast, part="state")
    found = found if wanted is arrays else found.carry
    return found if form is None else form.unpack(found)


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

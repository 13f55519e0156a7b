"""StepEnd: the argument of the user's `on_step` functions, which `fit` calls after each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from fnet.training.record import _metrics
from fnet.training.record._media import MEDIA


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """The argument of an `on_step` function: a step that `fit` has dispatched to the device.

    Fields:
      step: the number of steps so far, this one included.
      state: the state after it. The next step reuses its memory, so copy the arrays that you want
        to keep (`jax.device_get`).

    >>> losses = []
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {"loss": batch.sum()})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> on_step = lambda end: losses.append(float(end.metrics["loss"]))
    >>> _ = tr.fit(step, state, lambda i: jnp.ones(3), steps=2, on_step=on_step)
    >>> losses
    [3.0, 3.0]
    """

    step: int
    state: Any
    _metrics: Any = dataclasses.field(repr=False)
    _write: Callable[[Mapping[str, Any]], None] = dataclasses.field(repr=False)
    _stop: Callable[[], None] = dataclasses.field(repr=False)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics that the step returned, by name. Reading them waits for the device."""
        return _metrics.results(self._metrics)

    def log(self, values: Mapping[str, Any]) -> None:
        """Writes values for this step to the logs of the run. Without a workdir, it does nothing.

        Numbers go to metrics.jsonl and TensorBoard's files, `Histogram`, `Image` and `Text` only to
        the latter.

        Args:
          values: numbers, bools, `Histogram`s, `Image`s and `Text`s by name.

        Raises:
          TypeError: a value is none of these.
        """
        for name, value in values.items():
            number = np.ndim(value) == 0 and jnp.issubdtype(np.asarray(value).dtype, np.number)
            if not number and not isinstance(value, bool | np.bool_ | MEDIA):
                raise TypeError(
                    f"log: '{name}' is a {type(value).__name__}: expected a number, "
                    "tr.Histogram(values), tr.Image(pixels) or tr.Text(text)"
                )
        self._write(values)

    def stop(self) -> None:
        """Ends the run after this step, as early stopping does: `fit` saves the state, and the run
        is complete."""
        self._stop()

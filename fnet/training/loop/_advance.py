"""The compiled function that `fit` calls for each step. The compiled function runs the user's step,
and checks and sums the results."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from fnet.training.loop import _contract, _nonfinite
from fnet.training.record import _metrics


def function(
    step: Callable, state: Any, *, keeps: bool, exempt: Collection[str], metrics: bool
) -> Callable:
    """Returns a compiled function `advance`, which runs one step, checks the new state and adds up
    the metrics.

        state, total, watch, metrics = advance(state, total, watch, batch)

    `total` contains the sums of the metrics since the last log. `watch` contains the first step
    with NaN or infinity and the number of skipped steps (see `_nonfinite.start`). `metrics`
    contains the metrics of this step, or is None. The buffers of the arguments `state` and `total`
    are donated.

    Args:
      step: the step function, as in `fit`.
      state: the state before the first step. The state after every step has the same shardings as
          `state`.
      keeps: whether a step that produces NaN or infinity leaves the state unchanged, except that
          the counter `step` of the state increases.
      exempt: the paths of the leaves of the state that are not checked, because they are infinite
          at the start.
      metrics: whether `advance` returns the metrics of the step. If False, `advance` returns None
          instead of the metrics.
    """
    places = jax.tree.map(_place, state)
    if getattr(step, "separate", False):
        return _after(step, keeps=keeps, exempt=exempt, metrics=metrics)

    def advance(state, total, watch, batch):
        new, measured = step(state, batch)
        _contract.check_state(state, new)
        # Keeps the sharding: XLA would choose another, but a resumed run starts with this one.
        new = jax.tree.map(
            lambda x, place: x if place is None else jax.lax.with_sharding_constraint(x, place),
            new,
            places,
        )
        measured = _metrics.as_metrics(measured)
        sound, watch = _nonfinite.look(watch, state, new, measured, skip=keeps, exempt=exempt)
        more = _metrics.add(total, measured)
        if keeps:
            new, more = _nonfinite.kept(sound, new, state), _nonfinite.kept(sound, more, total)
        return new, more, watch, measured if metrics else None

    return jax.jit(advance, donate_argnums=(0, 1))


def _after(step, *, keeps, exempt, metrics):
    """Returns a function that calls `step`, and then checks the new state and adds up the metrics
    in a separate compiled program. `step` itself may call several compiled programs, such as one
    for each model of a population."""

    def check(new, old, total, watch, measured):
        measured = _metrics.as_metrics(measured)
        before = new.replace(step=new.step - 1) if old is None else old
        sound, watch = _nonfinite.look(watch, before, new, measured, skip=keeps, exempt=exempt)
        more = _metrics.add(total, measured)
        if keeps:
            new, more = _nonfinite.kept(sound, new, old), _nonfinite.kept(sound, more, total)
        return new, more, watch, measured if metrics else None

    whole, part = jax.jit(check, donate_argnums=(0, 2)), jax.jit(check, donate_argnums=2)

    def advance(state, total, watch, batch):
        old = jax.tree.map(jnp.copy, state) if keeps else None  # the step donates the state
        new, measured = step(state, batch)
        if old is not None:
            _contract.check_state(old, new)
        elif hasattr(new, "members"):  # members are exempt, and reading them is slow
            return new, *part(new.replace(members=()), None, total, watch, measured)[1:]
        return whole(new, old, total, watch, measured)

    return advance


def _place(x: jax.Array) -> NamedSharding | None:
    """Returns the sharding that the step must preserve for the array `x`. Returns None if the array
    is on one device, or if JAX preserves the sharding itself (explicit mesh axes)."""
    place = x.sharding
    if (
        not isinstance(place, NamedSharding)
        or place.num_devices == 1
        or AxisType.Explicit in place.mesh.axis_types
    ):
        return None
    return place

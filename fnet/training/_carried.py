"""The state of a run as arrays, with a counter of steps, and the user's functions of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fnet.jaxpr import Form, pack
from fnet.parallel import Plan
from fnet.transforms._modules import module_step


@struct.dataclass
class Counted:
    """A state that does not count the steps itself, such as modules: `carry`, and the counter."""

    step: jax.Array
    carry: Any


def counted(arrays: Any) -> Any:
    """Returns a state of arrays that has an attribute `step`."""
    return arrays if hasattr(arrays, "step") else Counted(jnp.zeros((), jnp.int32), arrays)


class Carried:
    """A step and a state as `fit` runs and saves them, and the way back to the user's.

    Args:
      step, state, plan: as in `fit`.

    Attributes:
      step: the step as a pure function of `state`.
      state: a pytree of arrays with a counter `step`.
      plan: the plan for `state`, or None.
    """

    def __init__(self, step: Callable, state: Any, plan: Plan | None):
        self._given = state
        self._form: Form | None
        arrays, self._form = pack(state)
        module, _ = module_step("fit", step, state)
        self.step = step if module is None else module.pure
        self.state = counted(arrays)
        self.plan = plan
        self._counts = self.state is not arrays
        if self._counts:
            self.step = _counting(self.step)
        if plan is not None and (self._counts or self._form is not None):
            places = plan.state
            if self._counts:
                whole = jax.sharding.NamedSharding(plan.mesh, jax.sharding.PartitionSpec())
                places = Counted(whole, plan.state)
            self.plan = dataclasses.replace(plan, state=places, form=None)

    def view(self, state: Any) -> Any:
        """Returns the user's form of a state, with new modules."""
        arrays = state.carry if self._counts else state
        return arrays if self._form is None else self._form.unpack(arrays)

    def result(self, state: Any) -> Any:
        """Returns the user's form of the last state. Modules of flax.nnx are the caller's own,
        which change in place, as they do in a loop of the user's."""
        arrays = state.carry if self._counts else state
        return arrays if self._form is None else self._form.update(self._given, arrays)

    def evaluations(self, functions: Mapping[str, Callable]) -> dict[str, Callable]:
        """Returns evaluations of a state of arrays."""
        return {name: _Evaluation(name, function, self) for name, function in functions.items()}

    def on_step(self, function: Callable) -> Callable:
        """Returns a function of a `StepEnd` with a state of arrays."""
        return lambda end: function(dataclasses.replace(end, state=self.view(end.state)))

    def check_unchanged(self, what: str, view: Any, state: Any) -> None:
        """Raises a ValueError if a function that only reads the modules of `view` changed them."""
        if self._form is not None:
            lost = self._form.lost(view, state.carry if self._counts else state)
            unchanged(what, lost)


def unchanged(what: str, lost: list[str]) -> None:
    """Raises a ValueError if there are updates of modules that would be lost."""
    if lost:
        raise ValueError(
            f"{what} changes {', '.join(lost[:3])}{', ...' * (len(lost) > 3)}, as training does, "
            "and the change would be lost. Call the model's eval() in it first"
        )


class _Evaluation:
    """An evaluation of a state of arrays. It has the attributes of the user's function."""

    def __init__(self, name: str, function: Callable, carried: Carried):
        self._name, self._function, self._carried = name, function, carried
        if hasattr(function, "names"):
            self.names = lambda state: function.names(carried.view(state))

    def __call__(self, state: Any) -> Any:
        view = self._carried.view(state)
        values = self._function(view)
        self._carried.check_unchanged(f"the evaluation '{self._name}'", view, state)
        return values


def _counting(step: Callable) -> Callable:
    """Returns a step of a `Counted` state."""

    def counting(state: Counted, batch: Any, **options: Any) -> Any:
        result = step(state.carry, batch, **options)
        if not isinstance(result, tuple) or len(result) != 2:
            return result  # `fit` says what is expected
        carry, metrics = result
        return Counted(state.step + 1, carry), metrics

    counting.__qualname__ = getattr(step, "__qualname__", type(step).__name__)
    return counting

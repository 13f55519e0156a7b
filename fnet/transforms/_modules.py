"""A training step of modules as a pure function of arrays, for `parallel.plan` and `fit`.

The state of such a step is a flax.nnx module, an Equinox model, or a tuple such as (model,
optimizer), whose items may be the first arguments of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from fnet.jaxpr import Form, is_array, mutable, pack, wraps


class ModuleStep:
    """A step, and how it is called with the arrays of its state.

    Args:
        who: the caller, for error messages, such as "plan".
        step: `step(state, batch)`, or `step(*state, batch)` if `items` is not 0, or `step(*state,
            *batch)` if it takes the arrays of a batch one by one. It returns the new state and
            metrics. A step that changes flax.nnx modules in place returns metrics alone.
        form: the form of the state, or None for a state of arrays.
        items: the number of items of the state that are arguments of their own, see `items_of`.

    Attributes:
        pure: the step as a function of arrays, `pure(arrays, batch) -> (arrays, metrics)`.
    """

    def __init__(self, who: str, step: Callable, form: Form | None, items: int):
        self._who, self._step, self._form, self._items = who, step, form, items
        self._returns = "metrics"

        @wraps(step)
        def pure(arrays: Any, batch: Any, **options: Any) -> tuple[Any, Any]:
            state = arrays if form is None else form.unpack(arrays)
            arguments = state if items else (state,)
            with mutable.explained():
                result = step(*arguments, *self._batch(batch), **options)
            new, metrics = self._split(state, result)
            return self._packed(new), metrics

        self.pure = pure

    def _batch(self, batch: Any) -> tuple:
        """The arguments of the step that are the batch: itself, or its items."""
        names = batch_names(self._step, self._items)
        if len(names) < 2:
            return (batch,)
        if not isinstance(batch, (tuple, list)) or len(batch) != len(names):
            raise TypeError(
                f"{self._who}: the step takes {', '.join(names)} after its state, so a batch must be "
                f"a tuple of {len(names)} items; got {_described(batch)}"
            )
        return tuple(batch)

    def result(self, state: Any, arrays: Any, metrics: Any) -> Any:
        """Returns what the step itself would have returned, and writes the new arrays into the
        flax.nnx modules of `state`."""
        new = arrays if self._form is None else self._form.update(state, arrays)
        if self._returns == "metrics":
            return metrics
        return (*new, metrics) if self._returns == "items" else (new, metrics)

    def _split(self, state: Any, result: Any) -> tuple[Any, Any]:
        """Returns (state, metrics) of what the step returned."""
        self._returns, n = "pair", self._items
        if isinstance(result, tuple):
            if n and len(result) == n + 1 and self._is_state(result[:n], state):
                self._returns = "items"
                return tuple(result[:n]), result[n]
            if len(result) == 2 and self._is_state(result[0], state):
                return result
        if self._form is not None and self._form.in_place:
            self._returns = "metrics"
            return state, {} if result is None else result
        wanted = "state, metrics"
        if n:
            names = [name for name, _ in _positional(self._step)][:n]
            wanted = f"{', '.join(names) or '*state'}, metrics"
        raise TypeError(
            f"{self._who}: the step must return ({wanted}), so with the items of the state in the "
            f"order of its arguments; it returned {_described(result)}"
        )

    def _is_state(self, new: Any, state: Any) -> bool:
        """Whether a result of the step is its new state, and not metrics."""
        if self._form is None or not self._form.in_place:
            return not self._items or (isinstance(new, tuple) and len(new) == self._items)
        own = lambda x: not isinstance(x, (tuple, list, dict))
        mine, its = (jax.tree.leaves(tree, is_leaf=own) for tree in (state, new))
        return list(map(type, mine)) == list(map(type, its))

    def _packed(self, new: Any) -> Any:
        arrays, form = pack(new)
        if form == self._form:
            return arrays
        if form is None or self._form is None:
            lines = ["it is a tree of other classes"]
        else:
            lines = self._form.differences(form)
        raise TypeError(
            f"{self._who}: the step must return a state in which only arrays change, but in it "
            f"{'; '.join(lines)}. Keep what changes in an array, in flax.nnx in an "
            "nnx.Variable(jnp.asarray(...)), and create all arrays before training"
        )


def module_step(who: str, step: Callable, state: Any) -> tuple[ModuleStep | None, Any]:
    """Returns the `ModuleStep` of a step, or None if it is `step(state, batch)` of arrays already,
    and the arrays of its state."""
    arrays, form = pack(state)
    items = items_of(step, state)
    if form is None and not items:
        return None, state
    return ModuleStep(who, step, form, items), arrays


def of_arrays(step: Callable, init: Callable) -> tuple[Callable, Callable, Callable]:
    """Returns a step and an init whose states are arrays, and a function that returns the form of
    the state, which is known once init was called."""
    found: list[tuple[Form | None, int]] = []

    @wraps(init)
    def packed(key: Any) -> Any:
        state = init(key)
        arrays, form = pack(state)
        found[:] = [(form, items_of(step, state))]
        return arrays

    @wraps(step)
    def pure(arrays: Any, batch: Any, **options: Any) -> Any:
        form, items = found[0]
        if form is None and not items:
            return step(arrays, batch, **options)
        return ModuleStep("plan", step, form, items).pure(arrays, batch, **options)

    return pure, packed, lambda: found[0][0]


def items_of(step: Callable, state: Any) -> int:
    """The number of items of a state that are arguments of their own: all if the state is a tuple
    and the step has more arguments than it has items, or else 0."""
    if type(state) is not tuple or len(state) < 2:
        return 0
    required = [name for name, optional in _positional(step) if not optional]
    return len(state) if len(required) > len(state) else 0


def batch_names(step: Callable, items: int) -> list[str]:
    """The arguments of a step after those of its state that have no default."""
    return [name for name, optional in _positional(step) if not optional][items or 1 :]


def _positional(step: Callable) -> list[tuple[str, bool]]:
    """Returns the name of each positional parameter of a step, and whether it has a default."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [(p.name, p.default is not p.empty) for p in parameters if p.kind in kinds]


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} values ({', '.join(map(_described, result))})"
    if is_array(result):
        return f"{result.dtype}{list(result.shape)}"
    return "None" if result is None else f"a {type(result).__name__}"

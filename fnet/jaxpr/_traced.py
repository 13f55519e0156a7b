"""Traces one call of a Python function. Arrays are traced; all other values are passed through
unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax

from fnet import _jax
from fnet.jaxpr import _mutable
from fnet.jaxpr._static_leaves import array_leaves, is_array
from fnet.jaxpr._values import as_array

# A traced jax.Ref is a Tracer, but not an Array: JAX rejects it.
_TRACED = (jax.Array, jax.core.Tracer)


class Traced:
    """The traced call f(*args, **kwargs).

    Attributes:
        closed: the closed jaxpr of the call. The inputs of the jaxpr are the arrays in the
            arguments, and its outputs are the arrays in the results.
        arrays: the arguments that are arrays.
    """

    def __init__(self, f: Callable, args: tuple, kwargs: dict):
        f, own = _mutable.opened(f)
        tree, modules, self._modules = _mutable.extract(((*own, *args), kwargs))
        self.arrays, rebuild = array_leaves((tree, modules))

        def flat(*arrays: Any) -> list:
            tree, modules = rebuild(arrays)
            (args, kwargs), new = _mutable.insert(tree, modules)
            with _mutable.explained():
                result = f(*args, **kwargs)
            results, self._structure = jax.tree.flatten(
                (_mutable.returned(result, new), _mutable.updates(new, modules))
            )
            # Constants in tuples.
            self._results = [None if isinstance(x, _TRACED) else (x,) for x in results]
            for x in results:
                _check(x)
            return [x for x in results if isinstance(x, _TRACED)]

        # JAX's errors name f and its line.
        vars(flat).update(__signature__=inspect.signature(flat), __wrapped__=f)
        self.closed = _jax.make_jaxpr(flat)(*self.arrays)

    def result(self, arrays: Iterable, modules: tuple | None = None) -> Any:
        """Returns f's result, built from the outputs of the jaxpr, and updates nnx modules among
        the arguments, or `modules`, of which those are copies."""
        result, state = self.tree(map(as_array, arrays))
        return _mutable.apply(result, self._modules if modules is None else modules, state)

    def tree(self, arrays: Iterable) -> tuple[Any, Any]:
        """Returns the result of `f`, and the new state of the nnx modules among its arguments."""
        rest = iter(arrays)
        filled = [next(rest) if constant is None else constant[0] for constant in self._results]
        return jax.tree.unflatten(self._structure, filled)


def _check(x: Any) -> None:
    """Raises TypeError if `x` is not an array but contains traced arrays, for example in the
    closure of a function."""
    if isinstance(x, _TRACED) or is_array(x):
        return
    inside = list(getattr(x, "__dict__", {}).values())
    what = f"a {type(x).__name__} with"
    if inspect.isfunction(x):
        inside += inspect.getclosurevars(x).nonlocals.values()
        what = f"the function {x.__qualname__!r}, which closes over"
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(inside)):
        raise TypeError(
            f"a transformed function must return arrays, or pytrees of arrays; it returned {what} "
            "arrays that were computed inside. Return the arrays themselves, or register the class "
            "with jax.tree_util.register_dataclass"
        )

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
        self._arguments = f, tree, modules

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

    def names(self) -> tuple[list[str], list[str]]:
        """Returns the paths of the inputs of the jaxpr, such as "params/head/kernel", which begin
        with the name of the argument, and the paths of its outputs."""
        f, (args, kwargs), modules = self._arguments
        named = dict(zip(_parameters(f, len(args)), args)) | kwargs
        # In the order of the leaves of `args`, then of `kwargs`, whose keys JAX sorts.
        inputs = [
            path
            for name in (*list(named)[: len(args)], *sorted(kwargs))
            for path, x in _paths(named[name], name)
            if is_array(x)
        ]
        marked = [0 if constant is None else _Constant() for constant in self._results]
        tree, new = jax.tree.unflatten(self._structure, marked)
        outputs = [path for path, x in _paths(tree) if not isinstance(x, _Constant)]
        return (
            [*inputs, *_module_paths(modules, is_array)],
            [*outputs, *_module_paths(new, lambda x: not isinstance(x, _Constant))],
        )

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


class _Constant:
    """Marks a result that is not traced."""


def _parameters(f: Any, count: int) -> list[str]:
    """Returns the names of the first `count` parameters of f, as far as they are known."""
    try:
        known = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        known = []
    positional = [
        each.name
        for each in known
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return [positional[i] if i < len(positional) else f"{i}" for i in range(count)]


def _paths(tree: Any, *above: str) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    inside = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return [("/".join(filter(None, (*above, inside(path)))), x) for path, x in leaves]


def _module_paths(modules: Any, wanted: Callable[[Any], bool]) -> list[str]:
    if modules is None:
        return []
    state = jax.tree.unflatten(modules.structure, modules.arrays)
    return [path for path, x in _paths(state, "modules") if wanted(x)]


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

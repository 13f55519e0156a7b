"""Passes flax.nnx modules to a traced function as arrays, and returns the changes that the function
makes to the modules.

An nnx module is updated in place. A traced function receives a copy of an nnx module, so it must
return the updates, which would otherwise be lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fnet.jaxpr._static_leaves import alike


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Slot:
    """A placeholder for the nnx module with the index `number` in the list of all nnx modules in
    the arguments."""

    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Modules:
    """The nnx modules in the arguments of a function call, as a pytree with the leaves `arrays`.

    Attributes:
        arrays: the arrays of the modules' variables.
        structure: the tree structure of the modules' state, whose leaves are `arrays`.
        graph: the `nnx.GraphDef` of the modules: their structure, and all attributes except
            variables.
        changed: whether a function has changed `graph`.
        written: for each array, whether a function has replaced the array. Only nnx variables with
            replaced arrays are updated after the call, because an unnecessary update would fail if
            the call is inside a scan or branch.
    """

    arrays: list
    structure: Any = dataclasses.field(metadata={"static": True})
    graph: Any = dataclasses.field(metadata={"static": True})
    changed: bool = dataclasses.field(default=False, metadata={"static": True})
    written: tuple[bool, ...] = dataclasses.field(default=(), metadata={"static": True})


def kinds() -> tuple[type, ...]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return ()  # no nnx modules exist before flax.nnx is imported
    return tuple(getattr(nnx, name) for name in ("Pytree", "Variable") if hasattr(nnx, name))


def opened(f: Any) -> tuple[Callable, tuple]:
    """Returns f as a function whose first arguments are the nnx modules in f, and these modules: f
    itself, or the object of which f is a method."""
    nodes = kinds()
    if nodes and isinstance(f, nodes):
        return type(f).__call__, (f,)
    if nodes and isinstance(getattr(f, "__self__", None), nodes) and hasattr(f, "__func__"):
        return f.__func__, (f.__self__,)
    return f, ()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Says in errors of flax.nnx what to do with a module that is not an argument."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            error.add_note(
                "fnet: the function changes a flax.nnx module that is not among its arguments, so "
                "that the change would be lost. Pass the module to it as an argument, for a "
                "training step as a part of its state. (A module that needs no updates: call its "
                "eval().)"
            )
        raise


def extract(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[Any, Modules | None, tuple]:
    """Replaces the nnx modules in a tree by placeholders.

    The function returns three values: the new tree, a `Modules` object with the arrays of the nnx
    modules, and a tuple of the original modules. If the tree contains no nnx modules, the `Modules`
    object is None. `is_leaf` says what in the variables counts as an array. If two nnx modules
    share a variable, the copies that `insert` creates share a variable, too.
    """
    nodes = kinds()
    if not nodes:
        return tree, None, ()
    found: list[Any] = []

    def place(x: Any) -> Any:
        if not isinstance(x, nodes):
            return x
        found.append(x)
        return Slot(len(found) - 1)

    tree = jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nodes))
    if not found:
        return tree, None, ()
    graph, state = sys.modules["flax.nnx"].split(tuple(found))
    arrays, structure = jax.tree.flatten(state, is_leaf=is_leaf)
    return tree, Modules(arrays, structure, graph), tuple(found)


def insert(tree: Any, modules: Modules | None) -> tuple[Any, Any]:
    """Creates new modules from the arrays in `modules`. Returns (the tree with placeholders
    replaced by the new modules, the new modules)."""
    if modules is None:
        return tree, None
    new = sys.modules["flax.nnx"].merge(
        modules.graph, jax.tree.unflatten(modules.structure, modules.arrays)
    )
    is_slot = lambda x: isinstance(x, Slot)
    return jax.tree.map(lambda x: new[x.number] if is_slot(x) else x, tree, is_leaf=is_slot), new


def updates(new: Any, modules: Modules | None) -> Modules | None:
    """Returns the arrays of the nnx modules after the function has run, or None if there are no
    modules.

    Raises:
        TypeError: if the function has added or removed variables.
    """
    if modules is None:
        return None
    graph, state = sys.modules["flax.nnx"].split(new)
    arrays, structure = jax.tree.flatten(state)
    if structure != modules.structure:
        before, after = _variables(modules.structure), _variables(structure)
        lines = [f"adds {path}" for path in after if path not in before]
        lines += [f"removes {path}" for path in before if path not in after]
        raise TypeError(
            "a transformed function may update the variables of an nnx module, but not add or "
            f"remove them; it {', '.join(lines) or 'changes the metadata of one'}. Create all "
            "variables first, for example by calling the module once"
        )
    written = tuple(new is not old for new, old in zip(arrays, modules.arrays))
    return Modules(arrays, structure, graph, graph != modules.graph, written)


def _variables(structure: Any) -> list[str]:
    """Returns the paths of the variables in the state of modules."""
    nnx = sys.modules["flax.nnx"]
    paths = [path for path, _ in nnx.to_flat_state(_placeholders(structure))]
    return [repr("/".join(map(str, path[1:]))) for path in paths]


def returned(result: Any, new: Any) -> Any:
    """Returns `result` with the nnx modules of the call replaced by placeholders."""
    if not new:
        return result
    numbers = {id(module): number for number, module in enumerate(new)}
    return jax.tree.map(
        lambda x: Slot(numbers[id(x)]) if id(x) in numbers else x,
        result,
        is_leaf=lambda x: id(x) in numbers,
    )


def apply(result: Any, found: tuple, updated: Modules | None) -> Any:
    """Updates the caller's nnx modules with the changes that a traced function made to its copies
    of the modules.

    Returns the result of the function, in which each placeholder for an nnx module is replaced by
    the caller's module.
    """
    if updated is None:
        return result
    nnx = sys.modules["flax.nnx"]
    state = jax.tree.unflatten(updated.structure, updated.arrays)
    written = jax.tree.unflatten(updated.structure, updated.written)
    paths = {path for path, flags in nnx.to_flat_state(written) if any(jax.tree.leaves(flags))}
    if paths:
        changes = [(path, x) for path, x in nnx.to_flat_state(state) if path in paths]
        nnx.update(found, nnx.from_flat_state(changes))
    if updated.changed:
        _copy_attributes(found, nnx.merge(updated.graph, state), kinds()[0], set())
    is_slot = lambda x: isinstance(x, Slot)
    return jax.tree.map(lambda x: found[x.number] if is_slot(x) else x, result, is_leaf=is_slot)


def _copy_attributes(old: Any, new: Any, kind: type, seen: set[int]) -> None:
    """Sets the attributes of the caller's modules `old`, except variables, to those of the modules
    `new`, recursively.

    `new` contains the modules with their attributes after the call of the traced function.
    """
    is_module = lambda x: isinstance(x, kind)
    structure = lambda x: jax.tree.structure(x, is_leaf=is_module)
    mine = jax.tree.leaves(old, is_leaf=is_module)
    copies = jax.tree.leaves(new, is_leaf=is_module)
    for module, copy in zip(mine, copies, strict=True):
        if not is_module(copy) or id(copy) in seen:
            continue
        seen.add(id(copy))
        before, after = _attributes(module), _attributes(copy)
        for name in before.keys() - after.keys():
            delattr(module, name)
        for name, value in after.items():
            # The variables of the caller's modules must stay the same objects, so a value that
            # holds any is not replaced.
            if _has_state(value) and structure(before.get(name)) == structure(value):
                _copy_attributes(before[name], value, kind, seen)
            else:
                setattr(module, name, value)


def changed_attributes(before: tuple, after: tuple) -> list[tuple[str, Any, Any]]:
    """Returns (path, old value, new value) for each attribute of modules, other than variables,
    that differs. Each argument is a pair (graph, structure of the state)."""
    old, new = _options(*before), _options(*after)
    missing = object()
    return [
        (".".join(map(str, path)), old.get(path), new.get(path))
        for path in {**old, **new}
        if not alike(old.get(path, missing), new.get(path, missing))
    ]


def _options(graph: Any, structure: Any) -> dict[tuple, Any]:
    """Returns {path: value} of the attributes of modules that hold no arrays."""
    nnx = sys.modules["flax.nnx"]
    nodes = nnx.iter_graph(nnx.merge(graph, _placeholders(structure)))
    return {
        (*path[1:], name): value
        for path, node in nodes
        if isinstance(node, nnx.Pytree)
        for name, value in _attributes(node).items()
        if not _has_state(value)
    }


def _placeholders(structure: Any) -> Any:
    return jax.tree.unflatten(structure, [0] * structure.num_leaves)


def _attributes(module: Any) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if not name.startswith("_pytree__")}


def _has_state(value: Any) -> bool:
    nodes = kinds()
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, nodes))
    return any(isinstance(x, nodes) or hasattr(x, "shape") for x in leaves)

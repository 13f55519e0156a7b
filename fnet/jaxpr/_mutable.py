"""Passes flax.nnx modules to a traced function as arrays, and returns the changes that the function
makes to the modules.

An nnx module is updated in place. A traced function receives a copy of an nnx module, so it must
return the updates, which would otherwise be lost.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Slot:
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


def _kinds() -> tuple[type, ...]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return ()  # no nnx modules exist before flax.nnx is imported
    return tuple(getattr(nnx, name) for name in ("Pytree", "Variable") if hasattr(nnx, name))


def extract(tree: Any) -> tuple[Any, Modules | None, tuple]:
    """Replaces the nnx modules in a tree by placeholders.

    The function returns three values: the new tree, a `Modules` object with the arrays of the nnx
    modules, and a tuple of the original modules. If the tree contains no nnx modules, the `Modules`
    object is None. If two nnx modules share a variable, the copies that `insert` creates share a
    variable, too.
    """
    kinds = _kinds()
    if not kinds:
        return tree, None, ()
    found: list[Any] = []

    def place(x: Any) -> Any:
        if not isinstance(x, kinds):
            return x
        found.append(x)
        return _Slot(len(found) - 1)

    tree = jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, kinds))
    if not found:
        return tree, None, ()
    graph, state = sys.modules["flax.nnx"].split(tuple(found))
    arrays, structure = jax.tree.flatten(state)
    return tree, Modules(arrays, structure, graph), tuple(found)


def insert(tree: Any, modules: Modules | None) -> tuple[Any, Any]:
    """Creates new modules from the arrays in `modules`. Returns (the tree with placeholders
    replaced by the new modules, the new modules)."""
    if modules is None:
        return tree, None
    new = sys.modules["flax.nnx"].merge(
        modules.graph, jax.tree.unflatten(modules.structure, modules.arrays)
    )
    is_slot = lambda x: isinstance(x, _Slot)
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
        raise TypeError(
            "a transformed function may update the variables of an nnx module, but not add or "
            "remove them: "
            f"before the call they were {modules.structure}, after it {structure}. Create all "
            f"variables "
            "first, for example by calling the module once"
        )
    written = tuple(new is not old for new, old in zip(arrays, modules.arrays))
    return Modules(arrays, structure, graph, graph != modules.graph, written)


def returned(result: Any, new: Any) -> Any:
    """Returns `result` with the nnx modules of the call replaced by placeholders."""
    if not new:
        return result
    numbers = {id(module): number for number, module in enumerate(new)}
    return jax.tree.map(
        lambda x: _Slot(numbers[id(x)]) if id(x) in numbers else x,
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
        _copy_attributes(found, nnx.merge(updated.graph, state), _kinds()[0], set())
    is_slot = lambda x: isinstance(x, _Slot)
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


def _attributes(module: Any) -> dict[str, Any]:
    return {name: x for name, x in vars(module).items() if not name.startswith("_pytree__")}


def _has_state(value: Any) -> bool:
    kinds = _kinds()
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, kinds))
    return any(isinstance(x, kinds) or hasattr(x, "shape") for x in leaves)

"""flax.nnx modules among the arguments of a function, as arrays: what the function changes in them is returned.

An nnx module is updated in place. A traced function receives a copy, so that its updates would be lost.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Slot:
    """The place of the module with this number."""

    number: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Modules:
    """The nnx modules of a call.

    Attributes:
        arrays: of their variables. structure: of the state that they make up (static).
        graph: the structure of the modules (static).
    """

    arrays: list
    structure: Any = dataclasses.field(metadata={"static": True})
    graph: Any = dataclasses.field(metadata={"static": True})


def _kinds() -> tuple:
    nnx = sys.modules.get("flax.nnx")    # no nnx modules exist before flax.nnx is imported
    return () if nnx is None else tuple(getattr(nnx, name) for name in ("Pytree", "Variable") if hasattr(nnx, name))


def extract(tree: Any) -> tuple[Any, Modules | None, tuple]:
    """(the tree with nnx modules replaced by placeholders, their arrays or None, the modules).

    Modules that share variables keep sharing them.
    """
    kinds, found = _kinds(), []
    if not kinds:
        return tree, None, ()

    def place(x):
        if not isinstance(x, kinds):
            return x
        found.append(x)
        return _Slot(len(found) - 1)

    tree = jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, kinds))
    if not found:
        return tree, None, ()
    graph, state = sys.modules["flax.nnx"].split(tuple(found))
    return tree, Modules(*jax.tree.flatten(state), graph), tuple(found)


def insert(tree: Any, modules: Modules | None) -> tuple[Any, Any]:
    """(the tree with new modules made of these arrays in their places, the modules)."""
    if modules is None:
        return tree, None
    new = sys.modules["flax.nnx"].merge(modules.graph, jax.tree.unflatten(modules.structure, modules.arrays))
    is_slot = lambda x: isinstance(x, _Slot)
    return jax.tree.map(lambda x: new[x.number] if is_slot(x) else x, tree, is_leaf=is_slot), new


def updates(new: Any, modules: Modules | None) -> Modules | None:
    """The modules after the function has run, None without modules.

    Raises:
        TypeError: if the function has added or removed variables.
    """
    if modules is None:
        return None
    arrays, structure = jax.tree.flatten(sys.modules["flax.nnx"].state(new))
    if structure != modules.structure:
        raise TypeError("a transformed function may update the variables of an nnx module, but not add or remove them: "
                        f"before the call they were {modules.structure}, after it {structure}. Create all variables "
                        "first, for example by calling the module once")
    return dataclasses.replace(modules, arrays=arrays)


def apply(found: tuple, updated: Modules | None) -> None:
    """Writes updated variables into the caller's modules."""
    if updated is not None:
        sys.modules["flax.nnx"].update(found, jax.tree.unflatten(updated.structure, updated.arrays))

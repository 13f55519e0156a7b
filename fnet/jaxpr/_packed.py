"""Trees with modules as trees of arrays, for programs that split, store or export arrays.

A flax.nnx module holds its arrays in variables, which it changes in place, and an Equinox module
holds functions and options beside its arrays. `pack` takes both apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from fnet.jaxpr import _mutable
from fnet.jaxpr._implicit import is_implicit
from fnet.jaxpr._static_leaves import Static, is_array, static

_Names = tuple[str, ...]
_NUMBERS = (int, float, complex)


@dataclasses.dataclass(frozen=True)
class _Node:
    """A pytree of a library with arrays and other leaves, such as an Equinox module.

    Attributes:
        structure: the structure of its leaves.
        names: the path of each leaf.
        statics: for each leaf, None if it is an array, or else the leaf.
    """

    structure: Any
    names: tuple[_Names, ...]
    statics: tuple[Static | None, ...]


@dataclasses.dataclass(frozen=True)
class _Module:
    """A flax.nnx module or variable.

    Attributes:
        names: the paths of its arrays, without those that it shares with an earlier module.
        random: for each array, whether it belongs to a stream of random numbers.
    """

    names: tuple[_Names, ...]
    random: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Form:
    """What a packed tree lacks: how it is put together again. Two forms are equal if a program that
    was traced for the one is also the program for the other.

    Attributes:
        outer: the structure of the containers around modules.
        parts: for each of its leaves a `_Node`, a `_Module`, a `Static`, or None for an array.
        graph: the `nnx.GraphDef` of the flax.nnx modules, or None.
        structure: the structure of their state.
    """

    outer: Any
    parts: tuple[Any, ...]
    graph: Any = None
    structure: Any = None

    @property
    def in_place(self) -> bool:
        """Whether all arrays are in variables of flax.nnx, which a function changes in place."""
        return all(isinstance(part, (_Module, Static)) for part in self.parts)

    @property
    def random(self) -> set[str]:
        """The paths of the arrays of a packed tree that belong to streams of random numbers of
        flax.nnx."""
        return {
            _joined((*place, *name))
            for place, part in zip(_paths(self.outer), self.parts)
            if isinstance(part, _Module)
            for name, random in zip(part.names, part.random)
            if random
        }

    def unpack(self, arrays: Any) -> Any:
        """Returns a tree with new modules, which hold the arrays of a packed tree."""
        payloads = self.outer.flatten_up_to(arrays)
        new = self._merged(payloads)
        return jax.tree.unflatten(self.outer, list(map(_restored, self.parts, payloads, new)))

    def _merged(self, payloads: Sequence) -> list:
        """Returns the flax.nnx module of each part, or None."""
        if self.graph is None:
            return [None] * len(payloads)
        arrays = self._taken(payloads)
        _, new = _mutable.insert((), _mutable.Modules(arrays, self.structure, self.graph))
        rest = iter(new)
        return [next(rest) if isinstance(part, _Module) else None for part in self.parts]

    def _arrays(self, packed: Any) -> list:
        """Returns the arrays of the flax.nnx modules in a packed tree."""
        return self._taken(self.outer.flatten_up_to(packed))

    def _taken(self, payloads: Sequence) -> list:
        return [
            _taken(payload, name)
            for part, payload in zip(self.parts, payloads)
            if isinstance(part, _Module)
            for name in part.names
        ]

    def update(self, tree: Any, arrays: Any, before: Any = None) -> Any:
        """Writes the arrays of a packed tree into the flax.nnx modules of `tree`, which has this
        form, except those that are the same as in the packed tree `before`. Returns the tree with
        new values of everything else."""
        if self.graph is None:
            return self.unpack(arrays)
        kinds = _mutable.kinds()
        items = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
        found = tuple(x for x in items if isinstance(x, kinds))
        new, old = self._arrays(arrays), () if before is None else self._arrays(before)
        written = tuple(a is not b for a, b in zip(new, old)) if old else (True,) * len(new)
        modules = _mutable.Modules(new, self.structure, self.graph, written=written)
        _mutable.apply((), found, modules)
        mine = iter(found)
        payloads = self.outer.flatten_up_to(arrays)
        return jax.tree.unflatten(
            self.outer,
            [
                _restored(part, x, next(mine) if isinstance(part, _Module) else None)
                for part, x in zip(self.parts, payloads)
            ],
        )

    def lost(self, tree: Any, arrays: Any) -> list[str]:
        """Returns the paths of the variables of flax.nnx that a function has changed in `tree`,
        which was unpacked from `arrays`. Streams of random numbers may move on."""
        after = pack(tree)[0]
        before, after = map(self.outer.flatten_up_to, (arrays, after))
        return [
            _joined((*place, *name))
            for place, part, old, new in zip(_paths(self.outer), self.parts, before, after)
            if isinstance(part, _Module)
            for name, random in zip(part.names, part.random)
            if not random and _taken(old, name) is not _taken(new, name)
        ]

    def differences(self, other: Form) -> list[str]:
        """Describes what is not as in another form, each in a line."""
        if self.outer != other.outer:
            return [f"{self.outer} became {other.outer}"]
        lines = []
        for place, mine, its in zip(_paths(self.outer), self.parts, other.parts):
            if isinstance(mine, _Node) and isinstance(its, _Node):
                lines += _changed_leaves(place, mine, its)
            elif isinstance(mine, _Module) and isinstance(its, _Module):
                lines += _changed_names(place, mine.names, its.names)
            elif mine != its:
                lines.append(f"{_joined(place)} was {_described(mine)}, is {_described(its)}")
        if not lines and self.graph != other.graph:
            graphs = (self.graph, self.structure), (other.graph, other.structure)
            lines = [
                f"the attribute {name!r} was {old!r}, is {new!r}"
                for name, old, new in _mutable.changed_attributes(*graphs)
            ]
        return lines or ["its static parts changed"] * (self != other)


def pack(tree: Any) -> tuple[Any, Form | None]:
    """Returns the arrays of a tree, in nested dicts where the tree has modules, and the `Form` that
    builds the tree from them. Of a tree of arrays and numbers alone, the first result is the tree
    itself, and the form is None.

    If a leaf of a tree is not an array, such as a function, its Equinox modules become dicts, too.
    Python numbers in them are options and belong to the form, as for `eqx.filter_jit`; elsewhere
    they count as arrays.

    Raises:
        TypeError: a leaf that is not an array is not hashable, or a flax.nnx module that is
            constructed in a traced function has an array outside of its variables.
    """
    if not has_modules(tree):
        return tree, None
    modules = None
    if _has_nnx(tree):
        tree, modules, found = _mutable.extract(tree, is_implicit)
        assert modules is not None
        if any(isinstance(x, jax.core.Tracer) for x in modules.arrays):
            _check_attributes(found)
    items, outer = jax.tree.flatten(tree, is_leaf=_is_item)
    groups = iter(() if modules is None else _grouped(modules))
    parts: list[Any] = []
    payloads: list[Any] = []
    for place, item in zip(_paths(outer), items):
        part, payload = _part(place, item, groups)
        parts.append(part)
        payloads.append(payload)
    form = Form(outer, tuple(parts))
    if modules is not None:
        form = dataclasses.replace(form, graph=modules.graph, structure=modules.structure)
    return jax.tree.unflatten(outer, payloads), form


def map_arrays(function: Callable, tree: Any) -> Any:
    """Applies `function(path, array)` to the arrays of a tree, such as "fc/kernel", with implicit
    arrays as leaves. Modules in the tree are replaced by new ones."""
    arrays, form = pack(tree)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    changed = jax.tree.map_with_path(
        lambda path, x: function(name(path), x), arrays, is_leaf=is_implicit
    )
    return changed if form is None else form.unpack(changed)


def has_modules(tree: Any) -> bool:
    """Whether a tree contains flax.nnx modules, or leaves that only `pack` can take apart."""
    if _has_nnx(tree):
        return True
    items = jax.tree.leaves(tree, is_leaf=_is_item)
    return any(
        not all(map(is_array, jax.tree.leaves(x))) if _is_model(x) else not _is_value(x)
        for x in items
    )


def holds_arrays(x: Any) -> bool:
    """Whether a callable object is a module: a pytree of its arrays, or a module of flax.nnx."""
    if isinstance(x, _mutable.kinds()):
        return True
    return _is_model(x) and any(map(is_array, jax.tree.leaves(x)))


def nodes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields (path, node) for each node of a tree that is not a leaf."""
    if jax.tree_util.all_leaves([tree]):
        return
    yield "", tree
    for path, child in jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        for inner, node in nodes(child):
            yield _joined([_joined(tuple(map(_name, path))), *filter(None, [inner])]), node


def _has_nnx(tree: Any) -> bool:
    """Whether a tree has modules or variables of flax.nnx. A tree whose variables are all in an
    `nnx.State` is a pytree of arrays already."""
    kinds = _mutable.kinds()
    if not kinds:
        return False
    whole = (*kinds, sys.modules["flax.nnx"].State)
    items = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, whole))
    return any(isinstance(x, kinds) for x in items)


def _part(place: tuple, item: Any, groups: Iterator) -> tuple[Any, Any]:
    """Returns what a leaf of the containers is, and its arrays."""
    if isinstance(item, _mutable.Slot):
        module, arrays = next(groups, (_Module((), ()), []))
        return module, _nested(place, module.names, arrays)
    if _is_model(item):
        return _node(place, item)
    if _is_value(item):
        return None, item
    return static(item, _joined(place) or "the tree"), None


def _node(place: tuple, item: Any) -> tuple[_Node, Any]:
    inner = lambda x: is_implicit(x) and x is not item
    leaves = jax.tree.leaves_with_path(item, is_leaf=inner)
    arrays = [is_implicit(x) or is_array(x) for _, x in leaves]
    names = tuple(tuple(map(_name, path)) for path, _ in leaves)
    statics = tuple(
        None if array else static(x, _joined((*place, *name)))
        for name, (_, x), array in zip(names, leaves, arrays)
    )
    held = [(name, x) for name, (_, x), array in zip(names, leaves, arrays) if array]
    node = _Node(jax.tree.structure(item, is_leaf=inner), names, statics)
    return node, _nested(place, [name for name, _ in held], [x for _, x in held])


def _restored(part: Any, payload: Any, module: Any) -> Any:
    if isinstance(part, _Module):
        return module
    if isinstance(part, Static):
        return part.value
    if part is None:
        return payload
    leaves = [
        _taken(payload, name) if static is None else static.value
        for name, static in zip(part.names, part.statics)
    ]
    return jax.tree.unflatten(part.structure, leaves)


def _is_item(x: Any) -> bool:
    return is_implicit(x) or _is_model(x)


def _is_value(x: Any) -> bool:
    """Whether a leaf is an array or a number. An implicit array may hold only the fixed parameters
    of another one, and then has no shape, so it is not asked for it."""
    return is_implicit(x) or is_array(x) or isinstance(x, _NUMBERS)


def _is_model(x: Any) -> bool:
    """Whether a node of a tree is a model, whose Python numbers are options: an Equinox module, or
    a pytree that can be called."""
    if isinstance(x, _mutable.Slot):
        return True
    equinox = sys.modules.get("equinox")
    if equinox is not None and isinstance(x, equinox.Module):
        return True
    return callable(x) and not is_array(x) and not isinstance(x, (type, jax.tree_util.Partial))


def _grouped(modules: _mutable.Modules) -> Iterator[tuple[_Module, list]]:
    """Yields each flax.nnx module with its arrays."""
    rest = iter(modules.arrays)
    for module in _named(modules.structure):
        yield module, list(itertools.islice(rest, len(module.names)))


@functools.lru_cache(1024)
def _named(structure: Any) -> tuple[_Module, ...]:
    """Returns the flax.nnx modules of a state with this structure."""
    random = sys.modules["flax.nnx"].RngState
    is_variable = lambda x: isinstance(x, _mutable.kinds())
    groups: dict[int, list[tuple]] = {}
    state = jax.tree.unflatten(structure, range(structure.num_leaves))
    for path, variable in jax.tree.leaves_with_path(state, is_leaf=is_variable):
        value = variable.get_value() if is_variable(variable) else variable
        for inside, _ in jax.tree.leaves_with_path(value):
            number, *name = map(_name, (*path, *inside))
            groups.setdefault(int(number), []).append((tuple(name), isinstance(variable, random)))
    count = 1 + max(groups, default=-1)
    return tuple(
        _Module(tuple(name for name, _ in group), tuple(drawn for _, drawn in group))
        for group in (groups.get(i, []) for i in range(count))
    )


def _check_attributes(found: tuple) -> None:
    """Raises a TypeError for an array that flax.nnx takes for an option, because it is traced."""
    nnx = sys.modules["flax.nnx"]
    for path, node in nnx.iter_graph(found):
        if not isinstance(node, nnx.Pytree):
            continue
        for name, value in vars(node).items():
            if isinstance(value, jax.core.Tracer):
                raise TypeError(
                    f"{'.'.join(map(str, (*path[1:], name)))} of a {type(node).__name__} is an "
                    "array outside of a variable. Store it as nnx.Variable(array), so that it is "
                    "part of the state"
                )


def _changed_leaves(place: tuple, before: _Node, after: _Node) -> list[str]:
    lines = _changed_names(place, before.names, after.names)
    if lines:
        return lines
    for name, old, new in zip(before.names, before.statics, after.statics):
        if old != new:
            path = _joined((*place, *name))
            lines.append(f"{path} was {_described(old)}, is {_described(new)}")
    if not lines and before.structure != after.structure:
        lines.append(f"{_joined(place)} was {before.structure}, is {after.structure}")
    return lines


def _changed_names(place: tuple, before: tuple, after: tuple) -> list[str]:
    lines = [f"{_joined((*place, *name))} is new" for name in after if name not in before]
    return lines + [f"{_joined((*place, *name))} is gone" for name in before if name not in after]


def _described(part: Any) -> str:
    if part is None:
        return "an array"
    if isinstance(part, Static):
        return repr(part.value)
    return "a flax.nnx module" if isinstance(part, _Module) else "a module"


def _paths(structure: Any) -> list[tuple]:
    """Returns the path of each leaf of a structure, as strings."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [tuple(map(_name, path)) for path, _ in jax.tree.leaves_with_path(numbered)]


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _joined(names: Sequence[str]) -> str:
    return "/".join(names)


def _nested(place: tuple, names: Sequence[_Names], leaves: Sequence) -> Any:
    """Returns nested dicts of leaves by their paths, or the only leaf if its path is empty."""
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ValueError(
            f"two arrays have the path {_joined((*place, *twice))!r}; give them different names"
        )
    tree: dict = {}
    for name, leaf in zip(names, leaves):
        if not name:
            return leaf
        node = tree
        for key in name[:-1]:
            node = node.setdefault(key, {})
        node[name[-1]] = leaf
    return tree


def _taken(tree: Any, name: _Names) -> Any:
    for key in name:
        tree = tree[key]
    return tree

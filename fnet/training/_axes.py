"""What the axes of parameters are to an optimizer: separate layers, inputs or outputs."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import optax

from fnet._util._nearest import nearest_to_pattern
from fnet.jaxpr import is_implicit
from fnet.layers import ParamSpec, Spec

_OUTPUTS = ("out", "logits")


class Leaf(NamedTuple):
    """A leaf of a tree of parameters.

    Attributes:
        names: the path, without the attribute in which a Flax variable holds its array.
        value: the leaf.
        owner: the node that contains the leaf, for example an Equinox module.
        part: the field of an implicit array, such as "a" of a low-rank kernel, or None. `names`
            then ends before it.
    """

    names: tuple[str, ...]
    value: Any
    owner: Any = None
    part: str | None = None

    @property
    def path(self) -> str:
        return "/".join(self.names if self.part is None else (*self.names, self.part))

    @property
    def shown(self) -> str:
        value = jax.typeof(self.value) if not hasattr(self.value, "dtype") else self.value
        return f"'{self.path}' {value.dtype}{list(value.shape)}"


def leaves(tree: Any) -> Iterator[Leaf]:
    """Yields the leaves of a tree of parameters, in JAX's order."""
    return _below(tree, (), None, None)


def _below(node, names, owner, inside):
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[
        0
    ]
    if len(children) == 1 and not children[0][0]:
        yield (
            Leaf(names, node, owner)
            if inside is None
            else Leaf(inside, node, owner, "/".join(names[len(inside) :]))
        )
        return
    inside = names if inside is None and is_implicit(node) else inside
    for path, child in children:
        name = path[-1]
        text = str(getattr(name, "name", getattr(name, "key", getattr(name, "idx", name))))
        boxed = text == "value" and _is_flax_variable(node)
        yield from _below(
            child, names if boxed else (*names, text), owner if boxed else node, inside
        )


def _is_flax_variable(node) -> bool:
    """Whether a node is a variable of Flax: an nnx.Variable, or a box of linen such as Partitioned."""
    for module, name in (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata")):
        if module in sys.modules and isinstance(node, getattr(sys.modules[module], name)):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Layout:
    """The roles of the axes of one parameter, see `ParamSpec.roles`. It is a leaf for JAX.

    `view` separates the layers of a parameter, and `joined` is its inverse. In the view, the
    parameter of each layer is a matrix [inputs, outputs] if it has both, and else a vector.
    """

    roles: tuple[str | None, ...]
    groups: int = 1

    @classmethod
    def of(cls, leaf: Leaf, roles: tuple[str | None, ...], who: str) -> Layout:
        shape, groups, plain = leaf.value.shape, 1, []
        if len(roles) != len(shape):
            raise ValueError(
                f"{who}: axes= names {len(roles)} axes of {leaf.shown} "
                f"({' '.join(map(str, roles))}): write one word for each axis"
            )
        for role, size in zip(roles, shape):
            count, star, word = (role or "").partition("*")
            if not star:
                plain.append(role)
                continue
            if (
                word != "out"
                or not count.isdecimal()
                or int(count) < 1
                or size % int(count)
                or groups > 1
            ):
                raise ValueError(
                    f"{who}: axes= says '{role}' of an axis with {size} elements of {leaf.shown}: "
                    "expected one such axis, N*out for N groups of outputs of one size"
                )
            groups = int(count)
            plain.append("grouped" if groups > 1 else "out")
        return cls(tuple(plain), groups)

    def _at(self, *words: str | None) -> list[int]:
        return [i for i, role in enumerate(self.roles) if role in words]

    @property
    def own(self) -> list[int]:
        """The axes that the parameter of one layer has."""
        return [i for i, role in enumerate(self.roles) if role != "layers"]

    @property
    def rank(self) -> int:
        """The number of axes of one layer in the merged view: 2 if there are rows and columns, else
        1."""
        _, rows, columns = self._order()
        return 2 if rows and columns else 1

    @property
    def declared(self) -> bool:
        """Whether the roles say all that there is to say. One axis alone never makes a matrix."""
        return None not in self.roles or len(self.own) < 2

    @property
    def spared(self) -> bool:
        """Whether the parameter is a bias or a scale: one number for each output."""
        return all(self.roles[i] in ("out", "grouped") for i in self.own)

    @property
    def matrix(self) -> bool:
        """Whether the parameter of one layer is a matrix that maps hidden features to hidden
        features."""
        inputs, outputs = self._at("in"), self._at("out", "grouped")
        return bool(inputs and outputs) and len(inputs) + len(outputs) == len(self.own)

    def separate(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the axes of layers of an array of the given shape, and the number of groups
        if there are any."""
        layers = tuple(shape[i] for i in self._at("layers"))
        return (*layers, self.groups) if self.groups > 1 else layers

    def _order(self) -> tuple[list[int], list[int], list[int]]:
        """The axes of layers, rows and columns, counted in an array whose grouped axis has been cut
        in two."""
        roles = list(self.roles)
        if "grouped" in roles:
            at = roles.index("grouped")
            roles[at : at + 1] = ["group", "out"]
        layers = [i for i, role in enumerate(roles) if role == "layers"]
        layers += [i for i, role in enumerate(roles) if role == "group"]
        columns = [i for i, role in enumerate(roles) if role in _OUTPUTS]
        return layers, [i for i in range(len(roles)) if i not in (*layers, *columns)], columns

    def _cut(self, shape):
        if "grouped" not in self.roles:
            return shape
        at = self.roles.index("grouped")
        return (*shape[:at], self.groups, shape[at] // self.groups, *shape[at + 1 :])

    def without_groups(self) -> Layout:
        """Returns the layout in which the groups of outputs belong to one layer."""
        return Layout(tuple("out" if role == "grouped" else role for role in self.roles))

    def view(self, x: jax.Array, *, merge: bool) -> jax.Array:
        """Returns the array [*layers, rows, columns], or [*layers, elements] if there are no rows
        or no columns. If not `merge`, the axes of rows and columns stay apart."""
        x = x.reshape(self._cut(x.shape))
        layers, rows, columns = self._order()
        x = x.transpose(*layers, *rows, *columns)
        if not merge:
            return x
        height, width = (
            math.prod(x.shape[i] for i in range(len(x.shape))[part])
            for part in (
                slice(len(layers), len(layers) + len(rows)),
                slice(len(layers) + len(rows), None),
            )
        )
        return x.reshape(
            *x.shape[: len(layers)], *((height, width) if self.rank == 2 else (height * width,))
        )

    def joined(self, x: jax.Array, shape: tuple[int, ...], *, merge: bool) -> jax.Array:
        """Returns the array of the given shape whose view is `x`."""
        cut = self._cut(shape)
        order = [axis for axes in self._order() for axis in axes]
        x = x.reshape([cut[i] for i in order]) if merge else x
        return x.transpose([order.index(i) for i in range(len(order))]).reshape(shape)


class Axes:
    """The argument `axes` of an optimizer: `model.spec(x)`, a dict of patterns, a tree of words, or
    several of them.

    Args:
        axes: the user's argument.
        who: the optimizer, for messages.
    """

    def __init__(self, axes: Any, who: str):
        self.who = who
        several = isinstance(axes, list | tuple) and not isinstance(axes, Spec)
        self._all = list(axes) if several else [] if axes is None else [axes]
        self._all = [each.params if isinstance(each, Spec) else each for each in self._all]
        self._trees = [
            None if isinstance(each, Mapping) else {leaf.names: leaf.value for leaf in leaves(each)}
            for each in self._all
        ]

    def roles(self, leaf: Leaf) -> tuple[str | None, ...] | None:
        """Returns the roles of a parameter's axes, or None if nothing names them. Later entries
        win."""
        found = None
        for each, tree in zip(self._all, self._trees):
            known = _words(each, leaf) if tree is None else tree.get(leaf.names)
            if isinstance(known, str):
                known = tuple(known.split())
            elif isinstance(known, ParamSpec):
                known = known.roles
                if known is not None and leaf.part == "b":  # the second factor of a low-rank kernel
                    known = (*(role for role in known if role == "layers"), "in", "out")
            found = found if known is None else known
        return found

    def layout(self, leaf: Leaf) -> Layout | None:
        roles = self.roles(leaf)
        return None if roles is None else Layout.of(leaf, roles, self.who)

    def layouts(self, params: Any, *, matrices: bool) -> list[Layout]:
        """Returns the layout of each leaf of `params`.

        Raises:
            ValueError: the axes of a leaf are not known, or if `matrices`, whether it is a matrix;
                or a pattern matches no leaf.
        """
        every = list(leaves(params))
        self._check(params, every)
        found = []
        for leaf in every:
            layout = self.layout(leaf)
            if layout is None or (matrices and not layout.declared):
                raise ValueError(self.unknown(leaf))
            found.append(layout)
        return found

    def unknown(self, leaf: Leaf) -> str:
        """The message for a parameter whose axes are not known."""
        return (
            f"{self.who}: which axes of {leaf.shown} are layers, inputs and outputs is not known, "
            f"and {self.who} "
            f"treats each layer by itself. For a model of fnet, write axes=model.spec(x). Else "
            f"name the axes of "
            f"each parameter, by patterns of paths:\n"
            f'    tr.optimizer({self.who!r}, ..., axes={{".*/kernel": "layers in out", ".*/bias": "layers '
            f'out", {leaf.path!r}: "..."}})\n'
            "Words: layers (separate layers or experts), in, out, N*out (N groups), logits; any "
            "other word, such "
            "as vocab, is none of these. In a layer of fnet, declare them: "
            'scope.param(..., roles=("in", "out"))'
        )

    def _check(self, params, every):
        if any(
            isinstance(node, optax.MaskedNode)
            for node in jax.tree.leaves(params, is_leaf=_is_masked)
        ):
            return  # the other leaves are in another transformation
        paths = [leaf.path for leaf in every]
        for each, tree in zip(self._all, self._trees):
            for pattern, words in each.items() if tree is None else ():
                if isinstance(words, str) and not any(_matches(pattern, leaf) for leaf in every):
                    raise ValueError(
                        f"{self.who}: the pattern {pattern!r} of axes= matches no parameter; "
                        f"nearest: {nearest_to_pattern(pattern, paths)}"
                    )


def _is_masked(node) -> bool:
    return isinstance(node, optax.MaskedNode)


def _words(axes: Mapping, leaf: Leaf):
    """Returns what a mapping says about a leaf: the node at its path, or the words of the last
    pattern that matches."""
    node = axes
    for name in leaf.names:
        node = node.params if isinstance(node, Spec) else node
        node = node.get(name) if isinstance(node, Mapping) else None
    if isinstance(node, str | ParamSpec):
        return node
    words = [
        words
        for pattern, words in axes.items()
        if isinstance(words, str) and _matches(pattern, leaf)
    ]
    return words[-1] if words else None


def _matches(pattern: str, leaf: Leaf) -> bool:
    """Whether a regular expression matches the complete path of a leaf, or the first names of the
    path."""
    names = leaf.path.split("/")
    try:
        return any(re.fullmatch(pattern, "/".join(names[: i + 1])) for i in range(len(names)))
    except re.error as error:
        raise ValueError(
            f"axes: the pattern {pattern!r} is not a regular expression: {error}"
        ) from None

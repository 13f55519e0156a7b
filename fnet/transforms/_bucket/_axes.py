"""The axes of arguments as the user spells them, such as "b, t, d", and the lengths of a call."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from fnet.jaxpr import is_array
from fnet.transforms._bucket import _sizes


@dataclasses.dataclass(frozen=True)
class Axes:
    """The sizes of the axes of an array: texts, such as "t" or "2*t", or None for an axis of any
    size."""

    texts: tuple[str | None, ...]

    @property
    def names(self) -> list[str]:
        return [name for text in self.texts if text for name in _sizes.letters(text)]


class Placement:
    """Where the letters are in the arguments of a function.

    Args:
        buckets: {letter: sizes}.
        axes: for each positional argument, None, a text, or a tree of them.
    """

    def __init__(self, buckets: Mapping[str, Sequence[int]], axes: Any):
        self.buckets = _checked(buckets)
        if axes is None or (not isinstance(axes, (str, tuple, list))):
            raise TypeError(
                "bucket: axes= says which axis of which argument is padded, with one entry for "
                'each positional argument: axes=(None, "b, t, d") pads axis 1 of the second one; '
                f"got {axes!r}"
            )
        self._axes = axes if isinstance(axes, str) else tuple(axes)
        spelled = [x for x in jax.tree.leaves(self._axes) if isinstance(x, str)]
        used = {name for text in spelled for name in _sizes.letters(text)}
        for name in self.buckets:
            if name not in used:
                raise ValueError(
                    f"bucket: no axis is {name!r} in axes={axes!r}; write its name where it "
                    f'stands, such as axes=(None, "b, {name}")'
                )

    def of(self, args: tuple) -> list[Axes | None]:
        """Returns the axes of each leaf of the positional arguments."""
        axes = self._axes
        if isinstance(axes, str):
            axes = (axes,) * (len(args) == 1)
        if len(axes) > len(args) or (not axes and args):
            raise TypeError(
                f"bucket: axes= has entries for {len(axes) or 1} positional arguments, the call "
                f"has {len(args)}: {self._axes!r}"
            )
        axes = (*axes, *[None] * (len(args) - len(axes)))
        found: list[Axes | None] = []
        for i, (each, argument) in enumerate(zip(axes, args)):
            found += self._spread(i, each, argument)
        return found

    def _spread(self, i: int, axes: Any, argument: Any) -> list[Axes | None]:
        leaf = lambda x: x is None or isinstance(x, str)
        try:
            spread = jax.tree.map(
                lambda text, tree: [text] * len(jax.tree.leaves(tree)), axes, argument, is_leaf=leaf
            )
        except ValueError as error:
            raise ValueError(
                f"bucket: the entry for argument {i} in axes= is not a tree of its form: {error}"
            ) from None
        texts = jax.tree.leaves(spread, is_leaf=leaf)
        leaves = jax.tree.leaves(argument)
        return [
            self._parsed(i, text, x) if text is not None and is_array(x) else None
            for text, x in zip(texts, leaves)
        ]

    def _parsed(self, i: int, text: str, x: Any) -> Axes | None:
        parts = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
        if "..." in parts:
            where = parts.index("...")
            parts[where : where + 1] = [""] * (x.ndim - len(parts) + 1)
        if len(parts) != len(x.shape) and text.strip():
            raise ValueError(
                f'bucket: argument {i} has an array of shape {tuple(x.shape)}, expected "{text}"; '
                'name each of its axes, or write "..." for some of them'
            )
        texts: list[str | None] = []
        for part, n in zip(parts, x.shape):
            names = _sizes.letters(part)
            mine = [name for name in names if name in self.buckets]
            if mine and len(mine) < len(names):
                other = next(name for name in names if name not in self.buckets)
                raise ValueError(
                    f"bucket: the size {part!r} mixes {mine[0]!r} with {other!r}, which has no "
                    "sizes"
                )
            if not names and part and int(part) != n:
                raise ValueError(
                    f"bucket: argument {i} has an array of shape {tuple(x.shape)}, expected "
                    f'"{text}"'
                )
            texts.append(part if mine else None)
        if not any(texts):
            return None
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(
                "bucket: an array of random keys cannot be padded; pass one key, and split it "
                "inside of the function"
            )
        return Axes(tuple(texts))

    def lengths(self, axes: Sequence[Axes | None], leaves: Sequence) -> dict[str, int]:
        """Returns the length of each letter in a call.

        Raises:
            ValueError: arrays disagree, or no axis states a length.
        """
        sizes = [
            (text, int(n), x)
            for each, x in zip(axes, leaves)
            if each is not None
            for text, n in zip(each.texts, x.shape)
            if text
        ]
        found: dict[str, int] = {}
        for text, n, _ in sizes:
            if text in self.buckets:
                found.setdefault(text, n)
        for text, n, _ in sizes:
            for name in _sizes.letters(text):
                if name not in found and len(_sizes.letters(text)) == 1:
                    fits = (
                        m for m in range(max(self.buckets[name]) + 1) if _at(text, name, m) == n
                    )
                    found[name] = next(fits, -1)
        for text, n, x in sizes:
            if any(name not in found for name in _sizes.letters(text)):
                raise ValueError(
                    f"bucket: the lengths in {text!r} cannot be told from the arguments; some "
                    "array needs an axis that is one of them"
                )
            if _sizes.value(text, found) != n:
                stated = ", ".join(f"{name} = {m}" for name, m in found.items())
                raise ValueError(
                    f"bucket: an array has shape {tuple(x.shape)} with an axis {text!r} of {n}, "
                    f"but {stated} in this call"
                )
        for name in self.buckets:
            if name not in found:
                raise ValueError(f"bucket: no array among the arguments has an axis {name!r}")
        return found

    def chosen(self, lengths: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Returns {letter: (shortest length, size)} of the program for some lengths.

        Raises:
            ValueError: a length is larger than all sizes.
        """
        found = {}
        for name, n in lengths.items():
            sizes = self.buckets[name]
            size = next((size for size in sizes if size >= n), None)
            if size is None:
                raise ValueError(
                    f"bucket: {name} = {n} is larger than all sizes of {name!r}, {list(sizes)}; "
                    "add a larger one, or shorten the array"
                )
            smaller = [other for other in sizes if other < size]
            found[name] = (max(smaller, default=0) + 1, size)
        return found

    def types(self, axes: Sequence[Axes | None], leaves: Sequence, least: int) -> list:
        """Returns the leaves, with the types that have open sizes in place of padded arrays. All
        lengths are at least `least`."""
        where = [f"{name} <= {max(sizes)}" for name, sizes in self.buckets.items()]
        where += [f"{name} >= {least}" for name in self.buckets]
        scope = export.SymbolicScope(where)
        types = []
        for each, x in zip(axes, leaves):
            if each is None:
                types.append(x)
                continue
            sizes = [text or str(n) for text, n in zip(each.texts, x.shape)]
            shape = export.symbolic_shape(",".join(sizes), scope=scope)
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            weak = getattr(x, "weak_type", False)
            types.append(jax.ShapeDtypeStruct(shape, dtype, weak_type=weak))
        return types


def _at(text: str, name: str, n: int) -> int:
    return int(_sizes.value(text, {name: n}))


def _checked(buckets: Any) -> dict[str, tuple[int, ...]]:
    if not isinstance(buckets, Mapping) or not buckets:
        raise TypeError(
            f'bucket: expected the sizes of each letter, such as {{"t": [64, 128]}}; got '
            f"{buckets!r}"
        )
    checked = {}
    for name, sizes in buckets.items():
        if not isinstance(name, str) or _sizes.letters(name) != [name]:
            raise ValueError(f"bucket: {name!r} is no name of a size, such as 't'")
        if isinstance(sizes, (str, Mapping)) or not isinstance(sizes, (Sequence, np.ndarray)):
            raise TypeError(f"bucket: expected a list of sizes of {name!r}, got {sizes!r}")
        whole = all(
            isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n > 0 for n in sizes
        )
        if not whole or not len(sizes):
            raise ValueError(
                f"bucket: the sizes of {name!r} must be positive integers, got {list(sizes)}"
            )
        checked[name] = tuple(sorted({int(n) for n in sizes}))
    return checked

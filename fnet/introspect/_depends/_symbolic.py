"""Symbolic sizes, such as those of `export.spec("b, t")`, as names of axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_FIRST = 5  # the analysis uses 5, 6, 7, ..., so that no two sizes are equal


def axes(f: Callable, args: tuple, kwargs: dict) -> tuple[dict, tuple]:
    """Returns ({name of a size: (in_axes, out_axes)}, the arguments with numbers as sizes).

    Raises:
        ValueError: a size is computed from others or occurs twice in one array, or a keyword
            argument has symbolic sizes.
    """
    names: list[str] = []
    for leaf in jax.tree.leaves(args):
        for size in getattr(leaf, "shape", ()):
            if not isinstance(size, int) and str(size) not in names:
                names.append(str(size))
    if any(
        not isinstance(n, int) for x in jax.tree.leaves(kwargs) for n in getattr(x, "shape", ())
    ):
        raise ValueError("depends: pass arrays with symbolic sizes as positional arguments")
    if not names:
        return {}, args
    for name in names:
        if not name.isidentifier():
            raise ValueError(
                f"depends: the size {name} is computed from others; pass arrays of numbers as sizes"
            )
    numbers = {name: _FIRST + i for i, name in enumerate(names)}

    def concrete(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", ())
        if all(isinstance(n, int) for n in shape):
            return leaf
        sizes = tuple(n if isinstance(n, int) else numbers[str(n)] for n in shape)
        return jax.ShapeDtypeStruct(sizes, leaf.dtype)

    results = jax.eval_shape(f, *args, **kwargs)
    place = lambda name: lambda leaf: _axis(leaf, name)
    found = {
        name: (tuple(jax.tree.map(place(name), args)), jax.tree.map(place(name), results))
        for name in names
    }
    return found, jax.tree.map(concrete, args)


def _axis(leaf: Any, name: str) -> int | None:
    """The axis of an array whose size has a name, or None."""
    shape = [str(n) for n in getattr(leaf, "shape", ())]
    if shape.count(name) > 1:
        raise ValueError(
            f"depends: the size {name} occurs twice in an array {tuple(shape)}; name its axes with "
            "axes="
        )
    return shape.index(name) if name in shape else None

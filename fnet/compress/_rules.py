"""Applies rules {pattern: option} to the leaves of a parameter tree whose paths match the patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from fnet._util._nearest import nearest_to_pattern
from fnet.jaxpr import is_implicit, pack

# Names in fnet, Flax and Haiku; if stacked, they have two axes.
_VECTORS = {"bias", "scale", "b", "offset"}


def is_kernel(path: Any, leaf: Any) -> bool:
    """Whether a leaf is a kernel or an embedding table. A kernel or embedding table is floating
    point and has at least two axes, and its name is not bias, scale, b or offset."""
    return (
        keystr(path[-1:], simple=True) not in _VECTORS
        and len(getattr(leaf, "shape", ())) >= 2
        and jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def apply_rules(
    who: str,
    params: Any,
    rules: Mapping[str, Any],
    check: Callable,
    accepts: Callable,
    change: Callable,
) -> Any:
    """Replaces kernels and embedding tables by `change(path, leaf, option)`. A leaf is replaced if
    a pattern of `rules` matches its path and `accepts(leaf)` is true. The argument `option` of
    `change` is the value of the matching pattern in `rules`.

    Args:
        who: the name of the public function, for error messages.
        params: a tree of arrays, in which implicit arrays (such as `Quantized`) are leaves.
        rules: {pattern: option}. A pattern is a regular expression that matches the whole path of a
            leaf, or the first parts of the path. If several patterns match a leaf, the first of
            these patterns applies.
        check: `check(pattern, option)` raises an error for an invalid option.

    Raises:
        TypeError: `rules` is not a mapping with strings as keys.
        ValueError: a pattern is not a regular expression, matches no kernel or embedding table
            that can be replaced, or only those that earlier patterns match.
    """
    arrays, form = pack(params)
    kernels = [
        (keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in tree_leaves_with_path(arrays, is_implicit)
        if is_kernel(path, leaf)
    ]
    paths = [path for path, leaf in kernels if accepts(leaf)]
    others = {path: type(leaf).__name__ for path, leaf in kernels if not accepts(leaf)}
    first = matching(who, rules, paths, "kernel or table", check, others)

    def apply(path, leaf):
        accepted, path = (
            is_kernel(path, leaf) and accepts(leaf),
            keystr(path, simple=True, separator="/"),
        )
        return change(path, leaf, rules[first[path]]) if accepted and path in first else leaf

    changed = tree_map_with_path(apply, arrays, is_leaf=is_implicit)
    return changed if form is None else form.unpack(changed)


def matching(
    who: str,
    rules: Mapping[str, Any],
    paths: Sequence[str],
    what: str,
    check: Callable = lambda pattern, option: None,
    others: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns {path: pattern} for the paths that a pattern matches. A pattern must match the whole
    path, or the first parts of the path, such as `blocks` in `blocks/0/kernel`. If several patterns
    match a path, the first pattern is returned. Raises the errors of `apply_rules`.

    The arguments `who`, `what` and `others` are used only for error messages. `who` is the name of
    the public function, `what` is the kind of the leaves, and `others` is {path: name of the class}
    for the leaves that cannot be changed.
    """
    if not isinstance(rules, Mapping) or not all(isinstance(pattern, str) for pattern in rules):
        raise TypeError(f"{who}: expected rules {{pattern: option}}; got {rules!r}")
    first: dict[str, str] = {}
    for pattern, option in rules.items():
        check(pattern, option)
        try:
            regex = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{who}: the pattern {pattern!r} is not a regular expression ({error})"
            ) from None
        matches = lambda path, regex=regex: any(map(regex.fullmatch, _prefixes(path)))
        matched = list(filter(matches, paths))
        done = next(filter(matches, others), None)
        if not matched and done is not None:
            raise ValueError(
                f"{who}: {done!r}, which the pattern {pattern!r} matches, is a {others[done]} "
                "already; remove the pattern, or pass the original parameters"
            )
        if not matched:
            raise ValueError(
                f"{who}: the pattern {pattern!r} matches no {what}; nearest: "
                f"{nearest_to_pattern(pattern, paths) or 'the tree has none'}"
            )
        if all(path in first for path in matched):
            earlier = dict.fromkeys(repr(first[path]) for path in matched)
            raise ValueError(
                f"{who}: the pattern {pattern!r} is not used, because all that it matches "
                f"({', '.join(map(repr, matched[:4]))}{', ...' if len(matched) > 4 else ''}) matches "
                f"the earlier {', '.join(earlier)}: move {pattern!r} up, or remove it"
            )
        for path in matched:
            first.setdefault(path, pattern)
    return first


def _prefixes(path) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]

"""Rules: which axes of which parameters are split over which axes of the mesh, said by the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax

Rules = Mapping[str, tuple[str | None, ...]]


def rules(spec: Any, axes: Mapping[str, str]) -> dict[str, tuple[str | None, ...]]:
    """Rules for `plan` from the names that layers give the axes of their parameters.

        plan = parallel.plan(step, init, batch, mesh={"data": -1, "tensor": 4},
                             rules=parallel.rules(model.spec(x)[0], {"heads": "tensor", "mlp": "tensor"}))

    Args:
        spec: a tree of `ParamSpec`s, the first of `model.spec(x)`.
        axes: {a logical name: an axis of the mesh}. Of several in one parameter the first is taken.

    Returns:
        {a parameter's path: its spec}, of those that have such an axis.

    Raises:
        ValueError: for a name that no parameter's axes have.
    """
    found, seen = {}, set()
    for path, each in jax.tree.leaves_with_path(spec, is_leaf=lambda x: hasattr(x, "axes")):
        names = each.axes or ()
        seen.update(name for name in names if name)
        mine = [axes.get(name) for name in names]
        mine = [name if name and name not in mine[:i] else None for i, name in enumerate(mine)]
        if any(mine):
            found[re.escape(path_of(path))] = tuple(mine)
    for name in axes:
        if name not in seen:
            raise ValueError(f"rules: no parameter has an axis called {name!r}; there are {', '.join(sorted(seen))}")
    return found


def path_of(path) -> str:
    """A path in a tree as names joined by "/"."""
    return "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)


def applied(rules: Rules, parameters: list[tuple[str, tuple[int, ...]]], mesh: Mapping[str, int]) -> dict[str, tuple]:
    """{a parameter's path: its spec} for rules that match.

    Raises:
        ValueError: for a pattern that matches no parameter, two that match one, a spec of more axes than the parameter
            has or with an axis that the mesh does not have or twice, or a size that does not divide.
    """
    found: dict[str, tuple[str, tuple]] = {}
    for pattern, spec in rules.items():
        try:
            match = re.compile(pattern).fullmatch
        except re.error as error:
            raise ValueError(f"plan: the rule {pattern!r} is no regular expression: {error}") from None
        spec = tuple(spec)
        mine = [(path, shape) for path, shape in parameters if match(path)]
        if not mine:
            raise ValueError(f"plan: the rule {pattern!r} matches no parameter; there are "
                             f"{', '.join(path for path, _ in parameters[:8])}{', ...' if len(parameters) > 8 else ''}")
        for path, shape in mine:
            if path in found:
                raise ValueError(f"plan: two rules match {path} {list(shape)}: {found[path][0]!r} and {pattern!r}; "
                                 "each parameter takes one")
            _check(pattern, spec, path, shape, mesh)
            found[path] = pattern, spec
    return {path: spec for path, (_, spec) in found.items()}


def _check(pattern, spec, path, shape, mesh):
    if len(spec) > len(shape):
        raise ValueError(f"plan: the rule {pattern!r}: {spec} is for {len(spec)} axes, and {path} {list(shape)} has "
                         f"{len(shape)}")
    named = [name for name in spec if name is not None]
    for name in named:
        if name not in mesh or name in ("data", "slice"):
            there = [axis for axis in mesh if axis not in ("data", "slice")]
            raise ValueError(f"plan: the rule {pattern!r} for {path} {list(shape)} splits over {name!r}; axes of the "
                             f"mesh that rules may name are "
                             f"{', '.join(there) or 'none: give plan a mesh= with some'}")
    if len(set(named)) < len(named):
        raise ValueError(f"plan: the rule {pattern!r} for {path} {list(shape)} splits two axes over the same one: "
                         f"{spec}")
    for axis, (size, name) in enumerate(zip(shape, spec)):
        if name is not None and size % mesh[name]:
            nearest = next(n for n in range(mesh[name], 0, -1) if size % n == 0)
            raise ValueError(f"plan: the rule {pattern!r} splits axis {axis} of {path} {list(shape)} over {name!r}, "
                             f"and {mesh[name]} does not divide {size}: nearest below that does is {name}={nearest}")

"""The user's sharding rules. A sharding rule states over which mesh axes the axes of a parameter
are split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax

Rules = Mapping[str, tuple[str | None, ...]]


def rules(spec: Any, axes: Mapping[str, str]) -> dict[str, tuple[str | None, ...]]:
    """Makes the argument `rules` of `plan` from the names that layers give to the axes of
    parameters.

        plan = parallel.plan(step, init, batch, mesh={"data": -1, "tensor": 4},
                             rules=parallel.rules(model.spec(x)[0], {"heads": "tensor", "mlp": "tensor"}))

    Args:
        spec: the first result of `model.spec(x)`, a tree of `ParamSpec`s.
        axes: {name of a parameter's axis: mesh axis over which it is split}. Of several axes of a
            parameter that would lie on the same mesh axis, only the first is split.

    Returns:
        A dict with a rule for each parameter that has such an axis: its path, escaped for use as a
        regular expression, and a tuple with a mesh axis or None for each axis.

    Raises:
        ValueError: no parameter has an axis with one of the names.

    >>> from fnet import layers as nn, parallel
    >>> spec = nn.Dense(8, axes=("embed", "mlp")).spec(jax.ShapeDtypeStruct((2, 4), "float32"))
    >>> parallel.rules(spec.params, {"mlp": "tensor"})["kernel"]
    (None, 'tensor')
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
            raise ValueError(
                f"rules: no parameter has an axis named {name!r}; there are "
                f"{', '.join(sorted(seen))}"
            )
    return found


def path_of(path) -> str:
    """Returns a path in a tree as names joined by "/"."""
    return "/".join(
        str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path
    )


def applied(
    rules: Rules, parameters: list[tuple[str, tuple[int, ...]]], mesh: Mapping[str, int]
) -> dict[str, tuple]:
    """Returns a dict {path of a parameter: spec} for the parameters that match a sharding rule. A
    spec contains, for each axis of the parameter, a mesh axis or None.

    Raises:
        ValueError: a pattern matches no parameter, two patterns match the same parameter, a spec
            has more axes than the parameter, a spec contains an unknown or repeated mesh axis, or
            the size of an axis is not a multiple of the length of its mesh axis.
    """
    found: dict[str, tuple[str, tuple]] = {}
    for pattern, spec in rules.items():
        try:
            match = re.compile(pattern).fullmatch
        except re.error as error:
            raise ValueError(
                f"plan: the rule {pattern!r} is not a regular expression: {error}"
            ) from None
        spec = tuple(spec)
        mine = [(path, shape) for path, shape in parameters if match(path)]
        if not mine:
            listed = ", ".join(path for path, _ in parameters[:8]) or "no parameters; pass rules={}"
            raise ValueError(
                f"plan: the rule {pattern!r} matches no parameter; there are {listed}"
                f"{', ...' if len(parameters) > 8 else ''}"
            )
        for path, shape in mine:
            if path in found:
                raise ValueError(
                    f"plan: two rules match {path} {list(shape)}: {found[path][0]!r} and "
                    f"{pattern!r}; expected one for each parameter"
                )
            _check(pattern, spec, path, shape, mesh)
            found[path] = pattern, spec
    return {path: spec for path, (_, spec) in found.items()}


def _check(pattern, spec, path, shape, mesh):
    if len(spec) > len(shape):
        raise ValueError(
            f"plan: the rule {pattern!r}: {spec} is for {len(spec)} axes, but {path} {list(shape)} "
            f"has {len(shape)}"
        )
    named = [name for name in spec if name is not None]
    for name in named:
        if name not in mesh or name in ("data", "slice"):
            there = [axis for axis in mesh if axis not in ("data", "slice")]
            raise ValueError(
                f"plan: the rule {pattern!r} for {path} {list(shape)} uses the mesh axis {name!r}; "
                f"available are {', '.join(there) or 'none; pass mesh= with such an axis'}"
            )
    if len(set(named)) < len(named):
        raise ValueError(
            f"plan: the rule {pattern!r} for {path} {list(shape)} uses a mesh axis twice: {spec}"
        )
    for axis, (size, name) in enumerate(zip(shape, spec)):
        if name is not None and size % mesh[name]:
            nearest = next(n for n in range(mesh[name], 0, -1) if size % n == 0)
            raise ValueError(
                f"plan: the rule {pattern!r} splits axis {axis} of {path} {list(shape)} over "
                f"{name!r}, but {size} is not a multiple of {mesh[name]}; use {name}={nearest}"
            )

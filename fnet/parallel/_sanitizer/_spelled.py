"""Writes equations and arrays as Python source."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from fnet import _jax


class _Unknown(Exception):
    """A parameter that cannot be written."""


def expression(eqn: Any, params: dict) -> str:
    """Returns an equation as an expression of `x`, its inputs that are not literals, such as
    "[primitives.sin_p.bind(x[0])]". Returns "" if a parameter cannot be written, or if the
    primitive is not public."""
    name = _jax.public_name(eqn.primitive)
    if name is None:
        return ""
    try:
        options = [f"{key}={_text(value)}" for key, value in params.items()]
        inputs, live = [], 0
        for atom in eqn.invars:
            if isinstance(atom, _jax.Literal):
                inputs.append(array(np.asarray(atom.val, atom.aval.dtype)))
            else:
                inputs.append(f"x[{live}]")
                live += 1
    except _Unknown:
        return ""
    call = f"primitives.{name}.bind({', '.join([*inputs, *options])})"
    return call if eqn.primitive.multiple_results else f"[{call}]"


def array(x: Any) -> str:
    """Writes an array."""
    x = np.asarray(x)
    wide = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
    if x.dtype.name in wide or x.dtype.kind == "V":
        return f"np.array({x.astype(np.float32).tolist()}, jnp.{x.dtype.name})"
    return f"np.array({x.tolist()}, np.{x.dtype.name if x.dtype != bool else 'bool_'})"


def _text(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str, np.bool_)):
        return repr(value)
    if isinstance(value, np.integer):
        return repr(int(value))
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return f"jnp.dtype({np.dtype(value).name!r})"
    if isinstance(value, enum.Enum):
        owner = type(value).__name__
        if getattr(lax, owner, None) is type(value):
            return f"lax.{owner}.{value.name}"
        raise _Unknown
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _named(value)
    if isinstance(value, Sequence) and isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    if type(value).__name__ in _RECORDS:
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return _call(value, fields)
    raise _Unknown


_RECORDS = ("ScatterDimensionNumbers", "GatherDimensionNumbers", "RaggedDotDimensionNumbers")


def _named(value: Any) -> str:
    return _call(value, value._asdict())


def _call(value: Any, fields: dict) -> str:
    owner = type(value).__name__
    if getattr(lax, owner, None) is not type(value):
        raise _Unknown
    return f"lax.{owner}({', '.join(f'{k}={_text(v)}' for k, v in fields.items())})"

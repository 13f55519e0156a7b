"""Values during the evaluation of a jaxpr, and the evaluation of equations on these values."""

from __future__ import annotations

from typing import Any

from jax import lax

from fnet import _jax


class Value:
    """A value during the evaluation of a jaxpr.

    Attributes:
        x: the array. The dtype of the array may differ from the dtype with which the value was traced.
        note: hashable information about the value, set by the interpreter. Default None.
        restored: the array in its traced dtype, or None before `restore` has created it. All equations that need the
            traced dtype use the one array `restored`, so the gradients of all its uses are summed in the traced dtype.
    """

    __slots__ = ("note", "restored", "x")

    def __init__(self, x: Any, note: Any = None):
        self.x, self.note, self.restored = x, note, None


def restore(value: Value, aval: Any) -> Any:
    """Returns the array of a value in the dtype with which it was traced."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or getattr(value.x, "dtype", dtype) == dtype:
        return value.x
    if value.restored is None:
        value.restored = lax.convert_element_type(value.x, dtype)
    return value.restored


def bind(eqn: Any, arrays: list, **changes: Any) -> list[Value]:
    """Applies the equation's primitive to other inputs, with some of its parameters changed."""
    outputs = _jax.bind(eqn.primitive, arrays, {**eqn.primitive.get_bind_params(eqn.params), **changes})
    return [Value(y) for y in outputs]


def plain(eqn: Any, inputs: list[Value]) -> list[Value]:
    """Evaluates the equation as it was traced."""
    return [Value(y) for y in _jax.bind_again(eqn, [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)])]


def arrays_of(values: list[Value]) -> list:
    return [value.x for value in values]

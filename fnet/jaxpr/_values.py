"""The values of variables while an `Interpreter` evaluates a jaxpr, and functions that evaluate a
single equation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fnet import _jax


class Value:
    """The value of a variable of a jaxpr while an `Interpreter` evaluates the jaxpr: an array and
    information about it.

    Attributes:
        x: the array. The dtype of the array may differ from the dtype with which the value was
            traced.
        note: hashable information about the value, set by the interpreter. Default None.
        restored: the array `x`, converted by `restore` to the traced dtype (the dtype with which
            the value was traced). `restored` is None until the function `restore` converts `x`. All
            equations that need the array in the traced dtype, for example float32, use the same
            converted array `restored`. Therefore, JAX sums the gradients of these equations in the
            traced dtype.
    """

    __slots__ = ("note", "restored", "x")

    def __init__(self, x: Any, note: Any = None):
        self.x, self.note, self.restored = x, note, None


def restore(value: Value, aval: Any) -> Any:
    """Returns the array `value.x`, converted to the dtype of `aval`. `aval` is the abstract value
    (shape and dtype) with which the value was traced."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or getattr(value.x, "dtype", dtype) == dtype:
        return value.x
    if value.restored is None:
        value.restored = converted(value.x, dtype)
    return value.restored


def converted(x: Any, dtype: Any) -> Any:
    """Converts an array to a dtype. The array may come from another mesh context than that of the
    equation that reads it: `jax.sharding.reshard` reads arrays of `jax.sharding.auto_axes`."""
    with _jax.mesh_of_type(x):
        return lax.convert_element_type(x, dtype)


def bind(eqn: Any, arrays: list, **changes: Any) -> list[Value]:
    """Applies the equation's primitive to other inputs, with some of its parameters changed."""
    outputs = _jax.bind(
        eqn.primitive, arrays, {**eqn.primitive.get_bind_params(eqn.params), **changes}
    )
    return [Value(y) for y in outputs]


def plain(eqn: Any, inputs: list[Value]) -> list[Value]:
    """Evaluates an equation in the dtypes with which it was traced: inputs of other dtypes are
    converted first."""
    return [
        Value(y)
        for y in _jax.bind_again(
            eqn, [restore(value, v.aval) for value, v in zip(inputs, eqn.invars)]
        )
    ]


def as_array(x: Any) -> Any:
    """Converts the value of a literal to an array of the same dtype and weak type.

    A jaxpr stores a constant scalar as a Python number with a dtype, for example as JAX's
    `TypedFloat`, which lacks the attributes and methods of an array. JAX's own transforms never
    return such a number. Every other value is returned unchanged.
    """
    number = isinstance(x, (int, float, complex, np.generic, np.ndarray))
    return jnp.asarray(x) if number and getattr(x, "dtype", None) != jax.dtypes.float0 else x


def arrays_of(values: list[Value]) -> list:
    return [value.x for value in values]

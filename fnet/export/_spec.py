"""Types (shapes and dtypes) of inputs with symbolic sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape and dtype of an input of a program, and constraints on its symbolic sizes. `spec`
    creates a `Spec` and documents the fields.

    >>> export.spec("b, 28, 28, 1")
    Spec(shape='b, 28, 28, 1', dtype='float32', where=())
    """

    shape: str
    dtype: str
    where: tuple[str, ...] = ()

    def __post_init__(self):
        _parsed(self.shape, export.SymbolicScope(self.where))
        _dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class SpecOf:
    """The type (shapes and dtypes) of an input that is a tree of arrays. The field `function` takes
    the symbolic sizes as arguments and returns a tree with the shapes and dtypes of the input.
    `spec_of` creates a `SpecOf`."""

    function: Callable
    where: tuple[str, ...] = ()


def spec(shape: str, dtype: Any = "float32", *, where: str | Iterable[str] = ()) -> Spec:
    """Returns the type (shape and dtype) of an input of an exported program.

    Args:
        shape: the sizes of the axes, separated by commas. A size is a number, the name of a size
            variable (a size that is not fixed), or an expression of variables, for example "b, 2*h,
            2*w, 3". A size variable (symbolic size) has the same value, at least 1, in all inputs
            of a program.
        dtype: the dtype of the input, such as "int32". Default "float32".
        where: the constraints on the symbolic sizes, a string or several strings, for example "t <=
            64" or ("h >= 32", "mod(h, 2) == 0"). Default: no constraints.

    Raises:
        ValueError: the shape, dtype or a constraint is not valid.

    >>> export.spec("b, t", "int32", where="t <= 64")
    Spec(shape='b, t', dtype='int32', where=('t <= 64',))
    """
    where = (where,) if isinstance(where, str) else tuple(where)
    try:
        return Spec(
            shape, str(jnp.dtype(dtype)) if not str(dtype).startswith("key<") else str(dtype), where
        )
    except TypeError:
        raise ValueError(f"export.spec: {dtype!r} is no dtype; use for example 'float32'") from None


def spec_of(function: Callable, *, where: str | Iterable[str] = ()) -> SpecOf:
    """Returns the type of an input of an exported program, if the input is a tree of arrays, such
    as a cache.

        cache = export.spec_of(lambda b: model.cache(jax.ShapeDtypeStruct((b, 64), jnp.int32)))

    Args:
        function: a function of sizes that returns a tree of arrays. The names of the function's
            parameters are the names of the size variables (symbolic sizes). The function is traced,
            but not run.
        where: the constraints on the symbolic sizes, as for `spec`.

    >>> caches = export.spec_of(lambda b: {"keys": jnp.zeros((b, 8))}, where="b <= 16")
    """
    return SpecOf(function, (where,) if isinstance(where, str) else tuple(where))


def resolve(specs: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns two values: the types of the inputs, {name: tree of `jax.ShapeDtypeStruct`}, and a
    tuple of all constraints. A size variable (symbolic size) has the same value in all inputs."""
    special = lambda x: isinstance(x, (Spec, SpecOf))
    leaves = [x for x in jax.tree.leaves(specs, is_leaf=special) if special(x)]
    where = tuple(dict.fromkeys(constraint for x in leaves for constraint in x.where))
    scope = export.SymbolicScope(where)

    def one(x):
        if isinstance(x, Spec):
            return jax.ShapeDtypeStruct(_parsed(x.shape, scope), _dtype(x.dtype))
        if isinstance(x, SpecOf):
            names = list(inspect.signature(x.function).parameters)
            sizes = export.symbolic_shape(",".join(names), scope=scope) if names else ()
            return jax.eval_shape(lambda: x.function(*sizes))
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        raise TypeError(
            f"export: expected an input type, export.spec('b, 3', 'float32'), got {x!r}"
        )

    return {name: jax.tree.map(one, tree, is_leaf=special) for name, tree in specs.items()}, where


def _parsed(shape: str, scope) -> tuple:
    try:
        return tuple(export.symbolic_shape(shape, scope=scope)) if shape.strip() else ()
    except Exception as error:  # JAX's parser raises errors of several types
        raise ValueError(
            f"export.spec: {shape!r} is no shape, such as 'b, 28, 28, 1': "
            f"{str(error).splitlines()[0]}"
        ) from None


def _dtype(name: str):
    if name.startswith("key<"):
        return jax.eval_shape(lambda: jax.random.key(0)).dtype
    return jnp.dtype(name)

"""Types (shapes and dtypes) of inputs with symbolic sizes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from fnet.export import _constraints


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape, dtype and constraints of an input, made by `spec`, which documents the fields.

    >>> export.spec("b, 28, 28, 1")
    Spec(shape='b, 28, 28, 1', dtype='float32', where=())
    """

    shape: str
    dtype: str
    where: tuple[str, ...] = ()

    def __post_init__(self):
        _parsed(self.shape, _scope(self.where))
        _dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class SpecOf:
    """The type of an input that is a tree of arrays, made by `spec_of`: a function from the size
    variables to a tree with the shapes and dtypes."""

    function: Callable
    where: tuple[str, ...] = ()


def spec(shape: str, dtype: Any = "float32", *, where: str | Iterable[str] = ()) -> Spec:
    """Returns the type of an input of an exported program, with sizes that may stay open.

        export.spec("b, 28, 28, 1")                        # any batch size b
        export.spec("b, 4*h, 4*w, 3", where="4 <= h < 64")    # images whose sides are multiples of 4

    A model that halves its images and doubles them again, such as a U-Net, needs sizes that divide
    evenly. Write the factor into the shape: JAX knows at once that half of 4*h is 2*h, while it can
    conclude little from the constraint h % 4 == 0.

    Args:
        shape: the sizes of the axes, separated by commas: numbers, names of size variables, or
            expressions of them. A variable is at least 1, and has the same value in all inputs of a
            program.
        dtype: such as "int32". Default "float32".
        where: constraints on the variables, comparisons such as "t <= 64", separated by commas or
            in several strings. Default: none.

    Raises:
        ValueError: the shape, dtype or a constraint is not valid.

    >>> export.spec("b, t", "int32", where="t <= 64")
    Spec(shape='b, t', dtype='int32', where=('t <= 64',))
    """
    where = _constraints.several(where)
    try:
        return Spec(
            _constraints.sizes(shape),
            str(jnp.dtype(dtype)) if not str(dtype).startswith("key<") else str(dtype),
            where,
        )
    except TypeError:
        raise ValueError(f"export.spec: {dtype!r} is no dtype; use for example 'float32'") from None


def spec_of(function: Callable, *, where: str | Iterable[str] = ()) -> SpecOf:
    """Returns the type of an input that is a tree of arrays, such as a cache.

        cache = export.spec_of(lambda b: model.cache(jax.ShapeDtypeStruct((b, 64), jnp.int32)))

    Args:
        function: returns the tree. Its parameters are the size variables, by their names. It is
            traced, but not run.
        where: constraints on the variables, as for `spec`.

    >>> caches = export.spec_of(lambda b: {"keys": jnp.zeros((b, 8))}, where="b <= 16")
    """
    return SpecOf(function, _constraints.several(where))


def resolve(specs: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns two values: the types of the inputs, {name: tree of `jax.ShapeDtypeStruct`}, and a
    tuple of all constraints. A size variable (symbolic size) has the same value in all inputs."""
    special = lambda x: isinstance(x, (Spec, SpecOf))
    leaves = [x for x in jax.tree.leaves(specs, is_leaf=special) if special(x)]
    where = tuple(dict.fromkeys(constraint for x in leaves for constraint in x.where))
    scope = _scope(where)

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


def _scope(where: tuple[str, ...]) -> export.SymbolicScope:
    for constraint in where:
        try:
            export.SymbolicScope((constraint,))
        except Exception as error:  # JAX's parser raises errors of several types
            raise ValueError(
                f"export.spec: {constraint!r} is no constraint; expected a comparison of sizes, such "
                f"as 't <= 64' or 'h % 4 == 0': {str(error).splitlines()[0]}"
            ) from None
    return export.SymbolicScope(where)


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

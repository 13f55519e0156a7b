"""Tags: identity operations that mark values for inspection.

`tag` creates identity operations only while the setting `tagging` is True, that is, while a program
is traced for inspection. The setting `tagging` is a part of the key of JAX's caches of traced
functions. Programs that are not traced for inspection contain no tags and are therefore not slower.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from fnet._jax import Primitive
from fnet.jaxpr._primitives import Description, Traits, describe

tagging = jax.make_user_context(False)
"""Whether `tag` marks values. Set this with `with tagging(True): ...`, and read it as
`tagging.value`."""

BLOCK = "[:]"  # the name of the output of each block of a stack


class Tagged:
    """One call of `tag`.

    Attributes:
        name: the name that was passed to `tag`, or None.
        structure: the tree structure of the value, with None in place of leaves that are not
            arrays.
    """

    __slots__ = ("__weakref__", "name", "structure")

    def __init__(self, name: str | None, structure: Any):
        self.name, self.structure = name, structure

    def __repr__(self) -> str:
        return self.name or "output"


tag_p = Primitive("site")


def tag(value: Any, name: str | None = None) -> Any:
    """Names a value, so that `transforms.capture` can return it and `transforms.intervene` can
    replace it.

    The value itself comes back unchanged, and compiled programs contain no trace of the name. fnet
    tags the outputs of each layer; in a plain function, tag what you want to see.

    Args:
        value: a tree of arrays.
        name: the last part of the value's name, after the path of the named scopes around it.
            Default None: the path alone.

    >>> def f(x):
    ...     return jnp.sin(tag(x * 2, "doubled"))
    >>> ft.capture(f, "doubled")(jnp.ones(2))[1]["doubled"].tolist()
    [2.0, 2.0]
    """
    if not tagging.value:
        return value
    leaves, structure = jax.tree.flatten(value)
    is_array = [isinstance(x, jax.Array) for x in leaves]  # False for a traced jax.Ref
    call = Tagged(
        name,
        jax.tree.structure(jax.tree.unflatten(structure, [0 if a else None for a in is_array])),
    )
    index = iter(range(len(leaves)))
    return jax.tree.unflatten(
        structure,
        [tag_p.bind(x, call=call, index=next(index)) if a else x for x, a in zip(leaves, is_array)],
    )


def tag_of(eqn: Any) -> tuple[Tagged, int] | None:
    """Returns (call, index) for an equation that `tag` created, and None for other equations.

    A call of `tag` creates one equation for each array in the tagged value. `call` is the `Tagged`
    of that call, and `index` is the position of the equation's array in the value.
    """
    return (eqn.params["call"], eqn.params["index"]) if is_tag(eqn) else None


def is_tag(eqn: Any) -> bool:
    """Whether an equation is an identity operation that `tag` created."""
    return eqn.primitive is tag_p


def _jvp(primals: tuple, tangents: tuple, **params: Any) -> tuple:
    return tag_p.bind(*primals, **params), tangents[0]


def _batch(args: tuple, axes: tuple, **params: Any) -> tuple[jax.Array, int]:
    first = jnp.moveaxis(args[0], axes[0], 0)  # captured values have the batch axis first
    return tag_p.bind(first, **params), 0


tag_p.def_impl(lambda x, **_: x)
tag_p.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[tag_p] = _jvp
ad.primitive_transposes[tag_p] = lambda cotangent, x, **_: [cotangent]
batching.primitive_batchers[tag_p] = _batch
mlir.register_lowering(tag_p, lambda ctx, x, **_: [x])
describe(tag_p, Description(Traits("alias", "exact", "free")))

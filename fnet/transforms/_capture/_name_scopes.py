"""Named scopes for the submodules of flax.nnx modules. flax.nnx itself does not name scopes."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax

from fnet.jaxpr import tag


def name_scopes(module: Any) -> Any:
    """Returns a flax.nnx module whose submodules run under named scopes, which flax.nnx does not
    set itself.

        named = ft.name_scopes(module)
        print(ft.sites(named)(x))

    Everything in fnet that addresses layers by their paths, such as `capture`, `autocast` and
    `cost.count`, then works with the module. A submodule has the path of the attribute that
    contains it, as in the module's state: `module.blocks[0].attention` is "blocks/0/attention". If
    several attributes refer to it, the first one counts.

    Args:
        module: a `flax.nnx.Module`. Equinox, Haiku and Flax Linen name their scopes themselves.

    Returns:
        A copy that shares all variables with the original module: an update of one changes both.

    Raises:
        TypeError: `module` is not a flax.nnx module.

    >>> from flax import nnx
    >>> module = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.nn.relu)
    >>> "layers/0" in ft.sites(ft.name_scopes(module))(jnp.ones((1, 2))).names
    True
    """
    nnx = sys.modules.get("flax.nnx")  # no nnx module exists before flax.nnx is imported
    if nnx is None or not isinstance(module, nnx.Module):
        raise TypeError(
            f"name_scopes: expected a flax.nnx.Module, got a {type(module).__name__}; other "
            "libraries name their scopes themselves"
        )
    return _copied(module, "", nnx.Module, {})


def _copied(value, name, kind, copies):
    """Returns a copy of `value`, in which all modules are copied. `name` is the path of `value`,
    relative to the innermost callable module that contains `value`."""
    if type(value) in (list, tuple):
        return type(value)(
            _copied(item, _below(name, str(i)), kind, copies) for i, item in enumerate(value)
        )
    if type(value) is dict:
        return {
            key: _copied(item, _below(name, str(key)), kind, copies) for key, item in value.items()
        }
    if not isinstance(value, kind):
        return value
    if id(value) not in copies:
        called = bool(name) and callable(value)
        copy = copies[id(value)] = object.__new__(
            _named(type(value), name) if called else type(value)
        )
        for key, item in vars(value).items():
            private = key.startswith("_pytree__")
            vars(copy)[key] = (
                item
                if private
                else _copied(item, key if called or not name else _below(name, key), kind, copies)
            )
    return copies[id(value)]


def _below(name, key):
    return f"{name}/{key}" if name else key


@functools.lru_cache(4096)
def _named(cls: type, name: str) -> type:
    """Returns a subclass of `cls` whose calls run under the named scope `name`."""

    @functools.wraps(cls.__call__)
    def __call__(self, *args, **kwargs):
        with jax.named_scope(name):
            return tag(cls.__call__(self, *args, **kwargs))

    return type(cls)(
        cls.__name__,
        (cls,),
        {"__call__": __call__, "__module__": cls.__module__, "__qualname__": cls.__qualname__},
    )

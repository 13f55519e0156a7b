"""Names and signatures of transformed functions."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

_NAMES = ("__module__", "__name__", "__qualname__", "__doc__", "__type_params__")


def check_function(who: str, f: Any) -> None:
    """Raises a TypeError if the argument `f` of the transform `who` is not a function."""
    if not callable(f):
        raise TypeError(
            f"{who}: expected a function, got {'None' if f is None else f'a {type(f).__name__}'}; "
            "pass the function itself, not its result"
        )


def wraps(f: Callable, who: str = "", *, signature: bool = True) -> Callable[[Any], Any]:
    """Returns a decorator that gives a transformed function the names and the docstring of `f`.

    Unlike `functools.wraps`, this function does not copy the attributes in `f.__dict__` to the
    transformed function. If `f` is a compiled function, `f.__dict__` can contain the methods
    `lower` and `trace` of `f`. With a copy of these methods, `transformed.lower(x)` would lower `f`
    instead of the transformed function.

    Args:
        f: the original function, or another callable object. If `f` is a `functools.partial`, the
            names and the docstring are those of the function in the partial.
        who: the name of the transform, for the error if `f` is not callable. Default: no check.
        signature: whether the transformed function also has the signature and the annotations of
            `f`. If False, `__wrapped__` and `__annotations__` are not set. Default True.
    """
    if who:
        check_function(who, f)

    def wrap(transformed: Any) -> Any:
        named = f
        while isinstance(named, functools.partial):
            named = named.func
        functools.update_wrapper(transformed, named, assigned=_NAMES, updated=())
        if signature:
            transformed.__wrapped__ = f
            if hasattr(named, "__annotations__"):
                transformed.__annotations__ = named.__annotations__
        else:
            del transformed.__wrapped__
        return transformed

    return wrap


class Compiled:
    """A compiled function with its own methods `lower` and `trace`, like those of `jax.jit`.

    `lower` and `trace` are stored in slots, not in `__dict__`. `jax.jit` and `functools.wraps` copy
    the `__dict__` of a function that they wrap. If `lower` and `trace` were in `__dict__`, a
    wrapper would call the methods of the wrapped function instead of its own.

    Args:
        f: the original function, from which the names and the signature are copied.
        call: the function that runs when the compiled function is called.
        lower, trace: the methods.
        direct: whether the compiled program has the function's arguments, and not the arrays of
            modules in them. Default True.
    """

    __slots__ = ("__dict__", "__weakref__", "_call", "direct", "lower", "trace")
    __wrapped__: Callable  # set by `wraps`

    def __init__(
        self,
        f: Callable,
        call: Callable,
        lower: Callable,
        trace: Callable,
        *,
        direct: bool = True,
    ):
        self._call, self.lower, self.trace, self.direct = call, lower, trace, direct
        wraps(f)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<compiled function {getattr(self, '__name__', None) or repr(self.__wrapped__)}>"

"""A program, plain or transformed, in the forms that the checks call; and how one call is run."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable

import jax

from .arguments import Arguments, rounded
from .program import EVENTS, Program


class Forms:
    """The forms of one function. JAX traces each of them once, for all checks."""

    def __init__(self, program: Program, wrap: Callable):
        self.program, self.wrap = program, wrap
        self.arguments = Arguments(program, program.args())

    @functools.cached_property
    def function(self) -> Callable:
        f, wrap = self.program.f, self.wrap
        return functools.partial(f, wrap) if self.program.inner else wrap(f)

    @functools.cached_property
    def jit(self) -> Callable:
        return jax.jit(self.arguments.flat(self.function))

    @functools.cached_property
    def vmap(self) -> Callable:
        return jax.jit(jax.vmap(self.arguments.flat(self.function)))

    @functools.cached_property
    def gradient(self) -> Callable:
        return jax.jit(self.arguments.gradient(self.function))


class PlainFails(Exception):
    """Plain JAX itself cannot run this check: the table needs an exclusion."""


class Plain(Forms):
    """A program as it is. What the checks compute of it is kept: it is the same for every
    transform."""

    def __init__(self, program: Program):
        super().__init__(program, lambda f: f)
        self._kept: dict = {}

    def once(self, key, make: Callable):
        """What `make` returns.

        Raises:
            PlainFails: if it raises anything.
        """
        if key not in self._kept:
            try:
                self._kept[key] = make()
            except Exception as e:
                self._kept[key] = PlainFails(f"{type(e).__name__}: {e}")
        if isinstance(self._kept[key], PlainFails):
            raise self._kept[key]
        return self._kept[key]

    def reference(self, key, f: Callable, args: Callable) -> tuple:
        """(the result of f, its events, its arguments after the call)"""

        def make():
            arguments = args()
            return *run(f, *arguments), arguments

        return self.once(key, make)

    def rounded(self, key, f: Callable, args: Callable) -> list:
        """The leaves of the result for arguments rounded to bfloat16."""
        return self.once(
            (key, "rounded"), lambda: jax.tree.leaves(run(f, *jax.tree.map(rounded, args()))[0])
        )


def run(call: Callable, *args) -> tuple:
    """(the result, the events)"""
    EVENTS.clear()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = call(*args)
        jax.block_until_ready([x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)])
        jax.effects_barrier()
    events = [*EVENTS, *printed.getvalue().splitlines()]
    EVENTS.clear()
    return result, events

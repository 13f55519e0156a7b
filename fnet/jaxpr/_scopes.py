"""Scopes: where in a model, and in which pass, an operation belongs. One parser for jaxprs and for compiled HLO.

JAX records the named scopes of an operation together with marks of the transformations that made it, such as
"transpose(jvp(block))/fc". The path without the marks, "block/fc", is the same in the forward and backward pass; the
marks give the phase.
"""

from __future__ import annotations

import functools
import re
from typing import Any, NamedTuple

from fnet import _jax

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
_RECOMPUTED = "rematted_computation"    # the scope in which jax.checkpoint computes values a second time
_REMATS = frozenset(("remat2", "checkpoint"))
_MARK = re.compile(r"(jvp|transpose|vmap|linearize|batched|pmap)\((.*)\)", re.DOTALL)
# What compiled programs insert between scopes: calls, loops, branches and the body of jax.checkpoint.
_STRUCTURE = re.compile(r"(jit|pjit|custom_\w+)\(.*\)|pjit|shard_map|while|body|cond|scan|closed_call|core_call|"
                        r"eval_jaxpr|branch_\d+_fun|remat2?|checkpoint|custom_(jvp|vjp)_call(_jaxpr)?|vmapped_\w+")


class Scope(NamedTuple):
    """A place in a program.

    Attributes:
        path: the named scopes, joined by "/"; "" outside of all.
        phase: "forward", "backward", or "recomputed" (computed again for the backward pass).
    """

    path: str = ""
    phase: str = FORWARD

    def joined(self, inner: Scope) -> Scope:
        """The scope `inner` inside this one."""
        if self == TOP:
            return inner
        path = f"{self.path}/{inner.path}" if self.path and inner.path else self.path or inner.path
        phases = self.phase, inner.phase
        phase = RECOMPUTED if RECOMPUTED in phases else BACKWARD if BACKWARD in phases else FORWARD
        return Scope(path, phase)


TOP = Scope()


def of_equation(eqn: Any, outer: Scope = TOP, stack: str | None = None) -> Scope:
    """The scope of an equation in a jaxpr that is itself at `outer`. `stack` is its name stack, if known."""
    stack = _jax.name_stack(eqn) if stack is None else stack
    if not stack:
        return outer
    repeated = eqn.primitive.name in _REMATS and bool(eqn.params.get("differentiated"))
    return outer.joined(_parsed(stack, repeated))


def marks(eqn: Any) -> frozenset[str]:
    """The transformations that made an equation: "jvp", "transpose", "vmap", ..."""
    return _marks(_jax.name_stack(eqn))


@functools.lru_cache(1 << 14)
def _marks(stack: str) -> frozenset[str]:
    return frozenset(name for name, mark in _tokens(stack) if mark)


def of_operation(op_name: str) -> Scope:
    """The scope of an operation of a compiled program, from its HLO metadata.

    >>> of_operation("jit(step)/transpose(jvp(block))/up/dot_general")
    Scope(path='block/up', phase='backward')
    """
    # XLA joins the names of operations that it merged: "block/(up/add:down/add)" keeps what they share.
    parts = re.sub(r"(^|/)\(.*", r"\1", op_name).split("/")[:-1]
    scope, part = TOP, []
    for name in parts:
        inner = name
        while found := _MARK.fullmatch(inner):    # "transpose(jvp(jit(f)))"
            inner = found[2]
        if _STRUCTURE.fullmatch(inner):
            part.append(name.replace(inner, "", 1))
            scope, part = scope.joined(_parsed("/".join(part), inner in ("checkpoint", "remat2", "remat"))), []
        else:
            part.append(name)
    return scope.joined(_parsed("/".join(part), False))


@functools.lru_cache(1 << 14)
def _parsed(stack: str, repeated: bool) -> Scope:
    """A name stack as a scope. `repeated`: it belongs to a jax.checkpoint that has been differentiated."""
    written = _tokens(stack)
    tokens = _once(written)
    names = [name for name, mark in tokens if not mark]
    half = len(names) // 2
    if repeated and half and names[:half] == names[half:] and tokens == written:
        names = names[:half]    # inside loops, calls and branches the marks are on the outer equation
    phase = RECOMPUTED if _RECOMPUTED in names else BACKWARD if ("transpose", True) in tokens else FORWARD
    return Scope("/".join(name for name in names if name != _RECOMPUTED), phase)


def _tokens(stack: str) -> tuple[tuple[str, bool], ...]:
    """Names and marks (True) in order: "transpose(jvp(a))/b" is transpose, jvp, a, b."""
    tokens = []
    for part in filter(None, _split(stack)):
        while found := _MARK.fullmatch(part):
            tokens.append((found[1], True))
            part = found[2]
        if part:
            tokens.extend((name, False) for name in part.split("/") if name)
    return tuple(tokens)


def _split(stack: str) -> list[str]:
    """The parts between slashes that are in no parentheses."""
    if "(" not in stack:
        return stack.split("/")
    parts, depth, start = [], 0, 0
    for i, char in enumerate(stack):
        depth += (char == "(") - (char == ")")
        if char == "/" and not depth:
            parts.append(stack[start:i])
            start = i + 1
    return [*parts, stack[start:]]


def _once(tokens):
    """JAX writes the name stack of a differentiated jax.checkpoint twice, A B: A is B with another "transpose" mark.
    Higher derivatives repeat this. Only A is kept."""
    marks = [token == ("transpose", True) for token in tokens]
    for end in range(1, len(tokens) if any(marks) else 0):
        first = tuple(token for token, mark in zip(tokens[:end], marks) if not mark)
        if all(mark for _, mark in first):
            continue
        second, i = [], end
        while i < len(tokens) and len(second) < len(first):
            if not marks[i]:
                second.append(tokens[i])
            i += 1
        if first == tuple(second) and sum(marks[:end]) > sum(marks[end:i]):
            return _once(tokens[:end] + tokens[i:])
    return tokens

"""The scope of an operation: the part of the model, and the pass (forward or backward), to which it
belongs.

JAX records the named scopes of an operation together with the names of the transformations that
created it, such as "transpose(jvp(block))/fc". The path without the names of transformations,
"block/fc", is the same in the forward and backward pass. The names of the transformations show
whether an operation belongs to the forward pass or to the backward pass. This module parses the
name stacks that jaxprs and compiled HLO contain, such as "transpose(jvp(block))/fc".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from fnet import _jax

FORWARD, BACKWARD, RECOMPUTED = "forward", "backward", "recomputed"
_PHASES = FORWARD, BACKWARD, RECOMPUTED  # an operation in two phases belongs to the last of them
_RECOMPUTED = (
    "rematted_computation"  # the scope in which jax.checkpoint computes values a second time
)
_REMATS = frozenset(("remat2", "checkpoint"))
_Tokens = tuple[tuple[str, bool], ...]  # see `_tokens`
_TRANSPOSE = ("transpose", True)
_MARK = re.compile(r"(jvp|transpose|vmap|linearize|batched|pmap)\((.*)\)", re.DOTALL)
# Names that compiled programs insert between scopes: calls, loops, branches and the body of
# jax.checkpoint.
_STRUCTURE = re.compile(
    r"(jit|pjit|custom_\w+)\(.*\)|pjit|shard_map|while|body|cond|scan|closed_call|core_call|"
    r"eval_jaxpr|branch_\d+_fun|remat2?|checkpoint|custom_(jvp|vjp)_call(_jaxpr)?|vmapped_\w+"
)


class Scope(NamedTuple):
    """The scope of an operation in a program.

    Attributes:
        path: the named scopes, joined by "/"; "" outside of all scopes.
        phase: "forward", "backward", or "recomputed" (computed again for the backward pass).
        transposes: how often "transpose" occurs in the name stacks of the operation and of the
            equations around it. If the operation is inside a jax.checkpoint whose parameter
            `differentiated` is True, the name stacks of this jax.checkpoint and of the equations
            around it are not counted. When JAX transposes a jax.checkpoint inside a loop, call or
            branch, JAX may write the scope names of the jax.checkpoint twice, such as a/b/a/b in
            place of a/b. Therefore, if "transpose" occurs n times in the name stacks, fnet shortens
            scope names such as a/b/a/b to a/b at most n times.
    """

    path: str = ""
    phase: str = FORWARD
    transposes: int = 0

    def joined(self, inner: Scope) -> Scope:
        """Returns the scope `inner` inside this scope."""
        if self == TOP:
            return inner
        path = "/".join(filter(None, (self.path, inner.path)))
        phase = max(self.phase, inner.phase, key=_PHASES.index)
        return Scope(path, phase, self.transposes + inner.transposes)


TOP = Scope()


def in_jaxpr(jaxpr: Any, outer: Scope = TOP) -> Callable[..., Scope]:
    """Returns a function that maps an equation of a jaxpr to the equation's scope.

    `outer` is the scope that contains the jaxpr. The optional second argument of the returned
    function is the equation's name stack, if known.
    """
    doubled: dict[tuple[str, ...], tuple[str, ...]] = {}
    for eqn in jaxpr.eqns:
        differentiated = _differentiates(eqn)
        if outer.transposes or differentiated:
            doubled |= _doubled(_jax.name_stack(eqn), differentiated, outer.transposes)
    # The longest is replaced first, because it may begin with a shorter one.
    replaced = tuple(sorted(doubled.items(), key=lambda item: -len(item[0])))

    def of_equation(eqn: Any, stack: str | None = None) -> Scope:
        stack = _jax.name_stack(eqn) if stack is None else stack
        at = outer.joined(_parsed(stack, replaced)) if stack else outer
        return at._replace(transposes=0) if at.transposes and _differentiates(eqn) else at

    return of_equation


def _differentiates(eqn: Any) -> bool:
    """Whether an equation is a jax.checkpoint whose parameter `differentiated` is True."""
    return eqn.primitive.name in _REMATS and bool(eqn.params.get("differentiated"))


@functools.lru_cache(1 << 14)
def _doubled(
    stack: str, differentiated: bool, transposes: int
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Returns {scope names with duplicates: scope names without duplicates}, such as {("a", "a"):
    ("a",)}.

    JAX may duplicate the scope names in the name stack of a jax.checkpoint, such as a/b/a/b in
    place of a/b. If the function finds no duplicate scope names in the name stack, it returns {}.
    `transposes` counts how often "transpose" occurs in the name stacks of the equations (for
    example a loop) that contain the jax.checkpoint. The result may be wrong if the program itself
    nests scopes of the same name, as in a/a. The result may also be wrong for second derivatives,
    and for a jax.checkpoint inside another jax.checkpoint in a loop.
    """
    tokens = _tokens(stack)
    names = tuple(name for name, mark in tokens if not mark)
    if _RECOMPUTED in names:
        names = names[: names.index(_RECOMPUTED)]
    elif not differentiated:
        return {}
    once = _undoubled(names, transposes + tokens.count(_TRANSPOSE))
    return {names: once} if once != names and _once(tokens) == tokens else {}


def _undoubled(names: tuple[str, ...], times: int) -> tuple[str, ...]:
    """Replaces a tuple with two equal halves, such as (a, b, a, b), by one half, such as (a, b).

    The function repeats the replacement until the two halves of the tuple differ, but makes at most
    `times` replacements.
    """
    half = len(names) // 2
    if times and half and names[:half] == names[half:]:
        return _undoubled(names[:half], times - 1)
    return names


def marks(eqn: Any) -> frozenset[str]:
    """Returns the transformations that created an equation: "jvp", "transpose", "vmap", ..."""
    return _marks(_jax.name_stack(eqn))


@functools.lru_cache(1 << 14)
def _marks(stack: str) -> frozenset[str]:
    return frozenset(name for name, mark in _tokens(stack) if mark)


def of_operation(op_name: str) -> Scope:
    """Returns the scope of an operation of a compiled program, from the operation's HLO metadata.

    >>> of_operation("jit(step)/transpose(jvp(block))/up/dot_general")
    Scope(path='block/up', phase='backward', transposes=0)
    """
    # XLA joins the names of operations that it merged: "block/(up/add:down/add)". Only their common
    # part is used.
    parts = re.sub(r"(^|/)\(.*", r"\1", op_name).split("/")[:-1]
    scope, part = TOP, []
    for name in parts:
        inner = name
        while found := _MARK.fullmatch(inner):  # "transpose(jvp(jit(f)))"
            inner = found[2]
        if _STRUCTURE.fullmatch(inner):
            part.append(name.replace(inner, "", 1))
            checkpoint = inner in ("checkpoint", "remat2", "remat")
            scope, part = _extended(scope, "/".join(part), checkpoint), []
            if checkpoint:
                scope = scope._replace(transposes=0)
        else:
            part.append(name)
    return _extended(scope, "/".join(part), False)._replace(transposes=0)


def _extended(scope: Scope, stack: str, differentiated: bool) -> Scope:
    return scope.joined(
        _parsed(stack, tuple(_doubled(stack, differentiated, scope.transposes).items()))
    )


@functools.lru_cache(1 << 14)
def _parsed(stack: str, doubled: tuple = ()) -> Scope:
    """Parses a name stack as a scope.

    If the argument `doubled` contains the pair (("a", "b", "a", "b"), ("a", "b")), a name stack
    that begins with a/b/a/b is parsed as if it began with a/b.
    """
    written = _tokens(stack)
    tokens = _once(written)
    names = tuple(name for name, mark in tokens if not mark)
    if tokens == written:
        for twice, once in doubled:
            if names[: len(twice)] == twice:
                names = once + names[len(twice) :]
                break
    transposes = written.count(_TRANSPOSE)
    phase = FORWARD
    if _RECOMPUTED in names:
        phase = RECOMPUTED
    elif transposes:
        phase = BACKWARD
    return Scope("/".join(name for name in names if name != _RECOMPUTED), phase, transposes)


def _tokens(stack: str) -> _Tokens:
    """Splits a name stack into pairs (name, whether it is the name of a transformation).

    For example, "transpose(jvp(a))/b" contains the transformations transpose and jvp, and the scope
    names a and b.
    """
    tokens: list[tuple[str, bool]] = []
    for part in filter(None, _split(stack)):
        while found := _MARK.fullmatch(part):
            tokens.append((found[1], True))
            part = found[2]
        tokens.extend((name, False) for name in part.split("/") if name)
    return tuple(tokens)


def _split(stack: str) -> list[str]:
    """Splits a name stack at slashes that are outside of parentheses."""
    if "(" not in stack:
        return stack.split("/")
    parts, depth, start = [], 0, 0
    for i, char in enumerate(stack):
        depth += (char == "(") - (char == ")")
        if char == "/" and not depth:
            parts.append(stack[start:i])
            start = i + 1
    return [*parts, stack[start:]]


def _once(tokens: _Tokens) -> _Tokens:
    """Removes duplicates from a name stack, given as a tuple of scope names and names of
    transformations.

    The name stack of a differentiated jax.checkpoint contains its scope names twice, such as
    "transpose(jvp(a))/jvp(a)". `_once` shortens "transpose(jvp(a))/jvp(a)" to "transpose(jvp(a))".
    `_once` removes the second copy of the scope names only if "transpose" occurs more often in the
    first copy than in the second copy. Derivatives of higher order may create name stacks with more
    than two copies of the scope names, so `_once` repeats the removal until it finds no more
    duplicates.
    """
    if _TRANSPOSE not in tokens:
        return tokens
    for end in range(1, len(tokens)):
        first = tokens[:end]
        copied = _without_transposes(first)
        if all(mark for _, mark in copied):
            continue  # the beginning contains no scope name
        stop, missing = end, len(copied)
        while stop < len(tokens) and missing:
            missing -= tokens[stop] != _TRANSPOSE
            stop += 1
        second = tokens[end:stop]
        more_transposes = first.count(_TRANSPOSE) > second.count(_TRANSPOSE)
        if more_transposes and copied == _without_transposes(second):
            return _once(first + tokens[stop:])
    return tokens


def _without_transposes(tokens: _Tokens) -> _Tokens:
    return tuple(token for token in tokens if token != _TRANSPOSE)

"""The arrays that are live at the peak of memory use, and their bytes on a chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fnet import _jax
from fnet.cost._fusion import Kept, heavy
from fnet.jaxpr import Frame


class Held(NamedTuple):
    """An array that is live at the peak of memory use. `bytes` is the size of the array on a chip,
    `what` is a description, and `line` is the source line that creates it."""

    bytes: int
    what: str
    line: str

    def __str__(self):
        return f"{self.bytes / 2**20:,.0f} MiB {self.what}{f' at {self.line}' if self.line else ''}"


class Inner(NamedTuple):
    """A body of an operation, such as that of a scan, and the bytes that are held beside it."""

    live: Live
    more: int


class Live:
    """When the values of a jaxpr come into being and when they die.

    Args:
        frame: the operations of the jaxpr.
        kept: which values are written to memory.
        values: {value: (its type, how it is split)}.
        given: the values that exist before the operations.
        inner: {operation: its bodies}.
        extra: {operation: the bytes that it needs besides its results}.
        outermost: whether the outputs may overwrite the inputs.
    """

    def __init__(
        self,
        frame: Frame,
        kept: Kept,
        values: Mapping[int, tuple[Any, Any]],
        given: frozenset[int],
        inner: Mapping[int, list[Inner]],
        extra: Mapping[int, int],
        outermost: bool,
    ):
        self.frame, self.kept, self.values = frame, kept, values
        self.inner, self.extra = inner, extra
        order = {id(op): at for at, op in enumerate(frame.ops)}
        last = self._last_uses(order)
        self.begins: dict[int, list[int]] = {}
        self.dies: dict[int, list[int]] = {}
        for op in kept.real:
            for out in op.outs:
                name = kept.name(out)
                if name in given or not kept(out) or not (name in last or name in kept.outputs):
                    continue
                if outermost and name in kept.outputs and not heavy(op):
                    continue  # the output overwrites an input
                self.begins.setdefault(order[id(op)], []).append(name)
                if name not in kept.outputs:
                    self.dies.setdefault(last[name], []).append(name)

    def _last_uses(self, order: dict[int, int]) -> dict[int, int]:
        """Returns {value: the last operation that reads it}. A value that is not in memory is
        computed by its readers."""
        kept = self.kept
        last: dict[int, int] = {}
        for op in reversed(kept.real):
            needed = order[id(op)]
            for out in op.outs:
                out = kept.name(out)
                if not kept(out):
                    needed = max(needed, last.get(out, needed))
            for i in op.ins:
                if i is not None:
                    i = kept.name(i)
                    last[i] = max(last.get(i, 0), needed)
        return last

    def held(self, names: list[int], size: Callable[[Any, Any], int]) -> list[Held]:
        makers = {self.kept.name(out): op for op in self.kept.real for out in op.outs}
        return [
            Held(
                size(*self.values[i]),
                self.values[i][0].str_short()
                + (f" of {makers[i].scope}" if makers[i].scope else ""),
                _jax.line(makers[i].eqn),
            )
            for i in names
        ]


def peak(live: Live, size: Callable[[Any, Any], int]) -> tuple[int, list[Held]]:
    """Returns the largest number of bytes that are live at the same time, without the values that
    exist before the operations, and the arrays of that moment. `size` returns the bytes of a value
    on a chip, from its type and how it is split."""
    most, names, deepest = _sweep(live, size)
    held = live.held(names, size)
    while deepest is not None:
        _, names, inner = _sweep(deepest, size)
        held += deepest.held(names, size)
        deepest = inner
    return most, held


def _sweep(live: Live, size) -> tuple[int, list[int], Live | None]:
    """Returns the peak, the values that are live then, and the body in which it lies, if any."""
    alive: dict[int, int] = {}
    now, most, names, within = 0, 0, [], None
    for at, op in enumerate(live.frame.ops):
        ending = live.dies.get(at, ())
        reused = 0
        if not heavy(op) or op.eqn.primitive.name == "scan":  # in place
            reused = sum(alive[i] for i in ending if i in alive)
        new = {i: size(*live.values[i]) for i in live.begins.get(at, ())}
        needs, body = _largest(live.inner.get(at, ()), size)
        total = now + max(0, sum(new.values()) - reused) + needs + live.extra.get(at, 0)
        if total > most:
            most, names, within = total, [*alive, *new], body
        alive.update(new)
        now += sum(new.values())
        for i in ending:
            now -= alive.pop(i, 0)
    return most, names, within


def _largest(inner, size) -> tuple[int, Live | None]:
    """Returns the bytes of the body that needs most, and this body."""
    most, body = 0, None
    for each in inner:
        needs = _sweep(each.live, size)[0] + each.more
        if needs > most:
            most, body = needs, each.live
    return most, body

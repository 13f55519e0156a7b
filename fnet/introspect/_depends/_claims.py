"""The claims about a program that can be proved, and where they break."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fnet import _jax
from fnet.introspect._depends._reach import FAR, Reach
from fnet.introspect._depends._walk import Step


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis that is followed.

    Attributes:
        sources: {input of the program: axis}.
        targets: {output of the program: axis}.
        size: its length.
    """

    sources: Mapping[int, int]
    targets: Mapping[int, int]
    size: int


class Claim:
    """A claim about the positions along an axis. This one excludes nothing.

    Attributes:
        text: the claim in words.
        sources: {input: axis} of the positions that are followed.
        constants: {input: array} of the inputs whose numbers count.
    """

    text = ""

    def __init__(self, axis: Axis, name: Any):
        self.axis, self.name = axis, name
        self.sources = dict(axis.sources)
        self.constants: dict[int, np.ndarray] = {}

    def broken(self, outputs: Sequence[Reach]) -> tuple[int, tuple[int, int]] | None:
        """The first output for which the claim is not proved, and the `violation`."""
        for k, along in self.compared(len(outputs)).items():
            pair = self.violation(outputs[k], along, k)
            if pair is not None:
                return k, pair
        return None

    def violation(self, reach: Reach, axis: Any, output: int | None) -> tuple[int, int] | None:
        """A pair (output position, input position) that the claim excludes and a value allows."""
        return None

    def forbidden(self, i: np.ndarray, j: int) -> np.ndarray:
        """Whether the claim excludes that output positions i depend on input position j."""
        return np.zeros(i.shape, bool)

    def compared(self, count: int) -> dict[int, int | None]:
        """{output: its axis} of the outputs, of `count`, about which the claim says something."""
        return dict(self.axis.targets)

    def leak(self, at: tuple[int, Any, int], differs: Callable) -> int | None:
        """A position of an output that differs although the claim excludes it, or None.

        Args:
            at: (output, its axis, the input position that was changed).
            differs: a function of axes, which returns where any bit differs along them.
        """
        _, axis, j = at
        found = differs((axis,))
        wrong = np.flatnonzero(found & self.forbidden(np.arange(len(found)), j))
        return int(wrong[0]) if len(wrong) else None

    def bad(self, reach: Reach) -> bool:
        """Whether no axis of a value fulfills the claim."""
        if (reach.low > reach.high).all():
            return False
        return all(
            n != self.axis.size or self.violation(reach, axis, None) is not None
            for axis, n in enumerate(reach.shape)
        )


class Independent(Claim):
    def __init__(self, axis: Axis, name: Any):
        super().__init__(axis, name)
        self.text = f"independent along {name!r}"

    def violation(self, reach: Reach, axis: int, output: int | None) -> tuple[int, int] | None:
        low, high = along(reach, (axis,))
        here = np.arange(reach.shape[axis])
        return _first(high > here, high) or _first((low < here) & (low <= high), low)

    def forbidden(self, i: np.ndarray, j: int) -> np.ndarray:
        return i != j

    def bad(self, reach: Reach) -> bool:
        axes = [
            i for i, n in enumerate(reach.shape) if n == self.axis.size and reach.low.shape[i] > 1
        ]
        if (reach.low >= reach.high).all() and not axes:
            return False  # each element depends on one position; the axis is now a part of another
        return super().bad(reach)


class _WithNumbers(Independent):
    """Positions are independent for these numbers of some inputs."""

    def __init__(self, axis: Axis, name: Any, constants: Mapping[int, np.ndarray]):
        super().__init__(axis, name)
        self.constants = dict(constants)
        for index in constants:
            self.sources.pop(index, None)


class Causal(Claim):
    def __init__(self, axis: Axis, name: Any):
        super().__init__(axis, name)
        self.text = f"causal along {name!r}"

    def violation(self, reach: Reach, axis: int, output: int | None) -> tuple[int, int] | None:
        _, high = along(reach, (axis,))
        return _first(high > np.arange(reach.shape[axis]), high)

    def forbidden(self, i: np.ndarray, j: int) -> np.ndarray:
        return i < j


class Segments(Claim):
    """Texts that are packed into rows do not see each other.

    Args:
        index: the input of the program with the numbers of the texts.
        ids: these numbers, [time] or [rows, time].
        rows: the axis of the rows, if there is one.

    Attributes:
        apart: the claims that must hold, too: rows do not see each other.
    """

    def __init__(self, axis: Axis, name: Any, index: int, ids: np.ndarray, rows: Sequence[Axis]):
        super().__init__(axis, name)
        self.text = f"segments of {name!r}, with these numbers, are apart"
        self.sources.pop(index)
        self.constants = {index: ids}
        self.ids = ids if ids.ndim == 2 else ids[None]
        self.rows = dict(rows[0].targets) if rows else {}
        self.apart = [_WithNumbers(each, "rows", self.constants) for each in rows]
        here = np.arange(self.ids.shape[1])
        new = np.ones(self.ids.shape, bool)
        new[:, 1:] = self.ids[:, 1:] != self.ids[:, :-1]
        self.first = np.maximum.accumulate(np.where(new, here, 0), 1)
        end = np.ones(self.ids.shape, bool)
        end[:, :-1] = new[:, 1:]
        last = np.where(end, here, here[-1])[:, ::-1]
        self.last = np.minimum.accumulate(last, 1)[:, ::-1]

    def violation(self, reach: Reach, axis: int, output: int | None) -> tuple[int, int] | None:
        count = len(self.ids)
        rows = self.rows.get(output) if output is not None else None
        if output is None and reach.shape[0] == count and axis != 0:
            rows = 0  # of an intermediate value, to name the operation
        if rows is None:
            low, high = (each[None] for each in along(reach, (axis,)))
        else:
            low, high = along(reach, (rows, axis))
        some = low <= high
        for wrong, where in ((some & (low < self.first), low), (some & (high > self.last), high)):
            if wrong.any():
                row, i = map(int, np.argwhere(wrong)[0])
                where = np.broadcast_to(where, wrong.shape)
                return i, int(where[row, i])
        return None

    def leak(self, at: tuple[int, Any, int], differs: Callable) -> int | None:
        output, axis, j = at
        rows = self.rows.get(output)
        found = differs((axis,))[None] if rows is None else differs((rows, axis))
        wrong = np.argwhere(found & (self.ids != self.ids[:, [j]]))
        return int(wrong[0][1]) if len(wrong) else None


class Padding(Claim):
    """What comes after a length along an axis reaches nothing that is kept: no result without the
    axis, and none of its first positions.

    Args:
        length: the number of positions that are kept.
        constants: {input: array} of the inputs whose numbers count, such as a mask.
    """

    def __init__(self, axis: Axis, name: Any, length: int, constants: Mapping[int, np.ndarray]):
        super().__init__(axis, name)
        self.text = f"independent of {name!r} from {length} on"
        self.length, self.constants = length, dict(constants)
        for index in constants:
            self.sources.pop(index, None)

    def compared(self, count: int) -> dict[int, int | None]:
        return {k: self.axis.targets.get(k) for k in range(count)}

    def violation(self, reach: Reach, axis: int | None, output: int | None) -> Any:
        if axis is None:
            last = int(reach.high.max(initial=-1))
            return (0, last) if last >= self.length else None
        _, high = along(reach, (axis,))
        kept = high[: self.length]
        return _first(kept >= self.length, kept)

    def leak(self, at: tuple[int, Any, int], differs: Callable) -> int | None:
        _, axis, j = at
        if j < self.length:
            return None
        found = np.atleast_1d(differs(() if axis is None else (axis,)))
        wrong = np.flatnonzero(found[: self.length])
        return int(wrong[0]) if len(wrong) else None

    def bad(self, reach: Reach) -> bool:
        return bool((reach.high >= self.length).any()) and super().bad(reach)


def along(reach: Reach, axes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last position on which a value depends at each position along some axes."""
    others = tuple(i for i in range(len(reach.shape)) if i not in axes)
    shape = [reach.shape[i] for i in axes]
    order = np.argsort(np.argsort(axes))

    def kept(array: np.ndarray) -> np.ndarray:
        array = array.reshape([array.shape[i] for i in sorted(axes)]).transpose(order)
        return np.broadcast_to(array, shape)

    low = reach.low.min(others, keepdims=True, initial=FAR)
    high = reach.high.max(others, keepdims=True, initial=-1)
    return kept(low), kept(high)


def _first(wrong: np.ndarray, where: np.ndarray) -> tuple[int, int] | None:
    found = np.flatnonzero(wrong)
    return (int(found[0]), int(where[found[0]])) if len(found) else None


def first_break(claim: Claim, steps: Sequence[Step], var: Any) -> Step | None:
    """The operation at which a claim breaks: the last one, going back from a value, all of whose
    operands still fulfill it."""
    produced = {v: (step, i) for step in steps for i, v in enumerate(step.eqn.outvars)}
    found = None
    while not isinstance(var, _jax.Literal) and var in produced:
        found, i = produced[var]
        wrong = [
            v
            for v, reach in zip(found.eqn.invars, found.operands)
            if not isinstance(v, _jax.Literal) and v in produced and claim.bad(reach)
        ]
        if wrong:
            var = wrong[0]
            continue
        if found.inner is None:
            return found
        inside, body = found.inner
        return first_break(claim, inside, body.outvars[i]) or found
    return found

"""What a proof assumes about the values in a program, and whether a batch fulfills it."""

from __future__ import annotations

import dataclasses
from typing import Any

from fnet.introspect._depends._reach import MOST

FEW = 2**12
"""The largest constant of an analysis that does not look at masks."""

_TEXTS = {
    "finite": "{what} is finite",
    "nonzero": "{what} is neither 0 nor NaN",
    "within": "{what} is within {bound:.4g} of 0",
    "at most": "{what} is at most {bound:.4g}",
    "at least": "{what} is at least {bound:.4g}",
    "above": "{what} is above {bound:.4g}",
}


@dataclasses.dataclass(frozen=True)
class Condition:
    """An assumption about one operand or result of an equation.

    Attributes:
        kind: "finite", "nonzero", "within", "at most", "at least" or "above".
        operand: the index of the operand, or None for the result.
        bound: the number to which it is compared.
        primitive: the equation's primitive.
        path: the path of the layer, "" outside of layers.
        eqn: the equation.
    """

    kind: str
    operand: int | None
    bound: float
    primitive: str
    path: str
    eqn: Any = dataclasses.field(repr=False)

    @property
    def key(self) -> tuple:
        """Equal for equal conditions on one program."""
        return id(self.eqn), self.kind, self.operand, self.bound

    def __str__(self) -> str:
        what = "the result" if self.operand is None else f"operand {self.operand}"
        place = f" in {self.path}" if self.path else ""
        return _TEXTS[self.kind].format(what=f"{what} of {self.primitive}{place}", bound=self.bound)


class Assumptions:
    """Collects what an analysis assumes. With `allowed=False`, nothing may be assumed.

    Attributes:
        allowed: whether anything may be assumed.
        largest: the number of elements of the largest constant that is known. A proof that needs
            no mask is much faster without them.
        made: what was assumed.
        count: how often something was assumed.
    """

    def __init__(self, allowed: bool, largest: int = MOST):
        self.allowed, self.largest = allowed, largest
        self.path = ""
        self.made: dict[tuple, Condition] = {}
        self.count = 0

    def finite(self, eqn: Any, operand: int) -> bool:
        return self._assume("finite", eqn, operand, 0.0)

    def nonzero(self, eqn: Any, operand: int) -> bool:
        return self._assume("nonzero", eqn, operand, 0.0)

    def within(self, eqn: Any, operand: int, bound: float) -> bool:
        return self._assume("within", eqn, operand, bound)

    def at_most(self, eqn: Any, operand: int, bound: float) -> bool:
        return self._assume("at most", eqn, operand, bound)

    def at_least(self, eqn: Any, operand: int, bound: float) -> bool:
        return self._assume("at least", eqn, operand, bound)

    def result_above(self, eqn: Any, bound: float) -> bool:
        return self._assume("above", eqn, None, bound)

    def _assume(self, kind: str, eqn: Any, operand: int | None, bound: float) -> bool:
        if self.allowed:
            self.count += 1
            key = (id(eqn), self.path, kind, operand)
            before = self.made.get(key)
            if before is not None and kind in ("at most", "within"):
                bound = min(bound, before.bound)
            elif before is not None:
                bound = max(bound, before.bound)
            self.made[key] = Condition(kind, operand, bound, eqn.primitive.name, self.path, eqn)
        return self.allowed

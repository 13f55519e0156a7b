"""What `invariant` does in a function, as `ft.explain` reports it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet import _jax, jaxpr
from fnet._util._text_table import aligned
from fnet._util._timing import timings
from fnet.jaxpr import traits
from fnet.transforms._invariant._equation import Part, Work
from fnet.transforms._invariant._layout import open_axes
from fnet.transforms._invariant._program import Program

_EXACT = ("sort", "top_k", "argmax", "argmin", "iota", "eq", "ne", "lt", "le", "gt", "ge")
_EXACT_KINDS = ("layout", "alias", "gather")


class Change(NamedTuple):
    """An equation that is computed in another way.

    Attributes:
        scope: the path of the named scopes around it.
        primitive: the name of its primitive.
        what: what is done.
        by_size: whether its bits may still depend on the number of rows.
        line: the line of the user's program.
    """

    scope: str
    primitive: str
    what: str
    by_size: bool
    line: str


@dataclasses.dataclass(frozen=True)
class Invariance:
    """What `invariant` does in a call. `str()` returns a table.

    Attributes:
        rows: the number of rows.
        phases: how often the program goes over the rows: once more after each sum over the rows
            that other computations need.
        changes: a `Change` for each equation that sums over rows, draws numbers for them, or needs
            all of them.
        price: the time of the call, divided by that of the function itself, both compiled. None if
            the arguments are no arrays.
    """

    rows: int
    phases: int
    changes: tuple[Change, ...]
    price: float | None

    @property
    def by_size(self) -> tuple[Change, ...]:
        """The changes whose bits may still depend on the number of rows."""
        return tuple(change for change in self.changes if change.by_size)

    def __str__(self) -> str:
        times = "once" if self.phases == 1 else f"{self.phases} times"
        first = f"{self.rows} rows, one after another, {times}"
        if self.price is not None:
            first += f"; {self.price:.2f} of the time of the function itself"
        second = [
            f"{len(self.by_size)} operations need all rows at once: their bits are the same on any "
            "number of devices, but may depend on the number of rows"
        ] * bool(self.by_size)
        if not self.changes:
            return first
        table = [("scope", "operation", "line", "what")]
        table += dict.fromkeys(
            (change.scope or "(no scope)", change.primitive, change.line, change.what)
            for change in self.changes
        )
        return "\n".join([first, *second, "", *aligned(table, left=range(4))])


def changes(program: Program) -> Iterator[Change]:
    scope_of = jaxpr.scopes_in(program.closed.jaxpr, jaxpr.Scope())
    for eqn, done in program.works:
        what, by_size = _what(eqn, done)
        if what:
            line = _jax.line(eqn) or ""
            yield Change(scope_of(eqn).path, eqn.primitive.name, what, by_size, line)


def _what(eqn: Any, done: Work) -> tuple[str, bool]:
    name = eqn.primitive.name
    if done.kind == "ordered":
        return "updated by one row after another", False
    ops = {at.op for at in done.states if isinstance(at, Part)} - {"same"}
    if done.kind == "parts" and ops:
        joined = " and ".join(sorted(ops))
        return f"{joined} over the rows, in the order of a tree", False
    drawn = name in ("random_bits", "random_split") and done.kind == "row"
    if drawn and not open_axes(eqn.invars[0]):
        return "drawn for each row, with its number folded into the key", False
    if done.kind == "all":
        exact = _exact(eqn)
        return f"computed for all rows at once: {done.why}", not exact
    if done.kind == "shared" and any(map(open_axes, eqn.outvars)) and not _exact(eqn):
        return "computed for all rows at once: its inputs are not made of rows", True
    return "", False


def _exact(eqn: Any) -> bool:
    """Whether the results do not depend on how an equation is computed."""
    whole = all(not jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    name = eqn.primitive.name
    return whole or name in _EXACT or traits(name).kind in _EXACT_KINDS or name == "select_n"


def price(run: Callable, plain: Callable) -> float:
    """Returns the median time of `run`, divided by that of `plain`."""
    times = timings({"run": run, "plain": plain}, time.perf_counter)
    return statistics.median(times["run"]) / statistics.median(times["plain"])

"""What an equation does with the rows of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from fnet import _jax
from fnet.axes import AxisMap, axis_map
from fnet.jaxpr import CALLS, bodies, ends_by_rows, options, scan, solve_inputs
from fnet.transforms._invariant._layout import (
    Rows,
    is_open,
    open_axes,
    outermost,
)

COMBINED = {
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "and",
    "reduce_or": "or",
}  # a result that does not depend on the order
ADDED = ("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_LINEAR = ("reshape", "transpose", "neg", "squeeze", "expand_dims", "copy")


class Part(NamedTuple):
    """What a row adds to a value, which is the sum, or the like, over all rows. `op` is "sum",
    "max", "min", "and", "or", or "same" if each row computes the whole value."""

    op: str


SAME = Part("same")
State = Rows | Part | None
"""Of a variable: its rows; a part of it; None if it is the same for all rows, and held whole."""


class Work(NamedTuple):
    """What an equation does.

    Attributes:
        kind: "shared" (it sees no rows), "row" (for each row on its own), "parts" (its results are
            sums of what it computes for each row), "ordered" (a scatter, one row after another), or
            "all" (it needs all rows at once).
        states: the state of each result.
        why: for "all", the reason.
    """

    kind: str
    states: tuple[State, ...]
    why: str = ""


class NeedsAll(Exception):
    """An equation that cannot be evaluated for one row."""


def work(eqn: Any, states: Sequence[State]) -> Work:
    """Returns what an equation does, given the states of its operands."""
    try:
        return _work(eqn, states)
    except NeedsAll as error:
        return Work("all", tuple(map(outermost, eqn.outvars)), str(error))


def _work(eqn: Any, states: Sequence[State]) -> Work:
    name = eqn.primitive.name
    if not any(states):
        return _without_rows(eqn)
    for v, state in zip(eqn.invars, states):
        if state is None and open_axes(v):
            raise NeedsAll("an operand is not made of rows")
    if name in _BODIES:
        return _BODIES[name](eqn, states)
    if name in _OWN:
        return _leading(eqn, states)
    axes = axis_map(eqn)
    if axes is None:
        raise NeedsAll("an operation without a rule")
    return _mapped(eqn, states, axes)


def _without_rows(eqn: Any) -> Work:
    """An equation whose operands have no rows may make some, such as zeros for each row."""
    name = eqn.primitive.name
    open_results = [v for v in eqn.outvars if open_axes(v)]
    made = tuple(map(outermost, eqn.outvars))
    if not open_results or any(open_axes(v) for v in eqn.invars):
        return Work("shared", made)
    if name in ("broadcast_in_dim", "iota", "random_bits", "random_split", "empty", "empty2"):
        if all(made) and (name != "iota" or _countable(eqn, made[0])):
            return Work("row", made)
    return Work("shared", made)


def _countable(eqn: Any, rows: Rows | None) -> bool:
    return rows is not None and (rows.minor == 1 or options(eqn).dimension != rows.axis)


class _Letter(NamedTuple):
    """The letter of the rows in an `AxisMap`, and what is major and minor inside it."""

    letter: Any
    major: int
    minor: int


def _mapped(eqn: Any, states: Sequence[State], axes: AxisMap) -> Work:
    found = {_letter(axes, axes.operands[i], at) for i, at in enumerate(states) if at is not None}
    if len(found) != 1:
        raise NeedsAll("rows meet other rows")
    (rows,) = found
    letters = {x for array in (*axes.operands, *axes.results) for axis in array for x in axis}
    if any(is_open(axes.sizes[x]) for x in letters - {rows.letter}):
        raise NeedsAll("rows meet other rows")
    name = eqn.primitive.name
    if rows.letter in axes.fixed and not name.startswith("random_"):
        if name in COMBINED:
            return Work("parts", (Part(COMBINED[name]),))
        if name in ADDED and states[0] is None and states[2] is not None:
            return Work("ordered", (None,))
        raise NeedsAll(axes.fixed[rows.letter])
    results = tuple(_place(axes, array, rows) for array in axes.results)
    if all(results):
        return Work("row", results)
    if any(results):
        raise NeedsAll("only some of its results have rows")
    return Work("parts", (Part("sum"),) * len(results))


def _letter(axes: AxisMap, array: Any, at: State) -> _Letter:
    if not isinstance(at, Rows):
        raise NeedsAll("a sum over the rows is needed")
    letters = array[at.axis]
    where = [i for i, x in enumerate(letters) if is_open(axes.sizes[x])]
    if len(where) != 1:
        raise NeedsAll("the axis of the rows is cut")
    major, minor = axes.size(letters[: where[0]]), axes.size(letters[where[0] + 1 :])
    if at.major % major or at.minor % minor:
        raise NeedsAll("the axis of the rows is read in another order")
    return _Letter(letters[where[0]], at.major // major, at.minor // minor)


def _place(axes: AxisMap, array: Any, rows: _Letter) -> Rows | None:
    for i, letters in enumerate(array):
        if rows.letter in letters:
            k = letters.index(rows.letter)
            major, minor = axes.size(letters[:k]), axes.size(letters[k + 1 :])
            return Rows(i, major * rows.major, rows.minor * minor)
    return None


def _leading(eqn: Any, states: Sequence[State]) -> Work:
    """An operation that works along some axes, which all of its operands and results have."""
    found = {at for at in states if at is not None}
    at = found.pop()
    if found or not isinstance(at, Rows):
        raise NeedsAll("rows meet other rows")
    own = _OWN[eqn.primitive.name](eqn, len(eqn.invars[0].aval.shape))
    arrays = [*(v for v, state in zip(eqn.invars, states) if state), *eqn.outvars]
    if at.axis in own or any(open_axes(v) != [at.axis] for v in arrays):
        raise NeedsAll("it works along the axis of the rows")
    return Work("row", (at,) * len(eqn.outvars))


def _last(count: int) -> Any:
    return lambda eqn, rank: range(rank - count, rank)


def _windows(eqn: Any, rank: int) -> list[int]:
    """The axes along which the windows of a pooling are longer than 1."""
    window = options(eqn)
    sizes = zip(window.window_dimensions, window.window_strides, window.padding)
    return [i for i, each in enumerate(sizes) if each != (1, 1, (0, 0))]


_OWN = {
    **dict.fromkeys(("cholesky", "lu", "qr", "eigh", "svd", "householder_product"), _last(2)),
    **dict.fromkeys(("triangular_solve", "tridiagonal_solve"), _last(2)),
    "fft": lambda eqn, rank: range(rank - len(options(eqn).fft_lengths), rank),
    "top_k": lambda eqn, rank: [options(eqn).axis % rank],
    "select_and_scatter_add": _windows,
    "random_split": lambda eqn, rank: [],
}


# Loops and branches: their bodies are evaluated for one row, if all their equations can be.


def _body(program: Any, states: Sequence[State]) -> list[State]:
    """Returns the states of the outputs of a body."""
    known: dict[Any, State] = dict(zip(program.invars, states))
    known.update((v, None) for v in program.constvars)
    for eqn in program.eqns:
        known.update(zip(eqn.outvars, _inside(eqn, [_read(known, v) for v in eqn.invars])))
    return [_read(known, v) for v in program.outvars]


def _read(known: dict, v: Any) -> State:
    return None if isinstance(v, _jax.Literal) else known[v]


def _inside(eqn: Any, states: list[State]) -> Sequence[State]:
    parts = [at for at in states if isinstance(at, Part)]
    if parts and eqn.primitive.name not in _BODIES:
        name = eqn.primitive.name
        linear = name in _LINEAR or (name in ("add", "add_any", "sub") and len(parts) == 2)
        if name == "convert_element_type":
            linear = _keeps_sums(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)
        if not linear or {at.op for at in parts} != {"sum"}:
            raise NeedsAll("a sum over the rows is needed in each turn")
        return [Part("sum")]
    done = _work(eqn, states)
    if done.kind not in ("row", "shared", "parts"):
        raise NeedsAll(done.why or f"{eqn.primitive.name} goes from row to row")
    if done.kind == "shared" and any(map(open_axes, eqn.outvars)):
        raise NeedsAll("a value inside is not made of rows")
    return [None if at == SAME else at for at in done.states]


def _keeps_sums(before: Any, after: Any) -> bool:
    """Whether the sum of converted numbers is the converted sum, up to rounding."""
    if jnp.issubdtype(before, jnp.inexact):
        return jnp.issubdtype(after, jnp.inexact)
    narrow = before.itemsize < 4 and after.itemsize > before.itemsize
    return bool not in (before, after) and not narrow  # narrow integers wrap around


def _scan(eqn: Any, states: Sequence[State]) -> Work:
    loop = scan(eqn)
    if is_open(loop.length):
        raise NeedsAll("a loop over the rows")
    consts, carry, slices = loop.split(states)
    inner = [_slice(at) for at in slices]
    for _ in range(2 * loop.carry + 2):
        found = _body(loop.jaxpr, [*consts, *carry, *inner])
        joined = [_joined(a, b) for a, b in zip(carry, found)]
        if joined == carry:
            break
        carry = joined
    else:
        raise NeedsAll("the rows of a carry move")
    stacks = [_stack(at) for at in found[loop.carry :]]
    return _of_body([*carry, *stacks])


def _of_body(states: Sequence[State]) -> Work:
    """A loop computes each of its results for one row; one without rows is the same for all."""
    found = tuple(SAME if at is None else at for at in states)
    kind = "row" if all(isinstance(at, Rows) for at in found) else "parts"
    return Work(kind, found)


def _slice(at: State) -> State:
    if isinstance(at, Rows):
        if at.axis == 0:
            raise NeedsAll("a loop over the rows")
        return at._replace(axis=at.axis - 1)
    return at


def _stack(at: State) -> State:
    return at._replace(axis=at.axis + 1) if isinstance(at, Rows) else at


def _joined(before: State, after: State) -> State:
    if before == after:
        return before
    if Part("sum") in (before, after):  # each row would add the whole that another turn has
        raise NeedsAll("a sum over the rows is needed in each turn")
    if after is None:
        return before
    if before is None:
        return after
    raise NeedsAll("the rows of a carry move")


def _while(eqn: Any, states: Sequence[State]) -> Work:
    test, step = bodies(eqn)
    count = len(eqn.invars) - len(eqn.outvars)
    given = lambda body, carry: [*(states[i] for i in body.inputs if i < count), *carry]
    carry = list(states[count:])
    for _ in range(2 * len(carry) + 2):
        found = _body(step.jaxpr, given(step, carry))
        joined = [_joined(a, b) for a, b in zip(carry, found)]
        if joined == carry:
            break
        carry = joined
    (goes,) = _body(test.jaxpr, given(test, carry))
    if goes is not None and not (ends_by_rows(eqn) and all(at == goes for at in carry)):
        raise NeedsAll("how often it runs depends on all rows")
    if any(isinstance(at, Part) for at in carry):
        raise NeedsAll("a sum over the rows is needed in each turn")
    return _of_body(carry)


def _cond(eqn: Any, states: Sequence[State]) -> Work:
    if states[0] is not None:
        raise NeedsAll("the branch depends on the rows")
    found = [_body(branch.jaxpr, states[1:]) for branch in bodies(eqn)]
    joined = []
    for each in zip(*found):
        kinds = set(each) - {None}
        parts = any(isinstance(at, Part) for at in kinds)
        if len(kinds) > 1 or (parts and None in each):
            raise NeedsAll("its branches differ in what they do with the rows")
        joined.append(kinds.pop() if kinds else None)
    return _of_body(joined)


def _solve(eqn: Any, states: Sequence[State]) -> Work:
    """A linear system is solved by the program that JAX made for it."""
    (solve,) = bodies(eqn)
    return _of_body(_body(solve.jaxpr, [states[i] for i in solve_inputs(eqn)]))


def _call(eqn: Any, states: Sequence[State]) -> Work:
    return _of_body(_body(bodies(eqn)[0].jaxpr, states))


_BODIES = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _solve,
    **dict.fromkeys(CALLS, _call),
}

"""Loops and branches over packed values. A scan over the positions of a text becomes one over the
places of the rows, which begins anew with each text."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax, jaxpr
from fnet.axes import axis_map
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._padded import NoRule
from fnet.transforms._pack._moves import resolved
from fnet.transforms._pack._rows import Column
from fnet.transforms._pack._rules import Call, _as, _is_zero, _widest, rule
from fnet.transforms._pack._values import ROW, TEXT, Packed, Time, per_place


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What a value of a loop is, without its array."""

    groups: tuple
    lead: str | None
    pending: bool

    def of(self, x: Any) -> Packed:
        return Packed(x, self.groups, self.lead, self.pending)


def _kind(value: Packed) -> _Kind:
    return _Kind(value.groups, value.lead, value.pending)


def _fit(value: Packed, kind: _Kind, rows: Any) -> Packed:
    """Returns a value as one of a kind."""
    if _kind(value) == kind:
        return dataclasses.replace(value, seed=None, lengths=False)
    if kind.pending and not value.pending:
        if value.seed is None or not _is_zero(value.seed):
            raise NoRule("a loop adds sums over texts to another number")
    elif value.pending:
        value = resolved(value, rows)
    found = _as(value, kind.of(None), rows)
    return dataclasses.replace(found, pending=kind.pending, seed=None, lengths=False)


def _joined(a: _Kind, b: _Kind) -> _Kind:
    values = [a.of(None), b.of(None)]
    return dataclasses.replace(_kind(_widest(values)), pending=a.pending or b.pending)


class _Recorder:
    """Evaluates a body, and remembers the kinds of its outputs."""

    def __init__(self, run: Callable):
        self._run = run
        self.kinds: list[_Kind] = []

    def __call__(self, *values: Any) -> list:
        outputs = self._run(*values)
        self.kinds = [_kind(y) for y in outputs]
        return [y.x for y in outputs]


def _settled(carry: list[Packed], kinds_of: Callable, rows: Any) -> list[Packed]:
    """Returns a carry of the kinds that the body returns. `kinds_of` gives them for a carry."""
    for _ in range(8):
        kinds = kinds_of(carry)
        wanted = [_joined(_kind(value), kind) for value, kind in zip(carry, kinds)]
        if wanted == [_kind(value) for value in carry]:
            return [dataclasses.replace(v, seed=None, lengths=False) for v in carry]
        carry = [_fit(value, kind, rows) for value, kind in zip(carry, wanted)]
    raise NoRule("its carry belongs to other texts in each turn")


@rule("scan")
def _scan(call: Call) -> list:
    parts = jaxpr.scan(call.eqn)
    consts = call.values[: parts.consts]
    carry = call.values[parts.consts : parts.consts + parts.carry]
    slices = call.values[parts.consts + parts.carry :]
    options = {name: parts.options[name] for name in ("reverse", "unroll") if name in parts.options}
    if _sizes.is_open(parts.length):
        if _sizes.letters(str(parts.length)) != [call.rows.time]:
            raise NoRule("it is a loop over texts")
        return _over_positions(call, parts, consts, carry, slices, options)
    rows = call.rows
    fronts = [_front(value) for value in slices]
    inner = [_kind(value.like(None, groups=value.groups[1:])) for value in slices]

    def body(carry: Sequence[Packed], each: Sequence[Any]) -> list[Packed]:
        given = [
            dataclasses.replace(kind.of(x), shared=value.shared)
            for kind, x, value in zip(inner, each, slices)
        ]
        return call.evaluate(parts.closed, [*consts, *carry, *given], rows)

    def kinds_of(carry: list) -> list:
        run = _Recorder(lambda xs, each: body([v.like(x) for v, x in zip(carry, xs)], each))
        each = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in fronts]
        jax.eval_shape(run, [v.x for v in carry], each)
        results.extend([run.kinds[parts.carry :]])
        return run.kinds[: parts.carry]

    results: list = []
    carry = _settled(list(carry), kinds_of, rows)
    after = results[-1]

    def step(xs: list, each: list) -> tuple[list, list]:
        outputs = body([v.like(x) for v, x in zip(carry, xs)], each)
        last = [_fit(y, _kind(v), rows).x for y, v in zip(outputs, carry)]
        return last, [y.x for y in outputs[parts.carry :]]

    last, stacked = lax.scan(
        step, [v.x for v in carry], fronts, length=int(parts.length), **options
    )
    found = [v.like(x) for v, x in zip(carry, last)]
    for kind, y in zip(after, stacked):
        y = jnp.moveaxis(y, 0, 1) if kind.lead else y
        found.append(Packed(y, ((int(parts.length),), *kind.groups), kind.lead, kind.pending))
    return found


def _front(value: Packed) -> Any:
    """Returns the array with the axis that is scanned in front."""
    (axis,) = value.axes_of(0)
    return jnp.moveaxis(value.x, axis, 0)


def _over_positions(
    call: Call, parts: Any, consts: list, carry: list, slices: list, options: dict
) -> list:
    call.note("it begins anew with each text")
    rows, time = call.rows, Time(str(parts.length))
    layout = rows.layout(time.size)
    reverse = bool(options.get("reverse"))
    values = [_by_place(resolved(value, rows), time, rows) for value in (*consts, *slices)]
    sums = _sums(parts, call.eqn, rows.letter)
    begins = [value if i in sums else _begin(value, time, rows) for i, value in enumerate(carry)]
    place = {
        "begins": layout.first(reverse).T,
        "exists": layout.valid.T,
        "lengths": jnp.take(rows.lengths, layout.text, mode="clip").T,
        "numbers": layout.text.T,
    }
    scanned = [x for _, x, moving in values if moving]
    fixed = [x for _, x, moving in values if not moving]
    starts = [x for i, (_, x) in ((i, b) for i, b in enumerate(begins) if i not in sums)]

    def body(carry: Sequence[Packed], each: list, place: dict) -> list[Packed]:
        column = Column(rows, place["exists"], place["lengths"], place["numbers"])
        moving, still = iter(each), iter(fixed)
        given = [kind.of(next(moving if m else still)) for kind, _, m in values]
        inputs = [*given[: parts.consts], *carry, *given[parts.consts :]]
        return call.evaluate(parts.closed, inputs, column)

    count = int(rows.shape[0])
    kinds = [_kind(v) if i in sums else b[0] for i, (v, b) in enumerate(zip(carry, begins))]
    blank = [
        v.x if i in sums else jnp.zeros(b[1].shape[1:], b[1].dtype)
        for i, (v, b) in enumerate(zip(carry, begins))
    ]
    found: list[_Kind] = []

    def step(xs: list, each: tuple) -> tuple[list, list]:
        each, starts, place = each
        rest = iter(starts)
        now = []
        for i, (x, kind) in enumerate(zip(xs, kinds)):
            if i not in sums:
                start = next(rest)
                at = place["begins"].reshape(_reach(kind, count, start.ndim))
                x = jnp.where(at, start, x)
            now.append(kind.of(x))
        column = Column(rows, place["exists"], place["lengths"], place["numbers"])
        outputs = body(now, each, place)
        after = [_fit(y, kind, column).x for y, kind in zip(outputs, kinds)]
        rest_ = [_of_row(y, column) for y in outputs[len(xs) :]]
        found[:] = [_kind(y) for y in rest_]
        wanted = [
            y if i not in sums and _used(call.eqn.outvars[i]) else None for i, y in enumerate(after)
        ]
        return after, [wanted, [y.x for y in rest_]]

    last, (states, stacked) = lax.scan(step, blank, (scanned, starts, place), **options)
    results = []
    for i, value in enumerate(carry):
        if i in sums:
            results.append(value.like(last[i]))
        elif states[i] is None:
            results.append(value)
        else:
            results.append(_final(value, kinds[i], states[i], layout, reverse, rows))
    return [*results, *(_stacked(kind, y, time) for kind, y in zip(found, stacked))]


def _used(v: Any) -> bool:
    return not _jax.is_dropped(v)


def _reach(kind: _Kind, count: int, ndim: int) -> list[int]:
    """The shape in which a number for each row is broadcast to a value of a kind."""
    shape = [1] * ndim
    shape[kind.of(None).roles.index(TEXT)] = count
    return shape


def _by_place(value: Packed, time: Time, rows: Any) -> tuple[_Kind, Any, bool]:
    """Returns the kind of a value within the loop, its array, and whether it has one element for
    each place, in front."""
    if value.is_global:
        return _kind(value), value.x, False
    if value.texts:
        if value.roles.count(TEXT) != 1:
            raise NoRule("it compares texts within a loop over positions")
        here = per_place(value, time, rows)
        return _Kind(value.groups, value.lead, False), _time_first(here), True
    if value.groups[0] != (time,) or len(value.times) != 1:
        raise NoRule("it needs all positions of a text within a loop over them")
    if any(ROW in group and group != (ROW,) for group in value.groups):
        raise NoRule("its texts are merged with another axis")
    groups = tuple((TEXT,) if group == (ROW,) else group for group in value.groups[1:])
    lead = TEXT if value.lead == ROW else None
    return _Kind(groups, lead, False), _time_first(value), True


def _time_first(value: Packed) -> Any:
    return jnp.moveaxis(value.x, value.times[0], 0)


def _begin(value: Packed, time: Time, rows: Any) -> tuple[_Kind, Any]:
    """Returns what a carry is at the beginning of the text at each place, [length, rows, ...]."""
    value = resolved(value, rows)
    if value.is_global:
        value = Packed(value.x, value.groups, TEXT, seed=value.seed)
        if value.seed is None:
            value = value.like(jnp.broadcast_to(value.x, (rows.texts, *value.x.shape)))
    if value.seed is not None:
        sizes = [rows.shape[0] if role == TEXT else role for role in value.roles]
        length = rows.layout(time.size).length
        x = jnp.broadcast_to(value.seed.x, (length, *sizes))
        return _Kind(value.groups, value.lead, False), x
    if not value.texts or value.roles.count(TEXT) != 1:
        raise NoRule("its carry holds more than one state of each text")
    return _Kind(value.groups, value.lead, False), _time_first(per_place(value, time, rows))


def _sums(parts: Any, eqn: Any, letter: str) -> set[int]:
    """Returns which parts of the carry are sums over all texts and positions, to which the body
    adds: those of gradients of what all positions share."""
    program = parts.closed.jaxpr
    of_texts = functools.partial(_text_axes, letter=letter)
    mixed = _mixed(program, of_texts)
    for v, used in zip(program.outvars[parts.carry :], map(_used, eqn.outvars[parts.carry :])):
        if used and not isinstance(v, _jax.Literal) and v in mixed:
            raise NoRule("it returns a sum over the texts at each position")
    found = set()
    for i in range(parts.carry):
        before, after = program.invars[parts.consts + i], program.outvars[i]
        if isinstance(after, _jax.Literal) or of_texts(before) or after not in mixed:
            continue
        users = [each for each in program.eqns if any(v is before for v in each.invars)]
        adds = len(users) == 1 and users[0].primitive.name == "add" and users[0].outvars[0] is after
        if not adds or any(v is before or v is after for j, v in enumerate(program.outvars)
                           if j != i):  # fmt: skip
            raise NoRule("its carry mixes the texts from one position to the next")
        found.add(i)
    return found


def _text_axes(v: Any, letter: str) -> list[int]:
    """Returns the axes of a variable that are axes of texts."""
    open_in = lambda n: _sizes.is_open(n) and letter in _sizes.letters(str(n))
    return [i for i, n in enumerate(getattr(v.aval, "shape", ())) if open_in(n)]


def _mixed(program: Any, of_texts: Callable[[Any], list[int]]) -> set:
    """Returns the variables of the body of a loop over positions that combine its texts. In packed
    rows these are at other positions at the same time, so nothing of a text may depend on them."""
    mixed: set = set()
    for each in program.eqns:
        inputs = [v for v in each.invars if not isinstance(v, _jax.Literal)]
        reads, combined = any(map(of_texts, inputs)), any(v in mixed for v in inputs)
        for v in each.outvars:
            if of_texts(v) and combined:
                raise NoRule("its texts read what all texts have at the same position")
            if not of_texts(v) and (reads or combined):
                mixed.add(v)
        if reads and any(map(of_texts, each.outvars)) and not _apart(each, of_texts):
            raise NoRule(f"{each.primitive.name} in it combines the texts at the same position")
        for body in jaxpr.bodies(each):
            if _mixed(body.jaxpr, of_texts):
                raise NoRule("a loop or branch in it combines the texts at the same position")
    return mixed


def _apart(eqn: Any, of_texts: Callable[[Any], list[int]]) -> bool:
    """Whether an equation computes the texts apart from each other, along one axis of texts."""
    if jaxpr.bodies(eqn):  # they are looked at themselves
        return all(len(of_texts(v)) < 2 for v in eqn.outvars)
    axes = axis_map(eqn)
    if axes is None:
        return False
    places = [of_texts(v) for v in eqn.outvars]
    for i, v in enumerate(eqn.invars):
        for axis in () if isinstance(v, _jax.Literal) else of_texts(v):
            if set(axes.operands[i][axis]) & axes.fixed.keys():
                return False
            after = axes.follow(i, axis)
            if any(place and place != [at] for place, at in zip(places, after)):
                return False
    return True


def _of_row(y: Packed, column: Any) -> Packed:
    """Returns an output of the body with an element for each row."""
    if not y.is_global:
        return dataclasses.replace(y, seed=None)
    x = jnp.broadcast_to(y.x, (column.texts, *y.x.shape))
    return Packed(x, y.groups, TEXT)


def _final(
    value: Packed, kind: _Kind, states: Any, layout: Any, reverse: bool, rows: Any
) -> Packed:
    """Returns the carry behind the last position of each text; `states` [length, ...]."""
    axis = kind.of(None).roles.index(TEXT)
    place = layout.start if reverse else layout.start + layout.size - 1
    x = jnp.moveaxis(states, axis + 1, 1)[jnp.maximum(place, 0), rows.row]  # [texts, ...]
    x = jnp.moveaxis(x, 0, axis)
    start = _as(dataclasses.replace(value, seed=None), kind.of(None), rows)
    empty = (layout.size == 0).reshape(_reach(kind, rows.texts, x.ndim))
    return kind.of(jnp.where(empty, start.x, x))


def _stacked(kind: _Kind, y: Any, time: Time) -> Packed:
    groups = ((time,), *(tuple(ROW if r == TEXT else r for r in g) for g in kind.groups))
    if kind.lead == TEXT:
        return Packed(jnp.moveaxis(y, 0, 1), groups, ROW)
    return Packed(y, groups)


@rule("while")
def _while(call: Call) -> list:
    tests, steps = call.options.cond_nconsts, call.options.body_nconsts
    test_body, step_body = jaxpr.bodies(call.eqn)
    of_test, of_step = call.values[:tests], call.values[tests : tests + steps]
    rows = call.rows

    def body(carry: list) -> list:
        return call.evaluate(step_body.closed, [*of_step, *carry], rows)

    def kinds_of(carry: list) -> list:
        run = _Recorder(lambda xs: body([v.like(x) for v, x in zip(carry, xs)]))
        jax.eval_shape(run, [v.x for v in carry])
        return run.kinds

    carry = _settled(list(call.values[tests + steps :]), kinds_of, rows)

    def again(xs: list) -> Any:
        now = [v.like(x) for v, x in zip(carry, xs)]
        (answer,) = call.evaluate(test_body.closed, [*of_test, *now], rows)
        if not answer.is_global:
            raise NoRule("each text would take another number of turns")
        return answer.x

    def step(xs: list) -> list:
        outputs = body([v.like(x) for v, x in zip(carry, xs)])
        return [_fit(y, _kind(v), rows).x for y, v in zip(outputs, carry)]

    last = lax.while_loop(again, step, [v.x for v in carry])
    return [v.like(x) for v, x in zip(carry, last)]


@rule("cond")
def _cond(call: Call) -> list:
    index, *values = call.values
    if not index.is_global:
        raise NoRule("each text would take another branch")
    rows = call.rows
    bodies = [
        lambda xs, body=body: call.evaluate(
            body.closed, [v.like(x) for v, x in zip(values, xs)], rows
        )
        for body in jaxpr.bodies(call.eqn)
    ]
    recorders = [_Recorder(body) for body in bodies]
    for run in recorders:
        jax.eval_shape(run, [v.x for v in values])
    kinds = recorders[0].kinds
    for run in recorders[1:]:
        kinds = [_joined(a, b) for a, b in zip(kinds, run.kinds)]
    branches = [
        lambda xs, body=body: [_fit(y, k, rows).x for y, k in zip(body(xs), kinds)]
        for body in bodies
    ]
    outputs = lax.switch(index.x, branches, [v.x for v in values])
    return [kind.of(y) for kind, y in zip(kinds, outputs)]

"""Rematerialization of a complete step: its backward pass recomputes activations instead of reading stored ones.

`jax.checkpoint` must be applied before a function is differentiated. Here, the step is already differentiated: its
jaxpr contains the residuals that the forward pass stores for the backward pass. This module removes some of these
residuals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.jaxpr import INLINED, Interpreter, Scope, Value, has_shardings, inline, marks, nbytes, scan, wraps

_SYMBOLIC = 1024
_WORTH = 0.8    # a jaxpr is changed only if its residuals shrink to at most this fraction


def rematerialize(step: Callable) -> Callable:
    """Reduces the memory of a training step: the step stores fewer activations, and recomputes the others.

        step = ft.rematerialize(step)

    The results do not change; the time grows by up to a third. A scan over layers stores the inputs of each layer, and
    no values inside the layers. Other code, such as a ResNet, is split into pieces at points where few activations are
    live. Only the activations at these points are stored. The pieces are chosen so that the recomputed activations of
    one piece need about as much memory as all stored activations together. Each piece is recomputed when the backward
    pass reaches it. If little memory would be saved, nothing changes.

    Args:
        step: a function that computes derivatives, such as a training step. (For a function that is differentiated
            later, use `jax.checkpoint`.)

    Returns:
        A function with the signature and results of `step`.

    Source: Chen et al., 2016, Training deep nets with sublinear memory cost, section 4.

    >>> step = rematerialize(jax.grad(lambda w: jnp.sum(jnp.tanh(w) ** 2)))
    >>> step(jnp.zeros(2)).tolist()
    [0.0, 0.0]
    """
    interpreter = _Rematerialize()

    @wraps(step)
    def rematerialized(*args, **kwargs):
        return interpreter.run(step, args, kwargs)

    return rematerialized


class _Rematerialize(Interpreter):
    def depends(self, at):
        return None

    def opened(self, closed):
        """Inlines jitted parts, because the residuals between two parts are visible only if both parts are in one
        jaxpr."""
        inliner = _Inliner()

        def flat(*arrays):
            outputs = inliner.evaluate(closed.jaxpr, closed.consts, list(map(Value, arrays)), Scope(),
                                       (None,) * len(closed.jaxpr.outvars))
            return [value.x for value in outputs]

        return jax.make_jaxpr(flat)(*closed.in_avals)

    def plan(self, jaxpr, wanted):
        plan = _Plan(jaxpr, _jax.current_names())
        return plan if plan.pairs or plan.cut else None

    def equation(self, eqn, at, inputs, plan):
        if plan is None:
            return NotImplemented
        if eqn in plan.sources:
            return self.source(eqn, at, inputs, plan)
        if not plan.is_backward(eqn):
            plan.seen(eqn, inputs)
            return NotImplemented
        inputs = [self.again(v, value, plan) for v, value in zip(eqn.invars, inputs)]
        if eqn in plan.pairs:
            outputs = self.sink(eqn, at, inputs, plan)
        else:
            outputs = self.default(eqn, at, inputs, (None,) * len(eqn.outvars))
        plan.latest = next((y.x for y in outputs if _plain_array(y.x)), plan.latest)
        return outputs

    def again(self, v, value, plan):
        """Returns a value of the forward pass. Recomputes the value if it was not stored."""
        piece = None if isinstance(v, _jax.Literal) else plan.cut.get(v)
        if piece is None:
            return value
        if piece.made is None:
            given = [plan.env[i] for i in piece.invars]
            tied = [i for i, value in enumerate(given) if _plain_array(value.x)]
            tie = [] if plan.latest is None else [plan.latest]
            # The barrier delays recomputation until the backward pass, and prevents the compiler from replacing it by
            # the values of the forward pass (common-subexpression elimination).
            held = lax.optimization_barrier([*(given[i].x for i in tied), *tie])
            for i, x in zip(tied, held):
                given[i] = Value(x)
            with _jax.names_context(plan.names, "rematted_computation"):    # not the scopes of the reader
                outputs = self.evaluate(piece, (), given, Scope(), (None,) * len(piece.outvars))
            piece.made = dict(zip(piece.outvars, outputs))
        return piece.made[v]

    def source(self, eqn, at, inputs, plan):
        """Evaluates the scan of a forward pass. It is changed to store the inputs of its iterations instead of inner
        values."""
        pair, parts = plan.sources[eqn], scan(eqn)
        consts, carry = parts.consts, parts.carry
        plan.seen(eqn, inputs)
        body = self.body(parts.closed, at, (None,) * len(eqn.outvars), [None] * len(inputs))
        arrays = [value.x for value in inputs]
        kept = [i for i in range(len(eqn.outvars) - carry) if i not in pair.dropped]

        def turn(carried, slices):
            outputs = body(*arrays[:consts], *carried, *slices)
            return outputs[:carry], ([outputs[carry + i] for i in kept], [carried[i] for i in pair.saved])

        carried, (stacked, pair.given) = lax.scan(turn, arrays[consts:consts + carry], arrays[consts + carry:],
                                                  **parts.options)
        pair.arrays = arrays
        outputs = dict(zip(kept, stacked))
        return [*map(Value, carried), *(Value(outputs.get(i)) for i in range(len(eqn.outvars) - carry))]

    def sink(self, eqn, at, inputs, plan):
        """Evaluates the scan of a backward pass. It is changed to recompute the values that the forward pass did not
        store."""
        pair, parts = plan.pairs[eqn], scan(eqn)
        consts, carry, source = parts.consts, parts.carry, scan(pair.source)
        its_consts, its_carry, inner = source.consts, source.carry, source.jaxpr
        piece = _piece(inner, [inner.outvars[its_carry + i] for i in pair.dropped])
        needs = {inner.invars.index(v) for v in piece.invars if v in set(inner.invars)}
        constvars = dict(zip(inner.constvars, source.closed.consts))
        body = self.body(parts.closed, at, (None,) * len(eqn.outvars), [None] * len(inputs))
        arrays = [value.x for value in inputs]
        own = {i: x for i, x in enumerate(arrays[consts + carry:]) if i not in pair.places}
        theirs = {i: pair.arrays[i] for i in needs if i >= its_consts + its_carry}

        def turn(carried, slices):
            mine, given, others = slices
            before = {its_consts + i: x for i, x in zip(pair.saved, given)}
            values = {**{i: pair.arrays[i] for i in needs if i < its_consts}, **before, **others}
            found = {v: Value(values[inner.invars.index(v)]) if v not in constvars else Value(constvars[v])
                     for v in piece.invars}
            with jax.named_scope("rematted_computation"):
                made = self.evaluate(piece, (), [found[v] for v in piece.invars], at, (None,) * len(piece.outvars))
            all_slices = {**mine, **{place: y.x for place, y in zip(pair.places, made)}}
            outputs = body(*arrays[:consts], *carried, *(all_slices[i] for i in range(len(all_slices))))
            return outputs[:carry], outputs[carry:]

        carried, stacked = lax.scan(turn, arrays[consts:consts + carry], (own, pair.given, theirs), **parts.options)
        return [*map(Value, carried), *map(Value, stacked)]


class _Inliner(Interpreter):
    """Inlines calls that do not specify shardings."""

    def depends(self, at):
        return None

    def equation(self, eqn, at, inputs, plan):
        if eqn.primitive.name in INLINED and not has_shardings(eqn):
            return inline(self, eqn, at, inputs, (None,) * len(eqn.outvars))
        return NotImplemented


class _Piece:
    """A list of equations with `eqns`, `invars`, `outvars` and `constvars`, like a jaxpr."""

    constvars = ()

    def __init__(self, eqns, invars, outvars):
        self.eqns, self.invars, self.outvars = eqns, invars, outvars
        self.made = None


class _Pair:
    """A scan of the forward pass, and the scan of the backward pass that reads its stacked outputs.

    `dropped` are the indices of the stacked outputs that are recomputed instead of stored. `places` are their positions
    among the scanned inputs of the backward scan. `saved` are the indices of the carries that are stored instead.
    """

    def __init__(self, source, dropped, places, saved):
        self.source, self.dropped, self.places, self.saved = source, dropped, places, saved
        self.given, self.arrays = [], []


class _Plan:
    """The recomputed values of a jaxpr.

    Attributes:
        pairs: {equation of a backward scan: _Pair}.
        sources: {equation of a forward scan: _Pair}.
        cut: {variable: the `_Piece` that recomputes it}.
        env: {variable: its value} for the inputs of the pieces. A value is None until it is computed.
        latest: the last array that the backward pass computed. The next piece is not recomputed before this array.
    """

    def __init__(self, jaxpr, names):
        self.names = names
        self.backward = [eqn for eqn in jaxpr.eqns if _backward(eqn)]
        self._backward = {id(eqn) for eqn in self.backward}
        self.pairs, self.sources, self.cut, self.env, self.latest = _Table(), _Table(), {}, {}, None
        if not self.backward:
            return
        uses = _uses(jaxpr)
        for eqn in self.backward:
            if eqn.primitive.name == "scan" and (pair := _pair(jaxpr, eqn, uses)) and pair.source not in self.sources:
                self.pairs[eqn] = self.sources[pair.source] = pair
        self.cut = _cuts(jaxpr, self, uses)
        self.env = {v: None for piece in self.cut.values() for v in piece.invars}

    def is_backward(self, eqn) -> bool:
        return id(eqn) in self._backward

    def seen(self, eqn, inputs):
        for v, value in zip(eqn.invars, inputs):
            if not isinstance(v, _jax.Literal) and v in self.env:
                self.env[v] = value


class _Table(dict):
    """A dict whose keys are equations, compared by identity: equations are not hashable in every version of JAX."""

    def __setitem__(self, eqn, value):
        super().__setitem__(id(eqn), value)

    def __getitem__(self, eqn):
        return super().__getitem__(id(eqn))

    def __contains__(self, eqn):
        return super().__contains__(id(eqn))


def _backward(eqn) -> bool:
    return "transpose" in marks(eqn)


def _forward(eqn) -> bool:
    return marks(eqn) >= {"jvp"} and not _backward(eqn)


def _uses(jaxpr) -> dict:
    """Returns {variable: the list of equations that read it}. For an output of the jaxpr, the list also contains
    None."""
    found: dict[Any, list] = {}
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, _jax.Literal):
                found.setdefault(v, []).append(eqn)
    for v in jaxpr.outvars:
        if not isinstance(v, _jax.Literal):
            found.setdefault(v, []).append(None)
    return found


def _pair(jaxpr, sink, uses):
    """Returns the pair of a backward scan and the forward scan whose stacked outputs it reads, or None if recomputing
    these outputs saves no memory."""
    makers = {v: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan" and _forward(eqn) for v in eqn.outvars}
    xs, length = scan(sink).split(sink.invars)[2], scan(sink).length
    by_source: dict[int, list] = {}
    for place, v in enumerate(xs):
        if not isinstance(v, _jax.Literal) and v in makers and uses[v] == [sink]:
            by_source.setdefault(id(makers[v]), []).append((place, v))
    best = None
    for read in by_source.values():
        source = makers[read[0][1]]
        parts = scan(source)
        its_consts, its_carry, inner = parts.consts, parts.carry, parts.jaxpr
        if parts.length != length:
            continue
        stacked = [(place, source.outvars.index(v) - its_carry) for place, v in read]
        stacked = [(place, i) for place, i in stacked if i >= 0]
        piece = _piece(inner, [inner.outvars[its_carry + i] for _, i in stacked])
        if any(eqn.effects for eqn in piece.eqns):    # side effects would occur twice
            continue
        needs = {inner.invars.index(v) for v in piece.invars if v in set(inner.invars)}
        saved = [i - its_consts for i in sorted(needs) if its_consts <= i < its_consts + its_carry]
        before = sum(_bytes(source.outvars[its_carry + i].aval) for _, i in stacked)
        after = length * sum(_bytes(inner.invars[its_consts + i].aval) for i in saved)
        if after < _WORTH * before and (best is None or before - after > best[0]):
            best = before - after, _Pair(source, [i for _, i in stacked], [place for place, _ in stacked], saved)
    return best and best[1]


def _piece(jaxpr, outvars, eqns=None) -> _Piece:
    """Returns the equations that these variables depend on, and the inputs of these equations."""
    wanted = dict.fromkeys(v for v in outvars if not isinstance(v, _jax.Literal))
    found, made = [], set()
    for eqn in reversed(jaxpr.eqns if eqns is None else eqns):
        if any(v in wanted for v in eqn.outvars):
            found.append(eqn)
            made.update(eqn.outvars)
            wanted.update(dict.fromkeys(v for v in eqn.invars if not isinstance(v, _jax.Literal)))
    return _Piece(found[::-1], [v for v in wanted if v not in made], list(outvars))


def _bytes(aval) -> int:
    """Returns the size of an array in bytes. A symbolic size counts as `_SYMBOLIC`."""
    shape = tuple(size if isinstance(size, int) else _SYMBOLIC for size in getattr(aval, "shape", ()))
    return nbytes(aval if shape == getattr(aval, "shape", ()) else jax.ShapeDtypeStruct(shape, aval.dtype))


class _Cut(NamedTuple):
    cost: int
    ends: list


def _cuts(jaxpr, plan, uses) -> dict:
    """Splits code without loops into pieces. Returns {variable: the piece that recomputes it}."""
    backward = plan._backward
    # The forward equations between the scans above, of one forward pass. If a step has several forward passes, the next
    # one uses results of the previous backward pass.
    runs, run = [], []
    for eqn in jaxpr.eqns:
        if eqn in plan.sources or id(eqn) in backward:
            runs, run = [*runs, *[run] * bool(run)], []
        elif _forward(eqn) and not eqn.effects:
            run.append(eqn)
    found = {}
    for eqns in [*runs, run]:
        found |= _cut_run(jaxpr, eqns, uses, backward)
    return found


def _cut_run(jaxpr, eqns, uses, backward) -> dict:
    at = {id(eqn): i for i, eqn in enumerate(eqns)}
    weight, crossing = [], [0] * (len(eqns) + 1)    # stored bytes of each equation's outputs; live bytes after each
    last_use = {}
    for i, eqn in enumerate(eqns):
        kept = 0
        for v in eqn.outvars:
            readers = uses.get(v, ())
            kept += _bytes(v.aval) if any(id(each) in backward for each in readers if each is not None) else 0
            elsewhere = [each for each in readers if each is None or (id(each) not in backward and id(each) not in at)]
            last = len(eqns) if elsewhere else max((at[id(each)] for each in readers if id(each) in at), default=i)
            last_use[v] = last
            if last > i:
                crossing[i] += _bytes(v.aval)
                crossing[last] -= _bytes(v.aval)
        weight.append(kept)
    for i in range(1, len(crossing)):
        crossing[i] += crossing[i - 1]
    before = sum(weight)
    if not before:
        return {}
    best = _Cut(before, [])
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        best = min(best, _spread(weight, crossing, before / parts), key=lambda cut: cut.cost)
    if best.cost > _WORTH * before:
        return {}
    found, begin = {}, 0
    for end in best.ends:    # the outputs after the last cut are needed immediately
        part = eqns[begin:end + 1]
        lost = [v for eqn in part for v in eqn.outvars if last_use[v] <= end
                and any(id(each) in backward for each in uses.get(v, ()) if each is not None)]
        if lost:
            piece = _piece(jaxpr, lost, part)
            found.update(dict.fromkeys(lost, piece))
        begin = end + 1
    return found


def _spread(weight, crossing, size) -> _Cut:
    """Returns cuts such that about `size` bytes of activations lie between two cuts, at positions where few bytes are
    live. Also returns an upper bound of the memory that is needed."""
    ends, inside, cheapest, largest, kept = [], 0, None, 0, 0
    total = 0
    for i, bytes_ in enumerate(weight[:-1]):
        inside += bytes_
        if inside >= size / 2 and (cheapest is None or crossing[i] < crossing[cheapest]):
            cheapest, total = i, inside
        if inside >= size and cheapest is not None:
            ends.append(cheapest)
            largest, kept = max(largest, total), kept + crossing[cheapest]
            inside, cheapest = inside - total, None
    return _Cut(kept + max(largest, inside), ends)


def _plain_array(x) -> bool:
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)    # nor a jax.Ref

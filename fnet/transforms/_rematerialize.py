"""Rematerialization of a complete step: its backward pass recomputes activations instead of reading
stored ones.

`jax.checkpoint` has to come before differentiation. `rematerialize` takes a step that is already
differentiated, and removes some of the residuals that its forward pass stores for the backward
pass.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.jaxpr import (
    Interpreter,
    Value,
    check_function,
    cut_out,
    has_shardings,
    inlined,
    marks,
    nbytes,
    scan,
)

_SYMBOLIC = 1024
_WORTH = 0.8  # a jaxpr is changed only if its residuals shrink to at most this fraction


def rematerialize(step: Callable) -> Callable:
    """Reduces the memory of a training step: it stores fewer activations, and recomputes the
    others.

        step = ft.rematerialize(step)

    The results do not change; the time of the step grows by up to a third. A scan over layers
    stores the inputs of each layer, and no values inside the layers. Code without loops, such as a
    ResNet, is split into segments where few activations are live, and only these are stored; a
    segment is recomputed when the backward pass reaches it. The segments are chosen so that the
    recomputed activations of one need about as much memory as all stored ones together. A step that
    would save little memory stays as it is.

    Args:
        step: a function that computes derivatives, such as a training step. For a function that is
            differentiated later, use `jax.checkpoint`.

    Returns:
        A function with the signature and results of `step`.

    Source: Chen et al., 2016, Training deep nets with sublinear memory cost, section 4.

    >>> step = rematerialize(jax.grad(lambda w: jnp.sum(jnp.tanh(w) ** 2)))
    >>> step(jnp.zeros(2)).tolist()
    [0.0, 0.0]
    """
    check_function("rematerialize", step)
    return _Rematerialize().applied(step)


class _Rematerialize(Interpreter):
    def depends(self, at):
        return None

    def opened(self, closed):
        """Inlines the calls of jitted functions. `rematerialize` can remove a residual only if the
        equation that computes it and the equations that read it are in the same jaxpr."""
        return inlined(closed, unless=has_shardings)

    def plan(self, jaxpr, wanted):
        plan = _Plan(jaxpr, _jax.current_names())
        return plan if plan.pairs or plan.cut else None

    def equation(self, eqn, at, inputs, plan):
        if plan is None:
            return NotImplemented
        if eqn in plan.sources:
            return self.source(eqn, at, inputs, plan)
        if eqn not in plan.backward:
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
        """Returns the value of the variable `v` for the backward pass, and recomputes it if it is
        not stored."""
        piece = None if isinstance(v, _jax.Literal) else plan.cut.get(v)
        if piece is None:
            return value
        if piece not in plan.made:
            given = [plan.env[i] for i in piece.invars]
            tied = [i for i, value in enumerate(given) if _plain_array(value.x)]
            tie = [] if plan.latest is None else [plan.latest]
            # The barrier delays recomputation until the backward pass, and prevents the compiler
            # from replacing it by the values of the forward pass (common-subexpression
            # elimination).
            # A barrier makes all its operands vary over the same mesh axes of a shard_map.
            for axes in dict.fromkeys(_jax.varies_over(given[i].x) for i in tied):
                same = [i for i in tied if _jax.varies_over(given[i].x) == axes]
                held = lax.optimization_barrier(
                    [*(given[i].x for i in same), *(x for x in tie if _jax.varies_over(x) <= axes)]
                )
                for i, x in zip(same, held):
                    given[i] = Value(x)
            with _jax.names_context(
                plan.names, "rematted_computation"
            ):  # not the scopes of the reader
                outputs = self.evaluate(piece, (), given)
            plan.made[piece] = dict(zip(piece.outvars, outputs))
        return plan.made[piece][v]

    def source(self, eqn, at, inputs, plan):
        """Evaluates the scan of a forward pass. The forward loop is changed to store the inputs of
        its iterations instead of the intermediate values."""
        pair, parts = plan.sources[eqn], scan(eqn)
        carry = parts.carry
        plan.seen(eqn, inputs)
        body = self.body(parts.closed, at, (None,) * len(eqn.outvars), [None] * len(inputs))
        pair.arrays = [value.x for value in inputs]
        consts, start, xs = parts.split(pair.arrays)
        kept = [i for i in range(len(eqn.outvars) - carry) if i not in pair.dropped]

        def turn(carried, slices):
            outputs = body(*consts, *carried, *slices)
            return outputs[:carry], (
                [outputs[carry + i] for i in kept],
                [carried[i] for i in pair.saved],
            )

        carried, (stacked, pair.given) = lax.scan(turn, start, xs, **parts.options)
        outputs = dict(zip(kept, stacked))
        return [
            *map(Value, carried),
            *(Value(outputs.get(i)) for i in range(len(eqn.outvars) - carry)),
        ]

    def sink(self, eqn, at, inputs, plan):
        """Evaluates a scan equation that belongs to a backward pass. The backward loop is changed
        to recompute the values that the forward pass did not store."""
        pair, parts = plan.pairs[eqn], scan(eqn)
        piece, source = pair.piece, scan(pair.source)
        fixed, saved, sliced = source.split(source.jaxpr.invars)
        saved = [saved[i] for i in pair.saved]
        constants = dict(
            zip([*source.jaxpr.constvars, *fixed], [*source.closed.consts, *pair.arrays])
        )
        theirs = {
            i: x for i, x in enumerate(source.split(pair.arrays)[2]) if sliced[i] in piece.invars
        }
        body = self.body(parts.closed, at, (None,) * len(eqn.outvars), [None] * len(inputs))
        consts, start, xs = parts.split(value.x for value in inputs)
        own = {i: x for i, x in enumerate(xs) if i not in pair.places}

        def turn(carried, slices):
            mine, given, others = slices
            values = constants | dict(zip(saved, given)) | {sliced[i]: x for i, x in others.items()}
            with jax.named_scope("rematted_computation"):
                made = self.evaluate(piece, (), [Value(values[v]) for v in piece.invars], at)
            all_slices = {**mine, **{place: y.x for place, y in zip(pair.places, made)}}
            outputs = body(*consts, *carried, *(all_slices[i] for i in range(len(all_slices))))
            return outputs[: parts.carry], outputs[parts.carry :]

        carried, stacked = lax.scan(turn, start, (own, pair.given, theirs), **parts.options)
        return [*map(Value, carried), *map(Value, stacked)]


class _Pair:
    """A scan of the forward pass, and the scan of the backward pass that reads its stacked outputs.

    `dropped` contains the indices of the stacked outputs that the forward scan does not store,
    because the backward scan recomputes them with the equations in `piece`. The backward scan reads
    the recomputed values as scanned inputs, and `places` contains the indices of these scanned
    inputs. `saved` contains the indices of the carries that the forward scan stores for every
    iteration, because the equations in `piece` read them.
    """

    def __init__(self, source, piece, dropped, places, saved):
        self.source, self.piece, self.dropped, self.places, self.saved = (
            source,
            piece,
            dropped,
            places,
            saved,
        )
        self.given, self.arrays = [], []


class _Plan:
    """The values of a jaxpr that are recomputed instead of stored.

    Attributes:
        backward: the equations of the backward pass in their order, as the keys of a dict whose
            values are None.
        pairs: a dict {equation of a backward scan: the `_Pair` of this scan and its forward scan}.
        sources: a dict {equation of a forward scan: the `_Pair` of this scan and its backward
            scan}.
        cut: a dict {variable: the `jaxpr.Piece` that recomputes the variable}.
        env: a dict {variable: its value} for the variables from which other variables are
            recomputed. A value is None until it is computed.
        made: {a piece: its values}, of those that are recomputed already.
        latest: the last array that the backward pass computed. An optimization barrier makes each
            recomputation of activations depend on the array `latest`, so that XLA does not
            recompute the activations too early.
    """

    def __init__(self, jaxpr, names):
        self.names = names
        self.backward = dict.fromkeys(eqn for eqn in jaxpr.eqns if _backward(eqn))
        self.pairs, self.sources, self.cut, self.env = {}, {}, {}, {}
        self.made, self.latest = {}, None
        if not self.backward:
            return
        uses = _uses(jaxpr)
        for eqn in self.backward:
            if (
                eqn.primitive.name == "scan"
                and (pair := _pair(jaxpr, eqn, uses))
                and pair.source not in self.sources
            ):
                self.pairs[eqn] = self.sources[pair.source] = pair
        self.cut = _cuts(jaxpr, self, uses)
        self.env = {v: None for piece in self.cut.values() for v in piece.invars}

    def seen(self, eqn, inputs):
        for v, value in zip(eqn.invars, inputs):
            if not isinstance(v, _jax.Literal) and v in self.env:
                self.env[v] = value


def _backward(eqn) -> bool:
    return "transpose" in marks(eqn)


def _forward(eqn) -> bool:
    return marks(eqn) >= {"jvp"} and not _backward(eqn)


def _uses(jaxpr) -> dict:
    """Returns a dict {variable: the list of equations in the jaxpr that read the variable}.

    If a variable is an output of the jaxpr, None is appended to the list of the equations that read
    the variable.
    """
    found = collections.defaultdict(list)
    for eqn, read in (*((eqn, eqn.invars) for eqn in jaxpr.eqns), (None, jaxpr.outvars)):
        for v in read:
            if not isinstance(v, _jax.Literal):
                found[v].append(eqn)
    return found


def _pair(jaxpr, sink, uses):
    """Finds the forward scan that computes scanned inputs of the backward scan `sink`. Returns a
    `_Pair` of the forward scan and the backward scan, or None if recomputation would not reduce the
    stored activations by more than 20 %."""
    best, most = None, 0
    for source, read in _forward_scans(jaxpr, sink, uses).items():
        parts = scan(source)
        if parts.length != scan(sink).length:
            continue
        # Only stacked outputs can be recomputed slice by slice, not the final carry.
        stacked = [(place, source.outvars.index(v) - parts.carry) for place, v in read]
        stacked = [(place, i) for place, i in stacked if i >= 0]
        places, dropped = [place for place, _ in stacked], [i for _, i in stacked]
        piece = cut_out(parts.jaxpr.eqns, [parts.jaxpr.outvars[parts.carry + i] for i in dropped])
        if any(eqn.effects for eqn in piece.eqns):  # side effects would occur twice
            continue
        carries = parts.split(parts.jaxpr.invars)[1]
        saved = [i for i, v in enumerate(carries) if v in piece.invars]
        before = sum(_bytes(source.outvars[parts.carry + i].aval) for i in dropped)
        after = parts.length * sum(_bytes(carries[i].aval) for i in saved)
        if after < _WORTH * before and (best is None or before - after > most):
            best, most = _Pair(source, piece, dropped, places, saved), before - after
    return best


def _forward_scans(jaxpr, sink, uses) -> dict:
    """Returns {forward scan: [(index, variable)]} of the scanned inputs of `sink` that a forward
    scan computes and that nothing else reads."""
    makers = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and _forward(eqn):
            makers.update(dict.fromkeys(eqn.outvars, eqn))
    by_source = collections.defaultdict(list)
    slices = scan(sink).split(sink.invars)[2]
    for place, v in enumerate(slices):
        if not isinstance(v, _jax.Literal) and v in makers and uses[v] == [sink]:
            by_source[makers[v]].append((place, v))
    return by_source


def _bytes(aval) -> int:
    """Returns the size of an array in bytes. A symbolic size counts as 1024 (`_SYMBOLIC`)."""
    shape = tuple(
        size if isinstance(size, int) else _SYMBOLIC for size in getattr(aval, "shape", ())
    )
    return nbytes(
        aval if shape == getattr(aval, "shape", ()) else jax.ShapeDtypeStruct(shape, aval.dtype)
    )


class _Cut(NamedTuple):
    cost: int
    ends: list


def _cuts(jaxpr, plan, uses) -> dict:
    """Splits the equations of the forward pass that are outside of scans into pieces (lists of
    equations).

    Returns a dict {variable: the `jaxpr.Piece` that recomputes the variable}. The
    keys are the variables that are not stored.
    """
    # The forward equations between the scans above, of one forward pass. If a step has several
    # forward passes, the next one uses results of the previous backward pass.
    runs, run = [], []
    for eqn in jaxpr.eqns:
        if eqn in plan.sources or eqn in plan.backward:
            runs, run = [*runs, *[run] * bool(run)], []
        elif _forward(eqn) and not eqn.effects:
            run.append(eqn)
    found = {}
    for eqns in [*runs, run]:
        found |= _cut_run(eqns, uses, plan.backward)
    return found


def _cut_run(eqns, uses, backward) -> dict:
    """Cuts a run of forward equations into parts, and returns {variable: the `Piece` that
    recomputes it} for the variables that need not be stored for the backward pass. Returns {} if
    this would not save enough memory."""
    at = {eqn: i for i, eqn in enumerate(eqns)}
    stored = []  # bytes of each equation's outputs that the backward pass reads
    last_use = {}
    crossing = [0] * (len(eqns) + 1)  # live bytes after each equation, first as differences
    for i, eqn in enumerate(eqns):
        stored.append(0)
        for v in eqn.outvars:
            size, readers = _bytes(v.aval), uses.get(v, ())
            if any(each in backward for each in readers):
                stored[-1] += size
            if any(each not in backward and each not in at for each in readers):
                last_use[v] = len(eqns)  # read after this run
            else:
                last_use[v] = max((at[each] for each in readers if each in at), default=i)
            if last_use[v] > i:
                crossing[i] += size
                crossing[last_use[v]] -= size
    crossing = list(itertools.accumulate(crossing))

    before = sum(stored)
    if not before:
        return {}
    best = _Cut(before, [])
    for parts in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        best = min(best, _spread(stored, crossing, before / parts), key=lambda cut: cut.cost)
    if best.cost > _WORTH * before:
        return {}

    pieces = {}
    begin = 0
    for end in best.ends:  # the outputs after the last cut are needed immediately
        part = eqns[begin : end + 1]
        lost = []
        for v in itertools.chain.from_iterable(eqn.outvars for eqn in part):
            if last_use[v] <= end and any(each in backward for each in uses.get(v, ())):
                lost.append(v)
        if lost:
            pieces.update(dict.fromkeys(lost, cut_out(part, lost)))
        begin = end + 1
    return pieces


def _spread(weight, crossing, size) -> _Cut:
    """Splits equations into segments, each with about `size` bytes of activations. The equations
    are split at positions where few bytes of activations are live. Returns the positions of the
    splits, and an upper bound of the memory that the stored and recomputed activations need."""
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
    # Nor a jax.Ref.
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)

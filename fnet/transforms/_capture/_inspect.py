"""Evaluation of a program in which named values, such as the outputs of layers, are captured or
replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan
from fnet.jaxpr._enter import ENTER, inline
from fnet.jaxpr._rewrite import Interpreter
from fnet.jaxpr._scopes import TOP
from fnet.jaxpr._tags import tag_of, tag_p, tagging
from fnet.jaxpr._values import Value, arrays_of, as_array, bind
from fnet.transforms._capture._sites import Level, Site


class Inspector(Interpreter):
    """Evaluates a program, and captures or replaces its sites, such as the outputs of layers.

    Args:
        level: a `Level` that lists all sites of the program, from `find_sites`.
        captured: the `Site`s to capture.
        selected: {`Site` inside scans: tuple with, for each scan around it, the iteration in which
            it is captured, or None for all}.
        changes: {site: change}. `change(leaves, indices)` returns the new leaves, given the
            original ones and the current iteration of each scan around the site.
        offsets: {site: list with an array or None for each leaf}, with a leading axis for each scan
            around the site. `change(leaves, indices, offsets)` then receives, in iteration i of a
            scan, the slice `array[i]` of each array.
    """

    def __init__(
        self,
        level: Level,
        captured: Sequence[Site] = (),
        changes: Mapping[Site, Callable] | None = None,
        offsets: Mapping[Site, list] | None = None,
        selected: Mapping[Site, tuple] | None = None,
    ):
        super().__init__()
        self._level, self._captured, self._changes = level, frozenset(captured), dict(changes or {})
        self._offsets, self._selected = dict(offsets or {}), dict(selected or {})
        self._wanted = self._captured | self._changes.keys()
        self._keep = tagging.value  # an outer inspection needs the tags, too
        self._indices: tuple = ()
        self._depth = 0  # number of scans around the current equation
        self._found: dict[Site, list] = {}
        self._held: dict[Site, dict[int, Value]] = {}

    def __call__(self, closed: Any, arrays: Sequence) -> tuple[list, dict[Site, list]]:
        """Returns (outputs of the program, {site: leaves}) for the captured sites."""
        self._found = found = {}
        outputs = self.evaluate(
            closed.jaxpr, closed.consts, list(map(Value, arrays)), TOP, (self._level,)
        )
        # Custom derivatives refer to this object after the trace has ended.
        self._found, self._offsets = ({}, {})
        return [as_array(y.x) for y in outputs], found

    def depends(self, at):
        return None  # bodies without requested sites are rewritten alike in all scopes

    def plan(self, jaxpr, wanted):
        level = wanted[0] if wanted else None
        return level if level is not None and not self._wanted.isdisjoint(level.sites) else None

    def equation(self, eqn, at, inputs, plan):
        found = tag_of(eqn)
        made = (
            [
                (k, site, leaf)
                for k, site, leaf in plan.made.get(id(eqn), ())
                if site in self._wanted
            ]
            if plan
            else ()
        )
        complete = (
            [site for site in plan.complete.get(id(eqn), ()) if site in self._wanted]
            if plan
            else ()
        )
        if found is not None:
            x = as_array(inputs[0].x)
            outputs = [
                Value(
                    tag_p.bind(x, call=found[0], index=found[1]) if self._keep and not made else x
                )
            ]
        elif plan is None:
            return NotImplemented
        else:
            inner = plan.inner.get(id(eqn))
            if inner is not None and not self._wanted.isdisjoint(inner.sites):
                outputs = self._enter(eqn, at, inputs, inner)
            elif not made and not complete:
                return NotImplemented
            else:
                outputs = self._within(eqn, at, inputs, [site for site in complete if site.compute])
        if made:
            # Separate objects, whose arrays a change may replace.
            outputs = [Value(y.x) for y in outputs]
        for k, site, leaf in made:
            self._held.setdefault(site, {})[leaf] = outputs[k]
        for site in complete:
            if not site.compute:
                self._complete(site, self._held.pop(site), found)
        return outputs

    def _within(self, eqn, at, inputs, sites):
        """Evaluates an equation, and captures or replaces its named intermediate values, such as
        attention weights."""
        arrays, outputs = [as_array(value.x) for value in inputs], None
        for site in sites:
            values = {0: Value(site.compute(eqn, arrays))}
            self._complete(site, values, None)
            if site in self._changes:
                outputs = list(map(Value, site.replace(eqn, arrays, values[0].x)))
        return (
            self.default(eqn, at, inputs, (None,) * len(eqn.outvars))
            if outputs is None
            else outputs
        )

    def _complete(self, site, values, found):
        leaves = [values[i].x for i in site.leaves]
        if site in self._changes:
            more = [self._offsets[site]] if site in self._offsets else []
            leaves = self._changes[site](leaves, self._indices, *more)
        if site in self._captured:
            self._found[site] = leaves
        for i, x in zip(site.leaves, leaves):
            values[i].x = (
                tag_p.bind(x, call=found[0], index=i) if self._keep and found is not None else x
            )

    def default(self, eqn, at, inputs, wanted):
        return (
            self._scan(eqn, at, inputs, None)
            if eqn.primitive.name == "scan"
            else super().default(eqn, at, inputs, wanted)
        )

    # Bodies with requested sites. The values of captured sites become additional outputs of the
    # equation.

    def _enter(self, eqn, at, inputs, level):
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, at, inputs, level)
        if name in ("jit", "pjit", "remat2", "checkpoint"):
            return self._call(eqn, at, inputs, level)
        if (
            name in ENTER and ENTER[name] is not inline
        ):  # a custom derivative: evaluated without changes
            self._body(bodies(eqn)[0].closed, at, level)(*arrays_of(inputs))
            return super().default(eqn, at, inputs, (None,) * len(eqn.outvars))
        closed = bodies(eqn)[0].closed
        return self.evaluate(closed.jaxpr, closed.consts, inputs, at, (level,))

    def _body(self, closed, at, level):
        """Returns a function of arrays that evaluates the jaxpr `closed` and stores the captured
        values in `_found`."""
        return lambda *arrays: arrays_of(
            self.evaluate(closed.jaxpr, closed.consts, list(map(Value, arrays)), at, (level,))
        )

    def _apart(self, body, level):
        """Returns (run, collect, sites).

        `run` returns the outputs of `body`, followed by the values that are captured inside it,
        which `collect` stores in `_found`. `sites` lists the captured sites.
        """
        sites = [site for site in level.sites if site in self._captured] if level else []

        def run(*arrays):
            outer, self._found = self._found, {}
            try:
                outputs = body(*arrays)
                return [*outputs, *(x for site in sites for x in self._found[site])]
            finally:
                self._found = outer

        def collect(leaves):
            rest = iter(leaves)
            self._found.update((site, [next(rest) for _ in site.leaves]) for site in sites)

        return run, collect, sites

    def _call(self, eqn, at, inputs, level):
        body = bodies(eqn)[0]
        run, collect, sites = self._apart(self._body(body.closed, at, level), level)
        closed = _jax.make_jaxpr(run)(*(jax.typeof(value.x) for value in inputs))
        if eqn.primitive.name in ("jit", "pjit"):
            changes, consts = _jax.hoisted(
                eqn.params, closed, sum(len(site.leaves) for site in sites)
            )
        else:
            changes, consts = {"jaxpr": _jax.consts_as_inputs(closed)}, closed.consts
        outputs = bind(eqn, [*consts, *arrays_of(inputs)], **changes)
        collect([y.x for y in outputs[len(eqn.outvars) :]])
        return outputs[: len(eqn.outvars)]

    def _scan(self, eqn, at, inputs, level):
        """Evaluates a scan, and captures or replaces named values in its body.

        If an array is captured under two names, or is also a stacked output of the scan, the scan
        stacks the array only once. If a named value is captured in only one iteration, its value is
        a part of the scan's carry instead of a stacked output.
        """
        parts, depth = scan(eqn), self._depth
        consts, carry, slices = map(arrays_of, parts.split(inputs))
        run, collect, sites = self._apart(self._body(parts.closed, at, level), level)
        changed = [site for site in level.sites if site in self._changes] if level else []
        picks = [self._pick(site, depth) for site in sites for _ in site.leaves]
        indexed = changed or any(pick is not None for pick in picks)
        counter = jnp.arange(parts.length, dtype=jnp.int32) if indexed else None
        offsets = {
            number: self._offsets[site]
            for number, site in enumerate(changed)
            if site in self._offsets
        }
        count, place = len(eqn.outvars), []

        def step(carried, xs):
            (carried, picked), (sliced, index, offset) = carried, xs
            outer = self._indices, self._offsets, self._depth
            self._indices = self._indices if index is None else (*self._indices, index)
            self._offsets = {
                **self._offsets,
                **{changed[number]: x for number, x in offset.items()},
            }
            self._depth += 1
            try:
                outputs = run(*consts, *carried, *sliced)
            finally:
                self._indices, self._offsets, self._depth = outer
            found = outputs[count:]
            picked = [
                jnp.where(index == i, x, old)
                for i, x, old in zip(
                    [i for i in picks if i is not None],
                    [x for i, x in zip(picks, found) if i is not None],
                    picked,
                )
            ]
            stacked = [
                *outputs[parts.carry : count],
                *(x for i, x in zip(picks, found) if i is None),
            ]
            different = {id(x): x for x in stacked}
            order = {key: number for number, key in enumerate(different)}
            place[:] = [order[id(x)] for x in stacked]
            return (outputs[: parts.carry], picked), list(different.values())

        zeros = [
            zero
            for site in sites
            if self._pick(site, depth) is not None
            for zero in self._zeros(site, depth)
        ]
        (carried, picked), stacked = lax.scan(
            step, (carry, zeros), (slices, counter, offsets), **parts.options
        )
        stacked = [stacked[i] for i in place]
        rest, chosen = iter(stacked[count - parts.carry :]), iter(picked)
        collect([next(rest) if i is None else next(chosen) for i in picks])
        return [*map(Value, carried), *map(Value, stacked[: count - parts.carry])]

    def _pick(self, site, depth):
        """Returns the iteration in which a site is captured, or None for all. `depth` selects one
        of the nested scans around it: 0 is the outermost."""
        return self._selected.get(site, (None,) * (depth + 1))[depth]

    def _zeros(self, site, depth):
        """Returns the initial carry (zeros) for a named value that is captured in only one
        iteration of a scan."""
        lengths = [
            length
            for i, (_, length) in enumerate(site.scans)
            if i > depth and self._pick(site, i) is None
        ]
        return [_jax.zeros(t, lead=tuple(lengths)) for t in (site.types[i] for i in site.leaves)]

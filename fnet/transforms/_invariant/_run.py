"""Evaluates the phases of a program, on one device or on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.transforms._invariant import _evaluate
from fnet.transforms._invariant._equation import SAME, Part
from fnet.transforms._invariant._layout import Rows, stacked, whole
from fnet.transforms._invariant._program import Program, Section
from fnet.transforms._invariant._tree import Tree, wide


class _Results(NamedTuple):
    """The variables that a section writes: rows; parts, and how they are combined; what is the same
    for all rows."""

    rows: list
    parts: list
    ops: list[str]
    same: list

    @classmethod
    def of(cls, section: Section) -> _Results:
        pairs = zip(section.eqns, section.works)
        how = {v: at for eqn, done in pairs for v, at in zip(eqn.outvars, done.states)}
        parts = [v for v in section.writes if isinstance(how[v], Part) and how[v] != SAME]
        return cls(
            [v for v in section.writes if isinstance(how[v], Rows)],
            parts,
            [how[v].op for v in parts],
            [v for v in section.writes if how[v] == SAME],
        )


class Run:
    """One evaluation of a program.

    A compiler may compute an expression in another way if it stands beside others, for example with
    a fused multiplication and addition. Therefore all that is done once, and all that is done for a
    row, is compiled as a program of its own, the branch of a condition that XLA cannot know.

    Args:
        program: the program.
        total: the number of rows of all devices.
        devices: the number of devices.
        names: the names of the mesh axes over which rows are divided.
        go: a traced True.
    """

    def __init__(self, program: Program, total: int, devices: int, names: tuple, go: Any):
        self._program, self._total, self._names, self._go = program, total, names, go
        self._devices, self._rows = devices, total // devices
        first = lax.axis_index(names) * self._rows if names else 0
        self._first = jnp.asarray(first, jnp.int32)
        self._wholes: dict[Any, Any] = {}
        self._stacks: dict[Any, Any] = {}

    def __call__(self, consts: Sequence, arrays: Sequence) -> list:
        """Evaluates the program. The arrays with rows are those of this device."""
        program = self._program.closed.jaxpr
        self._wholes.update(zip(program.constvars, consts))
        for v, x in zip(program.invars, arrays):
            at = self._program.states[v]
            if at is None:
                self._wholes[v] = x
            else:
                self._stacks[v] = stacked(x, at, self._rows)
        for once, rows in self._program.phases:
            self._once(once)
            self._each_row(rows)
        return [self._output(v) for v in program.outvars]

    def _output(self, v: Any) -> Any:
        if self._names and spec(self._program, v, self._names) != P():
            return whole(self._stack(v), self._program.states[v])
        return self._whole(v)

    def _whole(self, v: Any) -> Any:
        if isinstance(v, _jax.Literal):
            return jnp.asarray(v.val, v.aval.dtype)
        if v not in self._wholes:
            rows = self._stacks[v]
            if self._names:
                rows = lax.all_gather(rows, self._names, tiled=True)
            self._wholes[v] = whole(rows, self._program.states[v])
        return self._wholes[v]

    def _stack(self, v: Any) -> Any:
        if v not in self._stacks:
            rows = stacked(self._wholes[v], self._program.states[v], self._total)
            if self._names:
                rows = lax.dynamic_slice_in_dim(rows, self._first, self._rows)
            self._stacks[v] = rows
        return self._stacks[v]

    def _once(self, section: Section) -> None:
        if not section.writes and not any(eqn.effects for eqn in section.eqns):
            return
        inputs = [self._whole(v) for v in section.reads]
        size = _evaluate.Size(self._total, None, self._total)

        def compute(inputs: list) -> list:
            env = dict(zip(section.reads, inputs))
            for eqn, done in zip(section.eqns, section.works):
                if done.kind == "ordered":
                    env[eqn.outvars[0]] = self._ordered(eqn, env)
                else:
                    _evaluate.equations([eqn], env, size)
            return [env[v] for v in section.writes]

        self._wholes.update(zip(section.writes, self._alone(compute, inputs)))

    def _ordered(self, eqn: Any, env: dict) -> Any:
        """Evaluates a scatter whose updates are in rows, one row after another."""
        operand, *others = (_evaluate.read(env, v) for v in eqn.invars)
        states = [self._program.states.get(v) for v in eqn.invars[1:]]

        def turn(i: Any, x: Any) -> Any:
            each = [
                y if at is None else lax.dynamic_index_in_dim(y, i, keepdims=False)
                for y, at in zip(stacks, states)
            ]
            inner = dict(zip(eqn.invars, [x, *each]))
            _evaluate.equations([eqn], inner, _evaluate.Size(1, i, self._total))
            return inner[eqn.outvars[0]]

        stacks = [
            y if at is None else _at_least_two(stacked(y, at, self._total))
            for y, at in zip(others, states)
        ]
        return lax.fori_loop(0, self._count(self._total), turn, operand)

    def _each_row(self, section: Section) -> None:
        """Evaluates a section for the rows of this device, one after another."""
        if not section.writes:
            return
        results = _Results.of(section)
        stacks, found, once = self._loop(self._row(section, results), results.ops)
        self._stacks.update(zip(results.rows, stacks))
        self._wholes.update(zip(results.same, once))
        totals = self._combined(results.ops, found)
        for v, x, op in zip(results.parts, totals, results.ops):
            self._wholes[v] = _without_sign_of_zero(x, op).astype(v.aval.dtype)

    def _row(self, section: Section, results: _Results) -> Callable[[Any], tuple]:
        """Returns a function that evaluates a section for row i of this device: (rows, parts, what
        is the same for all rows)."""
        states = self._program.states
        reads = [v for v in section.reads if states[v] is not None]
        known = [v for v in section.reads if states[v] is None]
        shared = [self._whole(v) for v in known]
        given = [_at_least_two(self._stack(v)) for v in reads]

        def compute(values: tuple) -> tuple[list, list, list]:
            shared, i, rows = values
            env = dict(zip((*known, *reads), (*shared, *rows)))
            size = _evaluate.Size(1, self._first + i, self._total)
            _evaluate.equations(section.eqns, env, size)
            wider = [env[v].astype(wide(env[v].dtype)) for v in results.parts]
            return [env[v] for v in results.rows], wider, [env[v] for v in results.same]

        def row(i: Any) -> tuple[list, list, list]:
            rows = [lax.dynamic_index_in_dim(x, i, keepdims=False) for x in given]
            return self._alone(compute, (shared, i, rows))

        return row

    def _loop(self, row: Callable[[Any], tuple], ops: Sequence[str]) -> tuple[list, list, list]:
        """Evaluates `row` for all rows of this device. Returns the stacked rows, the parts of the
        rows, combined as far as this device can, along a first axis, and what is the same."""
        count = self._rows
        # On a device with, say, 6 rows, the tree over all rows does not consist of whole branches.
        uneven = self._devices > 1 and count & (count - 1)
        tree = Tree(ops, 1 if uneven else count)

        def turn(i: Any, carry: tuple) -> tuple:
            stacks, memory, _ = carry
            rows, values, once = row(i)
            put = lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, i, 0)
            memory = list(map(put, memory, values)) if uneven else tree.push(memory, i, values)
            return list(map(put, stacks, rows)), memory, once

        rows, values, once = jax.eval_shape(row, jnp.int32(0))
        empty = lambda like: [jnp.zeros((max(count, 2), *x.shape), x.dtype) for x in like]
        memory = empty(values) if uneven else tree.empty(values)
        start = empty(rows), memory, [jnp.zeros(x.shape, x.dtype) for x in once]
        stacks, memory, once = lax.fori_loop(0, self._count(count), turn, start)
        found = [x[:count] for x in memory] if uneven else [x[None] for x in tree.result(memory)]
        return [x[:count] for x in stacks], found, once

    def _combined(self, ops: Sequence[str], found: list) -> list:
        """Returns the results over the values of all devices."""
        if not found:
            return []
        if self._names:
            found = [lax.all_gather(x, self._names, tiled=True) for x in found]
        count = found[0].shape[0]
        if count == 1:
            return [x[0] for x in found]
        tree = Tree(ops, count)
        push = lambda i, memory: tree.push(memory, i, [x[i] for x in found])
        memory = lax.fori_loop(0, self._count(count), push, tree.empty([x[0] for x in found]))
        return tree.result(memory)

    def _count(self, n: int) -> Any:
        """A number of turns that XLA does not know: it would write out a loop of one turn."""
        return jnp.where(self._go, jnp.int32(n), 0)

    def _alone(self, compute: Callable, inputs: Any) -> Any:
        nothing = lambda inputs: jax.tree.map(_zeros, jax.eval_shape(compute, inputs))
        return lax.cond(self._go, compute, nothing, inputs)


def spec(program: Program, v: Any, names: tuple) -> P:
    """How an output of a program is divided over the devices."""
    at = None if isinstance(v, _jax.Literal) else program.states[v]
    if at is None or at.major != 1:
        return P()
    return P(*[None] * at.axis, names)


def _zeros(like: Any) -> Any:
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), like.shape)  # never computed
    return jnp.zeros(like.shape, like.dtype)


def _without_sign_of_zero(x: Any, op: str) -> Any:
    """Returns 0 for -0, which rows of zeros at the end would change to 0."""
    if op != "sum" or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(x == 0, jnp.zeros_like(x), x)


def _at_least_two(x: Any) -> Any:
    """XLA does not read row i of a single row, but this row, and then no longer in the loop."""
    return jnp.concatenate([x, x]) if x.shape[0] == 1 else x

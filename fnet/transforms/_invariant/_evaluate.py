"""Evaluates the equations of a program whose sizes depend on the number of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from fnet import _jax, jaxpr
from fnet.transforms._invariant._layout import at_size, is_open, open_axes, size

_KEYED = ("random_bits", "random_split")
_TYPE = type(jax.typeof(np.float32(0)))


class Size(NamedTuple):
    """For how many rows equations are evaluated.

    Attributes:
        rows: the number of rows: 1, or all.
        row: the number of the only row, or None for all.
        total: the number of all rows.
    """

    rows: int
    row: Any
    total: int


def program(body: Any, consts: Sequence, arrays: Sequence, at: Size) -> list:
    """Evaluates an open jaxpr."""
    env = dict(zip((*body.constvars, *body.invars), (*consts, *arrays)))
    equations(body.eqns, env, at)
    return [read(env, v) for v in body.outvars]


def equations(eqns: Sequence, env: dict, at: Size) -> None:
    """Evaluates equations, whose inputs are in `env`, and adds their results to it."""
    names, here = _jax.current_names(), jax.sharding.get_abstract_mesh()
    # The program was traced outside of the mesh.
    mesh = jax.sharding.use_abstract_mesh if here.manual_axes else contextlib.nullcontext
    for eqn in eqns:
        with _jax.equation_context(eqn, names), mesh(here):
            outputs = _outputs(eqn, [read(env, v) for v in eqn.invars], at)
        env.update(zip(eqn.outvars, outputs))


def read(env: dict, v: Any) -> Any:
    return jnp.asarray(v.val, v.aval.dtype) if isinstance(v, _jax.Literal) else env[v]


def _outputs(eqn: Any, arrays: list, at: Size) -> list:
    name = eqn.primitive.name
    if name in _BODIES:
        return _BODIES[name](eqn, arrays, at)
    if name == "dim_as_value":
        total = size(jaxpr.options(eqn).dim, at.total)
        return [jnp.asarray(total, eqn.outvars[0].aval.dtype)]
    if at.row is not None and any(map(is_open, eqn.outvars[0].aval.shape)):
        if name in _KEYED and not open_axes(eqn.invars[0]):
            arrays = [_of_row(arrays[0], at.row)]
        if name == "iota" and is_open(eqn.outvars[0].aval.shape[jaxpr.options(eqn).dimension]):
            shape = at_size(eqn.outvars[0].aval.shape, 1)
            return [jnp.broadcast_to(at.row, shape).astype(eqn.outvars[0].aval.dtype)]
    arrays = _ordered(eqn, arrays)
    if name == "div":  # XLA would multiply by the reciprocal, or not, as its passes come by
        arrays = list(lax.optimization_barrier(arrays))
    results = jaxpr.bind(eqn, arrays, **_numbers(at.rows, **eqn.params))
    return _ordered(eqn, [value.x for value in results])


def _ordered(eqn: Any, arrays: list) -> list:
    """Returns the operands or results of a product, or of an operation of linear algebra, with
    their last axis contiguous. XLA would choose another order of the axes, and with it another
    order of the sums, in a program for several devices."""
    if jaxpr.product(eqn) is None and jaxpr.traits(eqn.primitive.name).kind != "linear_algebra":
        return arrays
    layout = lambda x: Layout(major_to_minor=tuple(range(x.ndim)))
    return [with_layout_constraint(x, layout(x)) if x.ndim > 1 else x for x in arrays]


def _of_row(keys: Any, row: Any) -> Any:
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, row)


def _numbers(rows: int, /, **params: Any) -> dict[str, Any]:
    """Returns the parameters of an equation with numbers in place of sizes."""
    return {name: _closed(value, rows) for name, value in params.items()}


def _closed(value: Any, rows: int) -> Any:
    if is_open(value):
        return size(value, rows)
    if isinstance(value, _TYPE):  # of the result of a callback
        return value.update(shape=at_size(value.shape, rows))
    if type(value) in (tuple, list):
        return type(value)(_closed(x, rows) for x in value)
    return value


def _scan(eqn: Any, arrays: list, at: Size) -> list:
    loop = jaxpr.scan(eqn)
    consts, carry, slices = loop.split(arrays)

    def body(carried: list, each: list) -> tuple[list, list]:
        outputs = program(loop.jaxpr, loop.closed.consts, [*consts, *carried, *each], at)
        return outputs[: loop.carry], outputs[loop.carry :]

    last, stacks = lax.scan(
        body,
        carry,
        slices,
        length=size(loop.length, at.rows),
        reverse=bool(loop.options.get("reverse")),
    )
    return [*last, *stacks]


def _while(eqn: Any, arrays: list, at: Size) -> list:
    test, step = jaxpr.bodies(eqn)
    first = len(eqn.invars) - len(eqn.outvars)
    of_test, of_step = ([arrays[i] for i in each.inputs if i < first] for each in (test, step))

    def going(carry: list) -> Any:
        return program(test.jaxpr, test.consts, [*of_test, *carry], at)[0]

    def turn(carry: list) -> list:
        return program(step.jaxpr, step.consts, [*of_step, *carry], at)

    def turn_of_rows(carry: list) -> list:
        rows = going(carry)
        goes = [lax.broadcast_in_dim(rows, x.shape, range(rows.ndim)) for x in carry]
        return list(map(lax.select, goes, turn(carry), carry))

    start = list(arrays[first:])
    if jaxpr.ends_by_rows(eqn):  # rows that have ended stay as they are
        return lax.while_loop(lambda carry: going(carry).any(), turn_of_rows, start)
    return lax.while_loop(going, turn, start)


def _cond(eqn: Any, arrays: list, at: Size) -> list:
    index, *operands = arrays
    branches = [
        lambda *operands, body=body: program(body.jaxpr, body.consts, operands, at)
        for body in jaxpr.bodies(eqn)
    ]
    return lax.switch(index, branches, *operands)


def _solve(eqn: Any, arrays: list, at: Size) -> list:
    (solve,) = jaxpr.bodies(eqn)
    given = [arrays[i] for i in jaxpr.solve_inputs(eqn)]
    return program(solve.jaxpr, solve.consts, given, at)


def _call(eqn: Any, arrays: list, at: Size) -> list:
    (body,) = jaxpr.bodies(eqn)
    return program(body.jaxpr, body.consts, arrays, at)


_BODIES = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _solve,
    **dict.fromkeys(jaxpr.CALLS, _call),
}

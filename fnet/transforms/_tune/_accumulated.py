"""A matrix product that a loop adds up is computed once, after the loop.

The backward pass of a recurrent layer adds the gradient of its weights in each iteration of a scan:
sum over t of x[t]^T g[t]. Each iteration then reads and writes the whole sum, which is larger than
what it adds, x[t] and g[t]. After the loop, the same sum is one product, whose contracted axes
include t.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fnet import _jax, jaxpr
from fnet.jaxpr import DOT, Value, cut_out, has_shardings, inlined, nbytes, restore
from fnet.transforms._autocast._lowered import lowered

LARGE = 1 << 17
"""The smallest sum, times its iterations, in elements. For smaller ones, XLA is equally fast."""
TIMES = 4
"""How many times as large as its factors a product must be. With fewer, the loop is equally fast."""


class Sum(NamedTuple):
    """A carry of a scan to which each iteration adds a product, and that it reads for nothing else.

    Attributes:
        carry: the index of the carry.
        dot: the equation of the product.
        then: the transposes between the product and the addition, in order.
        dtype: the dtype in which the products are added.
    """

    carry: int
    dot: Any
    then: tuple[Any, ...]
    dtype: Any


def summed_products(tuner: Any, eqn: Any, at: Any, inputs: Sequence[Value]) -> list | None:
    """Evaluates a scan without the sums of products in its carry, and computes these after it."""
    parts = jaxpr.scan(eqn)
    if not _additions(parts):
        return None
    parts = dataclasses.replace(parts, closed=inlined(parts.closed, unless=has_shardings))
    sums = _worthwhile(parts, list(_sums(parts)))
    if not sums or any(each.effects for each in parts.jaxpr.eqns):
        return None
    program = parts.jaxpr
    consts, carry, slices = parts.split(program.invars)
    held, start, sliced = parts.split(list(inputs))
    left = [i for i in range(parts.carry) if all(i != each.carry for each in sums)]
    emitted = program.outvars[parts.carry :]
    stored = _stored(sums, [*slices, *emitted])
    wanted = [*(program.outvars[i] for i in left), *emitted, *stored]
    piece = cut_out(program.eqns, wanted)
    known = dict(zip(program.constvars, map(Value, parts.closed.consts)))
    known |= dict(zip(consts, held))

    def step(carried: list, arrays: list) -> tuple[list, list]:
        values = dict(zip((carry[i] for i in left), map(Value, carried)))
        values |= {v: Value(x, y.note) for v, x, y in zip(slices, arrays, sliced)}
        given = [(known | values)[v] for v in piece.invars]
        outputs = [restore(y, v.aval) for y, v in zip(tuner.evaluate(piece, (), given, at), wanted)]
        more = len(outputs) - len(stored)
        factors = [x.astype(dtype) for x, dtype in zip(outputs[more:], stored.values())]
        return outputs[: len(left)], [*outputs[len(left) : more], *factors]

    begin = [restore(start[i], carry[i].aval) for i in left]
    carried, arrays = lax.scan(step, begin, [value.x for value in sliced], **parts.options)
    stacked = list(map(Value, arrays))
    pairs = zip([*slices, *emitted, *stored], [*sliced, *stacked])
    stacks = {v: value for v, value in pairs if not isinstance(v, _jax.Literal)}
    outputs = dict(zip(left, map(Value, carried)))
    for each in sums:
        operands = [stacks[v] for v in each.dot.invars]
        outputs[each.carry] = _product(tuner, each, start[each.carry], operands, at)
    return [*(outputs[i] for i in range(parts.carry)), *stacked[: len(emitted)]]


def _stored(sums: Sequence[Sum], kept: Sequence[Any]) -> dict[Any, Any]:
    """{factor: the dtype in which the loop stores it}, of the factors that are not kept anyway."""
    stored: dict[Any, Any] = {}
    for each in sums:
        for v in each.dot.invars:
            if v not in kept:
                dtype = _factor(each)
                stored[v] = dtype if stored.get(v, dtype) == dtype else v.aval.dtype
    return stored


def _factor(each: Sum) -> Any:
    """The dtype in which a product reads its factors."""
    product = jaxpr.product(each.dot)
    assert product is not None
    return product.dtype


def _product(tuner: Any, each: Sum, start: Value, operands: list[Value], at: Any) -> Value:
    """The sum of the products of all iterations, added to the carry's start."""

    def total(start: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        with _jax.equation_context(each.dot, _jax.current_names()):
            z = _over_iterations(each, x, y)
            for transpose in each.then:
                z = z.transpose(jaxpr.options(transpose).permutation)
            return start + z

    given = [start, *operands]
    closed = _jax.make_jaxpr(total)(*(value.x for value in given))
    (value,) = tuner.evaluate(closed.jaxpr, closed.consts, given, at)
    return value


def _over_iterations(each: Sum, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product that also contracts the first axis of both operands, that of the iterations."""
    product = jaxpr.product(each.dot)
    assert product is not None
    contracted, batch = product.dimensions
    contracted = tuple((0, *(axis + 1 for axis in axes)) for axes in contracted)
    batch = tuple(tuple(axis + 1 for axis in axes) for axes in batch)
    rest = product.without("dimension_numbers", "preferred_element_type")
    if each.dot.primitive is DOT and product.dtype != jnp.bfloat16:
        dimensions = contracted, batch
        return lax.dot_general(x, y, dimensions, **rest, preferred_element_type=each.dtype)
    rest["dimension_numbers"] = contracted, batch  # XLA:CPU has no kernel for every such product
    return lowered(DOT, x, y, rest, compute=product.dtype, out=each.dtype)


def _additions(parts: Any) -> dict[int, Any]:
    """{index of a carry: its addition}, of those that an iteration reads only to add to them."""
    program, uses = parts.jaxpr, _uses(parts.jaxpr)
    made = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    _, carry, _ = parts.split(program.invars)
    found = {}
    for i, (before, after) in enumerate(zip(carry, program.outvars)):
        add = None if isinstance(after, _jax.Literal) else made.get(after)
        if add is None or add.primitive.name not in ("add", "add_any"):
            continue
        if uses[after] == uses[before] == 1 and before in add.invars:
            found[i] = add
    return found


def _uses(program: Any) -> collections.Counter:
    read = (*(v for eqn in program.eqns for v in eqn.invars), *program.outvars)
    return collections.Counter(v for v in read if not isinstance(v, _jax.Literal))


def _sums(parts: Any) -> Iterator[Sum]:
    program, uses = parts.jaxpr, _uses(parts.jaxpr)
    made = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    _, carry, slices = parts.split(program.invars)

    def only(v: Any, *names: str) -> Any:
        """The equation that makes a value, if nothing else reads the value."""
        eqn = made.get(v) if not isinstance(v, _jax.Literal) and uses[v] == 1 else None
        return eqn if eqn is not None and eqn.primitive.name in names else None

    for i, add in _additions(parts).items():
        term = add.invars[1 - list(add.invars).index(carry[i])]
        then, dtype = [], carry[i].aval.dtype
        while (eqn := only(term, "transpose", "convert_element_type")) is not None:
            if eqn.primitive.name == "transpose":
                then.append(eqn)
            elif not _widens(eqn.invars[0].aval.dtype, dtype):
                break
            term = eqn.invars[0]
        dot = only(term, DOT.name, "lowered")
        if dot is None or jaxpr.product(dot).op is not DOT:  # type: ignore[union-attr]
            continue
        if all(not isinstance(v, _jax.Literal) and (v in made or v in slices) for v in dot.invars):
            yield Sum(i, dot, tuple(reversed(then)), dtype)


def _widens(dtype: Any, into: Any) -> bool:
    floats = all(jnp.issubdtype(each, jnp.floating) for each in (dtype, into))
    return floats and jnp.finfo(dtype).bits < jnp.finfo(into).bits


def _worthwhile(parts: Any, sums: Sequence[Sum]) -> list[Sum]:
    """The sums that are larger than what must be stored to compute them after the loop, as long as
    the loop then stores at most twice as much as it did."""
    program = parts.jaxpr
    _, _, slices = parts.split(program.invars)
    stacked = [*slices, *program.outvars[parts.carry :]]
    space = sum(nbytes(v.aval) for v in stacked)
    chosen = []
    for each in sums:
        result = each.dot.outvars[0].aval
        factors = {v: v.aval.size * _factor(each).itemsize for v in each.dot.invars}
        added = sum(size for v, size in factors.items() if v not in stacked)
        large = parts.length * result.size >= LARGE
        if large and TIMES * sum(factors.values()) <= nbytes(result) and added <= space:
            space -= added
            chosen.append(each)
    return chosen

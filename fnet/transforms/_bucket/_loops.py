"""Loops and branches over padded arrays. A scan over a padded axis takes as many steps as the axis
is long."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from fnet import jaxpr
from fnet.transforms._bucket import _sizes
from fnet.transforms._bucket._rules import Call, rule


@rule("scan")
def _scan(call: Call) -> list:
    parts = jaxpr.scan(call.eqn)
    consts = call.arrays[: parts.consts]
    carry = call.arrays[parts.consts : parts.consts + parts.carry]
    slices = call.arrays[parts.consts + parts.carry :]
    reverse = bool(parts.options.get("reverse"))

    def body(carry: Any, each: Any) -> tuple[list, list]:
        outputs = call.evaluate(parts.closed, [*consts, *carry, *each])
        return outputs[: parts.carry], outputs[parts.carry :]

    if not _sizes.is_open(parts.length):
        last, stacked = lax.scan(body, carry, slices, length=parts.length, reverse=reverse)
        return [*last, *stacked]
    call.note("takes {} steps", [parts.length])
    length = call.lengths.true(parts.length)
    padded = call.lengths.padded(parts.length)
    types = [(call.padded(v.aval.shape), v.aval.dtype) for v in call.eqn.outvars[parts.carry :]]
    stacks = [_empty(shape, dtype) for shape, dtype in types]

    def step(i: Any, state: tuple) -> tuple[list, list]:
        carry, stacks = state
        where = length - 1 - i if reverse else i
        each = [lax.dynamic_index_in_dim(x, where, keepdims=False) for x in slices]
        carry, results = body(carry, each)
        return carry, [
            lax.dynamic_update_index_in_dim(stack, y, where, 0) for stack, y in zip(stacks, results)
        ]

    if not padded:
        return [*carry, *stacks]
    last, stacks = lax.fori_loop(0, length, step, (list(carry), stacks))
    return [*last, *stacks]


def _empty(shape: tuple, dtype: Any) -> Any:
    return jnp.zeros(shape, dtype)


@rule("while")
def _while(call: Call) -> list:
    tests, steps = call.options.cond_nconsts, call.options.body_nconsts
    test_body, step_body = jaxpr.bodies(call.eqn)
    of_test, of_step = call.arrays[:tests], call.arrays[tests : tests + steps]

    def test(carry: list) -> Any:
        return call.evaluate(test_body.closed, [*of_test, *carry])[0]

    def step(carry: list) -> list:
        return call.evaluate(step_body.closed, [*of_step, *carry])

    return lax.while_loop(test, step, list(call.arrays[tests + steps :]))


@rule("cond")
def _cond(call: Call) -> list:
    index, *arrays = call.arrays
    branches = [
        lambda *arrays, body=body: call.evaluate(body.closed, list(arrays))
        for body in jaxpr.bodies(call.eqn)
    ]
    return lax.switch(index, branches, *arrays)

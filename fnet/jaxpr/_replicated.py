"""Determines from a jaxpr which results of a mapped function may differ between the devices of the mapped axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan

_JOINING = frozenset(("psum", "pmax", "pmin", "all_gather"))    # the same result on every device of the axis
_DIFFERENT = frozenset(("axis_index", "get", "swap"))           # mutable arrays ("get", "swap") are not analyzed


def may_differ(jaxpr: Any, inputs: Sequence[bool], axis: Any) -> list[bool]:
    """Returns, for each output of an open jaxpr, whether its value may differ between the devices of a mapped axis.

    The results of the collectives psum, pmax, pmin and all_gather over the whole axis are equal on all devices, even if
    their inputs differ between devices. The result of axis_index over the mapped axis differs between devices. Values
    that are read from mutable arrays are assumed to differ between devices. If an equation is a call, loop or branch,
    the function analyzes the jaxprs inside the equation. The results of a primitive without a special rule, such as add
    or ppermute, may differ between devices if one of the inputs may differ. If a primitive without a special rule
    contains a jaxpr, the function also analyzes this inner jaxpr, as if its inputs were equal on all devices. If an
    output of the inner jaxpr may differ between devices, for example because it depends on axis_index, the results of
    the primitive may differ too.

    Args:
        jaxpr: the body of the mapped function.
        inputs: for each input of the jaxpr, whether its value may differ between devices. Constants do not differ.
        axis: the name of the mapped axis.
    """
    differs = dict(zip(jaxpr.invars, inputs))
    read = lambda v: not isinstance(v, _jax.Literal) and differs.get(v, False)
    for eqn in jaxpr.eqns:
        differs.update(zip(eqn.outvars, _outputs(eqn, [read(v) for v in eqn.invars], axis)))
    return [read(v) for v in jaxpr.outvars]


def _outputs(eqn, inputs, axis) -> list[bool]:
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
    names = params.get("axes", params.get("axis_name", ()))
    over = axis in names if isinstance(names, (tuple, list)) else axis == names
    if name in _JOINING and over and params.get("axis_index_groups") is None:
        return [False] * count
    if name in _DIFFERENT:
        return [over or name != "axis_index"] * count
    inside = bodies(eqn)
    kinds = {body.kind for body in inside}
    if kinds == {"call"}:
        return may_differ(inside[0].jaxpr, inputs, axis)
    if kinds == {"scan"}:
        return _loop(inside[0].jaxpr, *scan(eqn).split(inputs), axis)
    if kinds == {"while_cond", "while_body"}:
        test, step = (body.jaxpr for body in inside)
        tested, consts, carry = (len(test.invars) - count, len(step.invars) - count, inputs[len(inputs) - count:])
        after = _loop(step, inputs[tested:tested + consts], carry, [], axis)
        # If devices may leave the loop at different iterations, everything that it carries may differ.
        return [True] * count if any(may_differ(test, [*inputs[:tested], *after], axis)) else after
    if kinds == {"branch"}:
        branches = [may_differ(body.jaxpr, inputs[1:], axis) for body in inside]
        return [inputs[0] or any(branch) for branch in zip(*branches)]
    differ = (may_differ(body.jaxpr, [False] * len(body.jaxpr.invars), axis) for body in inside)
    return [any(inputs) or any(map(any, differ))] * count


def _loop(jaxpr, consts, carry, slices, axis) -> list[bool]:
    """Returns, for each element of the carry and each other output of a loop, whether it may differ between devices.

    The analysis of the loop body is repeated until the set of carry elements that may differ between devices no longer
    grows.
    """
    while True:
        outputs = may_differ(jaxpr, [*consts, *carry, *slices], axis)
        after = [before or now for before, now in zip(carry, outputs)]
        if after == carry:
            return [*after, *outputs[len(carry):]]
        carry = after

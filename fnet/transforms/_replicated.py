"""Determines from a jaxpr which results of a mapped function may differ between the devices of the
mapped axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fnet import _jax
from fnet.jaxpr._calls import bodies, scan

# The same result on every device.
_JOINING = frozenset(("psum", "pmax", "pmin", "all_gather", "pbroadcast"))
_UNCHANGED = frozenset(("pvary", "pcast", "mesh_cast"))  # no communication
_MUTABLE = frozenset(("get", "swap"))  # mutable arrays are not analyzed


def may_differ(jaxpr: Any, inputs: Sequence[bool], axis: Any, size: int) -> list[bool]:
    """Returns, for each output of an open jaxpr, whether its value may differ between the devices
    of a mapped axis.

    Equal are the results of psum, pmax, pmin, all_gather and pbroadcast over the whole axis, even
    from different inputs. From equal inputs, so are their results over groups of equal size, and
    that of a ppermute in which every device receives a value. The results of all other collectives
    over the axis may differ, such as axis_index, or reduce_scatter and all_to_all, which give each
    device another part of equal inputs. So may whatever is read from mutable arrays.

    Calls, loops and branches are analyzed inside. Any other primitive, such as add, may differ if
    one of its inputs may, or if a jaxpr that it contains may with equal inputs, for example because
    of an axis_index.

    Args:
        jaxpr: the body of the mapped function.
        inputs: for each input of the jaxpr, whether its value may differ between devices. Constants
            do not differ.
        axis: the name of the mapped axis.
        size: the number of devices of the mapped axis.
    """
    differs = dict(zip(jaxpr.invars, inputs))
    read = lambda v: not isinstance(v, _jax.Literal) and differs.get(v, False)
    for eqn in jaxpr.eqns:
        differs.update(zip(eqn.outvars, _outputs(eqn, [read(v) for v in eqn.invars], axis, size)))
    return [read(v) for v in jaxpr.outvars]


def _outputs(eqn, inputs, axis, size) -> list[bool]:
    name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
    names = params.get("axes", params.get("axis_name", ()))
    over = axis in names if isinstance(names, (tuple, list)) else axis == names
    if name in _MUTABLE:
        return [True] * count
    if over and name not in _UNCHANGED:
        return [_collective_differs(name, params, any(inputs), size)] * count
    inside = bodies(eqn)
    kinds = {body.kind for body in inside}
    if kinds == {"call"}:
        return may_differ(inside[0].jaxpr, inputs, axis, size)
    if kinds == {"scan"}:
        return _loop(inside[0].jaxpr, *scan(eqn).split(inputs), axis, size)
    if kinds == {"while_cond", "while_body"}:
        test, step = (body.jaxpr for body in inside)
        tested, consts, carry = (
            len(test.invars) - count,
            len(step.invars) - count,
            inputs[len(inputs) - count :],
        )
        after = _loop(step, inputs[tested : tested + consts], carry, [], axis, size)
        # If devices may leave the loop at different iterations, everything that it carries may
        # differ.
        return (
            [True] * count
            if any(may_differ(test, [*inputs[:tested], *after], axis, size))
            else after
        )
    if kinds == {"branch"}:
        branches = [may_differ(body.jaxpr, inputs[1:], axis, size) for body in inside]
        return [inputs[0] or any(branch) for branch in zip(*branches)]
    differ = (
        may_differ(body.jaxpr, [False] * len(body.jaxpr.invars), axis, size) for body in inside
    )
    return [any(inputs) or any(map(any, differ))] * count


def _collective_differs(name, params, inputs_differ, size) -> bool:
    """Whether the results of a collective over the mapped axis may differ between devices."""
    groups = params.get("axis_index_groups")
    if name in _JOINING:
        return groups is not None and (inputs_differ or len(set(map(len, groups))) > 1)
    if name == "ppermute":  # devices without a source get zeros
        return inputs_differ or {target for _, target in params["perm"]} != set(range(size))
    return True


def _loop(jaxpr, consts, carry, slices, axis, size) -> list[bool]:
    """Returns, for each element of the carry and each other output of a loop, whether it may differ
    between devices.

    The analysis of the loop body is repeated until the set of carry elements that may differ
    between devices no longer grows.
    """
    while True:
        outputs = may_differ(jaxpr, [*consts, *carry, *slices], axis, size)
        after = [before or now for before, now in zip(carry, outputs)]
        if after == carry:
            return [*after, *outputs[len(carry) :]]
        carry = after

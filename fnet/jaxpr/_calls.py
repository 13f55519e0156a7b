"""Finds the bodies of equations, that is, the jaxprs of calls, loops and branches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from fnet import _jax

RECURRENCES = ("recurrence", "recurrence_tangent", "recurrence_gradient")
"""fnet's own primitives that run their body, a program which a kernel may replace."""
# They only run their body.
INLINED = frozenset(("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr", *RECURRENCES))
CALLS = INLINED | {"remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call"}
"""Primitives that run one jaxpr once. The inputs and outputs of the jaxpr are those of the
equation."""
_HELD = ("jaxpr", "call_jaxpr", "call")  # the parameter that contains a call's jaxpr
CONTROL_NAMES = (
    ("jit", "pjit"),
    ("remat2", "checkpoint"),
    ("custom_jvp_call",),
    ("custom_vjp_call",),
    ("custom_vmap_call",),
    ("scan",),
    ("while",),
    ("cond",),
    ("shard_map",),
)  # in several JAX versions
# Scalar functions that combine two elements.
_COMBINERS = ("update_jaxpr", "select_jaxpr", "scatter_jaxpr")
_COMBINING = frozenset(("reduce", "reduce_window", "select_and_scatter"))


class Body(NamedTuple):
    """A jaxpr inside an equation.

    Attributes:
        kind: "call" (a body that runs once on the equation's inputs, as in jit, remat and
            custom_jvp), "scan", "while_cond", "while_body", "branch" (of a cond), "shard_map",
            "solve" (the forward solve of a custom_linear_solve), or "other" (a body of a primitive
            that fnet does not know).
        closed: the closed jaxpr.
        times: how often the body runs: the length of a scan, the number of shards of a shard_map,
            None for a loop of unknown length, and 1 otherwise.
        inputs: for each input of the jaxpr, the index of the corresponding input of the equation.
            The body of a scan or shard_map receives slices of the equation's inputs. `inputs` is
            None if it is unknown which inputs of the equation the body receives.
    """

    kind: str
    closed: Any
    times: int | None
    inputs: tuple[int, ...] | None

    @property
    def jaxpr(self) -> Any:
        """The open jaxpr, with `eqns`, `invars`, `constvars` and `outvars`."""
        return self.closed.jaxpr

    @property
    def consts(self) -> tuple:
        return tuple(self.closed.consts)


def bodies(eqn: Any) -> tuple[Body, ...]:
    """Returns the jaxprs inside an equation, or an empty tuple for an ordinary operation."""
    name, params = eqn.primitive.name, eqn.params
    inputs = range(len(eqn.invars))
    if name in CALLS:
        held = next(params[key] for key in _HELD if key in params)
        return (_body("call", held, 1, inputs),)
    if name == "scan":
        return (_body("scan", params["jaxpr"], params["length"], inputs),)
    if name == "while":
        tests, steps = params["cond_nconsts"], params["body_nconsts"]
        carry = inputs[tests + steps :]
        return (
            _body("while_cond", params["cond_jaxpr"], None, (*inputs[:tests], *carry)),
            _body("while_body", params["body_jaxpr"], None, inputs[tests:]),
        )
    if name == "cond":
        return tuple(_body("branch", branch, 1, inputs[1:]) for branch in params["branches"])
    if name == "shard_map":
        shards = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
        return (_body("shard_map", params["jaxpr"], shards, inputs),)
    if name == "custom_linear_solve":
        return (_body("solve", params["jaxprs"].solve, 1, None),)
    if name in _COMBINING or _jax.hi_primitive(eqn) is not None:
        return ()
    return tuple(_body("other", jaxpr, 1, None) for jaxpr in _jaxprs_in(params))


def mapped_whole(eqn: Any) -> bool:
    """Whether an equation is a shard_map over every axis of its mesh. XLA divides nothing inside
    of it."""
    if eqn.primitive.name != "shard_map":
        return False
    mesh = eqn.params["mesh"]
    return set(mesh.axis_names) <= {*mesh.manual_axes, *eqn.params["newly_manual_axes"]}


def solve_inputs(eqn: Any) -> tuple[int, ...]:
    """Returns the indices of the inputs of a custom_linear_solve that its forward solve gets."""
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    total = first + lengths.solve + lengths.transpose_solve
    return (*range(first, first + lengths.solve), *range(total, len(eqn.invars)))


def _jaxprs_in(params: dict) -> list:
    """Returns the jaxprs among the parameters of an unknown primitive, also those in lists."""
    jaxprs = []
    for name, value in params.items():
        if name in _COMBINERS:
            continue
        items = value if isinstance(value, (tuple, list)) else (value,)
        jaxprs += [item for item in items if hasattr(getattr(item, "jaxpr", item), "eqns")]
    return jaxprs


def _body(kind: str, jaxpr: Any, times: int | None, inputs: Iterable[int] | None) -> Body:
    return Body(kind, _jax.close(jaxpr), times, None if inputs is None else tuple(inputs))


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of an open jaxpr, at any depth. Each equation precedes the equations
    inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body.jaxpr)


def title(eqn: Any) -> str:
    """Returns the name of an equation's primitive, for a HiPrim the name of its class."""
    prim = _jax.hi_primitive(eqn)
    return eqn.primitive.name if prim is None else f"{type(prim).__name__} (HiPrim)"


def call_name(eqn: Any) -> str | None:
    """Returns the name of the function that a jit equation calls, or None for other equations."""
    return eqn.params["name"] if eqn.primitive.name in ("jit", "pjit") else None


def has_shardings(eqn: Any) -> bool:
    """Whether a call specifies shardings of its inputs or outputs."""
    return not _jax.unplaced(eqn.params)


def donated(eqn: Any) -> tuple[bool, ...]:
    """Returns a bool for each input of an equation: True if the input is donated (see `jax.jit`)."""
    return tuple(eqn.params.get("donated_invars", (False,) * len(eqn.invars)))


def opened(closed: Any) -> Any:
    """Removes the calls of `jax.jit` that enclose a whole jaxpr, and returns the jaxpr inside them.
    Calls of `jax.jit` with shardings are not removed."""
    while len(closed.jaxpr.eqns) == 1 and closed.jaxpr.eqns[0].primitive.name in ("jit", "pjit"):
        jaxpr, eqn = closed.jaxpr, closed.jaxpr.eqns[0]
        if (
            jaxpr.constvars
            or eqn.invars != jaxpr.invars
            or eqn.outvars != jaxpr.outvars
            or has_shardings(eqn)
        ):
            break
        closed = eqn.params["jaxpr"]
    return closed


@dataclasses.dataclass(frozen=True)
class Scan:
    """The body and the options of a scan equation, and how many of its inputs are constants,
    carried values and slices.

    Attributes:
        consts, carry, slices: the numbers of inputs that are constants, carried values, and sliced
            arrays.
        closed: the body of the scan, a closed jaxpr. The inputs of the body are the constants, the
            carry and the slices. The outputs of the body are the new carry and the values that the
            scan stacks.
        options: the keyword arguments of `jax.lax.scan` that the equation specifies, such as
            `length` and `reverse`.
    """

    consts: int
    carry: int
    slices: int
    closed: Any
    options: dict

    @property
    def jaxpr(self) -> Any:
        return self.closed.jaxpr

    @property
    def length(self) -> int:
        return self.options["length"]

    def split(self, values: Any) -> tuple[list, list, list]:
        """Splits `values`, one value for each input of the scan equation, into constants, carry and
        slices."""
        values, start = list(values), self.consts + self.carry
        return values[: self.consts], values[self.consts : start], values[start:]


def scan(eqn: Any) -> Scan:
    """Returns a `Scan`, which contains the body and the options of a scan equation."""
    params = eqn.params
    if "ft_in" in params:  # jax >= 0.11
        consts, carry, slices = (len(part) for part in params["ft_in"].unpack())
    else:
        consts, carry = params["num_consts"], params["num_carry"]
        slices = len(eqn.invars) - consts - carry
    options = {
        name: params[name]
        for name in ("length", "reverse", "unroll", "_split_transpose")
        if name in params
    }
    return Scan(consts, carry, slices, _jax.close(params["jaxpr"]), options)


def unrolled(eqn: Any) -> Any:
    """Returns a completely unrolled form of a scan equation."""
    return eqn.replace(params={**eqn.params, "unroll": eqn.params["length"]})

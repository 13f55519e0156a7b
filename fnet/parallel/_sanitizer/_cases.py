"""What a child process gets: exported programs, the types of their arguments, and shardings.

Everything here can be written as JSON. A child imports no code of the user.
"""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import PartitionSpec as P

Spec: TypeAlias = tuple[tuple[str, ...], ...] | None
"""For each axis of an array, the mesh axes over which it is split. None: XLA chooses."""
Axes: TypeAlias = tuple[tuple[str, int], ...]
"""The names and lengths of the axes of a mesh."""


# A child runs the same jaxlib, so calls that another jaxlib may not know are no problem.
_UNCHECKED = [
    export.DisabledSafetyCheck.custom_call(name)
    for name in (
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "TopK",
        "ApproxTopK",
        "Eigh",
    )
]


class Program(NamedTuple):
    """A function of arrays, exported.

    Attributes:
        code: the function, and its gradient if it has one, by `jax.export`, in base64.
        inputs, outputs: (shape, dtype) of each.
        domain: the name of the domain of the inputs, see `_values.draw`.
        differentiable: whether `code` contains the gradient.
    """

    code: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    domain: str = ""
    differentiable: bool = True


class Case(NamedTuple):
    """A program, the shardings with which it is to run, and what is computed.

    Attributes:
        program: the key of the program.
        mesh: the axes of the mesh.
        inputs, outputs, cotangents, gradients: the shardings. `cotangents` is None for the program
            itself, and otherwise the gradients are computed.
        stated: whether the shardings are stated by constraints inside of the compiled function,
            where a split need not be even, or else as its `in_shardings` and `out_shardings`.
    """

    program: str
    mesh: Axes
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    cotangents: tuple[Spec, ...] | None = None
    gradients: tuple[Spec, ...] = ()
    stated: bool = False


def exported(
    f: Callable,
    shapes: Sequence[Any],
    domain: str = "",
    *,
    gradient: bool = True,
    in_shardings: Any = None,
) -> Program:
    """Exports a function of arrays that returns a list of arrays, with its gradient if it has one."""
    jitted = jax.jit(f) if in_shardings is None else jax.jit(f, in_shardings=in_shardings)
    done = export.export(jitted, platforms=["cpu"], disabled_checks=_UNCHECKED)(*shapes)
    types = lambda avals: tuple((tuple(x.shape), str(x.dtype)) for x in avals)
    inputs, outputs = types(done.in_avals), types(done.out_avals)
    gradient = gradient and any(map(inexact, inputs)) and any(map(inexact, outputs))
    written = None
    if gradient:
        with contextlib.suppress(Exception):  # operations without a gradient raise many kinds
            written = done.serialize(vjp_order=1)
    code = base64.b64encode(done.serialize() if written is None else written).decode()
    return Program(code, inputs, outputs, domain, written is not None)


def inexact(kind: tuple) -> bool:
    """Whether an array of a type (shape, dtype) has a gradient."""
    return bool(jnp.issubdtype(jnp.dtype(kind[1]), jnp.inexact))


def deserialized(program: Program) -> export.Exported:
    return export.deserialize(bytearray(base64.b64decode(program.code)))


def gradient(f: Callable, program: Program) -> Callable:
    """Returns the function of inputs and cotangents that computes the gradients of those inputs
    that have some."""
    live = [i for i, kind in enumerate(program.inputs) if inexact(kind)]
    count = len(program.inputs)

    def run(*arrays: Any) -> list:
        inputs, cotangents = list(arrays[:count]), list(arrays[count:])

        def of_live(*xs: Any) -> list:
            full = list(inputs)
            for i, x in zip(live, xs):
                full[i] = x
            return [y for y, kind in zip(f(*full), program.outputs) if inexact(kind)]

        return list(jax.vjp(of_live, *(inputs[i] for i in live))[1](cotangents))

    return run


def spec_of(parts: P | None, ndim: int) -> Spec:
    """Writes a PartitionSpec as a `Spec`."""
    if parts is None:
        return None
    names = [() if part is None else part if isinstance(part, tuple) else (part,) for part in parts]
    return (*map(tuple, names), *((),) * (ndim - len(names)))


def partition(spec: Spec) -> P:
    """Writes a `Spec` as a PartitionSpec."""
    return P(*(names if len(names) > 1 else names[0] if names else None for names in spec or ()))


def size(mesh: Axes) -> int:
    return math.prod(length for _, length in mesh)


def fits(spec: Spec, shape: Sequence[int], mesh: Axes) -> bool:
    """Whether a sharding splits an array evenly."""
    lengths = dict(mesh)
    parts = [math.prod(lengths[name] for name in names) for names in spec or ()]
    return all(n % part == 0 for n, part in zip(shape, parts))


def divides(spec: Spec) -> bool:
    return spec is not None and any(spec)


def tuples(x: Any) -> Any:
    """Turns the lists that JSON makes of tuples back into tuples."""
    return tuple(map(tuples, x)) if isinstance(x, list) else x


def program(written: list) -> Program:
    return Program(*map(tuples, written))


def case(written: list) -> Case:
    return Case(*map(tuples, written))

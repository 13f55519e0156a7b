"""Sketches of the values of a program, from a run on its arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet.introspect._drawn import filled
from fnet.introspect._lock._program import Program, Sketch
from fnet.jaxpr import Interpreter, Value, cut_out

_RUNS = 3
_LAST_DIGITS = 4.0  # of the precision of a dtype, the changes of the inputs of the further runs


def add_sketches(program: Program, sources: Sequence[Any], closed: Any, arrays: Sequence) -> None:
    """Runs a program, and adds sketches to those of its nodes that other sections read: inputs,
    constants, and the values that leave a layer.

    Args:
        program: the program of `closed`.
        sources: what computes each of its nodes (see `build`).
        closed: its jaxpr.
        arrays: its inputs; those that are only described are drawn.
    """
    wanted = [i for i in _leaving(program) if sources[i] is not None]
    variables = [sources[i] for i in wanted if _is_variable(sources[i])]
    piece = cut_out(closed.jaxpr.eqns, variables)
    rng = np.random.default_rng(0)
    inputs = [filled(x, rng) for x in arrays]

    @functools.partial(jax.jit, compiler_options=_fast())
    def run(inputs: list, consts: list) -> list:
        env = dict(zip(closed.jaxpr.invars, inputs)) | dict(zip(closed.jaxpr.constvars, consts))
        outputs = Interpreter().evaluate(piece, (), [Value(env[v]) for v in piece.invars])
        return [y.x for y in outputs]

    def sketches(inputs: list, consts: list) -> np.ndarray:
        values = dict(zip(variables, run(inputs, consts)))
        given = lambda source: inputs[source] if isinstance(source, int) else source
        taken = lambda source: values.pop(source) if _is_variable(source) else given(source)
        rows = [_numbers(np.asarray(taken(sources[i]))) for i in wanted]
        return np.array(rows, np.float64).reshape(len(wanted), 3)

    consts = list(closed.consts)
    first = sketches(inputs, consts)
    noise = np.zeros(len(wanted))
    for _ in range(_RUNS - 1):
        moved = sketches([_moved(x, rng) for x in inputs], [_moved(x, rng) for x in consts])
        noise = np.maximum(noise, np.abs(moved - first).max(axis=1, initial=0))
    for i, numbers, each in zip(wanted, first, noise):
        mean, rms, projection = (_rounded(x, 5) for x in numbers)
        program.nodes[i].sketch = Sketch(mean, rms, projection, _rounded(each, 1))


def _fast() -> dict[str, Any] | None:
    """The compiler options for a program that runs three times: compiling a step would take most of
    the time."""
    if jax.default_backend() != "cpu":
        return None
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def alike(a: Sketch, b: Sketch, dtype: str) -> bool:
    """Whether two sketches are those of equal values, up to rounding."""
    if not all(math.isfinite(x) for x in (*a, *b)):
        return [math.isfinite(x) for x in a] == [math.isfinite(x) for x in b]
    tolerance = _TOLERANCE.get(dtype.partition("[")[0], 1e-3) * max(a.rms, b.rms)
    tolerance = max(tolerance, 8 * max(a.noise, b.noise))
    return all(abs(x - y) <= tolerance for x, y in zip(a[:3], b[:3]))


_TOLERANCE = {"bf16": 0.06, "f16": 0.008}


def _leaving(program: Program) -> list[int]:
    """Returns the nodes of the program itself, not of loops in it, whose results another section
    reads."""
    leaving = set(program.roots) | set(program.inputs.values())
    for node in program.nodes:
        for ref in node.refs:
            if program.nodes[ref.node].section != node.section:
                leaving.add(ref.node)
    return [
        i
        for i in sorted(leaving)
        if not program.nodes[i].section.inside and _sketched(program.nodes[i].types[0])
    ]


def _sketched(kind: str) -> bool:
    """Whether a type is that of an array of numbers with at least one element."""
    name, bracket, sizes = kind.partition("[")
    numbers = bracket and name.isalnum() and name != "f0"
    return bool(numbers) and "0" not in sizes.rstrip("]").split(",")


def _is_variable(source: Any) -> bool:
    return not isinstance(source, int | np.ndarray)


def _numbers(x: np.ndarray) -> tuple[float, float, float]:
    """The mean, the root mean square, and the projection of an array."""
    if np.iscomplexobj(x):
        x = np.stack([x.real, x.imag])
    x = x.astype(np.float64).reshape(-1)
    mixed = np.arange(1, x.size + 1, dtype=np.uint32) * np.uint32(2654435761)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(2246822519)
    signs = np.where((mixed >> np.uint32(16)) & np.uint32(1), 1.0, -1.0)
    return x.mean(), math.sqrt(np.square(x).mean()), x @ signs / math.sqrt(x.size)


def _moved(x: Any, rng: np.random.Generator) -> Any:
    """Changes the last digits of an array."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        return x
    signs = rng.integers(0, 2, np.shape(x)) * 2 - 1
    step = _LAST_DIGITS * float(jnp.finfo(dtype).eps)
    return x * jnp.asarray(1 + step * signs, dtype)


def _rounded(x: float, digits: int) -> float:
    return float(f"{x:.{digits}g}")

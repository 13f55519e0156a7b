"""The passes that make a located failure readable: smaller axes, dtypes and numbers that are
simpler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax
from fnet.axes._atoms import Atoms
from fnet.axes._resize import Resizer
from fnet.axes._ties import tie_axes
from fnet.introspect._reduce._program import Program, is_float, is_spread
from fnet.introspect._reduce._search import Search
from fnet.jaxpr import Evaluator, Value


def smaller(search: Search, program: Program) -> Program:
    """Removes indices along axes, together along all axes that must have equal sizes."""
    done: set[tuple[int, int]] = set()
    while True:
        atoms = Atoms()
        inputs = [atoms.axes(v.aval.shape) for v in program.jaxpr.invars]
        frame = tie_axes(program.jaxpr, inputs, atoms)
        every = [axis for axes in frame.axes.values() for axis in axes]
        found = dict.fromkeys(atom for axis in every for atom in atoms.expand(axis))
        for position, atom in enumerate(found):
            if (position, atoms.size(atom)) in done:
                continue
            cut = next(
                (
                    candidate
                    for kept in _parts(atoms.size(atom))
                    if _size(candidate := _cut(program, frame, inputs, atoms, {atom: kept}))
                    < _size(program)
                    and search.holds(candidate)
                ),
                None,
            )
            if cut is not None:
                program = cut
                search.progress("shrank an axis", program)
                break
            done.add((position, atoms.size(atom)))
        else:
            return program


def _parts(size: int) -> Iterator[np.ndarray]:
    """Indices to keep: one, two, then the halves and single ones further on."""
    whole = np.arange(size)
    if size <= 1:
        return
    yield whole[:1]
    if size > 2:
        yield whole[:2]
        yield whole[: size // 2]
    yield whole[size // 2 :]
    if 2 < size <= 64:
        yield from (whole[i : i + 1] for i in range(1, size // 2))
    if size > 3:
        yield whole[: size - max(1, size // 4)]


def _cut(
    program: Program, frame: Any, inputs: list, atoms: Atoms, kept: dict[int, np.ndarray]
) -> Program | None:
    resizer = Resizer(atoms, kept)
    closed = _jax.close(program.jaxpr)

    def run(*arrays: Any) -> list:
        return resizer.whole(closed, frame, list(map(Value, arrays)))

    try:
        arrays = [
            like(x, resizer.cut(np.asarray(x), axes)) if _plain(x) else x
            for x, axes in zip(program.arrays, inputs)
        ]
        return program.retraced(run, arrays)
    except Exception:  # the axis cannot be made smaller alone
        return None


def _size(program: Program | None) -> float:
    """The number of elements of all values of a program."""
    if program is None:
        return np.inf
    variables = [*program.jaxpr.invars, *(v for eqn in program.equations for v in eqn.outvars)]
    return sum(v.aval.size for v in variables)


def _plain(x: Any) -> bool:
    return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def like(x: Any, new: np.ndarray) -> Any:
    """Places a new value of an array where the old one was."""
    return jax.device_put(new, x.sharding) if is_spread(x) else new


def plainer(search: Search, program: Program) -> Program:
    """Replaces floating-point dtypes other than float32 by float32."""
    for name in ("float64", "bfloat16", "float16"):
        old = jnp.dtype(name)
        if any(x.dtype == old for x in program.arrays):
            candidate = _retyped(program, old, np.dtype(np.float32))
            program = candidate if candidate is not None and search.holds(candidate) else program
    search.progress("simplified the dtypes", program)
    return program


def _retyped(program: Program, old: np.dtype, new: np.dtype) -> Program | None:
    """Returns the program with another dtype in place of `old`, or None if it has none."""

    def typed(x: Any) -> Any:
        return like(x, np.asarray(x).astype(new)) if getattr(x, "dtype", None) == old else x

    def rule(eqn: Any, arrays: list) -> list:
        operands = [x if isinstance(x, jax.core.Tracer) else typed(x) for x in arrays]
        bound = eqn.primitive.get_bind_params(eqn.params)
        params = {name: new if _is_dtype(value, old) else value for name, value in bound.items()}
        return _jax.bind(eqn.primitive, operands, params)

    evaluate = Evaluator(rule)
    closed = _jax.close(program.jaxpr)
    try:
        return program.retraced(
            lambda *arrays: evaluate(closed, *arrays), list(map(typed, program.arrays))
        )
    except Exception:  # such as a loop, whose body states its dtypes itself
        return None


def _is_dtype(value: Any, dtype: np.dtype) -> bool:
    kind = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    return kind and np.dtype(value) == dtype


def simpler(search: Search, program: Program) -> Program:
    """Replaces the values of arguments by simpler ones: first by a pattern, then by rounded ones."""
    for i, x in enumerate(program.arrays):
        if _plain(x):
            program = _replaced(search, program, i, _patterns(np.asarray(x)))
            program = _replaced(search, program, i, _rounded(np.asarray(program.arrays[i])))
    search.progress("simplified the arguments", program)
    return program


def _replaced(search: Search, program: Program, i: int, values: Iterator[np.ndarray]) -> Program:
    """Returns the program with the first of the values of its argument i for which it fails."""
    x = program.arrays[i]
    for value in values:
        if value.tobytes() == np.asarray(x).tobytes():
            return program
        arrays = list(program.arrays)
        arrays[i] = like(x, value)
        candidate = program.with_arrays(arrays)
        if search.holds(candidate):
            return candidate
    return program


def _patterns(x: np.ndarray) -> Iterator[np.ndarray]:
    """Arrays that a line of code makes, the simplest first."""
    yield np.ones_like(x)
    yield np.zeros_like(x)
    if x.dtype.kind == "b" or not x.size:
        return
    if x.size > 1:
        yield np.arange(x.size).reshape(x.shape).astype(x.dtype)
        yield np.full_like(x, x.ravel()[0])
    extreme = x.ravel()[np.argmax(np.abs(x.ravel().astype(np.complex128)))]
    yield np.full_like(x, extreme)


def _rounded(x: np.ndarray) -> Iterator[np.ndarray]:
    """Fewer digits, and powers of ten where these do."""
    if not is_float(x) or x.dtype.kind == "c" or not x.size:
        return
    wide = x.astype(np.float64)
    finite = np.isfinite(wide)
    size = np.abs(wide[finite]).max(initial=0.0)
    if not size:
        return
    exponent = int(np.floor(np.log10(size)))
    for digits in range(5):
        kept = np.round(np.where(finite, wide, 0), digits - exponent)
        with np.errstate(over="ignore"):
            yield np.where(finite, kept, wide).astype(x.dtype)

"""The check at the end of `repro.py`, which gives it its exit status."""

from __future__ import annotations

import functools
import math

import numpy as np

from fnet.introspect._reduce._child import REPRODUCED
from fnet.introspect._reduce._predicates import (
    Differs,
    InChild,
    Memory,
    NotFinite,
    Own,
    Predicate,
    Raises,
    Slower,
    Transformed,
    side,
    work,
)
from fnet.introspect._reduce._program import Program
from fnet.introspect._reduce._reference import tolerance
from fnet.introspect._reduce._script import Script, Writing
from fnet.introspect._reduce._write import WIDTH


def script(program: Program, predicate: Predicate) -> Script:
    """Returns the script that shows a failure.

    Raises:
        Unwritable: an equation cannot be written with public names of JAX.
    """
    return Writing(program).script(functools.partial(check, predicate))


def check(predicate: Predicate, writing: Writing) -> list[str]:
    """The lines that run f, and end with status 1 if it fails."""
    if isinstance(predicate, NotFinite):
        return _not_finite(writing)
    if isinstance(predicate, Differs):
        return _differs(writing, predicate)
    if isinstance(predicate, Transformed):
        return _transformed(writing, predicate)
    if isinstance(predicate, Raises):
        return [
            "try:",
            f"    jax.block_until_ready({writing.call()})",
            "except Exception as error:",
            f'    sys.exit(f"{REPRODUCED}raises {{type(error).__name__}}: {{error}}")',
        ]
    if isinstance(predicate, Slower):
        return _slower(writing, predicate)
    if isinstance(predicate, Memory):
        return [
            f"memory = f.lower({', '.join(writing.inputs)}).compile().memory_analysis()",
            "used = memory.temp_size_in_bytes + memory.output_size_in_bytes",
            f"if used > {math.ceil(predicate.megabytes * 1e6):_}:",
            _end("memory", "used"),
        ]
    if isinstance(predicate, InChild):
        return _in_child(writing, predicate)
    assert isinstance(predicate, Own)
    return _own(writing, predicate)


def _not_finite(writing: Writing) -> list[str]:
    finite = "jnp.isfinite(y).all()" if writing.single else "all(jnp.isfinite(x).all() for x in y)"
    return [f"y = {writing.call()}", f"if not {finite}:", _end("not finite", "y")]


def _end(what: str, value: str) -> str:
    return f'    sys.exit(f"{REPRODUCED}{what}: {{{value}}}")'


def _differs(writing: Writing, predicate: Differs) -> list[str]:
    limit = predicate.limit(writing.program.run())
    expected = predicate.expected(writing.program)
    assert expected is not None
    constrained = any(
        eqn.primitive.name == "sharding_constraint" for eqn in writing.program.equations
    )
    by_call = predicate.other == "one device" and not constrained
    if by_call:
        there = writing.call(spread=False)
    else:
        written = [writing.array(f"expected{i}", x) for i, x in enumerate(expected)]
        there = written[0] if writing.single else f"({', '.join(written)})"
    lines = [f"got, expected = {writing.call()}, {there}"]
    if len(lines[0]) > WIDTH:
        lines = [f"got = {writing.call()}", f"expected = {there}"]
    if not by_call:
        lines[-1] += f"  # {predicate.where}"
    return [*lines, *_compared(writing, expected, limit, f"differs from {predicate.other}")]


def _compared(writing: Writing, expected: list, limit: float, what: str) -> list[str]:
    """The lines that compare the results `got` and `expected`. `limit` is relative to the
    largest number of each result."""
    if not writing.single:
        return [
            "close = lambda x, y: np.allclose(np.complex128(x), np.complex128(y), 0, "
            f"{limit:.0e} * np.abs(y).max())",
            "if not all(map(close, got, expected)):",
            f'    sys.exit("{REPRODUCED}{what}")',
        ]
    x = np.asarray(expected[0])
    largest = np.abs(x[np.isfinite(x.astype(np.complex128))].astype(np.complex128)).max(initial=0)
    got = "got" if x.dtype.kind in "fc" and _plain_output(writing) else "np.float64(got)"
    allowed = f"{limit * largest:.1g}"
    line = f"if not np.allclose({got}, expected, 0, {allowed}): "
    end = f'sys.exit("{REPRODUCED}{what}")'
    return [line + end] if len(line + end) <= WIDTH else [line.rstrip(), f"    {end}"]


def _plain_output(writing: Writing) -> bool:
    return writing.program.jaxpr.outvars[0].aval.dtype.name in ("float32", "float64", "complex64")


def _transformed(writing: Writing, predicate: Transformed) -> list[str]:
    changed = predicate.changed(writing.program).opened()
    expected = writing.program.run()
    own = {id(x): name for name, x in zip(writing.inputs, writing.program.arrays)}
    lines, given = [], []
    for i, x in enumerate(changed.arrays):
        name = own.get(id(x))
        if name is None:
            name = f"k{i}"
            lines.append(f"{name} = {writing.array(name, x)}")
        given.append(name)
    limit = tolerance(expected) if predicate.bound is None else predicate.bound
    return [
        *lines,
        *writing.writer.function("g", changed, given),
        f"got, expected = g({', '.join(given)}), {writing.call()}",
        *_compared(writing, expected, limit, "the rewritten program differs"),
    ]


def _slower(writing: Writing, predicate: Slower) -> list[str]:
    size = side(work(writing.program))
    return [
        "def seconds(function, *args):",
        "    jax.block_until_ready(function(*args))",
        "    times = []",
        "    for _ in range(5):",
        "        start = time.perf_counter()",
        "        jax.block_until_ready(function(*args))",
        "        times.append(time.perf_counter() - start)",
        "    return min(times)",
        f"x = np.ones(({size}, {size}), np.float32)  # a product with as many operations",
        f"ratio = seconds({', '.join(['f', *writing.inputs])}) / seconds(jax.jit(jnp.dot), x, x)",
        f"if ratio > {predicate.times:g}:",
        _end("slow", "ratio"),
    ]


def _in_child(writing: Writing, predicate: InChild) -> list[str]:
    lowered = f"f.lower({', '.join(writing.inputs)})"
    if predicate.kind == "compiles longer":
        return [
            f"lowered, start = {lowered}, time.perf_counter()",
            "lowered.compile()",
            f"if (seconds := time.perf_counter() - start) > {predicate.bound:g}:",
            _end("compiles longer", "seconds"),
        ]
    return [f"print({writing.call()})"]


def _own(writing: Writing, predicate: Own) -> list[str]:
    if predicate.source is None:
        return [f"print({writing.call()})"]
    run = f"[{writing.call()}]" if writing.single else f"list({writing.call()})"
    return [
        *predicate.source.splitlines(),
        f"run = lambda: {run}",
        f"if {predicate.name}(run, run()):",
        _end(predicate.name, "run()"),
    ]

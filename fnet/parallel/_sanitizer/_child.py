"""The child process: runs cases on emulated devices, and writes a line for each of them.

python -m fnet.parallel._sanitizer._child JOB RESULTS
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from fnet.parallel._sanitizer import _cases, _values
from fnet.parallel._sanitizer._differences import Difference, difference


class Runner:
    """Runs the cases of a job."""

    def __init__(self, programs: dict[str, _cases.Program], write: Callable[[dict], None]):
        self.programs, self.write = programs, write
        self.function = functools.cache(lambda key: _cases.deserialized(programs[key]).call)
        self.expected = functools.cache(self._expected)
        self.arguments = functools.cache(self._arguments)

    def batch(self, cases: dict[int, _cases.Case]) -> None:
        """Runs cases in one compiled program, or one after the other if this raises an error."""
        self.write({"begin": list(cases)})
        ready = {}
        for i, case in cases.items():
            try:
                self.expected(case.program, case.cotangents is not None)
                ready[i] = case
            except Exception as error:
                self.write({"id": i, "status": "not run", "text": _first_line(error)})
        try:
            lines = self._compared(ready)
        except Exception as error:
            if len(ready) == 1:
                lines = [{"id": i, "status": "raises", "text": _first_line(error)} for i in ready]
            else:
                for i, case in ready.items():
                    self.batch({i: case})
                return
        for line in lines:
            self.write(line)

    def _compared(self, cases: dict[int, _cases.Case]) -> list[dict]:
        if not cases:
            return []
        runs = [self.run(case) for case in cases.values()]
        mesh = mesh_of(next(iter(cases.values())).mesh)
        sides = [_sides(case, mesh, self.programs[case.program]) for case in cases.values()]
        compiled = jax.jit(
            lambda args: [run(*each) for run, each in zip(runs, args)],
            in_shardings=([before for before, _ in sides],),
            out_shardings=[after for _, after in sides],
        )
        verdicts: dict[int, dict] = {i: {"id": i, "status": "right"} for i in cases}
        for kind in _values.DRAWS:
            args = [
                self.arguments(c.program, c.cotangents is not None, kind) for c in cases.values()
            ]
            results = jax.device_get(compiled(args))
            for (i, case), got in zip(cases.items(), results):
                if verdicts[i]["status"] == "right":
                    verdicts[i] |= self._verdict(case, kind, got)
        return list(verdicts.values())

    def _verdict(self, case: _cases.Case, kind: str, got: Sequence[Any]) -> dict:
        wanted, noises = self.expected(case.program, case.cotangents is not None)[kind]
        for k, (many, one, noise) in enumerate(zip(got, wanted, noises)):
            if kind != "exact" and not np.isfinite(np.asarray(one, _wide(one))).all():
                continue  # an overflow, whose place may depend on the order of a sum
            found = difference(many, one, noise)
            if found is not None:
                return {"status": "wrong", "output": k, "draw": kind, **_json(found)}
        return {}

    def run(self, case: _cases.Case) -> Callable:
        """Returns the function of a case."""
        program = self.programs[case.program]
        f = self.function(case.program)
        if case.cotangents is not None:
            f = _cases.gradient(f, program)
        if not case.stated:
            return f
        mesh = mesh_of(case.mesh)
        before = [*case.inputs, *(case.cotangents or ())]
        after = case.gradients if case.cotangents is not None else case.outputs

        def stated(*arrays: Any) -> list:
            placed = [constrained(x, spec, mesh) for x, spec in zip(arrays, before)]
            return [constrained(y, spec, mesh) for y, spec in zip(f(*placed), after)]

        return stated

    def _arguments(self, key: str, backward: bool, kind: str) -> list:
        program = self.programs[key]
        cotangents = [t for t in program.outputs if _cases.inexact(t)] if backward else []
        return _values.draw(kind, program.inputs, program.domain, cotangents)

    def _expected(self, key: str, backward: bool) -> dict:
        """Returns for each kind of values the results of one device, and their noise."""
        f = self.function(key)
        run = jax.jit(_cases.gradient(f, self.programs[key]) if backward else f)
        found = {}
        for kind in _values.DRAWS:
            args = self.arguments(key, backward, kind)
            results = jax.device_get(run(*args))
            noises = [0.0] * len(results)
            if kind == "hostile":
                again = jax.device_get(run(*map(_values.shaken, args)))
                noises = [_noise(a, b) for a, b in zip(results, again)]
            found[kind] = results, noises
        return found


def constrained(x: Any, spec: _cases.Spec, mesh: Mesh) -> Any:
    if spec is None:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, _cases.partition(spec)))


@functools.cache
def mesh_of(axes: _cases.Axes) -> Mesh:
    names, lengths = zip(*axes)
    devices = np.array(jax.devices()[: math.prod(lengths)]).reshape(lengths)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def _sides(case: _cases.Case, mesh: Mesh, program: _cases.Program) -> tuple[list, list]:
    """Returns the `in_shardings` and `out_shardings` of a case."""
    before = [*case.inputs, *(case.cotangents or ())]
    if case.cotangents is None:
        after = [*case.outputs]
    else:
        after = [*case.gradients]
    if case.stated:
        whole = NamedSharding(mesh, _cases.partition(()))
        return [whole] * len(before), [None] * len(after)
    place = lambda spec: None if spec is None else NamedSharding(mesh, _cases.partition(spec))
    return list(map(place, before)), list(map(place, after))


def _wide(x: Any) -> Any:
    return np.complex128 if np.iscomplexobj(x) else np.float64


def _noise(a: Any, b: Any) -> float:
    if not jax.numpy.issubdtype(np.asarray(a).dtype, np.inexact):
        return 0.0
    a, b = np.asarray(a, _wide(a)), np.asarray(b, _wide(b))
    with np.errstate(all="ignore"):
        apart = np.abs(a - b)
    return float(np.max(apart[np.isfinite(apart)], initial=0.0))


def _json(found: Difference) -> dict:
    return {**found._asdict(), "error": float(found.error), "index": list(found.index)}


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0]}"[:500]


def batches(cases: dict[int, _cases.Case], size: int) -> Iterator[dict[int, _cases.Case]]:
    """Yields cases of one mesh, at most `size` at a time."""
    by_mesh: dict[Any, dict] = {}
    for i, case in cases.items():
        by_mesh.setdefault(case.mesh, {})[i] = case
    for group in by_mesh.values():
        items = list(group.items())
        for start in range(0, len(items), size):
            yield dict(items[start : start + size])


def propagated(job: dict) -> list:
    """Compiles a program, and returns the sharding of each of its outputs."""
    program = _cases.program(job["program"])
    mesh = mesh_of(_cases.tuples(job["mesh"]))
    place = lambda spec: None if spec is None else NamedSharding(mesh, _cases.partition(spec))
    inputs = [place(_cases.tuples(spec)) for spec in job["inputs"]]
    exported = _cases.deserialized(program)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in exported.in_avals]
    f = jax.jit(lambda *xs: list(exported.call(*xs)), in_shardings=tuple(inputs))
    compiled = f.lower(*shapes).compile()
    specs = [getattr(sharding, "spec", None) for sharding in compiled.output_shardings]
    ndims = [len(shape) for shape, _ in program.outputs]
    return [_cases.spec_of(spec, ndim) for spec, ndim in zip(specs, ndims)]


def limit(gib: float) -> None:
    """Limits the address space of this process, and keeps it from writing its memory to a file."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on each platform
        import resource

        most = int(gib * (1 << 30))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(job_file: str, results_file: str) -> None:
    with open(job_file) as stream:
        job = json.load(stream)
    limit(job["gib"])
    with open(results_file, "a") as results:

        def write(line: dict) -> None:
            results.write(json.dumps(line) + "\n")
            results.flush()

        if "program" in job:
            write({"specs": propagated(job)})
            return
        programs = {key: _cases.program(text) for key, text in job["programs"].items()}
        cases = {int(i): _cases.case(text) for i, text in job["cases"].items()}
        runner = Runner(programs, write)
        for some in batches(cases, job["size"]):
            runner.batch(some)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs the divided equations of a step, and says which of them differ from one device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fnet import _jax
from fnet.jaxpr import misdivided
from fnet.parallel._sanitizer import _cases, _processes, _program, _smaller, _spelled, _values
from fnet.parallel._sanitizer._cases import Case, Program, Spec
from fnet.parallel._sanitizer._program import Equation
from fnet.parallel._sanitizer._results import Checked, Finding
from fnet.parallel._sanitizer._smaller import Alone

_DOMAINS = {
    "cholesky": "definite",
    "eig": "definite",
    "eigh": "definite",
    "geqrf": "definite",
    "householder_product": "definite",
    "lu": "definite",
    "qr": "definite",
    "svd": "definite",
    "triangular_solve": "triangular",
    "digamma": "positive",
    "lgamma": "positive",
    "log": "positive",
    "log2": "positive",
    "pow": "positive",
    "rsqrt": "positive",
    "sqrt": "positive",
    "approx_top_k": "distinct",
}
_MODES = {
    "free": "the result lies where XLA puts it",
    "placed": "the result lies as in the step",
    "free cotangents": "the cotangents and the gradients lie where XLA puts them",
    "whole cotangents": "the cotangents are replicated",
    "placed cotangents": "the cotangents and the gradients lie as in the step",
}


@dataclasses.dataclass
class Kind:
    """Equations that are alike.

    Attributes:
        equation: the first of them.
        alone: it as a program of its own.
        key: the key of the exported program.
        inputs, outputs: the shardings of the program's arrays.
        stated: whether a sharding does not divide its array evenly.
        times: how many are alike.
    """

    equation: Equation
    alone: Alone
    key: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    stated: bool
    times: int = 1


class Sweep:
    """Runs the divided equations among `equations`."""

    def __init__(self, equations: list[Equation], mesh: _cases.Axes, limits: _processes.Limits):
        self.mesh, self.limits = mesh, limits
        self.count = len(equations)
        self.divided = [e for e in equations if any(map(_cases.divides, (*e.inputs, *e.outputs)))]
        self.programs: dict[str, Program] = {}
        self.skipped: list[tuple[str, str, str]] = []
        self.kinds: dict[tuple, Kind] = {}
        for equation in self.divided:
            self._add(equation)

    def result(self) -> Checked:
        kinds = list(self.kinds.values())
        tried = [(kind, mode, case) for kind in kinds for mode, case in self._cases(kind)]
        results = _processes.run(self.programs, [case for *_, case in tried], self.limits)
        found: dict[tuple, list] = {}
        for (kind, mode, case), result in zip(tried, results):
            if result["status"] == "not run":
                self._skip(kind.equation, f"one device does not run it, either: {result['text']}")
            elif result["status"] != "right":
                key = id(kind), case.cotangents is not None, result["status"], result.get("output")
                found.setdefault(key, []).append((kind, mode, case, result))
        return Checked(
            self.count,
            len(self.divided),
            len(kinds),
            len(results),
            tuple(self._finding(rows) for rows in found.values()),
            tuple(dict.fromkeys(self.skipped)),
            dict(self.mesh),
        )

    def _skip(self, equation: Equation, why: str) -> None:
        self.skipped.append((equation.eqn.primitive.name, equation.scope.path, why))

    def _add(self, equation: Equation) -> None:
        why = _program.why_not(equation.eqn)
        if why is not None:
            return self._skip(equation, why)
        alike = _signature(equation), equation.inputs, equation.outputs
        if alike in self.kinds:
            self.kinds[alike].times += 1
            return None
        alone = _smaller.alone(equation, self.mesh)
        if alone is None:
            return self._skip(equation, "its arrays are too large for emulated devices")
        literal = [isinstance(atom, _jax.Literal) for atom in equation.eqn.invars]
        inputs = tuple(spec for spec, flag in zip(equation.inputs, literal) if not flag)
        try:
            key = self._exported(equation, alone)
        except Exception as error:  # whatever it is, the other equations can still be run
            return self._skip(equation, f"it cannot be exported: {error}".splitlines()[0][:200])
        program = self.programs[key]
        pairs = zip((*inputs, *equation.outputs), (*program.inputs, *program.outputs))
        even = all(_cases.fits(spec, shape, self.mesh) for spec, (shape, _) in pairs)
        self.kinds[alike] = Kind(equation, alone, key, inputs, equation.outputs, not even)
        return None

    def _exported(self, equation: Equation, alone: Alone) -> str:
        key = repr((_signature(equation), alone.shapes))
        if key not in self.programs:
            domain = _DOMAINS.get(equation.eqn.primitive.name, "")
            if _unstable(**equation.eqn.params):
                domain = "distinct"
            self.programs[key] = _cases.exported(alone.function, alone.shapes, domain)
        return key

    def _cases(self, kind: Kind) -> Iterator[tuple[str, Case]]:
        """Yields (mode, case) for each way in which an equation is run."""
        program, inputs = self.programs[kind.key], kind.inputs
        free: tuple[Spec, ...] = (None,) * len(kind.outputs)
        yield "free", Case(kind.key, self.mesh, inputs, free, stated=kind.stated)
        if any(map(_cases.divides, kind.outputs)):
            yield "placed", Case(kind.key, self.mesh, inputs, kind.outputs, stated=kind.stated)
        if not program.differentiable:
            return
        keep = lambda specs, types: tuple(
            spec for spec, kind in zip(specs, types) if _cases.inexact(kind)
        )
        whole = tuple(((),) * len(shape) for shape, _ in program.outputs)
        gradients = keep(inputs, program.inputs)
        for mode, cotangents, results in (
            ("free cotangents", free, (None,) * len(gradients)),
            ("whole cotangents", whole, (None,) * len(gradients)),
            ("placed cotangents", kind.outputs, gradients),
        ):
            yield (
                mode,
                Case(
                    kind.key,
                    self.mesh,
                    inputs,
                    free,
                    keep(cotangents, program.outputs),
                    results,
                    kind.stated,
                ),
            )

    def _finding(self, rows: list[tuple]) -> Finding:
        kind, _, case, result = rows[0]
        program, equation = self.programs[kind.key], kind.equation
        backward = case.cotangents is not None
        function = kind.alone.function
        return Finding(
            primitive=equation.eqn.primitive.name,
            scope=equation.scope.path,
            phase=equation.scope.phase,
            line=_jax.line(equation.eqn),
            what=_what(program, backward, result.get("output")),
            status=result["status"],
            error=result.get("error", 0.0),
            factor=result.get("factor"),
            text=_text(result),
            mesh=dict(self.mesh),
            program=_cases.gradient(function, program) if backward else function,
            arguments=arguments(program, case, result.get("draw", "exact")),
            shardings=tuple(map(_partition, (*case.inputs, *(case.cotangents or ())))),
            out_shardings=tuple(map(_partition, case.gradients if backward else case.outputs)),
            modes=tuple(_MODES[mode] for _, mode, *_ in rows),
            known=self._known(equation, backward),
            times=kind.times,
            code=program.code,
            written=_spelled.expression(equation.eqn, kind.alone.params),
            count=len(program.inputs),
        )

    def _known(self, equation: Equation, backward: bool) -> tuple[str, ...]:
        """Returns the names of the rows of `misdivided.TABLE` for an equation, or for those of its
        gradient."""
        lengths = tuple(length for _, length in self.mesh)
        names = tuple(name for name, _ in self.mesh)
        mesh = AbstractMesh(lengths, names, axis_types=(AxisType.Auto,) * len(names))
        eqns = [equation.eqn]
        if backward:
            eqns = _gradient_equations(equation)
        rows: dict[str, None] = {}
        for eqn in eqns:
            found = misdivided.in_equation(eqn, mesh)
            rows |= dict.fromkeys(row.name for row in (found.rows if found else ()))
        return tuple(rows)


def _gradient_equations(equation: Equation) -> list:
    alone = _smaller.original(equation)
    types = lambda shapes: tuple((tuple(x.shape), str(x.dtype)) for x in shapes)
    results = jax.eval_shape(alone.function, *alone.shapes)
    program = Program("", types(alone.shapes), types(results))
    cotangents = [y for y in results if _cases.inexact((y.shape, str(y.dtype)))]
    closed = _jax.make_jaxpr(_cases.gradient(alone.function, program))(*alone.shapes, *cotangents)
    everything, recorded = _program.recording(closed)
    jax.eval_shape(everything, *alone.shapes, *cotangents)
    entries, _ = recorded()
    return [entry.eqn for entry in entries]


def arguments(program: Program, case: Case, kind: str) -> tuple:
    """Returns the arrays with which a case was run."""
    cotangents = [t for t in program.outputs if _cases.inexact(t)]
    backward = case.cotangents is not None
    return tuple(_values.draw(kind, program.inputs, program.domain, cotangents if backward else ()))


def of_step(
    function: Callable,
    shapes: Sequence[Any],
    whole: Program,
    specs: Sequence[Spec],
    mesh: _cases.Axes,
    ended: str,
) -> Checked:
    """Returns the result for a step whose compilation ended the child process."""
    arrays: tuple = ()
    if math.prod(n for shape, _ in whole.inputs for n in shape) < 1 << 16:
        arrays = tuple(_values.draw("exact", whole.inputs))
    finding = Finding(
        primitive="the whole step",
        scope="",
        phase="forward",
        line="",
        what="compiling it",
        status="hangs" if ended.startswith("no result") else "aborts",
        error=0.0,
        factor=None,
        text=ended,
        mesh=dict(mesh),
        program=function,
        arguments=arrays,
        shardings=tuple(map(_partition, specs)),
        out_shardings=(None,) * len(whole.outputs),
        modes=("no equation was run alone",),
        known=(),
        times=1,
        code=whole.code,
        written="",
        count=len(shapes),
    )
    return Checked(0, 0, 0, 1, (finding,), (), dict(mesh))


def _signature(equation: Equation) -> str:
    eqn = equation.eqn
    inputs = [
        f"{atom.aval.dtype} {atom.val}" if isinstance(atom, _jax.Literal) else str(atom.aval)
        for atom in eqn.invars
    ]
    return f"{eqn.primitive.name} {eqn.params} {inputs}"


def _unstable(*, is_stable: bool = True, **_: Any) -> bool:
    """Whether a sort may put equal elements in any order."""
    return not is_stable


def _partition(spec: Spec) -> P | None:
    return None if spec is None else _cases.partition(spec)


def _what(program: Program, backward: bool, output: int | None) -> str:
    if backward and output is None:
        return "its gradient"
    if backward:
        live = [i for i, kind in enumerate(program.inputs) if _cases.inexact(kind)]
        return f"the gradient of input {live[output]}"
    return "the result" if len(program.outputs) == 1 or output is None else f"result {output}"


def _text(result: dict) -> str:
    if result["status"] != "wrong":
        return result["text"]
    index = ", ".join(map(str, result["index"]))
    return (
        f"{result['count']} of {result['size']} elements differ: element [{index}] is "
        f"{result['many']}, and {result['one']} on one device"
    )

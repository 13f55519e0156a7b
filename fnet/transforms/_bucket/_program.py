"""A program that was traced for sizes of any value, evaluated on padded arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax, jaxpr
from fnet.transforms._bucket import _indexing, _loops, _sizes, _windows
from fnet.transforms._bucket._padded import Lengths, NoRule, Note
from fnet.transforms._bucket._rules import RULES, Call

_LOADED = _indexing, _loops, _windows  # they register their rules
_BODIES = ("scan", "while", "cond")
Ranges = Mapping[str, tuple[int, int]]
"""{letter: (shortest length, size)} of a bucket"""


def backward(raw: Any, wanted: tuple[int, ...]) -> tuple[Any, list]:
    """Returns the jaxpr (*inputs, *cotangents of the floating-point outputs) -> cotangents of the
    inputs `wanted` of a closed jaxpr with open sizes, and the sizes that it assumes not to be 0."""

    def pulled(*arrays: Any) -> list:
        inputs, cotangents = list(arrays[: len(raw.in_avals)]), arrays[len(raw.in_avals) :]

        def function(*some: Any) -> list:
            for i, x in zip(wanted, some):
                inputs[i] = x
            return [y for y in _jax.evaluate(raw, raw.consts, inputs) if is_inexact(y)]

        return jax.vjp(function, *[inputs[i] for i in wanted])[1](list(cotangents))

    with _jax.symbolic_trace() as unequal:
        closed = _jax.make_jaxpr(pulled)(*raw.in_avals, *filter(is_inexact, raw.out_avals))
    return closed, unequal


class Program:
    """A jaxpr whose sizes are expressions of letters, as one program for each bucket.

    Args:
        raw: the closed jaxpr, without constants.
        unequal: expressions of letters for which the trace assumed that they are not 0.
        least: the shortest length for which it was traced.
        donated: the inputs whose memory the program may use again.

    Attributes:
        outputs: the shapes of the outputs.
    """

    def __init__(
        self, raw: Any, unequal: Iterable = (), least: int = 1, donated: Iterable[int] = ()
    ):
        self._raw, self._shortest = raw, least
        with _jax.symbolic_trace() as more:
            self._closed = jaxpr.flatten(raw)
        program = self._closed.jaxpr
        self._inputs = [tuple(v.aval.shape) for v in program.invars]
        self.outputs = [tuple(v.aval.shape) for v in program.outvars]
        self._donated = [i for i in donated if not any(map(_sizes.is_open, self._inputs[i]))]
        self._names = sorted({name for shape in self._inputs for name in _names(shape)})
        self._unequal = [
            text
            for text in dict.fromkeys(map(str, (*unequal, *more)))
            if set(_sizes.letters(text)) <= set(self._names)
        ]
        self._least = list(dict.fromkeys(_least(program)))
        self._compiled: dict[tuple, tuple[Callable, list]] = {}
        self._derivatives: dict[tuple[int, ...], Program] = {}

    def unlike(self, lengths: Mapping[str, int]) -> str | None:
        """Why the program is not the one for some lengths: a comparison that the function makes has
        another answer, or an array would have a negative size. None if it is."""
        for name in self._names:
            if lengths[name] < self._shortest:
                return f"the function can be traced only for lengths from {self._shortest} on"
        for text in self._unequal:
            if _sizes.value(text, lengths) == 0:
                return f"the function compares sizes, and {text} is 0"
        for text in self._least:
            if _sizes.value(text, lengths) < 0:
                return f"the size {text} is less than 0"
        return None

    def __call__(self, lengths: Mapping[str, int], ranges: Ranges, arrays: Sequence) -> list:
        """Evaluates the program on arrays without padding."""
        run, shapes = self._run(ranges)
        padded = [_padded(x, shape) for x, shape in zip(arrays, shapes)]
        numbers = np.asarray([lengths[name] for name in self._names], np.int32)
        outputs = run(numbers, self._closed.consts, *padded)
        return [
            _cut(y, tuple(_sizes.value(n, lengths) for n in shape))
            for y, shape in zip(outputs, self.outputs)
        ]

    def derivative(self, wanted: tuple[int, ...]) -> Program:
        """Returns the program (*inputs, *cotangents of the floating-point outputs) -> cotangents of
        the inputs `wanted`."""
        if wanted not in self._derivatives:
            closed, unequal = backward(self._raw, wanted)
            self._derivatives[wanted] = Program(closed, [*self._unequal, *unequal], self._shortest)
        return self._derivatives[wanted]

    def padded(
        self, ranges: Ranges, numbers: Any, consts: Sequence, arrays: Sequence, note: Callable
    ) -> list:
        """Evaluates the program on padded arrays, for lengths in the order of their letters."""
        lengths = Lengths({name: numbers[i] for i, name in enumerate(self._names)}, ranges)
        run = _Evaluation(lengths, note, self._raw.jaxpr).run
        return run(self._closed.jaxpr, consts, arrays)

    def notes(self, ranges: Ranges) -> list[Note]:
        """Returns what is added to the equations, without computing anything."""
        sizes = Lengths({}, ranges)
        found: list[Note] = []
        arrays = [
            jax.ShapeDtypeStruct(sizes.shape(v.aval.shape), v.aval.dtype)
            for v in self._closed.jaxpr.invars
        ]

        def run(numbers: Any, *arrays: Any) -> list:
            note = lambda *each: found.append(Note(*each))
            return self.padded(ranges, numbers, self._closed.consts, arrays, note)

        jax.eval_shape(run, jax.ShapeDtypeStruct((len(self._names),), jnp.int32), *arrays)
        return list(dict.fromkeys(found))

    def _run(self, ranges: Ranges) -> tuple[Callable, list[tuple[int, ...]]]:
        """Returns the compiled program of a bucket, and the padded shapes of its inputs."""
        key = tuple(ranges[name] for name in self._names)
        if key not in self._compiled:

            def run(numbers: Any, consts: list, *arrays: Any) -> list:
                return self.padded(ranges, numbers, consts, arrays, lambda *_: None)

            compiled = jax.jit(run, donate_argnums=[2 + i for i in self._donated])
            shapes = list(map(Lengths({}, ranges).shape, self._inputs))
            self._compiled[key] = compiled, shapes
        return self._compiled[key]


class _Evaluation:
    """Evaluates jaxprs on padded arrays. `original` is the whole one before it was flattened."""

    def __init__(self, lengths: Lengths, note: Callable, original: Any):
        self._lengths, self._note, self._original = lengths, note, original

    def _line(self, eqn: Any) -> str:
        return _jax.line(eqn) or _line_around(self._original, eqn.primitive.name) or ""

    def run(self, program: Any, consts: Sequence, arrays: Sequence, outer: Any = None) -> list:
        env: dict = dict(zip(program.constvars, consts))
        env.update(zip(program.invars, arrays))
        names = _jax.current_names()
        scope_of = jaxpr.scopes_in(program, outer or jaxpr.Scope())

        def read(v: Any) -> Any:
            return jnp.asarray(v.val, v.aval.dtype) if isinstance(v, _jax.Literal) else env[v]

        for eqn in program.eqns:
            at = scope_of(eqn)
            with _jax.equation_context(eqn, names):
                outputs = self._outputs(eqn, at, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outputs))
        return [read(v) for v in program.outvars]

    def _outputs(self, eqn: Any, at: Any, arrays: list) -> list:
        name = eqn.primitive.name
        if name not in _BODIES and not _open_in(eqn):
            return _jax.bind_again(eqn, arrays)
        path = at.path

        def evaluate(closed: Any, arrays: list) -> list:
            return self.run(closed.jaxpr, closed.consts, arrays, at)

        def note(eqn: Any, text: str) -> None:
            self._note(path, eqn.primitive.name, text, self._line(eqn))

        try:
            if name not in RULES or not jaxpr.builtin(eqn.primitive):
                raise NoRule("")
            outputs = RULES[name](Call(eqn, arrays, self._lengths, note, evaluate))
        except NoRule as error:
            raise ValueError(_message(eqn, path, self._line(eqn), str(error))) from None
        for y, v in zip(outputs, eqn.outvars):
            expected = self._lengths.shape(v.aval.shape)
            assert y.shape == expected and y.dtype == v.aval.dtype, (name, y.aval, v.aval, expected)
        return outputs


def _message(eqn: Any, path: str, line: str, why: str) -> str:
    shapes = ", ".join(f"[{', '.join(map(str, getattr(v.aval, 'shape', ())))}]" for v in eqn.invars)
    return (
        f"bucket: no rule for {eqn.primitive.name!r} over an axis that is padded"
        f"{f', as {why}' if why else ''}: inputs {shapes or 'none'}"
        f"{f', in {path!r}' if path else ''}"
        f"{f', at {line}' if line else ''}. Write this part with other "
        "operations, or leave it outside of the function"
    )


def _line_around(program: Any, name: str) -> str | None:
    """Returns the line of the call that contains an equation of a primitive over an open size, of
    a jitted function of JAX, whose own equations have no line of the user's. None without one."""
    for eqn in program.eqns:
        if eqn.primitive.name == name and _open_in(eqn):
            return _jax.line(eqn)
        for body in jaxpr.bodies(eqn):
            inside = _line_around(body.jaxpr, name)
            if inside is not None:
                return inside or _jax.line(eqn)
    return None


def _open_in(eqn: Any) -> bool:
    """Whether an equation depends on an open size, anywhere inside."""
    atoms = (*eqn.invars, *eqn.outvars)
    if any(map(_sizes.is_open, (n for v in atoms for n in getattr(v.aval, "shape", ())))):
        return True
    if any(map(_open_param, eqn.params.values())):
        return True
    return any(_open_in(inner) for body in jaxpr.bodies(eqn) for inner in body.jaxpr.eqns)


def _open_param(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_open_param, value))
    return _sizes.is_open(value)


def _names(shape: Sequence) -> Iterator[str]:
    for size in shape:
        if _sizes.is_open(size):
            yield from _sizes.letters(str(size))


def _least(program: Any) -> Iterator[str]:
    """Yields the open sizes of a program that must be 0 or more."""
    for eqn in program.eqns:
        for v in (*eqn.invars, *eqn.outvars):
            yield from map(str, filter(_sizes.is_open, getattr(v.aval, "shape", ())))
        if eqn.primitive.name == "top_k":
            chosen = jaxpr.options(eqn)
            rest = eqn.invars[0].aval.shape[chosen.axis] - chosen.k
            if _sizes.is_open(rest):
                yield str(rest)
        for body in jaxpr.bodies(eqn):
            yield from _least(body.jaxpr)


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _padded(x: Any, shape: tuple[int, ...]) -> Any:
    if x.shape == shape:
        return x
    padding = [(0, m - n) for n, m in zip(x.shape, shape)]
    if _on_host(x):
        return np.pad(np.asarray(x), padding)
    return jnp.pad(x, padding)


def _cut(x: Any, shape: tuple[int, ...]) -> Any:
    if x.shape == shape:
        return x
    place = tuple(slice(0, n) for n in shape)
    if _on_host(x):
        return jax.device_put(np.asarray(x)[place], x.sharding if x.committed else None)
    return x[place]


def _on_host(x: Any) -> bool:
    """Whether an array is padded and cut by NumPy, as JAX compiles a program for each length."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or len(x.sharding.device_set) == 1

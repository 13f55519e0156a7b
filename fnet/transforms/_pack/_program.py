"""A program that was traced for any number of texts of any length, evaluated on packed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fnet import _jax, jaxpr
from fnet.transforms._bucket._padded import NoRule, Note
from fnet.transforms._bucket._program import _line_around, _open_in, backward
from fnet.transforms._pack import (
    _indexing,
    _loops,
    _products,
    _reductions,
    _shifts,
    _windows,
    _writes,
)
from fnet.transforms._pack._flat import back, flat_outputs, of_all_tokens, sizes_of
from fnet.transforms._pack._moves import existing, resolved
from fnet.transforms._pack._rows import Rows
from fnet.transforms._pack._rules import RULES, Call
from fnet.transforms._pack._values import ROW, TEXT, Packed, Time, groups_of, whole

_LOADED = (
    _indexing,
    _loops,
    _products,
    _reductions,
    _shifts,
    _windows,
    _writes,
)  # they register their rules
_BODIES = ("scan", "while", "cond")
KEPT = ("attention", "attention_backward")


class Program:
    """A jaxpr whose sizes are expressions of the number of texts and the length of one.

    Args:
        raw: the closed jaxpr, without constants.
        least: the shortest length for which it was traced.
    """

    def __init__(self, raw: Any, least: int = 1):
        self._raw, self.least = raw, least
        with _jax.symbolic_trace():
            self._closed = jaxpr.flatten(raw, kept=KEPT)
        self._derivatives: dict[tuple[int, ...], Program] = {}

    @property
    def outputs(self) -> list:
        return list(self._closed.jaxpr.outvars)

    def __call__(
        self, rows: Rows, arrays: Sequence, lengths: Sequence[int] = (), note: Any = None
    ) -> list:
        """Evaluates the program on packed arrays, and puts zeros where no element exists.
        `lengths` are the numbers of the inputs that are the lengths of the texts."""
        program = self._closed.jaxpr
        inputs = [
            _input(x, v.aval, rows, i in lengths)
            for i, (x, v) in enumerate(zip(arrays, program.invars))
        ]
        run = Evaluation(note or (lambda *_: None), self._raw.jaxpr).run
        outputs = run(program, [whole(c) for c in self._closed.consts], inputs, rows)
        return [_output(y, v.aval, rows, i) for i, (y, v) in enumerate(zip(outputs, self.outputs))]

    def derivative(self, wanted: tuple[int, ...]) -> Program:
        """Returns the program (*inputs, *cotangents of the floating-point outputs) -> cotangents of
        the inputs `wanted`."""
        if wanted not in self._derivatives:
            closed, _ = backward(self._raw, wanted)
            self._derivatives[wanted] = Program(closed, self.least)
        return self._derivatives[wanted]


def _input(x: Any, aval: Any, rows: Rows, lengths: bool) -> Packed:
    groups = groups_of(aval.shape, rows)
    value = Packed(x, groups, lengths=lengths)
    if value.is_global:
        return value
    return value.like(existing(value, rows), lengths=lengths)


def _output(value: Packed, aval: Any, rows: Rows, number: int) -> Any:
    value = resolved(back(value, rows), rows)
    if value.lead is not None:
        raise ValueError(
            f"pack: output {number}, {_shape(aval)}, differs from text to text, since it depends on "
            f"the length {rows.time} of a text, but it has no axis {rows.letter} of the texts. "
            f"Return it for each text, [{rows.letter}, ...], or combine the texts before"
        )
    for role in value.roles:
        if isinstance(role, Time) and not rows.layout(role.size).plain:
            raise ValueError(
                f"pack: output {number}, {_shape(aval)}, is longer than the text, and packed rows "
                f"have room for {rows.time} elements of each; cut it, such as x[:, :-1]"
            )
    x = existing(value, rows)
    sizes, i = [], 0
    for group in value.groups:
        sizes.append(int(np.prod(x.shape[i : i + len(group)], dtype=int)))
        i += len(group)
    return jnp.reshape(x, sizes)


def _shape(aval: Any) -> str:
    return f"[{', '.join(map(str, aval.shape))}]"


class Evaluation:
    """Evaluates jaxprs on packed values. `original` is the whole one before it was flattened."""

    def __init__(self, note: Callable, original: Any):
        self._note, self._original = note, original

    def run(
        self, program: Any, consts: Sequence, values: Sequence, rows: Any, outer: Any = None
    ) -> list:
        env: dict = dict(zip(program.constvars, consts))
        env.update(zip(program.invars, values))
        names = _jax.current_names()
        scope_of = jaxpr.scopes_in(program, outer or jaxpr.Scope())

        def read(v: Any) -> Packed:
            if isinstance(v, _jax.Literal):
                return whole(np.asarray(v.val, v.aval.dtype))
            return env[v]

        for eqn in program.eqns:
            at = scope_of(eqn)
            with _jax.equation_context(eqn, names):
                outputs = self._outputs(eqn, at, [read(v) for v in eqn.invars], rows)
            env.update(zip(eqn.outvars, outputs))
        return [read(v) for v in program.outvars]

    def _outputs(self, eqn: Any, at: Any, values: list, rows: Any) -> list:
        name = eqn.primitive.name
        if all(v.is_global and not v.pending for v in values) and not _open_in(eqn):
            arrays = [v.x for v in values]
            if all(map(_small, arrays)) and name not in _BODIES and not eqn.effects:
                with jax.ensure_compile_time_eval():
                    return [_same(y) for y in _jax.bind_again(eqn, list(map(jnp.asarray, arrays)))]
            return [_same(y) for y in _jax.bind_again(eqn, arrays)]
        path = at.path

        def evaluate(closed: Any, values: list, rows: Any) -> list:
            return self.run(closed.jaxpr, [whole(c) for c in closed.consts], values, rows, at)

        def note(eqn: Any, text: str) -> None:
            self._note(path, eqn.primitive.name, text, self._line(eqn))

        try:
            if not jaxpr.builtin(eqn.primitive):
                raise NoRule("")
            flat, loop = of_all_tokens(sizes_of(eqn), rows), name in _BODIES
            if flat and not loop and any(value.is_flat for value in values):
                return flat_outputs(eqn, values, rows, note, evaluate)
            try:
                if name not in RULES:
                    raise NoRule("")
                here = values if loop else [back(value, rows) for value in values]
                return _marked(name, here, RULES[name](Call(eqn, here, rows, note, evaluate)))
            except NoRule:
                if not flat:
                    raise
                return flat_outputs(eqn, values, rows, note, evaluate)
        except NoRule as error:
            raise ValueError(_message(eqn, path, self._line(eqn), str(error))) from None

    def _line(self, eqn: Any) -> str:
        return _jax.line(eqn) or _line_around(self._original, eqn.primitive.name) or ""


def _marked(name: str, inputs: list[Packed], outputs: list[Packed]) -> list[Packed]:
    """Marks results that are the same for all texts at each position. Their sum over the positions
    would be that over the positions of a text, and of some positions it has several."""
    open_sums = [v for v in inputs if v.pending and v.times]
    shared = any(v.shared for v in inputs)
    if not open_sums and not shared:
        return outputs
    linear = (
        name in ("reduce_sum", "dot_general", "scatter-add") and len(open_sums) == 1 and not shared
    )
    marked = []
    for y in outputs:
        own = any(role in (ROW, TEXT) for group in y.groups for role in group)
        here = not own and not y.pending
        if here and not y.times and not linear:
            raise NoRule("it combines over the positions what all texts have at each of them")
        marked.append(dataclasses.replace(y, shared=here and bool(y.times)))
    return marked


def _small(x: Any) -> bool:
    """Whether a number is known, so that it may say by how much something is shifted."""
    return not isinstance(x, jax.core.Tracer) and np.size(x) <= 4 and not _is_key(x)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)


def _same(y: Any) -> Packed:
    return Packed(y, tuple((int(n),) for n in y.shape))


def _message(eqn: Any, path: str, line: str, why: str) -> str:
    shapes = ", ".join(f"[{', '.join(map(str, getattr(v.aval, 'shape', ())))}]" for v in eqn.invars)
    return (
        f"pack: no rule for {eqn.primitive.name!r} on packed texts"
        f"{f', as {why}' if why else ''}: inputs {shapes or 'none'}"
        f"{f', in {path!r}' if path else ''}"
        f"{f', at {line}' if line else ''}. Write this part with other "
        "operations, or leave it outside of the function"
    )


def note_of(notes: list) -> Callable:
    return lambda *each: notes.append(Note(*each))

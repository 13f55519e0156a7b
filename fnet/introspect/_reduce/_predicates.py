"""What it means that a program fails: the predicates that have names.

A predicate's `judge(program)` returns the reason of the failure as text, or None. While a program
is cut into pieces, any reason counts; once the piece is found, it is made simpler for as long as
the reason stays the same.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import secrets
import textwrap
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from fnet import _jax
from fnet._util._nearest import did_you_mean
from fnet.introspect._reduce import _other_release, _reference
from fnet.introspect._reduce._program import (
    Program,
    Recorded,
    is_float,
    is_spread,
    recorded,
)
from fnet.introspect._reduce._reference import error, tolerance


class Predicate:
    """Attributes:
    name: as the user writes it.
    by_type: whether the failure does not depend on the values of arrays, which are then made up.
    in_child: whether a program is only ever judged by a script in a child process (see
        `_script`), since it may crash or hang.
    """

    in_child = False
    by_type = False

    @property
    def name(self) -> str:
        raise NotImplementedError

    def judge(self, program: Program) -> str | None:
        """Returns why the program fails, or None."""
        raise NotImplementedError

    def question(self, program: Program) -> str:
        """What is asked of a program, for the journal: all on which the answer depends but the
        program itself."""
        return self.name

    def step_by_step(self, program: Program) -> str | None:
        """Returns why a program fails whose equations are compiled one by one, if it only fails
        so: compiled as a whole, XLA may hide a NaN (its fast maximum on a CPU does)."""
        return None

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        """Yields the equations that may fail alone, as indices, the most likely first."""
        return range(len(program.equations))

    def found(self, program: Program) -> str:
        """What was found where the predicate does not hold, for the error message."""
        return "it does not"


class NotFinite(Predicate):
    name = "not finite"

    def judge(self, program: Program) -> str | None:
        return _new_kind(program.arrays, program.run())

    def step_by_step(self, program: Program) -> str | None:
        values = recorded(program)
        return _new_kind(program.arrays, [values[v] for v in program.jaxpr.outvars])

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        """The equations that make the first NaN or infinity on the way to an output."""
        eqns = program.equations
        maker = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        look = lambda v: np.asarray(v.val if isinstance(v, _jax.Literal) else values[v])
        bad = lambda v: is_float(v) and not np.isfinite(look(v)).all()
        open_, seen, found = [v for v in program.jaxpr.outvars if bad(v)], set(), set()
        while open_:
            i = maker.get(open_.pop())
            if i is None or i in seen:
                continue
            seen.add(i)
            sources = [v for v in eqns[i].invars if bad(v)]
            made = _new_kind(map(look, eqns[i].invars), map(look, eqns[i].outvars))
            if made is not None:
                found.add((len(sources) > 0, i))  # infinity - infinity comes after what overflows
            open_ += [v for v in sources if not isinstance(v, _jax.Literal)]
        return [i for _, i in sorted(found)]

    def found(self, program: Program) -> str:
        if any(is_float(x) and not np.isfinite(np.asarray(x)).all() for x in program.arrays):
            return "an argument is not finite itself"
        return "all of its results are finite"


def _new_kind(inputs: Iterable, outputs: Iterable) -> str | None:
    """Returns "NaN" or "infinity" if an output contains it and no input does; an infinite input is
    taken to excuse an infinite output only."""
    before, after = ([np.asarray(x) for x in arrays if is_float(x)] for arrays in (inputs, outputs))
    nan = [any(np.isnan(x).any() for x in arrays) for arrays in (before, after)]
    if nan[0]:
        return None
    if nan[1]:
        return "NaN"
    infinite = [any(np.isinf(x).any() for x in arrays) for arrays in (before, after)]
    return "infinity" if infinite[1] and not infinite[0] else None


@dataclasses.dataclass
class Differs(Predicate):
    """The results differ from those of another computation.

    Attributes:
        other: "NumPy", "float64", "one device", the name of a platform such as "cpu", or a release
            of JAX such as "jax 0.10.2".
        bound: the largest relative error that counts as equal; None: see `tolerance`.
    """

    other: str
    bound: float | None = None

    @property
    def where(self) -> str:
        """Where the other results come from, as a comment."""
        places = {"NumPy": "by NumPy", "float64": "in float64", "one device": "on one device"}
        return places.get(self.other, f"by {self.other}")

    @property
    def name(self) -> str:
        return f"differs from {self.other}"

    def question(self, program: Program) -> str:
        return f"{self.name} {self.bound}"

    def judge(self, program: Program) -> str | None:
        if self.other == "one device" and not any(map(is_spread, program.arrays)):
            return None
        expected = self.expected(program)
        if expected is None:
            return None
        got = program.run()
        return "differs" if not error(got, expected) <= self.limit(got) else None

    def limit(self, got: list) -> float:
        return tolerance(got) if self.bound is None else self.bound

    def expected(self, program: Program) -> list | None:
        if self.other in ("NumPy", "float64"):
            return _reference.by_numpy(program, wide=self.other == "float64")
        if self.other.startswith("jax "):
            return _other_release.results(program, self.other.removeprefix("jax "))
        device = None if self.other == "one device" else jax.devices(self.other)[0]
        return _reference.on_one_device(program, device)

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        """The equations whose recorded results differ from those of the other computation, the
        largest error first."""
        found = []
        other = self if self.other == "float64" else dataclasses.replace(self, other="NumPy")
        for i, eqn in enumerate(program.equations):
            outvars = [v for v in eqn.outvars if not _jax.is_dropped(v)]
            one = program.of([eqn], outvars, values)
            if one is None or not any(map(is_float, outvars)):
                continue
            expected = other.expected(one)
            got = [values[v] for v in outvars]
            if expected is None or not (apart := error(got, expected)) <= self.limit(got):
                found.append((0.0 if expected is None else -apart, i))
        return [i for _, i in sorted(found)]

    def found(self, program: Program) -> str:
        if self.other == "one device" and not any(map(is_spread, program.arrays)):
            return "no argument lies on several devices"
        expected = self.expected(program)
        if expected is None:
            return "it contains an operation for which there is no NumPy form"
        got = program.run()
        return f"the largest relative error is {error(got, expected):.1e}, and {self.limit(got):.1e} is allowed"


@dataclasses.dataclass
class Transformed(Predicate):
    """A transform, such as `ft.tune`, changes the results."""

    transform: Callable
    bound: float | None = None
    name = "differs from plain JAX"

    def question(self, program: Program) -> str:
        try:
            changed = _text(self.changed(program))
        except Exception as failed:
            changed = said(failed)
        return f"{self.name} {self.bound} {changed}"

    def judge(self, program: Program) -> str | None:
        expected = program.run()
        got = self.changed(program).run() if self._changes(program) else expected
        limit = tolerance(expected) if self.bound is None else self.bound
        return "differs" if not error(got, expected) <= limit else None

    def changed(self, program: Program) -> Program:
        """The program as the transform rewrites it."""
        return program.retraced(self.transform(program.function), program.arrays)

    def _changes(self, program: Program) -> bool:
        return _text(self.changed(program)) != _text(program)

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        """The equations that the transform rewrites."""
        known: dict[str, bool] = {}
        for i, eqn in enumerate(program.equations):
            one = program.of([eqn], eqn.outvars, values)
            if one is None:
                continue
            text = _text(one)
            if text not in known:
                known[text] = self._changes(one)
            if known[text]:
                yield i

    def found(self, program: Program) -> str:
        apart = error(self.changed(program).run(), program.run())
        return f"the largest relative error is {apart:.1e}"


def _text(program: Program) -> str:
    return str(program.jaxpr)


class Raises(Predicate):
    name = "raises"

    def judge(self, program: Program) -> str | None:
        try:
            program.run()
        except Exception as failed:
            return said(failed)
        return None

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        return () if values.failed is None else (values.failed,)

    def found(self, program: Program) -> str:
        return "it raises no error"


def said(failed: BaseException) -> str:
    """An error without what differs between two programs that fail for the same reason."""
    line = (str(failed).strip().splitlines() or [""])[0]
    return f"{type(failed).__name__}: {re.sub(r'[0-9]+', '#', line)[:80]}"


@dataclasses.dataclass
class Own(Predicate):
    """A function `failing(f, results)` of the user: `f()` runs the program once more."""

    function: Callable
    name: str = "your function"

    def question(self, program: Program) -> str:
        return f"{self.name} {self.source or self._only_here}"

    @functools.cached_property
    def _only_here(self) -> str:
        """Of a function that may read anything, another call knows no answers."""
        return secrets.token_hex()

    @property
    def written(self) -> bool:
        """Whether a script can contain the function."""
        return self.source is not None

    @functools.cached_property
    def source(self) -> str | None:
        """The text of the function, if it is a `def` that reads nothing but its arguments, and
        jax, jnp and np."""
        code = getattr(self.function, "__code__", None)
        if code is None or code.co_freevars or self.name == "<lambda>":
            return None
        if {*code.co_names} & {*self.function.__globals__} - {"jax", "jnp", "np"}:
            return None
        try:
            text = textwrap.dedent(inspect.getsource(self.function))
        except (OSError, TypeError):
            return None
        return text if text.startswith("def ") else None

    def judge(self, program: Program) -> str | None:
        results = program.run()
        holds = self.function(lambda: program.run(), results)
        return self.name if holds else None


@dataclasses.dataclass
class Slower(Predicate):
    """The program takes more than `times` the time of a matrix product with as many operations."""

    times: float

    @property
    def name(self) -> str:
        return f"slower than {self.times:g}x"

    def judge(self, program: Program) -> str | None:
        return "slow" if self.ratio(program) > self.times else None

    def ratio(self, program: Program) -> float:
        run = jax.jit(program.function)
        measured = fastest(lambda: run(*program.arrays))
        size = side(work(program))
        x = np.ones((size, size), np.float32)
        product = jax.jit(lambda x: x @ x)
        return measured / fastest(lambda: product(x))

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        """The equations, the slowest first."""
        known: dict[str, float] = {}
        found = []
        for i, eqn in enumerate(program.equations):
            one = program.of([eqn], eqn.outvars, values)
            if one is None:
                continue
            text = _text(one)
            if text not in known:
                run = jax.jit(one.function)
                known[text] = fastest(lambda run=run, one=one: run(*one.arrays), repeat=2)
            found.append((-known[text], i))
        return [i for _, i in sorted(found)[:20]]

    def found(self, program: Program) -> str:
        return (
            f"it takes {self.ratio(program):.1f} times as long as a product of as many operations"
        )


def work(program: Program) -> float:
    """The operations of a program, at least one for each number that it reads or writes."""
    from fnet.cost import count

    flops = count(program.function, *program.arrays).flops
    moved = sum(x.size for x in program.arrays) + sum(v.aval.size for v in program.jaxpr.outvars)
    return max(float(flops), 10.0 * moved)


def side(operations: float) -> int:
    """The side of square matrices whose product has so many operations."""
    return max(64, round((operations / 2) ** (1 / 3)))


def fastest(call: Callable[[], Any], repeat: int = 5) -> float:
    """The shortest time of several calls in seconds, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


@dataclasses.dataclass
class Memory(Predicate):
    """The compiled program needs more than `megabytes` for its results and between them."""

    megabytes: float
    by_type = True

    @property
    def name(self) -> str:
        return f"uses more than {self.megabytes:g} MB"

    def judge(self, program: Program) -> str | None:
        return "memory" if self.used(program) > self.megabytes * 1e6 else None

    def used(self, program: Program) -> int:
        memory = jax.jit(program.function).lower(*program.arrays).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        """The equations with the largest results that, with their operands, are too large."""
        sizes = [sum(map(_bytes, eqn.outvars)) for eqn in program.equations]
        large = [i for i, size in enumerate(sizes) if size > 0.4e6 * self.megabytes]
        return sorted(large, key=lambda i: -sizes[i])[:20]

    def found(self, program: Program) -> str:
        return f"it uses {self.used(program) / 1e6:.0f} MB"


def _bytes(v: Any) -> int:
    return v.aval.size * getattr(v.aval.dtype, "itemsize", 0)


@dataclasses.dataclass
class InChild(Predicate):
    """A predicate that the written script itself decides, in a child process.

    Attributes:
        kind: "crashes", "hangs" or "compiles longer".
        bound: the seconds that are allowed.
    """

    kind: str
    bound: float = 0.0
    name: str = ""
    in_child = True
    by_type = True

    def suspects(self, program: Program, values: Recorded) -> Iterable[int]:
        return ()


_NAMES: dict[str, Callable[[], Predicate] | None] = {
    "not finite": lambda: NotFinite(),
    "raises": lambda: Raises(),
    "crashes": lambda: InChild("crashes", name="crashes"),
    "hangs": lambda: InChild("hangs", name="hangs"),
    "differs from NumPy": lambda: Differs("NumPy"),
    "differs from float64": lambda: Differs("float64"),
    "differs from one device": lambda: Differs("one device"),
    "differs from cpu": None,
    "differs from jax 0.10.2": None,
    "differs from plain JAX": None,
    "slower than 5x": None,
    "compiles longer than 10 s": None,
    "uses more than 100 MB": None,
}
_NUMBERED: tuple[tuple[str, Callable[[Any], Predicate]], ...] = (
    (r"differs from (jax [0-9.]+|jax /.*|cpu|gpu|cuda|rocm|tpu)", lambda name: Differs(name)),
    (r"slower than ([0-9.]+) ?x", lambda n: Slower(float(n))),
    (
        r"compiles longer than ([0-9.]+) ?s",
        lambda n: InChild("compiles longer", float(n), name=f"compiles longer than {n} s"),
    ),
    (
        r"uses more than ([0-9.]+) ?MB",
        lambda n: Memory(float(n)),
    ),
)


def predicate(failing: Any, transform: Callable | None, tolerance: float | None) -> Predicate:
    """Returns the predicate of a name or of a function.

    Raises:
        ValueError: there is no predicate of this name.
    """
    if callable(failing):
        return Own(failing, name=getattr(failing, "__name__", "your function"))
    if failing == "differs from plain JAX":
        if transform is None:
            raise ValueError(
                "reduce: 'differs from plain JAX' compares a function before and after a "
                "transform: pass a function that ft.tune or ft.autocast returned, or transform="
            )
        return Transformed(transform, tolerance)
    for pattern, make in _NUMBERED:
        if match := re.fullmatch(pattern, str(failing)):
            return _bounded(make(match[1]), tolerance)
    if (make := _NAMES.get(failing)) is None:
        near = did_you_mean(str(failing), _NAMES)
        raise ValueError(
            f"reduce: failing={failing!r} is not a predicate{near and '; '}{near}. Expected a "
            f"function of a program and its results, or one of: {', '.join(_NAMES)}"
        )
    return _bounded(make(), tolerance)


def _bounded(made: Predicate, tolerance: float | None) -> Predicate:
    if isinstance(made, Differs):
        made.bound = tolerance
    return made

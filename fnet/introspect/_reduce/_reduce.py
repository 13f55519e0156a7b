"""`reduce`: the few equations of a program that make it fail, as a script."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax

from fnet._util import _files
from fnet.introspect._reduce import _child, _switches
from fnet.introspect._reduce._checks import script
from fnet.introspect._reduce._child import Limits
from fnet.introspect._reduce._passes import located
from fnet.introspect._reduce._predicates import Own, Predicate, Transformed, predicate
from fnet.introspect._reduce._program import Program, traced
from fnet.introspect._reduce._script import DATA, Script
from fnet.introspect._reduce._search import Search, log, outcome_reason
from fnet.introspect._reduce._simplify import plainer, simpler, smaller
from fnet.introspect._reduce._spell import Unwritable

SCRIPT, PARAGRAPH = "repro.py", "repro.txt"


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A program that fails, reduced to a script.

    Attributes:
        path: the script, `repro.py`. It exits with status 1 if it reproduces the failure.
        source: its text.
        failing: the predicate.
        reason: what fails, such as "NaN".
        layer: the path of the named scopes of the last of its equations, such as "blocks/mlp".
        operations: the names of the primitives of its equations, in order.
        iterations: in which iterations of which loops it failed, from the outside in.
        reproduced: whether the script was seen to fail in a process without fnet. None for a
            function of yours that the script cannot contain.
        switches: the rules of tune, scopes of autocast, or flags of the compiler, without which it
            does not fail.
        versions: {version of jax: "fails", "does not fail", or why it could not be tried}.
        tried: the number of programs that were tried.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = introspect.reduce(lambda x: jnp.log(x - 1).sum(), (jnp.ones(3),), "not finite", folder)
    >>> found.operations, found.reason
    (('log',), 'infinity')
    """

    path: Path
    source: str
    failing: str
    reason: str
    layer: str
    operations: tuple[str, ...]
    iterations: tuple[str, ...] = ()
    reproduced: bool | None = None
    switches: tuple[str, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    tried: int = 0

    @property
    def lines(self) -> int:
        """The number of lines of the script."""
        return len(self.source.splitlines())

    def __str__(self) -> str:
        return paragraph(self)


def reduce(
    f: Callable,
    args: tuple,
    failing: str | Callable,
    folder: str | Path = "out",
    *,
    transform: Callable | None = None,
    tolerance: float | None = None,
    versions: Iterable[str] = (),
    seconds: float = 600.0,
    limit_seconds: float = 120.0,
    limit_bytes: int | None = None,
    child: bool = False,
) -> Reduced:
    """Reduces a program that fails to a short script that fails for the same reason.

        found = introspect.reduce(loss, (params, batch), "not finite")
        print(found)                                        # layer, operation, and where the script is

    The program is cut by delta debugging: outputs are dropped, parts of it are replaced by the
    values that they compute, loops are opened at the iteration that fails. Then axes are made
    shorter and arguments simpler. `repro.py` needs jax and NumPy alone, and is run in a process
    without fnet before you get it. Its array data, if they are long, are in `repro.npz`.

    Args:
        f: a function of arrays.
        args: its arguments, a tuple.
        failing: a predicate's name, or a function `failing(run, results)` that returns whether a
            program fails, given the list of its results and a function that runs it again. The
            names: "not finite"; "raises"; "differs from NumPy", "... from float64", "... from one
            device" (arguments that lie on several), "... from plain JAX" (a function that `ft.tune`
            returned, or `transform`); "slower than 5x" (a matrix product with as many operations);
            "compiles longer than 10 s"; "uses more than 100 MB"; "crashes"; "hangs".
        folder: where the script goes, and a journal of what was tried: a second call continues.
        transform: a function of functions, for "differs from plain JAX".
        tolerance: the largest relative error that counts as equal. Default: the root of the
            machine epsilon, 3e-4 for float32.
        versions: releases of JAX, such as "0.10.2", or paths of Python interpreters, with which the
            script is run at the end.
        seconds: the time after which no further program is tried.
        limit_seconds, limit_bytes: what one child process may use. Default: 120 s; no limit.
        child: whether each program is run in a child process; "crashes" and the like always are.
            Its values are then not recorded, but made up.

    Returns:
        A `Reduced`, whose text says which layer and operation fail.

    Raises:
        ValueError: `failing` is not known, or the program does not fail.

    >>> import tempfile
    >>> def f(x):
    ...     with jax.named_scope("head"):
    ...         return jnp.sqrt(x - 2).sum()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(introspect.reduce(f, (jnp.ones(3),), "not finite", folder).layer)
    head
    """
    f, transform = _switches.parted(f, failing, transform)
    judge = predicate(failing, transform, tolerance)
    folder = Path(folder)
    program = traced(f, args)
    limits = Limits(limit_seconds, limit_bytes)
    search = Search(judge, folder, limits=limits, seconds=seconds, child=child)
    try:
        return _Reduction(search, judge, program, folder).reduced(tuple(versions))
    finally:
        search.journal.close()


class _Reduction:
    def __init__(self, search: Search, judge: Predicate, program: Program, folder: Path):
        self.search, self.judge, self.program, self.folder = search, judge, program, folder

    def reduced(self, versions: tuple[str, ...]) -> Reduced:
        search, start = self.search, time.monotonic()
        search.progress("begin", self.program)
        if not self._fails():
            what = "it ends well" if search.child else self.judge.found(self.program)
            raise ValueError(f"reduce: the program does not fail ({self.judge.name}): {what}")
        stages = [located(search, self.program)]
        search.reason = search.judge(stages[-1])
        for simplify in (smaller, plainer, simpler):
            stages.append(simplify(search, stages[-1]))
        if stages[-1] is not stages[0]:
            stages.append(smaller(search, stages[-1]))
        found = self._written(stages[::-1])
        if versions:
            outcomes = _switches.versions(found.path, versions, search.limits)
            found = dataclasses.replace(found, versions=outcomes)
        _files.write(self.folder / PARAGRAPH, f"{found}\n")
        log.info("%s: %d lines, %.0f s", found.path, found.lines, time.monotonic() - start)
        return found

    def _fails(self) -> bool:
        if self.search.judge(self.program) is not None:
            return True
        return not self.search.child and self.judge.step_by_step(self.program) is not None

    def _written(self, stages: list[Program]) -> Reduced:
        """Writes the simplest program whose script fails on its own."""
        path = self.folder / SCRIPT
        written: list[tuple[Program, Script]] = []
        for program in dict.fromkeys(stages):
            try:
                text = script(program, self.judge)
            except Unwritable as failed:
                log.info("%s", failed)
                continue
            text.write(path)
            written.append((program, text))
            if self._reproduces(path) is not False:
                return self._result(program, text, self._reproduces(path))
        if not written:
            raise ValueError(
                "reduce: the failing operations cannot be written with public names of JAX: "
                f"{', '.join(_operations(stages[0]))}"
            )
        program, text = written[0]
        text.write(path)
        return self._result(program, text, False)

    def _reproduces(self, path: Path) -> bool | None:
        if isinstance(self.judge, Own) and not self.judge.written:
            return None
        key = f"script {_files_digest(path)}"
        journal = self.search.journal
        if key not in journal:
            outcome = _child.run(path, self.search.limits)
            journal.add(key, outcome_reason(self.judge, outcome))
        return journal[key] is not None

    def _result(self, program: Program, text: Script, reproduced: bool | None) -> Reduced:
        return Reduced(
            path=self.folder / SCRIPT,
            source=text.text,
            failing=self.judge.name,
            reason=self.search.reason or "",
            layer=_layer(program),
            operations=_operations(program),
            iterations=program.iterations,
            reproduced=reproduced,
            switches=self._switches(program),
            tried=self.search.tried,
        )

    def _switches(self, program: Program) -> tuple[str, ...]:
        if isinstance(self.judge, Transformed):
            return _switches.parts(self.judge, program)
        return _switches.flags(self.folder / SCRIPT, self.judge, self.search.limits)


def _layer(program: Program) -> str:
    return next((at.path for at in program.scopes[::-1] if at.path), "")


def _operations(program: Program) -> tuple[str, ...]:
    return tuple(eqn.primitive.name for eqn in program.equations)


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _files_digest(path: Path) -> str:
    import hashlib

    digest = hashlib.sha256(path.read_bytes())
    if (data := path.parent / DATA).exists():
        digest.update(data.read_bytes())
    return digest.hexdigest()[:24]


def paragraph(found: Reduced) -> str:
    """What was found, as text."""
    counted = {name: found.operations.count(name) for name in dict.fromkeys(found.operations)}
    names = ", ".join(f"{name} ({n} times)" if n > 1 else name for name, n in counted.items())
    where = f"in '{found.layer}'" if found.layer else "outside of any layer"
    inside = f", {', in '.join(found.iterations)} of the loop around it" if found.iterations else ""
    seen = {
        True: "It exits with status 1 in a process without fnet.",
        False: "It does not fail on its own: the failure needs the rest of the program.",
        None: "It prints the results; your function judges them.",
    }[found.reproduced]
    lines = [
        f"{found.failing} ({found.reason}): {names} {where}{inside}.",
        f"{found.path}: {_counted(len(found.operations), 'equation')}, {found.lines} lines. {seen}",
    ]
    if found.switches:
        lines.append(f"It takes {', '.join(found.switches)}: it does not fail without.")
    lines += [f"jax {version}: {outcome}" for version, outcome in found.versions.items()]
    lines.append(
        f"jax {jax.__version__} on {jax.default_backend()}; {_counted(found.tried, 'program')} tried."
    )
    return "\n".join(lines)

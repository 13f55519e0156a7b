"""What a failure depends on besides the program: rules, flags of the compiler, versions of JAX."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fnet import transforms as ft
from fnet.introspect._reduce import _child
from fnet.introspect._reduce._child import Limits
from fnet.introspect._reduce._environments import interpreter
from fnet.introspect._reduce._predicates import Predicate, Transformed
from fnet.introspect._reduce._program import Program
from fnet.introspect._reduce._search import minimized, outcome_reason


def parted(f: Callable, failing: Any, transform: Callable | None) -> tuple[Callable, Any]:
    """Returns a function and the transform that was applied to it, if `failing` compares both."""
    if failing != "differs from plain JAX" or transform is not None:
        return f, transform
    if (tuned := getattr(f, "tuned", None)) is not None:
        step, chip, chosen, _ = tuned
        return step, Tuned(chip, [rule.name for rule in chosen])
    if (cast := getattr(f, "autocast", None)) is not None:
        plain, policy, rules = cast
        return plain, functools.partial(ft.autocast, policy=policy, rules=rules)
    return f, None


class Tuned:
    """`ft.tune` for a chip, with some of its rules."""

    def __init__(self, chip: Any, names: Sequence[str]):
        self.chip, self.names = chip, list(names)

    def __call__(self, f: Callable) -> Callable:
        known = [rule.name for rule in ft.tune(f, self.chip).tuned[2]]
        return ft.tune(f, self.chip, rules={n: False for n in known if n not in self.names})


def rules(judge: Transformed, program: Program) -> tuple[str, ...]:
    """Returns the rules of a tuned program without which its results are right."""
    tuned = judge.transform
    if not isinstance(tuned, Tuned):
        return ()

    def wrong(kept: list[str]) -> bool:
        try:
            return Transformed(Tuned(tuned.chip, kept), judge.bound).judge(program) is not None
        except Exception:
            return False

    if not wrong(tuned.names) or wrong([]):
        return ()
    return tuple(f"the rule {name!r} of tune" for name in minimized(tuned.names, wrong))


def flags(script: Path, judge: Predicate, limits: Limits) -> tuple[str, ...]:
    """Returns the flags in XLA_FLAGS without which a script does not fail."""
    given = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "host_platform_device_count" not in flag
    ]

    def fails(kept: list[str]) -> bool:
        outcome = _child.run(script, limits, environment={"XLA_FLAGS": " ".join(kept)})
        return outcome_reason(judge, outcome) is not None

    if not given or fails([]) or not fails(given):
        return ()
    return tuple(minimized(given, fails))


def versions(script: Path, wanted: Sequence[str], limits: Limits) -> dict[str, str]:
    """Runs a script with other releases of JAX, each in an environment of its own.

    Args:
        script: the script.
        wanted: versions of jax, or paths of Python interpreters that have one.

    Returns:
        {version: "fails", "does not fail", or why it could not be tried}.
    """
    found: dict[str, str] = {}
    for version in wanted:
        try:
            python = interpreter(version)
        except (OSError, ValueError) as failed:
            found[version] = str(failed)
            continue
        outcome = _child.run(script, limits, python=python)
        if outcome.reproduced is not None:
            found[version] = "fails"
        elif outcome.status == 0:
            found[version] = "does not fail"
        else:
            found[version] = outcome.crashed or outcome.hung or outcome.last_line
    return found

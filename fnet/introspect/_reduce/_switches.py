"""What a failure depends on besides the program: rules, flags of the compiler, versions of JAX."""

from __future__ import annotations

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
from fnet.transforms._autocast._autocast import of_part


def parted(f: Callable, failing: Any, transform: Callable | None) -> tuple[Callable, Any]:
    """Returns a function and the transform that was applied to it, if `failing` compares both."""
    if failing != "differs from plain JAX" or transform is not None:
        return f, transform
    if (tuned := getattr(f, "tuned", None)) is not None:
        step, chip, chosen, _ = tuned
        return step, Tuned(chip, [rule.name for rule in chosen])
    if (cast := getattr(f, "autocast", None)) is not None:
        plain, policy, rules = cast
        return plain, Cast(policy, rules)
    return f, None


class Tuned:
    """`ft.tune` for a chip, with some of its rules."""

    def __init__(self, chip: Any, names: Sequence[str]):
        self.chip, self.names = chip, list(names)

    def __call__(self, f: Callable) -> Callable:
        known = [rule.name for rule in ft.tune(f, self.chip).tuned[2]]
        return ft.tune(f, self.chip, rules={n: False for n in known if n not in self.names})


class Cast:
    """`ft.autocast` with a policy and rules, except in some scopes, which stay in float32."""

    def __init__(self, policy: Any, rules: tuple, spared: Sequence[str] = ()):
        self.policy, self.rules, self.spared = policy, rules, spared

    def __call__(self, f: Callable) -> Callable:
        return of_part(f, self.policy, self.rules, self.spared)


def parts(judge: Transformed, program: Program) -> tuple[str, ...]:
    """Returns the rules of a tuned program, or the scopes of one in mixed precision, without which
    its results are right."""
    whole = judge.transform
    if isinstance(whole, Tuned):
        kind, names = "rule {!r} of tune", whole.names
        some = lambda kept: Tuned(whole.chip, kept)
    elif isinstance(whole, Cast):
        kind, names = "scope {!r} of autocast", sorted({at.path for at in program.scopes} - {""})
        some = lambda kept: Cast(whole.policy, whole.rules, [n for n in names if n not in kept])
    else:
        return ()

    def wrong(kept: list[str]) -> bool:
        try:
            return Transformed(some(kept), judge.bound).judge(program) is not None
        except Exception:
            return False

    if not wrong(names) or wrong([]):
        return ()
    return tuple(f"the {kind.format(name)}" for name in minimized(names, wrong))


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

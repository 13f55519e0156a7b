"""Selects the rewrite rules of tune for one program by timing the program with and without the
rules."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np

from fnet._util._cache import cache_folder, read_json, write_json
from fnet.hardware._cpu import read_cpu

FASTER = 0.98  # rules are omitted if the program then takes at most this fraction of the time
_ROUNDS = 9
_SECONDS = 20  # after this time, no further round begins (but at least three rounds run)
_MEMORY = 0.1  # the maximum fraction of this machine's memory that the arguments may use


class Measured(NamedTuple):
    """The rewrite rules of tune that are used for a program.

    Attributes:
        rules: the names of the rewrite rules that are used.
        seconds: {selection of rules: median time of a call in seconds}, with keys such as "all
            rules". Empty if nothing was measured.
        reason: the reason why the rules in `rules` are used.
    """

    rules: tuple[str, ...]
    seconds: Mapping[str, float]
    reason: str

    def __str__(self):
        times = ", ".join(
            f"{name} {1e3 * seconds:.3g} ms" for name, seconds in self.seconds.items()
        )
        return self.reason + (f" ({times})" if times else "")


def measure(
    compiled: Callable,
    lowered: Callable[[], str],
    fired: Callable[[], set[str]],
    rules: tuple,
    chip: Any,
    arguments: Any,
) -> Measured:
    """Times a program with all rules, with no rule, and with each rule disabled in turn. Stored
    results are reused.

    Args:
        compiled: `compiled(rules)` returns the program as a function of `arguments`. The program
            may donate its arguments.
        lowered: a function that returns the StableHLO text of the original program, to which no
            rewrite rule is applied. The StableHLO text is a part of the key under which the
            measured times are stored.
        fired: a function that returns the names of the rewrite rules that change the program.
        rules: all rules.
        chip: the chip.
        arguments: the arguments of a call. They are copied.

    Returns:
        The selection of rules with which the program runs fastest. If the program cannot be timed,
        all rewrite rules are selected.
    """
    every = tuple(rule.name for rule in rules)
    if reason := _unmeasurable(arguments):
        return Measured(every, {}, f"all rules, not measured: {reason}")
    names = [name for name in every if name in fired()]
    if not names:
        return Measured(every, {}, "no rule applies")
    text = lowered()
    if "callback" in text:
        return Measured(
            every, {}, "all rules, not measured: the step has callbacks, which would run more often"
        )
    path = cache_folder() / "tuned" / f"{_key(text, chip, every)}.json"
    known = _known(path, every)
    if known is not None:
        return known
    variants = {"all rules": names, "no rule": []}  # {label: names of the rules that are used}
    if len(names) > 1:
        for name in names:
            variants[_without(name)] = [other for other in names if other != name]

    def used(label: str) -> tuple:
        """The rules of a variant. Rules that do not change this program stay, for other ones."""
        kept = variants[label]
        return tuple(rule for rule in rules if rule.name in kept or rule.name not in names)

    def timed(labels: Iterable[str]) -> dict[str, list[float]]:
        return _times({label: compiled(used(label)) for label in labels}, arguments)

    times = timed(variants)
    ratio = lambda label: statistics.median(a / b for a, b in zip(times[label], times["all rules"]))
    slow = []
    if len(names) > 1:
        slow = [name for name in names if ratio(_without(name)) <= FASTER]
    if len(slow) > 1:
        label = _without(*slow)
        variants[label] = [name for name in names if name not in slow]
        both = timed(("all rules", label))
        # The machine may be faster or slower now than in the first measurement.
        scale = statistics.median(times["all rules"]) / statistics.median(both["all rules"])
        times[label] = [scale * each for each in both[label]]

    best = min(variants, key=ratio)
    if ratio(best) > FASTER:
        best = "all rules"
    seconds = {label: statistics.median(each) for label, each in times.items()}
    selected = tuple(rule.name for rule in used(best))
    result = Measured(selected, seconds, f"{best}: the fastest, measured")
    write_json(path, result._asdict())
    return result


def _without(*names: str) -> str:
    return f"without {', '.join(names)}"


def _unmeasurable(arguments) -> str | None:
    leaves = jax.tree.leaves(arguments)
    if not all(
        isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)
        for leaf in leaves
    ):
        return "an argument is not an array"
    if jax.process_count() > 1:
        return "several processes could select different rules"
    memory = read_cpu().memory_bytes
    if memory and sum(getattr(leaf, "nbytes", 0) for leaf in leaves) > _MEMORY * memory:
        return "copies of the arguments would need too much memory"
    return None


def _key(text, chip, every) -> str:
    cpu = read_cpu()
    parts = text, chip.name, cpu.model, cpu.flags, cpu.cores, jaxlib.__version__, every
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _known(path, every) -> Measured | None:
    content = read_json(path)
    rules, seconds, reason = (content.get(field) for field in Measured._fields)
    if (
        isinstance(rules, list)
        and set(rules) <= set(every)
        and isinstance(seconds, dict)
        and isinstance(reason, str)
    ):
        return Measured(tuple(rules), seconds, reason)
    return None


def _times(programs, arguments) -> dict[str, list[float]]:
    """Returns {name of a program: its times in seconds, one for each round}. In each round, every
    program runs once."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    end = None
    for number in range(_ROUNDS + 1):  # the first one compiles
        if number > 3 and end is not None and time.perf_counter() > end:
            break
        for name, run in programs.items():
            copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, arguments)
            jax.block_until_ready(copies)
            began = time.perf_counter()
            jax.block_until_ready(run(copies))
            if number:
                times[name].append(time.perf_counter() - began)
        end = end or time.perf_counter() + _SECONDS
    return times

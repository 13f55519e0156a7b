"""Compiles a step for the devices of a plan, and reads from the compiled program how much memory it
needs and which transfers between chips it contains."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax

from fnet.parallel._ledger import Ledger, ledger

_FULL = (
    "RESOURCE_EXHAUSTED",
    "Ran out of memory",
    "out of memory",
    "exceeds the memory",
    "Exceeded hbm capacity",
)


class Compiled(NamedTuple):
    """Properties of a compiled program.

    Attributes:
        arguments: bytes of the program's arguments on each chip.
        peak: bytes that the program needs on each chip, or None if the program does not fit into
            memory.
        ledger: the transfers between chips, or None if the compiler does not return the HLO text of
            the program.
        said: the error message of the compiler if the program does not fit into memory, or an empty
            string if it fits.
    """

    arguments: int
    peak: int | None
    ledger: Ledger | None
    said: str = ""


def compiled(step, state, batch) -> Compiled:
    """Compiles a step that `Plan.jit` returned, and returns the properties of the program."""
    lowered = step.lower(state, batch)
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
        if not any(mark in said for mark in _FULL):
            raise
        line = next(
            (line for line in said.splitlines() if any(mark in line for mark in _FULL)), said
        )
        return Compiled(0, None, None, re.split(r"\. (?=[A-Z])", line.strip())[0][:200])
    stats = program.memory_analysis()
    peak = (
        stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes
        + stats.temp_size_in_bytes
    )
    return Compiled(stats.argument_size_in_bytes, peak, _sent(program))


def _sent(program) -> Ledger | None:
    """Returns the ledger (the transfers between chips) of a program, or None if the compiler does
    not return the HLO text of the program. libtpu (the compiler for TPUs) does not return the HLO
    text of some large programs."""
    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError:
        return None
    return None if text is None else ledger(text)

"""Regular expressions: what another syntax would read differently, and their form in llguidance."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fnet.serve._structured._vocabulary import library

# An escape, a class with its escapes, or one character.
_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_SETS = re.compile(r"\[|&&|--|~~")  # in a class, outside of escapes
_WHY = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?>": "an atomic group",
    "(?(": "a condition",
}


def terminal(pattern: str) -> str:
    """Returns a regular expression as a terminal of llguidance's Lark. The classes \\d, \\w and \\s
    have ASCII characters only.

    Raises:
        ValueError: Python and llguidance would read it differently.
    """
    check(pattern)
    return f"/{library().regex_to_lark(pattern, 'dws')}/" if pattern else '""'


def check(pattern: str) -> None:
    """Raises the errors of `terminal`."""
    for feature in _unsupported(pattern):
        raise ValueError(f"the pattern {pattern!r:.200}: {feature}")


def _unsupported(pattern: str) -> Iterator[str]:
    repeated = False  # whether the part before is a repetition
    for match in _PART.finditer(pattern):
        part, rest = match[0], pattern[match.start() :]
        for start, feature in _WHY.items():
            if rest.startswith(start):
                yield f"{feature} is not supported"
        if repeated and part == "+":
            yield "possessive repetitions are not supported; leave the second + out"
        if part[0] == "[" and len(part) > 1 and _SETS.search(_unescaped(part)):
            yield f"escape '[', '&&', '--' and '~~' in the class {part[:80]}"
        if part[0] == "\\" and part[1:].isdigit() and part != "\\0":
            yield "references to groups are not supported"
        repeated = part in ("*", "+", "?", "}") and not repeated


def _unescaped(part: str) -> str:
    return re.sub(r"\\.", "", part[1:-1], flags=re.DOTALL)

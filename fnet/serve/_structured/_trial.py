"""Compiles a grammar and follows it for a few tokens, in a process that may be killed.

`check` starts this file as a program. It must import nothing but llguidance: a process with JAX
would take seconds to start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from typing import Any

SECONDS = 2  # of processor time for a grammar
_WALL = 20  # seconds, if others use the processors
_MEMORY = 1 << 30  # bytes
_PATHS, _TOKENS = 2, 48  # random texts, and the most bytes of each
# Fewer states than llguidance's own 250,000: they take 1 to 2 kB each, and stay.
LIMITS = {"max_lexer_states": 30_000, "verbose_errors": False}
_AT_ONCE = threading.Semaphore(4)
_TOO_SLOW = f"it takes more than {SECONDS} seconds to compile; simplify it"


def check(text: str) -> str | None:
    """Returns why llguidance cannot use a grammar, or None.

    Args:
        text: the grammar in the form of llguidance's Lark.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with _AT_ONCE:
        try:
            result = subprocess.run(
                [sys.executable, "-P", __file__],
                input=text.encode(),
                capture_output=True,
                timeout=_WALL,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            return _TOO_SLOW
    if result.returncode == 0:
        return json.loads(result.stdout)
    if result.returncode == -signal.SIGPROF:
        return _TOO_SLOW
    if result.returncode < 0:  # a stack that is full, or the memory
        return "it is nested too deeply, or needs too much memory; simplify it"
    raise RuntimeError(f"the trial of a grammar failed: {result.stderr.decode()[-500:]}")


def _main() -> None:
    import llguidance

    _limit()
    text = sys.stdin.buffer.read().decode()
    library = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(library, text, log_level=0, limits=limits)
    error = matcher.get_error() or None
    for seed in range(_PATHS):
        error = error or _follow(matcher.deep_copy(), random.Random(seed))
    print(json.dumps(error))


def _limit() -> None:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    os.nice(5)  # the texts that are generated meanwhile come first
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    except (ImportError, ValueError, OSError):  # not on every system
        pass


class _Bytes:
    """The tokenizer whose tokens are the bytes that UTF-8 has, and an end."""

    eos_token_id, bos_token_id = 256, None
    tokens = (*(bytes([i]) if i < 255 else b"" for i in range(256)), b"<end>")
    special_token_ids = (256,)

    def __call__(self, text: Any) -> list[int]:
        return []  # no tokens are forced


def _follow(matcher: Any, draw: random.Random) -> str | None:
    for _ in range(_TOKENS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            return matcher.get_error()
        tokens = [i for i in range(256) if bits >> i & 1]
        if not tokens:
            return None
        matcher.consume_token(draw.choice(tokens))
    return None


if __name__ == "__main__":
    _main()

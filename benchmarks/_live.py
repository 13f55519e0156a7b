"""Peers in separate processes that run at the same time and alternate: one works while the others sleep.

A peer's process reads one JSON object per line and answers each with one: see `serve`. Peers are started and compiled
once, and a slow period of the machine affects all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class PeerError(Exception):
    """A peer died, did not answer in time, or failed; the message states which."""


class Live:
    """A process that answers questions. Leaving its `with` block ends it.

    Args:
        name: its name in messages.
        command: the command to run in the repository's root; it ends in `serve`.
        environment: variables to set.
    """

    def __init__(self, name: str, command: list[str], environment: dict | None = None):
        self.name = name
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            cwd=Path(__file__).parent.parent, env={**os.environ, **(environment or {})})
        self.heard = b""

    def ask(self, do: str, *, limit: float, **details):
        """The answer to a question, or a PeerError after `limit` seconds."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died(do) from None
        end = time.monotonic() + limit
        while b"\n" not in self.heard:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.process.kill()
                raise PeerError(f"{self.name} gave no answer to {do!r} within {limit:g} s and was stopped")
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._died(do)
            self.heard += chunk
        line, self.heard = self.heard.split(b"\n", 1)
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name} failed at {do!r}: {answer['error']}")
        return answer["value"]

    def _died(self, do):
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return PeerError(f"{self.name} {how} at {do!r}" + (f": {lines[-1]}" if lines else ""))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        for file in self.process.stdout, self.errors:
            file.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def serve(answers: dict) -> None:
    """Answers the questions on standard input with `answers[do](**details)` until it closes.

    Standard output contains only the answers. All other output goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        details = json.loads(line)
        try:
            answer = {"value": answers[details.pop("do")](**details)}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


def turns(peers: list[Live], *, rounds: int, budget: float, untimed: int = 0,
          limit: float = 600) -> dict[str, list[float]]:
    """Seconds per step of every peer in every round; in each round each runs for about `budget` seconds.

    The first `untimed` rounds are discarded. JAX queues steps, each with its own memory, so the process grows
    in the first rounds, and the first access to memory can be ten times as slow as later ones.
    """
    figures = {peer.name: [] for peer in peers}
    for _ in range(untimed + rounds):
        for peer in peers:
            figures[peer.name].append(peer.ask("time", budget=budget, limit=limit))
    return {name: values[untimed:] for name, values in figures.items()}

"""Runs the peers of a benchmark in separate processes. One peer works while the others sleep.

A peer is one of the libraries or variants that a benchmark compares. Its process reads a JSON
object from each line, and answers with a line that contains a JSON object (see `serve`). Each peer
is started and compiled once. A slow period of the machine affects all peers.
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
    """A peer ended unexpectedly, did not answer in time, or failed. The message states the peer and
    the reason."""


class Live:
    """The process of a peer, which answers questions. At the end of its `with` block, the process
    is killed.

    Args:
        name: the name of the peer in messages.
        command: the command that starts the process, in the root folder of the repository. The
            process must call `serve`.
        environment: environment variables to set, {name: value}. Default None.
    """

    def __init__(self, name: str, command: list[str], environment: dict | None = None):
        self.name = name
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, **(environment or {})},
        )
        self.heard = b""

    def ask(self, do: str, *, limit: float, **details):
        """Asks a question and returns the answer. Raises a PeerError if there is no answer within
        `limit` seconds."""
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
                raise PeerError(
                    f"{self.name} gave no answer to {do!r} within {limit:g} s and was stopped"
                )
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
    """Answers the questions from standard input with `answers[do](**details)`, until standard input
    is closed.

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


def turns(
    peers: list[Live], *, rounds: int, budget: float, untimed: int = 0, limit: float = 600
) -> dict[str, list[float]]:
    """Returns the seconds per step of every peer in every round, {name: seconds}. In each round,
    each peer runs for about `budget` seconds.

    The first `untimed` rounds are discarded. JAX queues steps, each with its own memory, so a
    process grows in the first rounds. The first access to new memory can be ten times as slow as
    later accesses.
    """
    figures = {peer.name: [] for peer in peers}
    for _ in range(untimed + rounds):
        for peer in peers:
            figures[peer.name].append(peer.ask("time", budget=budget, limit=limit))
    return {name: values[untimed:] for name, values in figures.items()}

"""Runs a script in a child process with limits, without fnet on its path."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

REPRODUCED = "reproduced: "

_START = """
import runpy, sys
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
sys.modules["fnet"] = None  # an import of fnet is an error
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a child process may use.

    Attributes:
        seconds: its time. Default 120.
        memory: its address space in bytes. Default None: as much as this process may use.
    """

    seconds: float = 120.0
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a script ended.

    Attributes:
        status: its exit status; negative for a signal, None for a script that was stopped at the
            limit of time.
        output: what it printed, both to standard output and to standard error.
        seconds: the limit of time.
    """

    status: int | None
    output: str
    seconds: float

    @property
    def crashed(self) -> str | None:
        """How the process crashed, or None. An exit by `sys.exit` or an exception is no crash."""
        if self.status is None or self.status >= 0:
            return None
        name = signal.Signals(-self.status).name
        return f"crashed with signal {-self.status} ({name})"

    @property
    def hung(self) -> str | None:
        return None if self.status is not None else f"still running after {self.seconds:g} s"

    @property
    def reproduced(self) -> str | None:
        """What the script said after "reproduced: ", or None."""
        lines = self.output.splitlines()
        said = [line[len(REPRODUCED) :] for line in lines if line.startswith(REPRODUCED)]
        return said[-1] if said and self.status == 1 else None

    @property
    def last_line(self) -> str:
        lines = self.output.strip().splitlines()
        return lines[-1].strip() if lines else "it printed nothing"


def run(
    script: Path,
    limits: Limits,
    *,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Runs a script in its own folder. A script that still runs at the limit of time is killed,
    with the processes that it has started."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    flags = own.pop("XLA_FLAGS", "").split()  # a script states its number of devices itself
    own["XLA_FLAGS"] = " ".join(flag for flag in flags if "device_count" not in flag)
    memory = [] if limits.memory is None else [str(limits.memory)]
    process = subprocess.Popen(
        [python, "-c", _START, script.name, *memory],
        cwd=script.parent,
        env={**own, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limits.seconds)
        return Outcome(process.returncode, output, limits.seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Outcome(None, output, limits.seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise

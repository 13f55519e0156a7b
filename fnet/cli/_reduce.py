"""`fnet reduce RUN`: reduces the step at which a run failed to a short script."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = (
    __doc__
    + """

RUN is the folder of a run that fit(workdir=) ended with Diverged or OutOfMemory. The command that started it is started
again. It replays the run from its last checkpoint up to the step, without writing to the folder, and reduces the step:
repro.py needs jax and NumPy alone, and exits with status 1 if it reproduces the failure. A second call continues.

    fnet reduce runs/digits
    fnet reduce runs/digits --step 120 --failing "differs from float64" --output out

If RUN has a repro.py, the script is run with other releases of JAX, each in an environment that pip installs into
FNET_CACHE, or with the Python interpreters whose paths you give:

    fnet reduce runs/digits/reduced --versions 0.10.2,0.12.0.1
"""
)
_SCRIPT, _PARAGRAPH = "repro.py", "repro.txt"


def define(commands: Any) -> None:
    """Adds the command `reduce` to the parser of `fnet`."""
    parser = commands.add_parser(
        "reduce",
        help="reduce the step at which a run failed to a short script",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="folder of the run, or of a repro.py")
    parser.add_argument(
        "--step", type=int, help="number of the step, from 1 (default: the step that failed)"
    )
    parser.add_argument(
        "--failing",
        help="predicate, as in introspect.reduce: 'not finite', 'differs from float64', ... "
        "(default: that of the error)",
    )
    parser.add_argument(
        "--output", help="folder of the script (default: the folder reduced in that of the run)"
    )
    parser.add_argument(
        "--seconds", type=float, default=600, help="time after which nothing more is tried"
    )
    parser.add_argument(
        "--versions",
        help="releases of jax, or paths of Python interpreters, with which the script is run at "
        "the end, separated by commas",
    )


def run(args: argparse.Namespace) -> int:
    """Reduces the step, and prints what was found.

    Raises:
        ValueError: the folder has neither a step that failed nor a script.
    """
    folder = Path(args.run).resolve()
    if (folder / _SCRIPT).exists():
        if not args.versions:
            raise ValueError(
                f"{args.run} has a {_SCRIPT} already: run it, or state --versions=0.10.2,..."
            )
        output = folder
    else:
        output = Path(args.output).resolve() if args.output else folder / "reduced"
        _replay(args, folder, output)
        print((output / _PARAGRAPH).read_text(), end="")
    if args.versions:
        _print_versions(output / _SCRIPT, args.versions)
    return 0


def _replay(args: argparse.Namespace, folder: Path, output: Path) -> None:
    from fnet._util._cache import read_json
    from fnet.training.loop._reducing import RECORD, VARIABLE, place_of_command

    record = folder / RECORD
    if not record.exists():
        raise ValueError(
            f"{args.run}: no step of this run has failed. Expected the workdir= of a run that "
            "ended with Diverged or OutOfMemory"
        )
    failed, started = json.loads(record.read_text()), read_json(place_of_command(folder))
    if not started:
        raise ValueError(
            f"{args.run}: the command of this run is not known, because it was not started here by "
            "you, or the folder was moved. Start the run again here, and reduce it then"
        )
    step = failed["step"] if args.step is None else args.step
    if step < 1:
        raise ValueError(f"--step={step}: expected a number from 1")
    request = {
        "run": str(folder),
        "step": step,
        "failing": args.failing or failed["failing"],
        "folder": str(output),
        "seconds": args.seconds,
    }
    (output / _PARAGRAPH).unlink(missing_ok=True)
    said = ""
    with subprocess.Popen(
        started["command"],
        cwd=started["directory"],
        env={**os.environ, VARIABLE: json.dumps(request)},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:  # its progress
            said = line.strip() or said
            print(line, end="", file=sys.stderr, flush=True)
    status = process.returncode
    if not (output / _PARAGRAPH).exists():
        raise RuntimeError(
            f"the run was started again, but step {step} was not reduced: "
            f"{said or f'it ended with status {status}'}"
        )


def _print_versions(script: Path, versions: str) -> None:
    from fnet.introspect._reduce._child import Limits
    from fnet.introspect._reduce._switches import versions as tried

    wanted = [name.strip() for name in versions.split(",") if name.strip()]
    for version, outcome in tried(script, wanted, Limits()).items():
        print(f"jax {version}: {outcome}", flush=True)

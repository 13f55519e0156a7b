"""The `fnet` command.

Its commands:

    fnet devices            shows the chips of this machine and the dtypes that fnet selects for them; if JAX computes
                            on a CPU, the first call also measures the CPU
    fnet chips              shows the catalog of chips
    fnet chips "TPU v5e"    shows computed and published peaks, prices, FLOP per dollar, power and sources of a chip
    fnet chips --plot FILE  plots FLOP per dollar and per watt over the years
    fnet export runs/digits --to=bundle,onnx,litert         writes the trained model of a run as files
    fnet bundle show FILE   describes an exported model
    fnet bundle check FILE  compares the outputs of an exported model with the outputs that are stored in the file
    fnet bundle renew FILE  writes the programs of an exported model again, with the installed version of JAX
    fnet serve FILE         serves exported models over HTTP
    fnet report runs/digits                                 writes an HTML report of a run
    fnet plan module:function --devices v5e:16x16           selects the sharding of a training step
    fnet lock step.py:make  writes down what a training step computes
    fnet diff step.lock     names the first equation of the step that an upgrade of JAX, or of the code, has changed
    fnet run --elastic FOLDER -- python train.py            trains on hosts that come and go
    fnet sweep SCRIPT --space space.json --budget 30m       searches for hyperparameters
    fnet reduce runs/digits                                 reduces the step at which a run failed to a short script
    fnet compare resnet50 --chips "RTX 2080 Ti,TPU v2-8"    compares a training step on several chips
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from fnet.cli import (
    _bundle,
    _chips,
    _compare,
    _devices,
    _diff,
    _export,
    _lock,
    _plan,
    _reduce,
    _report,
    _run,
    _serve,
    _sweep,
)
from fnet.cli._devices import no_device

_COMMANDS = {
    "devices": _devices,
    "chips": _chips,
    "plan": _plan,
    "lock": _lock,
    "diff": _diff,
    "bundle": _bundle,
    "export": _export,
    "serve": _serve,
    "compare": _compare,
    "report": _report,
    "reduce": _reduce,
    "run": _run,
    "sweep": _sweep,
}


class _Parser(argparse.ArgumentParser):
    """An argparse parser that reports a wrong command line in one line."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command of `fnet` and returns its exit code.

    The exit code is 0 for success, 2 for an invalid argument, an unreadable file or a missing
    device, and 1 for other errors, and for a change that `fnet diff` finds. Errors are printed to
    standard error in one line, or as a traceback with --debug.
    """
    parser = _Parser(prog="fnet", description="fnet: neural networks as pure functions on JAX.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="<command>")
    for module in _COMMANDS.values():
        module.define(commands)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as in fnet chips >&-
            setattr(sys, name, open(os.devnull, "w"))
    argv, flags = _sweep.separate(sys.argv[1:] if argv is None else argv)
    try:
        args = parser.parse_args(argv)
        args.flags = flags
        if args.command is None:
            parser.print_help()
            return 0
        code = _COMMANDS[args.command].run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in fnet chips | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if "Unable to initialize backend" in first:
            print(f"fnet {args.command}: {no_device(error)}", file=sys.stderr)
            return 2
        print(
            f"fnet {args.command}: {first} (use fnet --debug {args.command} for a traceback)",
            file=sys.stderr,
        )
        return 2 if isinstance(error, ValueError | OSError) else 1

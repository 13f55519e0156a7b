"""`fnet run --elastic FOLDER -- COMMAND`: trains on hosts that come and go."""

from __future__ import annotations

import argparse
import shutil
from typing import Any

_DESCRIPTION = (
    __doc__
    + """

Run it on every host, with a FOLDER that all of them see, a directory or the URL of an object store:

    fnet run --elastic=/shared/runs/gpt/hosts -- python train.py --workdir=/shared/runs/gpt

Each host starts the command as one process of the run; `parallel.initialize()` in the script connects them. If a host
is lost, leaves after SIGTERM, or joins, the processes begin again together on the hosts that are there: `tr.fit`
continues from its last checkpoint, and `parallel.plan(..., devices="dividing")` divides the step over the devices that
are left.
"""
)


def define(commands: Any) -> None:
    """Adds the command `run` to the parser of `fnet`."""
    parser = commands.add_parser(
        "run",
        help="train on hosts that come and go",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--elastic",
        required=True,
        metavar="FOLDER",
        help="folder in which the hosts find each other",
    )
    parser.add_argument(
        "--min-hosts",
        type=int,
        default=1,
        help="number of hosts below which the run waits (default: %(default)s)",
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time without a sign of life after which a host is lost (default: %(default)g)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time to save a checkpoint when hosts join or leave (default: %(default)g)",
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=3,
        help="how often a program that fails by itself is started again, in a row (default: %(default)s)",
    )
    parser.add_argument(
        "--address",
        help="name or number under which other hosts reach this one (default: its name)",
    )
    parser.epilog = "-- COMMAND ...: the program and its arguments"


def run(args: argparse.Namespace) -> int:
    from fnet.training.elastic._host import Host

    if not args.flags:
        raise ValueError("expected a command after --, such as -- python train.py")
    if shutil.which(args.flags[0]) is None:
        raise ValueError(f"-- {args.flags[0]}: there is no such program")
    for name, least in (("min_hosts", 1), ("grace", 0), ("restarts", 0)):
        if getattr(args, name) < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}={getattr(args, name)}: expected at least {least}")
    if not args.lost_after > 0:
        raise ValueError(f"--lost-after={args.lost_after:g}: expected more than 0 seconds")
    return Host(
        args.elastic,
        args.flags,
        at_least=args.min_hosts,
        lost_after=args.lost_after,
        grace=args.grace,
        restarts=args.restarts,
        address=args.address,
    ).run()

"""Compares fnet with other libraries and prints a table for each workload (see `benchmarks.peers`)."""

from __future__ import annotations

import sys

from benchmarks._harness import header
from benchmarks._live import PeerError
from benchmarks.peers._compare import PACKAGES, compare, parser, several, tables
from benchmarks.peers._worker import PEERS


def main(arguments=None) -> None:
    """Runs the workloads one after another and prints their tables."""
    made = parser(prog="python -m benchmarks.peers", description=__doc__)
    made.add_argument(
        "--peers",
        type=several(PEERS),
        help=f"of {', '.join(PEERS)}; by default all that are installed",
    )
    made.add_argument(
        "--base",
        type=several(PEERS),
        default="jax,torch-compile",
        help="denominators of the ratios",
    )
    options = made.parse_args(arguments)
    peers = {name: {"peer": name} for name in options.peers or PEERS}
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.peers {command}", options.rounds, PACKAGES))
    for workload, mode, dtype in tables(options):
        _, text = compare(
            peers, workload, mode, dtype, options, bases=options.base, required=bool(options.peers)
        )
        print(text, flush=True)


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"benchmarks.peers: {error}")

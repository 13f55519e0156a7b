"""fnet beside its peers on one workload, see `benchmarks.peers`."""

from __future__ import annotations

import argparse
import json
import sys

from benchmarks._harness import header, table
from benchmarks._live import Live, PeerError, turns
from benchmarks.peers._worker import PEERS
from benchmarks.peers._workloads import WORKLOADS

TOLERANCE = {"float32": 1e-4, "mixed": 3e-2}
INSTALL = "pip install -e '.[bench]'"


def main(arguments=None) -> dict:
    """Runs the peers and prints their table; {peer: seconds per step in every round}."""
    options = _options(arguments)
    peers = [_live(name, options) for name in options.peers]
    try:
        peers = _present(peers, options)
        started = {}
        for peer in peers:
            started[peer.name] = peer.ask("start", limit=options.limit)
            agree(peer.name, started[peer.name]["losses"], peers[0].name, started[peers[0].name]["losses"],
                  TOLERANCE[options.dtype])
        figures = turns(peers, rounds=options.rounds, budget=options.budget, limit=options.limit)
        memory = {peer.name: peer.ask("memory", limit=60) for peer in peers}
    finally:
        for peer in peers:
            peer.stop()
    _print(options, started, figures, memory)
    return figures


def agree(name, losses, reference, expected, tolerance):
    """Raises a PeerError where a loss is not the reference's within the tolerance."""
    for i, (got, want) in enumerate(zip(losses, expected, strict=True)):
        if not abs(got - want) <= tolerance * abs(want):
            raise PeerError(f"{name} does not compute what {reference} does: its loss on batch {i} is {got:.6g}, "
                            f"{reference}'s is {want:.6g} (relative {tolerance:g} allowed); no times were taken")


def _options(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--peers", help=f"of {', '.join(PEERS)}; by default all that are installed")
    parser.add_argument("--base", default="jax,torch-compile", help="the peers that ratios are taken to")
    parser.add_argument("--mode", choices=("train", "infer"), default="train")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--allocator", choices=("default", "tuned"), default="default",
                        help="tuned: glibc keeps what one step allocated for the next, in all peers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of each peer's turn, two steps at least")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a peer may take to compile or to step")
    options = parser.parse_args(arguments)
    options.named = options.peers is not None
    options.peers = options.peers.split(",") if options.named else list(PEERS)
    for name in options.peers:
        if name not in PEERS:
            parser.error(f"no peer {name!r}; there are {', '.join(PEERS)}")
    return options


def _live(name, options):
    details = {"peer": name, "workload": options.workload, "size": options.size, "mode": options.mode,
               "mixed": options.dtype == "mixed", "checked": 4, "allocator": options.allocator}
    # All peers share the device: none may take its memory whole.
    return Live(name, [sys.executable, "-m", "benchmarks.peers._worker", json.dumps(details)],
                {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _present(peers, options):
    """Those whose packages are installed. One that was asked for by name must be."""
    present = []
    for peer in peers:
        missing = peer.ask("prepare", limit=options.limit).get("missing")
        if missing is None:
            present.append(peer)
            continue
        sentence = f"{peer.name} needs {missing}, which is not installed: {INSTALL}"
        if options.named:
            raise PeerError(sentence)
        print(f"left out: {sentence}\n")
        peer.stop()
    return present


def _print(options, started, figures, memory):
    bases = [name for name in options.base.split(",") if name in figures] or [next(iter(figures))]
    command = " ".join(["python -m benchmarks.peers", *sys.argv[1:]])
    print(header(command, options.rounds, ("optax", "equinox", "keras", "torch")))
    devices = " / ".join(sorted({each["device"] for each in started.values()}))
    print(f"{options.workload}, {options.mode}, {options.dtype}, {options.size} size, allocator: {options.allocator}, "
          f"on {devices}; losses agree to {TOLERANCE[options.dtype]:g}\n")
    print(table(figures, unit="ms", scale=1e3, bases=bases, more={
        "first step s": {name: f"{each['first']:.1f}" for name, each in started.items()},
        "peak MB": {name: _peak(each) for name, each in memory.items()},
    }))


def _peak(memory):
    return f"{memory['process'] / 1e6:.0f}" + (f" + {memory['device'] / 1e6:.0f}" if memory["device"] else "")


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"benchmarks.peers: {error}")

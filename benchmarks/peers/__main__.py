"""fnet beside its peers: each workload's table, see `benchmarks.peers`."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys

from benchmarks._harness import header, table
from benchmarks._live import Live, PeerError, turns
from benchmarks.peers import _workloads as spec
from benchmarks.peers._worker import PEERS

TOLERANCE = {"float32": 1e-4, "mixed": 3e-2}
ON_TF32 = 2e-3    # float32 products on an accelerator are rounded
INSTALL = "pip install -e '.[bench]'"


def main(arguments=None) -> None:
    """Runs the workloads one after the other and prints a table for each."""
    options = _options(arguments)
    command = f"python -m benchmarks.peers {' '.join(sys.argv[1:] if arguments is None else arguments)}"
    print(header(command, options.rounds, ("optax", "equinox", "keras", "torch")))
    for workload in options.workloads:
        for mode in options.mode:
            for dtype in options.dtype or ["mixed" if workload in spec.ACCELERATOR else "float32"]:
                print(compare(workload, mode, dtype, options), flush=True)


def compare(workload: str, mode: str, dtype: str, options) -> str:
    """The table of one workload.

    Raises:
        PeerError: where a peer fails, or does not compute what the first one does.
    """
    with contextlib.ExitStack() as alive:
        peers = [alive.enter_context(_live(name, workload, mode, dtype, options)) for name in options.peers]
        present, notes = _present(peers, workload, options)
        started, tolerance = {}, TOLERANCE[dtype]
        for peer in present:
            answer = started[peer.name] = peer.ask("start", limit=options.limit)
            if answer["platform"] != "cpu" and dtype == "float32":
                tolerance = ON_TF32
            reference = present[0].name
            agree(peer.name, answer["losses"], reference, started[reference]["losses"], tolerance)
        figures = turns(present, rounds=options.rounds, budget=options.budget, limit=options.limit)
        memory = {peer.name: peer.ask("memory", limit=60) for peer in present}
    more = {
        "first step s": {name: f"{each['first']:.1f}" for name, each in started.items()},
        "peak MB": {name: _peak(each) for name, each in memory.items()},
        **_rates(workload, mode, dtype, options, figures, started),
    }
    bases = [name for name in options.base if name in figures] or [next(iter(figures))]
    devices = " / ".join(sorted({each["device"] for each in started.values()}))
    return "\n".join([
        f"**{workload}**, {mode}, {dtype}, {options.size} size, allocator: {options.allocator}, on {devices}; "
        f"losses agree to {tolerance:g}\n", *notes,
        table(figures, unit="ms", scale=1e3, bases=bases, more=more), ""])


def agree(name, losses, reference, expected, tolerance):
    """Raises a PeerError where a loss is not the reference's within the tolerance."""
    for i, (got, want) in enumerate(zip(losses, expected, strict=True)):
        if not abs(got - want) <= tolerance * abs(want):
            raise PeerError(f"{name} does not compute what {reference} does: its loss on batch {i} is {got:.6g}, "
                            f"{reference}'s is {want:.6g} (relative {tolerance:g} allowed); no times were taken")


def _options(arguments):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    several = lambda names: lambda text: _several(text, names)
    parser.add_argument("workloads", nargs="+", choices=list(spec.WORKLOADS), metavar="WORKLOAD",
                        help=f"of {', '.join(spec.WORKLOADS)}")
    parser.add_argument("--peers", type=several(PEERS), help=f"of {', '.join(PEERS)}; by default all that are there")
    parser.add_argument("--base", type=several(PEERS), default="jax,torch-compile", help="what ratios are taken to")
    parser.add_argument("--mode", type=several(("train", "infer")), default="train", help="train, infer or train,infer")
    parser.add_argument("--dtype", type=several(TOLERANCE), help="float32, mixed or float32,mixed; by default mixed "
                        f"for {', '.join(spec.ACCELERATOR)} and float32 otherwise")
    parser.add_argument("--size", choices=("full", "small"), default="full", help="small: for a test of the harness")
    parser.add_argument("--allocator", choices=("default", "tuned"), default="default",
                        help="tuned: glibc keeps what one step allocated for the next, in all peers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=0.25, help="seconds of a turn, which is two steps at least")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a peer may take to compile or run")
    parser.add_argument("--force", action="store_true", help="run on a CPU what is meant for accelerators")
    options = parser.parse_args(arguments)
    options.named = options.peers is not None
    options.peers = options.peers or list(PEERS)
    return options


def _several(text, names):
    values = text.split(",")
    for value in values:
        if value not in names:
            raise argparse.ArgumentTypeError(f"no {value!r} among {', '.join(names)}")
    return values


def _live(name, workload, mode, dtype, options):
    details = {"peer": name, "workload": workload, "size": options.size, "mode": mode, "mixed": dtype == "mixed",
               "checked": 4, "allocator": options.allocator}
    # All peers share the device: none may take its memory whole.
    return Live(name, [sys.executable, "-m", "benchmarks.peers._worker", json.dumps(details)],
                {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def _present(peers, workload, options):
    """Those whose packages are installed, and a note on each of the others. One that was asked for by name must be."""
    present, notes = [], []
    refused = workload in spec.ACCELERATOR and options.size == "full" and not options.force
    for peer in peers:
        answer = peer.ask("prepare", limit=options.limit)
        if "missing" in answer:
            sentence = f"{peer.name} needs {answer['missing']}, which is not installed: {INSTALL}"
            if options.named:
                raise PeerError(sentence)
            notes.append(f"Left out: {sentence}\n")
            continue
        if refused and answer["platform"] == "cpu":
            raise PeerError(f"{workload} is meant for an accelerator and {peer.name} sees none here: a step would take "
                            "minutes; --force runs it all the same")
        present.append(peer)
    return present, notes


def _peak(memory):
    return f"{memory['process'] / 1e6:.0f}" + (f" + {memory['device'] / 1e6:.0f}" if memory["device"] else "")


def _rates(workload, mode, dtype, options, figures, started):
    """What one step gets through, per second; on an accelerator also the model FLOPs utilisation."""
    w = spec.workload(workload, options.size)
    kind, count = spec.items(w)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    rates = {f"{kind}/s": {name: f"{count / seconds:,.0f}" for name, seconds in medians.items()}}
    if all(each["platform"] == "cpu" for each in started.values()):
        return rates
    from benchmarks.peers._flops import model_flops
    from fnet import hardware as hw

    flops, chip = model_flops(w, train=mode == "train"), hw.detect()
    shares = {name: hw.mfu(flops, seconds, chip, "bfloat16" if dtype == "mixed" else "float32")
              for name, seconds in medians.items()}
    return {**rates, "MFU": {name: share.why if share.value is None else f"{share.value:.1%}"
                             for name, share in shares.items()}}


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"benchmarks.peers: {error}")

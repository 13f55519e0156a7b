"""Runs one comparison: starts the processes of the peers, checks their losses, times them in
rounds, and formats the table."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys

from benchmarks._harness import table
from benchmarks._live import Live, PeerError, turns
from benchmarks.peers import _workloads as spec

TOLERANCE = {"float32": 1e-4, "mixed": 3e-2}
ON_TF32 = 2e-3  # accelerators may round the operands of float32 products
PACKAGES = ("optax", "equinox", "keras", "torch")
INSTALL = "pip install -e '.[bench]'"


def compare(
    peers: dict, workload: str, mode: str, dtype: str, options, *, bases, required: bool
) -> tuple[dict, str]:
    """Returns {label: seconds per step in every round}, and the table as text.

    Args:
        peers: {label: arguments of its worker process}. The arguments are "peer", a key of `PEERS`,
            and options such as "rules".
        workload, mode, dtype: see `benchmarks.peers`.
        options: the parsed options of `parser`.
        bases: the labels of the peers to whose times ratios are computed. Labels of peers that do
            not run are ignored. If none of them runs, ratios are computed to the first peer that
            runs.
        required: whether a peer that is not installed is an error. Otherwise, it is omitted, and a
            note in the table states this.

    Raises:
        PeerError: a peer fails, or its losses differ from those of the first peer.
    """
    with contextlib.ExitStack() as alive:
        every = [
            alive.enter_context(_live(label, how, workload, mode, dtype, options))
            for label, how in peers.items()
        ]
        present, notes = _present(every, workload, options, required)
        started, tolerance = {}, TOLERANCE[dtype]
        for peer in present:
            answer = started[peer.name] = peer.ask("start", limit=options.limit)
            if answer["platform"] != "cpu" and dtype == "float32":
                tolerance = ON_TF32
            reference = present[0].name
            agree(peer.name, answer["losses"], reference, started[reference]["losses"], tolerance)
        figures = turns(
            present,
            rounds=options.rounds,
            budget=options.budget,
            untimed=options.untimed,
            limit=options.limit,
        )
        memory = {peer.name: peer.ask("memory", limit=60) for peer in present}
    more = {
        "first step s": {name: f"{each['first']:.1f}" for name, each in started.items()},
        "peak MB": {name: _peak(each) for name, each in memory.items()},
        **_rates(workload, mode, dtype, options, figures, started),
    }
    bases = [name for name in bases if name in figures] or [next(iter(figures))]
    devices = " / ".join(sorted({each["device"] for each in started.values()}))
    title = (
        f"**{workload}**, {mode}, {dtype}, {options.size} size, allocator: {options.allocator}, on "
        f"{devices}; losses agree to {tolerance:g}\n"
    )
    return figures, "\n".join(
        [title, *notes, table(figures, unit="ms", scale=1e3, bases=bases, more=more), ""]
    )


def parser(**named) -> argparse.ArgumentParser:
    """Returns the argument parser that all comparisons share."""
    made = argparse.ArgumentParser(**named)
    made.add_argument(
        "workloads",
        nargs="+",
        choices=list(spec.WORKLOADS),
        metavar="WORKLOAD",
        help=f"of {', '.join(spec.WORKLOADS)}",
    )
    made.add_argument(
        "--mode",
        type=several(("train", "infer")),
        default="train",
        help="train, infer or train,infer",
    )
    made.add_argument(
        "--dtype",
        type=several(TOLERANCE),
        help="float32, mixed or float32,mixed; by default mixed for "
        f"{', '.join(spec.ACCELERATOR)} and float32 otherwise",
    )
    made.add_argument(
        "--size", choices=("full", "small"), default="full", help="small: to test the benchmark"
    )
    made.add_argument(
        "--allocator",
        choices=("default", "tuned", "huge"),
        default="default",
        help="tuned: glibc keeps what one step allocated for the next; huge: it asks for huge pages; "
        "in all peers",
    )
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--untimed", type=int, default=2, help="rounds to discard at the start")
    made.add_argument(
        "--budget", type=float, default=0.5, help="seconds of a peer in a round, at least two steps"
    )
    made.add_argument(
        "--limit", type=float, default=600, help="seconds that a peer may take to compile or run"
    )
    made.add_argument(
        "--force", action="store_true", help="run workloads for accelerators on a CPU"
    )
    return made


def several(names):
    """Returns an argument type for some of these names, separated by commas."""

    def parse(text):
        values = text.split(",")
        for value in values:
            if value not in names:
                raise argparse.ArgumentTypeError(f"no {value!r} among {', '.join(names)}")
        return values

    return parse


def tables(options):
    """Yields (workload, mode, dtype) for each requested table."""
    for workload in options.workloads:
        for mode in options.mode:
            for dtype in options.dtype or ["mixed" if workload in spec.ACCELERATOR else "float32"]:
                yield workload, mode, dtype


def agree(name, losses, reference, expected, tolerance):
    """Raises a PeerError if a loss differs from the loss of the reference peer by more than the
    tolerance.

    The tolerance is relative to the largest loss of the reference peer, because the loss of a
    memorized batch is near 0.
    """
    for i, (got, want) in enumerate(zip(losses, expected, strict=True)):
        if not abs(got - want) <= tolerance * max(map(abs, expected)):
            raise PeerError(
                f"{name} does not compute what {reference} does: its loss {i} is {got:.6g}, "
                f"{reference}'s is {want:.6g} (relative {tolerance:g} allowed); no times were taken"
            )


def _live(label, how, workload, mode, dtype, options):
    details = {
        "workload": workload,
        "size": options.size,
        "mode": mode,
        "mixed": dtype == "mixed",
        "checked": 3,
        "allocator": options.allocator,
        **how,
    }
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false"
    }  # all peers share the memory of the device
    if options.allocator == "huge":
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return Live(
        label, [sys.executable, "-m", "benchmarks.peers._worker", json.dumps(details)], environment
    )


def _present(peers, workload, options, required):
    """Returns the peers whose packages are installed, and a note about each of the others."""
    present, notes = [], []
    refused = workload in spec.ACCELERATOR and options.size == "full" and not options.force
    for peer in peers:
        answer = peer.ask("prepare", limit=options.limit)
        if "missing" in answer:
            sentence = f"{peer.name} needs {answer['missing']}, which is not installed: {INSTALL}"
            if required:
                raise PeerError(sentence)
            notes.append(f"Left out: {sentence}\n")
            continue
        if refused and answer["platform"] == "cpu":
            raise PeerError(
                f"{workload} needs an accelerator, and {peer.name} finds none here; a step would "
                "take minutes; --force runs it nevertheless"
            )
        present.append(peer)
    return present, notes


def _peak(memory):
    return f"{memory['process'] / 1e6:.0f}" + (
        f" + {memory['device'] / 1e6:.0f}" if memory["device"] else ""
    )


def _rates(workload, mode, dtype, options, figures, started):
    """Returns the columns with tokens or examples per second and, on an accelerator, with the model
    FLOPs
    utilization."""
    w = spec.workload(workload, options.size)
    kind, count = spec.items(w)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    rates = {f"{kind}/s": {name: f"{count / seconds:,.0f}" for name, seconds in medians.items()}}
    if all(each["platform"] == "cpu" for each in started.values()):
        return rates
    from benchmarks.peers._flops import model_flops
    from fnet import cost
    from fnet import hardware as hw

    flops, chip = model_flops(w, train=mode == "train"), hw.detect()
    shares = {
        name: cost.mfu(flops, seconds, chip, "bfloat16" if dtype == "mixed" else "float32")
        for name, seconds in medians.items()
    }
    return {
        **rates,
        "MFU": {
            name: share.why if share.value is None else f"{share.value:.1%}"
            for name, share in shares.items()
        },
    }

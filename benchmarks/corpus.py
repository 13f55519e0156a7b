"""Applies `ft.tune` to programs of many kinds, and measures the ratio of the tuned program's time
to the plain one's.

    python -m benchmarks.corpus                            # all programs: forward pass, gradient and training step
    python -m benchmarks.corpus --only=lstm,unet --measure # names with lstm or unet; with tune(measure=True)

Each program is compiled plain and tuned in one process. The two forms alternate in nine rounds. A
row contains the median of the nine ratios and its 95 % interval, from the second smallest to the
second largest ratio. A program is reported as slower if the median is above 1.03 and the interval
does not contain 1. The programs of Flax, Equinox and Haiku are omitted if the library is not
installed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

from benchmarks._harness import header
from benchmarks._programs import PROGRAMS
from fnet import transforms as ft

ROUNDS, AT_MOST, SECONDS = 9, 1.03, 0.03


def kinds(f, params, inputs):
    """Returns {kind: (function, arguments)}. The kinds are "forward", "gradient" and "step"."""
    tx = optax.sgd(1e-3, momentum=0.9)

    def loss(params, *inputs):
        return sum(
            (leaf.astype(jnp.float32) ** 2).mean() for leaf in jax.tree.leaves(f(params, *inputs))
        )

    def step(params, momentum, *inputs):
        value, grads = jax.value_and_grad(loss)(params, *inputs)
        updates, momentum = tx.update(grads, momentum, params)
        return optax.apply_updates(params, updates), momentum, value

    return {
        "forward": (f, (params, *inputs)),
        "gradient": (jax.grad(loss), (params, *inputs)),
        "step": (step, (params, tx.init(params), *inputs)),
    }


def compared(f, args, *, measure: bool) -> list[float]:
    """Returns the ratios tuned / plain of all rounds, in ascending order."""
    runs = [
        jax.jit(lambda *args: f(*args)),
        ft.tune(jax.jit(lambda *args: f(*args)), measure=measure),
    ]
    number = 1
    for run in runs:
        jax.block_until_ready(run(*args))
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        number = max(number, math.ceil(SECONDS / (time.perf_counter() - began)))
    ratios = []
    for turn in range(ROUNDS):
        times = [0.0, 0.0]
        for i in ((0, 1), (1, 0))[turn % 2]:  # the order alternates
            began = time.perf_counter()
            for _ in range(number):
                out = runs[i](*args)
            jax.block_until_ready(out)
            times[i] = time.perf_counter() - began
        ratios.append(times[1] / times[0])
    return sorted(ratios)


def main(arguments=None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.corpus", description=__doc__.split("\n\n")[0]
    )
    made.add_argument("--only", default="", help="parts of names, separated by commas")
    made.add_argument("--measure", action="store_true", help="tune(measure=True)")
    made.add_argument("--kinds", default="forward,gradient,step")
    options = made.parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.corpus {command}".strip(), ROUNDS, allocator="default"))
    print("| program | kind | tuned / plain | 95 % interval | |\n|---|---|---|---|---|")
    every, slower, missing = [], [], []
    for name, make in PROGRAMS.items():
        if not any(part in name for part in options.only.split(",")):
            continue
        try:
            found = kinds(*make())
        except ModuleNotFoundError as error:
            missing.append(f"{name} (no {error.name})")
            continue
        for kind in options.kinds.split(","):
            ratios = compared(*found[kind], measure=options.measure)
            median = statistics.median(ratios)
            slow = median > AT_MOST and ratios[1] > 1
            every.append(median)
            slower += [f"{name}, {kind}: {median:.2f}"] * slow
            print(
                f"| {name} | {kind} | {median:.2f} | {ratios[1]:.2f} to {ratios[-2]:.2f} | "
                f"{'slower' * slow} |",
                flush=True,
            )
        jax.clear_caches()
    print(
        f"\n{len(every)} rows: worst {max(every):.2f}, median {statistics.median(every):.2f}, best "
        f"{min(every):.2f}; {len(slower)} slower{': ' * bool(slower)}{'; '.join(slower)}"
    )
    if missing:
        print(f"left out: {'; '.join(missing)}")


if __name__ == "__main__":
    main()

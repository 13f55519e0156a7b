"""Inference with fixed parameters: plain JAX, `ft.tune`, and `ft.fold`, which moves BatchNorm into
convolutions.

    python -m benchmarks.folding
    python -m benchmarks.folding resnet50 --batches=1,8

The three forms alternate in one process. The weights are random. A time is the median over the
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import jax

from benchmarks._harness import header
from fnet import models
from fnet import transforms as ft

ROUNDS = 9
MODELS = {
    "resnet18": models.ResNet,
    "resnet50": models.ResNet,
    "mobilenet_v2": models.MobileNetV2,
    "efficientnet_lite0": models.EfficientNet,
}


def milliseconds(name: str, batch: int, size: int) -> dict[str, float]:
    model, x = (
        MODELS[name].preset(name),
        jax.random.normal(jax.random.key(0), (batch, size, size, 3)),
    )
    params, state = model.init(jax.random.key(0), x)
    f = lambda params, state, x: model(params, x, state=state)[0]
    plain, tuned, folded = jax.jit(f), ft.tune(jax.jit(f)), ft.fold(model, params, state)
    runs = {
        "plain": lambda: plain(params, state, x),
        "tune": lambda: tuned(params, state, x),
        "fold": lambda: folded(x),
    }
    times: dict[str, list[float]] = {each: [] for each in runs}
    for turn in range(ROUNDS + 1):  # the first round compiles
        for each, run in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[each] += [time.perf_counter() - began] * bool(turn)
    return {each: 1e3 * statistics.median(values) for each, values in times.items()}


def main(arguments=None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.folding", description=__doc__.split("\n\n")[0]
    )
    made.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    made.add_argument("--batches", default="1,8")
    made.add_argument("--size", type=int, default=224, help="height and width of the images")
    options = made.parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.folding {command}".strip(), ROUNDS, allocator="default"))
    print(
        "| model | batch | plain ms | tune ms | fold ms | tune / plain | fold / plain |\n"
        + "|---" * 7
        + "|"
    )
    for name in options.models:
        for batch in map(int, options.batches.split(",")):
            plain, tuned, folded = milliseconds(name, batch, options.size).values()
            print(
                f"| {name} | {batch} | {plain:.1f} | {tuned:.1f} | {folded:.1f} | "
                f"{tuned / plain:.2f} | {folded / plain:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

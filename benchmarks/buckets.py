"""Requests of random lengths: `ft.bucket`, one program for each length, and one padded size.

    python -m benchmarks.buckets
    python -m benchmarks.buckets --requests=200 --longest=128 --sizes=32,64,128

The model is an encoder of 4 layers of width 128 with random weights. It knows nothing of padding,
and returns the mean over the positions of a text. The table has the number of programs that XLA
compiles, the CPU time of all requests in a new process, that of the same requests again, and the
largest difference from the results without padding.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import header
from fnet import layers as nn
from fnet import transforms as ft

WIDTH, DEPTH, VOCABULARY = 128, 4, 1000


@nn.layer
def block(scope, x):  # [batch, time, width]
    x = x + nn.Attention(4)(scope["attention"], nn.LayerNorm()(scope["before"], x))
    y = nn.Dense(4 * WIDTH)(scope["up"], nn.LayerNorm()(scope["norm"], x))
    return x + nn.Dense(WIDTH)(scope["down"], jax.nn.gelu(y))


@nn.layer
def encoder(scope, tokens):  # [batch, time]
    x = nn.Embed(VOCABULARY, WIDTH)(scope["embed"], tokens)
    return nn.Stack(block(), DEPTH)(scope["blocks"], x).mean(1)


@contextlib.contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    count = [0]

    def listen(event: str, *_, **__) -> None:
        count[0] += event.endswith("backend_compile_duration")

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield lambda: count[0]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def passed(run: Callable, requests: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
    began = time.process_time()
    results = [np.asarray(run(tokens)) for tokens in requests]
    return results, time.process_time() - began


def measured(run: Callable, requests: list[np.ndarray]) -> tuple[list[np.ndarray], str]:
    with compilations() as count:
        results, first = passed(run, requests)
        programs = count()
    _, again = passed(run, requests)
    return results, f"{programs} | {first:.1f} | {again:.2f}"


def main(arguments=None) -> None:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.buckets", description=__doc__.split("\n\n")[0]
    )
    made.add_argument("--requests", type=int, default=1000)
    made.add_argument("--longest", type=int, default=256)
    made.add_argument("--sizes", default="64,128,256")
    options = made.parse_args(arguments)
    sizes = [int(size) for size in options.sizes.split(",")]
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, options.longest + 1, options.requests)
    requests = [draw.integers(0, VOCABULARY, (1, n)).astype(np.int32) for n in lengths]
    model = encoder()
    params, _ = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))
    peers = {
        "one program for each length": jax.jit(model),
        f"ft.bucket, {options.sizes}": ft.bucket(model, {"t": sizes}, axes=(None, "b, t")),
        f"ft.bucket, {sizes[-1]}": ft.bucket(model, {"t": sizes[-1:]}, axes=(None, "b, t")),
    }
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.buckets {command}".strip(), 1, allocator="default"))
    distinct = len(set(lengths.tolist()))
    print(f"{options.requests} requests of {distinct} lengths from 1 to {options.longest}\n")
    print(
        "| | programs | first pass, CPU s | again, CPU s | largest difference |\n"
        + "|---" * 5
        + "|"
    )
    exact = None
    for name, f in peers.items():
        results, figures = measured(lambda tokens, f=f: f(params, tokens), requests)
        exact = exact or results
        worst = max(float(np.abs(a - b).max()) for a, b in zip(results, exact))
        print(f"| {name} | {figures} | {worst:.0e} |", flush=True)


if __name__ == "__main__":
    main()

"""Convolutions by fnet's own kernels for CPUs, one by one, beside XLA's and PyTorch's.

    python -m benchmarks.native
    python -m benchmarks.native r18 gradient      # rows whose names contain all of these words
    python -m benchmarks.native bfloat16 cnn      # in bfloat16

Each peer is a process of its own on one core, and they alternate. Times are processor time, because
it depends least on what else the machine does. The peers are `xla` (`jax.jit`), `tuned` (`ft.tune`
without the kernels), `native` (`ft.tune`) and `torch`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time

from benchmarks._harness import header
from benchmarks._live import Live, serve

PEERS = "xla", "tuned", "native", "torch"
ROUNDS, BUDGET = 7, 0.05  # seconds of each peer in each round
# (name, batch, height and width, input features, output features, window, stride)
SHAPES = [
    ("cnn conv0", 64, 32, 3, 64, 3, 1),
    ("cnn conv1", 64, 32, 64, 64, 3, 1),
    ("cnn conv2", 64, 16, 64, 128, 3, 1),
    ("cnn conv3", 64, 16, 128, 128, 3, 1),
    ("r18 stem", 32, 32, 3, 64, 3, 1),
    ("r18 64@32", 32, 32, 64, 64, 3, 1),
    ("r18 64-128/2", 32, 32, 64, 128, 3, 2),
    ("r18 128@16", 32, 16, 128, 128, 3, 1),
    ("r18 shortcut 64-128/2", 32, 32, 64, 128, 1, 2),
    ("r18 128-256/2", 32, 16, 128, 256, 3, 2),
    ("r18 256@8", 32, 8, 256, 256, 3, 1),
    ("r18 256-512/2", 32, 8, 256, 512, 3, 2),
    ("r18 512@4", 32, 4, 512, 512, 3, 1),
]
RESNET50 = [  # forward only, at batches 1 and 8
    ("7x7/2", 224, 3, 64, 7, 2),
    ("1x1 64-64@56", 56, 64, 64, 1, 1),
    ("3x3 64@56", 56, 64, 64, 3, 1),
    ("1x1 64-256@56", 56, 64, 256, 1, 1),
    ("1x1 256-64@56", 56, 256, 64, 1, 1),
    ("3x3 128@28", 28, 128, 128, 3, 1),
    ("1x1 128-512@28", 28, 128, 512, 1, 1),
    ("1x1 512-128@28", 28, 512, 128, 1, 1),
    ("3x3 256@14", 14, 256, 256, 3, 1),
    ("3x3 256/2", 28, 256, 256, 3, 2),
    ("1x1 256-1024@14", 14, 256, 1024, 1, 1),
    ("1x1 1024-256@14", 14, 1024, 256, 1, 1),
    ("3x3 512@7", 7, 512, 512, 3, 1),
    ("1x1 512-2048@7", 7, 512, 2048, 1, 1),
    ("1x1 2048-512@7", 7, 2048, 512, 1, 1),
]
PASSES = "forward", "input gradient", "kernel gradient"


def cases():
    """Yields (row, shape, pass). The input of a network's first layer has no gradient."""
    for name, *shape in SHAPES:
        for phase in PASSES:
            if phase != "input gradient" or shape[2] > 3:
                yield f"{name}, {phase}", shape, phase
    for batch in (1, 8):
        for name, *shape in RESNET50:
            yield f"r50 b{batch} {name}, forward", [batch, *shape], "forward"


def by_jax(peer: str):
    """Returns prepare(shape, phase, dtype), which returns a function that runs the pass once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    from fnet import transforms as ft

    def prepare(shape, phase, dtype):
        batch, size, channels, features, window, stride = shape
        random = np.random.default_rng(0)
        draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)
        x, w = draw(batch, size, size, channels), draw(window, window, channels, features)
        # PyTorch's padding, which is the same on both sides
        pads, names = ((window // 2, window // 2),) * 2, ("NHWC", "HWIO", "NHWC")
        strides = (stride, stride)
        convolve = lambda x, w: lax.conv_general_dilated(
            x, w, strides, pads, dimension_numbers=names
        )
        dy = draw(*jax.eval_shape(convolve, x, w).shape)
        step, arguments = {
            "forward": (convolve, (x, w)),
            "input gradient": (
                lambda x, w, dy: jax.vjp(lambda x: convolve(x, w), x)[1](dy)[0],
                (x, w, dy),
            ),
            "kernel gradient": (
                lambda x, w, dy: jax.vjp(lambda w: convolve(x, w), w)[1](dy)[0],
                (x, w, dy),
            ),
        }[phase]
        run = {
            "xla": lambda: jax.jit(step),
            "tuned": lambda: ft.tune(step, rules={"native_convolution": False}),
            "native": lambda: ft.tune(step),
        }[peer]()
        return lambda: jax.block_until_ready(run(*arguments))

    return prepare


def by_torch():
    import torch

    torch.set_num_threads(1)

    def prepare(shape, phase, dtype):
        batch, size, channels, features, window, stride = shape
        draw = lambda *shape: torch.randn(*shape, dtype=getattr(torch, dtype)).to(
            memory_format=torch.channels_last
        )
        x, w = draw(batch, channels, size, size), draw(features, channels, window, window)
        pad = window // 2
        forward = lambda: torch.nn.functional.conv2d(x, w, None, stride, pad)
        if phase == "forward":
            return forward
        dy = torch.randn_like(forward())
        wanted = [phase == "input gradient", phase == "kernel gradient", False]
        return lambda: torch.ops.aten.convolution_backward(
            dy, x, w, None, [stride] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, wanted
        )

    def without_graph(*arguments):
        run = prepare(*arguments)

        def step():
            with torch.no_grad():
                run()

        return step

    return without_graph


def child(peer: str) -> None:
    """Answers "time" with the processor seconds of a call."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})  # before the libraries count cores
    prepare = by_torch() if peer == "torch" else by_jax(peer)
    ready: dict = {}

    def measure(shape, phase, dtype, budget):
        key = (*shape, phase, dtype)
        if key not in ready:
            ready.clear()
            ready[key] = prepare(shape, phase, dtype)
            ready[key]()
        run, calls, start = ready[key], 0, time.process_time()
        while time.process_time() - start < budget:
            run()
            calls += 1
        return (time.process_time() - start) / calls

    serve({"time": measure})


def main():
    if sys.argv[1:2] and sys.argv[1] in PEERS:
        child(sys.argv[1])
        return
    words = list(sys.argv[1:])
    dtype = "bfloat16" if "bfloat16" in words else "float32"
    words = [word for word in words if word != "bfloat16"]
    command = " ".join(["python -m benchmarks.native", *sys.argv[1:]])
    print(header(command, ROUNDS, ("torch",)))
    print(
        "| convolution, " + dtype + " | torch ms | xla / torch | tuned / torch | native / torch |"
    )
    print("|---" * 5 + "|")
    environment = {"JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as alive:
        live = [
            alive.enter_context(
                Live(peer, [sys.executable, "-m", "benchmarks.native", peer], environment)
            )
            for peer in PEERS
        ]
        for row, shape, phase in cases():
            if not all(word in row for word in words):
                continue
            figures: dict[str, list[float]] = {peer: [] for peer in PEERS}
            for _ in range(ROUNDS):
                for peer in live:
                    seconds = peer.ask(
                        "time", limit=600, shape=shape, phase=phase, dtype=dtype, budget=BUDGET
                    )
                    figures[peer.name].append(seconds)
            ratios = [
                statistics.median(a / b for a, b in zip(figures[peer], figures["torch"]))
                for peer in PEERS[:-1]
            ]
            cells = [1e3 * statistics.median(figures["torch"]), *ratios]
            print(f"| {row} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()

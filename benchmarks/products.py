"""Products of a few rows and a matrix on a CPU: XLA, fnet's kernel (`native_product`), and PyTorch.

    python -m benchmarks.products [--rounds=7] [--peers=xla,native,torch] [--dtype=float32]

Each peer is a process of its own, and the peers alternate. A measurement multiplies the same rows with
as many matrices as fill 200 MB, as the layers of a model, so that no cache holds them. Ratios are to
XLA, of the medians.
"""

from __future__ import annotations

import contextlib
import statistics
import sys

import numpy as np
from absl import app, flags

from benchmarks._harness import header, seconds
from benchmarks._live import Live, serve

ROUNDS = flags.DEFINE_integer("rounds", 7, "measurements of each peer")
PEERS = flags.DEFINE_list(
    "peers", ["xla", "native"], "the peers; torch, too, where it is installed"
)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of all arrays")
ROWS = (2, 4, 8, 16, 32)
SHAPES = (  # inputs, outputs, whether the matrix is transposed, as a table of embeddings
    (576, 1536, False),
    (1536, 576, False),
    (1024, 4096, False),
    (256, 256, False),
    (576, 49152, True),
)
BYTES = 200e6


def numbers(rows, inputs, outputs, flipped):
    draw = np.random.default_rng(0)
    count = max(2, int(BYTES / (4 * inputs * outputs)))
    shape = (outputs, inputs) if flipped else (inputs, outputs)
    matrix = draw.normal(0, 1, shape).astype(np.float32)
    return draw.normal(0, 1, (rows, inputs)).astype(np.float32), [matrix] * count


def of_jax(native, dtype, case):
    import jax
    import jax.numpy as jnp

    from fnet import transforms as ft

    x, matrices = numbers(*case)
    x, matrices = jnp.asarray(x, dtype), [jnp.array(w, dtype) for w in matrices]

    def f(x, matrices):
        return [x @ (w.T if case[-1] else w) for w in matrices]

    run = jax.jit(ft.tune(f, rules={"native_product": native}))
    return lambda: jax.block_until_ready(run(x, matrices)), len(matrices)


def of_torch(dtype, case):
    import torch

    torch.set_grad_enabled(False)
    x, matrices = numbers(*case)
    cast = lambda a: torch.tensor(a).to(getattr(torch, dtype))
    x, matrices = cast(x), [cast(w) for w in matrices]
    return lambda: [x @ (w.T if case[-1] else w) for w in matrices], len(matrices)


def child(peer):
    def measure(case, dtype, budget=0.5):
        run, count = (
            of_torch(dtype, case) if peer == "torch" else of_jax(peer == "native", dtype, case)
        )
        return seconds(run, budget=budget, repeats=3) / count

    serve({"measure": measure})


def main(argv):
    if len(argv) > 2 and argv[1] == "serve":
        return child(argv[2])
    with contextlib.ExitStack() as alive:
        live = [
            alive.enter_context(
                Live(
                    name,
                    [sys.executable, "-m", "benchmarks.products", "serve", name],
                    {"JAX_PLATFORMS": "cpu"},
                )
            )
            for name in PEERS.value
        ]
        print(header(" ".join(["python -m benchmarks.products", *argv[1:]]), ROUNDS.value))
        print(
            "| matrix | rows | " + " | ".join(PEERS.value) + " |\n" + "|---" * (2 + len(live)) + "|"
        )
        for *shape, flipped in SHAPES:
            for rows in ROWS:
                case, times = (rows, *shape, flipped), {each.name: [] for each in live}
                for _ in range(ROUNDS.value):
                    for each in live:
                        asked = each.ask("measure", limit=300, case=case, dtype=DTYPE.value)
                        times[each.name].append(asked)
                medians = {name: statistics.median(values) for name, values in times.items()}
                base = medians[PEERS.value[0]]
                cells = [f"{1e6 * t:.0f} us ({t / base:.2f})" for t in medians.values()]
                size = " x ".join(map(str, shape)) + (", transposed" if flipped else "")
                print(f"| {size} | {rows} | " + " | ".join(cells) + " |", flush=True)
    return None


if __name__ == "__main__":
    app.run(main)

"""Shows which convolutions `tune` makes faster. Compares Eigen's kernels, YNNPACK's kernels and the
tuned program.

    python -m benchmarks.convolutions
    python -m benchmarks.convolutions depthwise            # convolutions with this word in their names

The programs run in one process and alternate, because a process for each program would take
minutes.
"""

from __future__ import annotations

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks._harness import header
from fnet import transforms as ft
from fnet.transforms._tune._library import YNNPACK

ROUNDS = 7
# (batch, height and width, input features, output features, window, stride, groups)
SHAPES = [
    (8, 28, 32, 64, 3, 1, 1),
    (8, 56, 64, 64, 3, 1, 1),
    (8, 28, 128, 128, 3, 1, 1),
    (8, 14, 256, 256, 3, 1, 1),
    (8, 28, 64, 64, 3, 2, 1),
    (2, 224, 3, 32, 3, 2, 1),
    (8, 2, 512, 512, 3, 1, 1),
    (8, 4, 256, 512, 3, 2, 1),
    (8, 28, 24, 96, 1, 1, 1),
    (8, 56, 64, 64, 1, 1, 1),
    (8, 28, 96, 96, 3, 1, 96),
    (8, 28, 96, 96, 5, 1, 96),
    (8, 28, 96, 96, 3, 2, 96),
    (8, 28, 96, 96, 7, 1, 96),
    (1, 112, 32, 32, 3, 1, 32),
    (1, 7, 960, 960, 3, 1, 960),
    (8, 28, 64, 64, 3, 1, 4),
    (8, 28, 128, 128, 3, 1, 32),
    (8, 14, 256, 256, 3, 2, 32),
]


def milliseconds(f, *args) -> dict[str, float]:
    """Returns {form: median milliseconds of ROUNDS calls}. The forms are "YNNPACK" (JAX's default),
    "Eigen" and "tuned"."""
    runs = {
        "YNNPACK": jax.jit(f),
        "Eigen": jax.jit(f, compiler_options=YNNPACK),
        "tuned": ft.tune(f),
    }
    times = {name: [] for name in runs}
    for turn in range(ROUNDS + 1):  # the first round compiles
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            times[name] += [time.perf_counter() - start] * bool(turn)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def cases():
    """Yields (name, function of x and w, x, w) for each convolution and each pass."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    for n, size, c, out, window, stride, groups in SHAPES:

        def convolve(x, w, stride=stride, groups=groups):
            return lax.conv_general_dilated(
                x,
                w,
                (stride, stride),
                "SAME",
                feature_group_count=groups,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )

        grouped = ", depthwise" if groups == c else f", {groups} groups" * (groups > 1)
        name = f"{window}x{window}/{stride} {c} to {out}{grouped} at {n}x{size}x{size}"
        x, w = draw(n, size, size, c), draw(window, window, c // groups, out)
        yield name, convolve, x, w
        if groups == 1:
            yield f"{name}, bfloat16", convolve, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    for n, *space, c in ((8, 28, 28, 64), (2, 8, 16, 16, 32)):
        yield (
            f"transposed {'x'.join('4' * len(space))}/2 {c} to {c} at "
            f"{'x'.join(map(str, (n, *space)))}",
            lambda x, w: lax.conv_transpose(x, w, (2,) * (x.ndim - 2), "SAME"),
            draw(n, *space, c),
            draw(*[4] * len(space), c, c),
        )


def main():
    print(
        header(
            " ".join(["python -m benchmarks.convolutions", *sys.argv[1:]]),
            ROUNDS,
            allocator="default",
        )
    )
    print(
        "| convolution | pass | YNNPACK ms | Eigen ms | tuned ms | Eigen / YNNPACK | tuned / "
        "YNNPACK |"
    )
    print("|---" * 7 + "|")
    for name, convolve, x, w in cases():
        if not all(word in name for word in sys.argv[1:]):
            continue
        loss = lambda x, w, f=convolve: jnp.square(f(x, w)).sum(dtype=jnp.float32)
        for phase, f in ("forward", convolve), ("gradient", jax.grad(loss, (0, 1))):
            times = milliseconds(f, x, w)
            cells = [
                *times.values(),
                times["Eigen"] / times["YNNPACK"],
                times["tuned"] / times["YNNPACK"],
            ]
            print(
                f"| {name} | {phase} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True
            )


if __name__ == "__main__":
    main()

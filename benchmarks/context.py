"""One text of 32,768 tokens on 16 TPU v5e that are not attached: the memory of each chip.

    python -m pip install libtpu        # 200 MB; no TPU is needed
    python -m benchmarks.context [--depth=12] [--tokens=32768] [--grouped]

The batch has a single row, so it cannot be split over the axis "data". Without context parallelism,
the chips can only share the heads and the hidden features of each layer. The exit code is 1 if the
plan that splits time needs more than 0.35 of that.
"""

import math
import sys
import time

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft

DEVICES = flags.DEFINE_string("devices", "v5e:4x4", "the chips")
DEPTH = flags.DEFINE_integer("depth", 12, "layers")
GROUPED = flags.DEFINE_bool(
    "grouped", False, "a Llama of this size with 4 key/value heads, so that attention is a ring"
)
TOKENS = flags.DEFINE_integer("tokens", 32768, "tokens of the text")
GOAL = 0.35  # of the memory that a chip needs without context parallelism
TENSOR = {
    r"blocks/attention/(query|key|value)/kernel": (None, None, "tensor"),
    r"blocks/attention/out/kernel": (None, "tensor"),
    r"blocks/fc/kernel": (None, None, "tensor"),
    r"blocks/proj/kernel": (None, "tensor"),
}


def planned(**options):
    """Returns the plan of a training step in bfloat16 with AdamW."""
    tokens = TOKENS.value
    sizes = {"vocab_size": 32000, "width": 1024, "depth": DEPTH.value, "heads": 16}
    if GROUPED.value:
        model = models.Decoder(**sizes, kv_heads=4, hidden=2816, context=tokens)
    else:
        model = models.GPT(**sizes, context=tokens)
    tx = optax.adamw(6e-4)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, tokens):
        loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = ft.autocast(ft.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(tx, grads), {"loss": value}

    batch = jax.ShapeDtypeStruct((1, tokens + 1), jnp.int32)
    return parallel.plan(step, init, batch, devices=DEVICES.value, announce=print, **options)


def shown(name, **options):
    """Plans, and returns (name, strategy, mesh, estimated peak, compiled peak or None)."""
    began = time.perf_counter()
    try:
        plan = planned(**options)
    except ValueError as error:  # nothing fits
        print(f"{error}\n", flush=True)
        strategy, mesh = options["strategy"], " ".join(map("=".join, _pairs(options["mesh"])))
        return name, strategy, mesh, None, None
    print(f"{plan}\n{time.perf_counter() - began:.0f} s\n", flush=True)
    chosen = plan.chosen
    assert chosen.compiled is not None, "install libtpu"
    mesh = " ".join(map("=".join, _pairs(chosen.mesh)))
    return name, chosen.strategy, mesh, chosen.estimate.peak, chosen.compiled.peak


def _pairs(mesh):
    return [(axis, str(size)) for axis, size in mesh.items()]


def main(argv):
    del argv
    count = chips()
    split = {"mesh": {"data": 1, "tensor": count}, "rules": TENSOR}
    rows = []
    if not GROUPED.value:
        for name in ("data", "data+remat"):
            rows.append(shown("heads and features", strategy=name, **split))
    rows += [shown("time", strategy=name) for name in ("context", "context+remat")]
    before = min((peak for name, *_, peak in rows if peak and name != "time"), default=None)
    print("| split | strategy | mesh | MiB on a chip, estimated | compiled | of the best before |")
    print("|---|---|---|---|---|---|")
    for name, strategy, mesh, estimated, peak in rows:
        if peak is None:
            print(f"| {name} | {strategy} | {mesh} | | does not fit | |")
            continue
        sizes = f"{estimated / 2**20:,.0f} | {peak / 2**20:,.0f}"
        share = f"{peak / before:.3f}" if before else ""
        print(f"| {name} | {strategy} | {mesh} | {sizes} | {share} |")
    best = min(peak for name, *_, peak in rows if peak and name == "time")
    sys.exit(int(before is not None and best > GOAL * before))


def chips():
    """The number of chips."""
    return math.prod(map(int, DEVICES.value.partition(":")[2].split("x")))


if __name__ == "__main__":
    app.run(main)

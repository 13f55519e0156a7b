"""One text of 32,768 tokens on 16 TPU v5e that are not attached: the memory of each chip.

    python -m pip install libtpu        # 200 MB; no TPU is needed
    python -m benchmarks.context [--depth=12] [--tokens=32768]

The batch has a single row, so it cannot be split over the axis "data". Without context parallelism,
the chips can only share the heads and the hidden features of each layer.
"""

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
TOKENS = flags.DEFINE_integer("tokens", 32768, "tokens of the text")
TENSOR = {
    r"blocks/attention/(query|key|value)/kernel": (None, None, "tensor"),
    r"blocks/attention/out/kernel": (None, "tensor"),
    r"blocks/fc/kernel": (None, None, "tensor"),
    r"blocks/proj/kernel": (None, "tensor"),
}


def planned(**options):
    """Returns the plan of a training step in bfloat16 with AdamW."""
    tokens = TOKENS.value
    model = models.GPT(vocab_size=32000, width=1024, depth=DEPTH.value, heads=16, context=tokens)
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
    """Plans, and prints a row of the table for each strategy that was compiled."""
    began = time.perf_counter()
    try:
        plan = planned(**options)
    except ValueError as error:  # nothing fits
        print(f"{name}: {error}\n")
        return
    print(plan, flush=True)
    seconds = time.perf_counter() - began
    for each in plan.candidates:
        compiled = each.compiled and each.compiled.peak
        said = f"{compiled / 2**20:,.0f}" if compiled else each.verdict
        print(f"| {name} | {each.strategy} | {each.estimate.peak / 2**20:,.0f} | {said} |")
    print(f"{name}: {plan.strategy}, {seconds:.0f} s\n", flush=True)


def main(argv):
    del argv
    count = 16
    for strategy in ("data", "fsdp+pins", "fsdp+pins+remat"):
        shown("time split", mesh={"data": 1, "context": count}, strategy=strategy)
    for strategy in ("data", "data+remat"):
        shown(
            "heads and features split",
            mesh={"data": 1, "tensor": count},
            rules=TENSOR,
            strategy=strategy,
        )


if __name__ == "__main__":
    app.run(main)

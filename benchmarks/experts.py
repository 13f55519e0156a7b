"""What a training step with a mixture of experts sends on TPU chips that are not attached, with the
experts apart (tokens travel by all-to-all) and with other strategies.

    python -m pip install libtpu        # 200 MB; no TPU is needed
    python -m benchmarks.experts [--devices=v5e:2x4] [--experts=8] [--capacity=1.25]

The model has the shape of Mixtral, sized down. "annotations" are sharding rules for the kernels
alone, with which XLA divides the layer for itself. The exit code is 1 if a chip sends at least as
much with experts apart as with every other strategy.
"""

import collections
import sys
import time

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft

DEVICES = flags.DEFINE_string("devices", "v5e:2x4", "the chips")
EXPERTS = flags.DEFINE_integer("experts", 8, "experts of a layer")
CAPACITY = flags.DEFINE_float("capacity", None, "capacity of an expert; default: dropless")
DEPTH = flags.DEFINE_integer("depth", 4, "layers")
WIDTH = flags.DEFINE_integer("width", 1024, "features")
ROWS = flags.DEFINE_integer("rows", 16, "texts of a batch")
TOKENS = flags.DEFINE_integer("tokens", 1024, "tokens of a text")
APART = flags.DEFINE_integer("apart", 4, "devices that share the experts")
KINDS = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce", "collective-permute")


def planned(**options):
    """Returns the plan of a training step in bfloat16 with AdamW."""
    width = WIDTH.value
    model = models.Decoder(
        vocab_size=8192,
        width=width,
        depth=DEPTH.value,
        heads=width // 128,
        kv_heads=max(1, width // 512),
        hidden=7 * width // 2,
        context=TOKENS.value,
        experts=EXPERTS.value,
        expert_capacity=CAPACITY.value,
    )
    tx = optax.adamw(6e-4)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, tokens):
        loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = ft.autocast(ft.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(tx, grads), {"loss": value}

    batch = jax.ShapeDtypeStruct((ROWS.value, TOKENS.value + 1), jnp.int32)
    return parallel.plan(step, init, batch, devices=DEVICES.value, announce=print, **options)


def shown(name, **options):
    """Plans, and returns the name, the chosen candidate and the number of all-gathers."""
    began = time.perf_counter()
    try:
        plan = planned(**options)
    except ValueError as error:  # nothing fits
        print(f"{name}: {error}\n", flush=True)
        return name, None
    print(
        f"{name}\n{plan}\n{plan.chosen.ledger}\n{time.perf_counter() - began:.0f} s\n", flush=True
    )
    assert plan.chosen.compiled is not None, "install libtpu"
    return name, plan.chosen


def main(argv):
    del argv
    kernels = {f"blocks/{name}": (None, "tensor") for name in ("gate", "up", "down")}
    apart = {"data": -1, "expert": APART.value}
    rows = [
        shown("fully sharded", strategy="fsdp+pins+remat"),
        shown(
            "annotations",
            strategy="fsdp+pins+remat",
            mesh={"data": -1, "tensor": APART.value},
            rules=kernels,
        ),
        shown("experts apart", strategy="expert+remat", mesh=apart),
    ]
    heads = " | ".join(f"{kind} (times)" for kind in KINDS)
    print(f"| experts | strategy | peak MiB, estimated | compiled | MiB sent | {heads} |")
    print("|---" * (5 + len(KINDS)) + "|")
    for name, each in rows:
        if each is None:
            print(f"| {name} | does not fit |")
            continue
        sent, times = collections.Counter(), collections.Counter()
        for transfer in each.ledger.transfers:
            sent[transfer.collective] += transfer.sent
            times[transfer.collective] += transfer.times
        kinds = " | ".join(f"{sent[kind] / 2**20:,.1f} ({times[kind]})" for kind in KINDS)
        print(
            f"| {name} | {each.strategy} | {each.estimate.peak / 2**20:,.0f} | "
            f"{each.peak / 2**20:,.0f} | {each.ledger.sent / 2**20:,.0f} | {kinds} |"
        )
    *others, (_, mine) = rows
    least = min((each.ledger.sent for _, each in others if each), default=float("inf"))
    sys.exit(int(mine is None or mine.ledger.sent >= least))


if __name__ == "__main__":
    app.run(main)

"""Compares pipelines with fully sharded parameters on TPUs that are not attached: the memory of each
chip and the bytes that it sends, estimated and from the compiled programs, and the bubble.

    python -m pip install libtpu        # 200 MB; no TPU is needed
    python -m benchmarks.pipelines [--devices=v5e:2x4] [--width=1024] [--depth=16] [--rows=64]

The step trains a GPT in bfloat16 with AdamW on texts of 1,024 tokens, and recomputes activations.
"""

import jax
import jax.numpy as jnp
import optax
from absl import app, flags

from fnet import models, parallel
from fnet import training as tr
from fnet import transforms as ft

DEVICES = flags.DEFINE_string("devices", "v5e:2x4", "the chips")
WIDTH = flags.DEFINE_integer("width", 1024, "width of the GPT")
DEPTH = flags.DEFINE_integer("depth", 16, "number of blocks")
ROWS = flags.DEFINE_integer("rows", 64, "texts in a batch")
STAGES = flags.DEFINE_multi_integer("stages", [4, 8], "numbers of stages")


def step_of(width, depth, rows):
    model = models.GPT(32000, width, depth, width // 64, context=1024)
    tx = optax.adamw(1e-3)

    def init(key):
        return tr.TrainState.create(model.init(key, model.example())[0], tx)

    def step(state, tokens):
        loss = lambda params: model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()
        value, grads = ft.autocast(ft.value_and_grad(loss), "bfloat16")(state.params)
        return state.apply(tx, grads), {"loss": value}

    return step, init, jax.ShapeDtypeStruct((rows, 1025), jnp.int32)


def main(_):
    case = step_of(WIDTH.value, DEPTH.value, ROWS.value)
    choices = [("fsdp+pins+remat", None)]
    choices += [("pipeline+remat", {"data": -1, "stage": n}) for n in STAGES.value]
    lines = []
    for strategy, mesh in choices:
        plan = parallel.plan(
            *case, devices=DEVICES.value, strategy=strategy, mesh=mesh, announce=print
        )
        for each in plan.candidates:
            if each.compiled is None or each.compiled.peak is None:
                continue
            axes = " x ".join(f"{name} {n}" for name, n in each.mesh.items())
            peak, sent = each.compiled.peak / 2**20, each.ledger.sent / 2**20
            guess = each.estimate.peak / 2**20
            lines.append(
                f"| {each.strategy} | {axes} | {each.persistent / 2**20:,.0f} | {peak:,.0f} | "
                f"{guess:,.0f} | {sent:,.0f} |"
            )
        for each in plan.pipeline:
            print(f"{each.scope}: {each.schedule}, bubble {each.schedule.bubble:.1%}")
    print("| strategy | mesh | state, MiB | peak, MiB | peak, estimated | sent, MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    app.run(main)

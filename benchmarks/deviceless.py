"""Memory and attention kernels of GPT-2's bfloat16 training step, compiled for an H100 that is not
attached.

    python -m pip install --no-deps jax-cuda13-pjrt==VERSION jax-cuda13-plugin==VERSION      # jax's own version
    python -m benchmarks.deviceless [--preset=gpt2] [--batch=8,16]

Neither a GPU nor CUDA is needed. The step does not run, so its speed is not measured.
"""

import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fnet import hardware, models
from fnet import transforms as ft
from fnet.parallel import _gpus

PRESET = flags.DEFINE_string("preset", "gpt2", "the preset of GPT")
BATCH = flags.DEFINE_list("batch", ["8", "16"], "texts of 1,024 tokens in a step")


def h100():
    """Returns a device to compile for."""
    found, why = _gpus.devices(hardware.chips["H100"], 1)
    return found[0] if found else sys.exit(why)


def compiled(model, batch, loss, device):
    """Returns a training step with AdamW, compiled for the device."""
    place = NamedSharding(jax.sharding.Mesh(np.array([device]), ("data",)), P())
    tx = optax.adamw(6e-4)

    def step(params, opt_state, tokens):
        gradient = ft.autocast(
            jax.value_and_grad(lambda params: loss(model, params, tokens).mean()), "bfloat16"
        )
        value, grads = gradient(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, _ = jax.eval_shape(model.init, jax.random.key(0), model.example())
    tokens = jax.ShapeDtypeStruct((batch, model.context + 1), jnp.int32)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (params, jax.eval_shape(tx.init, params), tokens),
    )
    return (
        jax.jit(step, donate_argnums=(0, 1))
        .trace(*args)
        .lower(lowering_platforms=("cuda",))
        .compile()
    )


def whole(model, params, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(
        model(params, tokens[:, :-1]), tokens[:, 1:]
    )


def chunked(model, params, tokens):
    return model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:])


def main(_):
    device, model = h100(), models.GPT.preset(PRESET.value)
    print(
        f"`python -m benchmarks.deviceless --preset={PRESET.value} "
        f"--batch={','.join(BATCH.value)}`, jax {jax.__version__}, for one {device.device_kind}\n\n"
        "| batch | loss | state GiB | temporary GiB | attention's kernels | compile s "
        "|\n|---|---|---|---|---|---|"
    )
    for batch in map(int, BATCH.value):
        for name, loss in ("model.cross_entropy", chunked), ("of whole logits", whole):
            start = time.perf_counter()
            step = compiled(model, batch, loss, device)
            memory = step.memory_analysis()
            kernels = sorted(
                set(re.findall(r'custom_call_target="__cudnn\$(\w+)"', step.as_text()))
            )
            print(
                f"| {batch} | {name} | {memory.argument_size_in_bytes / 2**30:.2f} | "
                f"{memory.temp_size_in_bytes / 2**30:.2f} | {' and '.join(kernels) or 'none'} | "
                f"{time.perf_counter() - start:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)

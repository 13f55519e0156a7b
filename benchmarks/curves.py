"""Loss curves of a small GPT in float32, in bfloat16 and with a residual stream in bfloat16, for several seeds.

    python -m benchmarks.curves [--steps=200] [--seeds=3]

Trains on the bytes of Shakespeare (`FNET_CACHE` or ~/.cache/fnet). The loss is the mean of the last 20 steps.
"""

import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from benchmarks import _handwritten
from fnet import hardware as hw
from fnet import models
from fnet import transforms as ft
from fnet.hardware._cache import cache_folder

STEPS = flags.DEFINE_integer("steps", 200, "training steps")
SEEDS = flags.DEFINE_integer("seeds", 3, "number of seeds, which change the parameters and the order of the data")
POLICIES = {"float32": "float32", "bfloat16": hw.Policy(compute="bfloat16"),
            "bfloat16, residual stream and its gradient in bfloat16": hw.Policy(
                compute="bfloat16", residual="bfloat16")}
BATCH, LENGTH, LAST = 16, 128, 20


def losses(policy, text, seed, steps):
    """The loss of each step."""
    model = models.GPT(256, 128, 6, 4, context=LENGTH)
    params, _ = model.init(jax.random.key(seed), model.example())
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 4, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    def loss(params, tokens):
        return model.cross_entropy(params, tokens[:, :-1], tokens[:, 1:]).mean()

    gradient = ft.autocast(jax.value_and_grad(loss), policy)
    step = jax.jit(_handwritten.train_step(gradient, tx), donate_argnums=(0, 1))
    random, opt_state, values = np.random.default_rng(seed), tx.init(params), []
    for _ in range(steps):
        starts = random.integers(0, len(text) - LENGTH - 1, BATCH)
        tokens = jnp.asarray(np.stack([text[start:start + LENGTH + 1] for start in starts]), jnp.int32)
        params, opt_state, value = step(params, opt_state, tokens)
        values.append(float(value))
    return values


def main(_):
    path = cache_folder() / "shakespeare" / "input.txt"
    if not path.exists():
        sys.exit(f"{path} is missing: put the text of Shakespeare there, such as that of nanoGPT (1.1 MB)")
    text = np.frombuffer(path.read_bytes(), np.uint8)
    print(f"`python -m benchmarks.curves {' '.join(sys.argv[1:])}`, jax {jax.__version__}, {STEPS.value} steps\n\n"
          f"| policy | {' | '.join(f'seed {seed}' for seed in range(SEEDS.value))} | mean |\n"
          f"|---|{'---|' * (SEEDS.value + 1)}")
    for name, policy in POLICIES.items():
        found = [statistics.mean(losses(policy, text, seed, STEPS.value)[-LAST:]) for seed in range(SEEDS.value)]
        print("|", name, "|", " | ".join(f"{value:.4f}" for value in (*found, statistics.mean(found))), "|", flush=True)


if __name__ == "__main__":
    app.run(main)

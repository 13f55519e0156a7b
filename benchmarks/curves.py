"""Loss curves in float32, in bfloat16 and with a residual stream in bfloat16, for several seeds.

    python -m benchmarks.curves [--model=gpt] [--steps=200] [--seeds=3]

--model=gpt trains a small GPT on the bytes of Shakespeare, --model=resnet a small ResNet on
CIFAR-10. The data are in `FNET_CACHE` or ~/.cache/fnet. The loss is the mean of the last 20 steps.
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
from fnet import training as tr
from fnet import transforms as ft
from fnet._util._cache import cache_folder

MODEL = flags.DEFINE_enum("model", "gpt", ["gpt", "resnet"], "the model")
STEPS = flags.DEFINE_integer("steps", 200, "training steps")
SEEDS = flags.DEFINE_integer(
    "seeds", 3, "number of seeds, which change the parameters and the order of the data"
)
POLICIES = {
    "float32": "float32",
    "bfloat16": hw.Policy(compute="bfloat16"),
    "bfloat16, residual stream and its gradient in bfloat16": hw.Policy(
        compute="bfloat16", residual="bfloat16"
    ),
}
BATCH, LENGTH, LAST = 16, 128, 20
IMAGES = 64


def gpt(policy, seed, steps):
    """The loss of each step of a GPT."""
    path = cache_folder() / "shakespeare" / "input.txt"
    if not path.exists():
        sys.exit(
            f"{path} is missing: put the text of Shakespeare there, such as that of nanoGPT (1.1 "
            f"MB)"
        )
    text = np.frombuffer(path.read_bytes(), np.uint8)
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
        tokens = jnp.asarray(
            np.stack([text[start : start + LENGTH + 1] for start in starts]), jnp.int32
        )
        params, opt_state, value = step(params, opt_state, tokens)
        values.append(float(value))
    return values


def resnet(policy, seed, steps):
    """The loss of each step of a ResNet with three stages, on flipped images."""
    data = tr.datasets.load("cifar10", download=False)
    pixels = data.train_images[:10_000].astype(np.float32) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    model = models.ResNet((1, 1, 1), bottleneck=False, classes=10, width=32)
    params, state = model.init(jax.random.key(seed), jnp.zeros((1, 32, 32, 3)))
    tx = optax.sgd(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, steps // 4, steps), momentum=0.9, nesterov=True
    )

    def loss(params, state, images, labels):
        logits, state = model(params, images, state=state, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    gradient = ft.autocast(jax.value_and_grad(loss, has_aux=True), policy)

    @jax.jit
    def step(params, state, opt_state, images, labels):
        (value, state), grads = gradient(params, state, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, value

    random, opt_state, values = np.random.default_rng(seed), tx.init(params), []
    for _ in range(steps):
        chosen = random.integers(0, len(data.train_labels), IMAGES)
        images = (data.train_images[chosen].astype(np.float32) / 255 - mean) / std
        images = np.where(random.random((IMAGES, 1, 1, 1)) < 0.5, images, images[:, :, ::-1])
        params, state, opt_state, value = step(
            params, state, opt_state, images, data.train_labels[chosen].astype(np.int32)
        )
        values.append(float(value))
    return values


def main(_):
    losses = {"gpt": gpt, "resnet": resnet}[MODEL.value]
    print(
        f"`python -m benchmarks.curves {' '.join(sys.argv[1:])}`, jax {jax.__version__}, "
        f"{STEPS.value} steps\n\n"
        f"| policy | {' | '.join(f'seed {seed}' for seed in range(SEEDS.value))} | mean |\n"
        f"|---|{'---|' * (SEEDS.value + 1)}"
    )
    for name, policy in POLICIES.items():
        found = [
            statistics.mean(losses(policy, seed, STEPS.value)[-LAST:])
            for seed in range(SEEDS.value)
        ]
        print(
            "|",
            name,
            "|",
            " | ".join(f"{value:.4f}" for value in (*found, statistics.mean(found))),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    app.run(main)

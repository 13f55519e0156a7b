"""Quantizes MobileNetV2 on CIFAR-10, after training and with quantization-aware training.

    python -m benchmarks.quantization_aware
    python -m benchmarks.quantization_aware --qat_steps=1200 --qat_formats=int4

The published weights are fine-tuned on CIFAR-10, enlarged to 64 x 64 pixels. Training then
continues for half as many steps, once with float32 kernels, and once with rounded kernels
(`compress.fake_quantize`). Both results are quantized and evaluated, so they differ only in the
rounding during training. All convolutions except the first are rounded, with a scale for each
output channel. With int8, activations are also rounded, with a scale for each image. With int4,
depthwise convolutions are rounded to int8.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from fnet import compress, models
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

STEPS = flags.DEFINE_integer("qat_steps", 600, "steps of fine-tuning; half as many follow")
SIZE = flags.DEFINE_integer("qat_size", 64, "height and width of the images")
BATCH = flags.DEFINE_integer("qat_batch", 64, "images of a step")
SEED = flags.DEFINE_integer("qat_seed", 0, "for the images, their order and the last layer")
TEST = flags.DEFINE_integer("qat_test", 10000, "test images")
KERNELS = "stage.*/conv/kernel|last/conv/kernel"
RECIPES = {
    "int8": {KERNELS: compress.Int8(activations="dynamic")},
    "int4": {".*depthwise/conv/kernel": compress.Int8(), KERNELS: compress.Int4(None)},
}
NAMES = flags.DEFINE_list("qat_formats", list(RECIPES), f"some of {', '.join(RECIPES)}")


def network():
    """Returns (model, params, state) with the published weights and a new last layer."""
    path = pretrained.find("mobilenet_v2")
    params, state = pretrained.load(pretrained.model("mobilenet_v2", path), path)
    model = models.MobileNetV2(classes=10)
    fresh, _ = model.init(jax.random.key(SEED.value), jnp.zeros((1, SIZE.value, SIZE.value, 3)))
    return model, {**params, "head": fresh["head"]}, state


def prepared(images):
    """Returns the images, enlarged and normalized as for ImageNet."""
    x = jax.image.resize(
        images.astype(jnp.float32) / 255, (len(images), SIZE.value, SIZE.value, 3), "bilinear"
    )
    return (x - jnp.array([0.485, 0.456, 0.406])) / jnp.array([0.229, 0.224, 0.225])


def train(model, params, state, data, *, steps: int, peak: float):
    """Trains with Adam on randomly flipped images, and returns (params, state)."""
    tx = tr.optimizer("adam", tr.schedule("cosine", peak, steps, warmup=0.1))
    run = ft.use_implicit_arrays(model)

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(SEED.value), state.step)
        images = prepared(tr.random_flip(key, batch["image"]))

        def loss(params):
            logits, new = run(params, images, state=state.state, train=True, key=key)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            ).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply(tx, grads, state=new), {"loss": value}

    batches = tr.Batches(
        {"image": data.train_images, "label": data.train_labels},
        batch_size=BATCH.value,
        seed=SEED.value,
    )
    done = tr.fit(
        step, tr.TrainState.create(params, tx, state=state), batches, steps=steps, log_every=100
    )
    return done.params, done.state


def accuracy(model, params, state, data) -> float:
    classify = jax.jit(
        lambda params, images: ft.use_implicit_arrays(model)(params, prepared(images), state=state)[
            0
        ].argmax(-1)
    )
    images = data.test_images[: TEST.value]
    guesses = [classify(params, images[i : i + 250]) for i in range(0, len(images), 250)]
    return float((np.concatenate(guesses) == data.test_labels[: TEST.value]).mean())


def main(argv):
    del argv
    began, data = time.perf_counter(), tr.datasets.load("cifar10")
    model, params, state = network()
    more = dict(steps=STEPS.value // 2, peak=2e-4)
    params, state = train(model, params, state, data, steps=STEPS.value, peak=1e-3)
    plain, plain_state = train(model, params, state, data, **more)
    rows = [("float32", plain, accuracy(model, plain, plain_state, data), None)]
    for name in NAMES.value:
        recipe = RECIPES[name]
        codes = compress.quantize(plain, recipe)
        aware, aware_state = train(
            model, compress.fake_quantize(params, recipe), state, data, **more
        )
        rows.append(
            (
                name,
                codes,
                accuracy(model, codes, plain_state, data),
                accuracy(model, compress.convert(aware), aware_state, data),
            )
        )
    print(
        f"MobileNetV2, CIFAR-10 at {SIZE.value} x {SIZE.value}, {STEPS.value} + {STEPS.value // 2} "
        f"steps of {BATCH.value} images, one seed, {time.perf_counter() - began:.0f} s\n"
    )
    print(
        "| kernels | MB | rounded after training | quantization-aware training |\n|---|---|---|---|"
    )
    for name, tree, after, aware in rows:
        print(
            f"| {name} | {compress.size(tree) / 1e6:.1f} | {after:.2%} | "
            f"{'' if aware is None else f'{aware:.2%}'} |"
        )


if __name__ == "__main__":
    app.run(main)

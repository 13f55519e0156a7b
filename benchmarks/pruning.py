"""Structured pruning: sizes and times of models with half of their channels, and accuracy of a
network at four sizes.

    python -m benchmarks.pruning models                             # parameters, FLOPs and time before and after
    python -m benchmarks.pruning accuracy --prune_plot=digits.png   # accuracy against FLOPs
    python -m benchmarks.pruning accuracy --prune_data=cifar10 --prune_width=16 --prune_steps=4000

The models have random parameters, which determine neither sizes nor times. For the accuracy, a
ResNet9 is trained, shrunk to each number of FLOPs, and trained further for a quarter of the steps.
For comparison, a ResNet9 with half the channels is trained for the same total number of steps.
Accuracies are means over seeds.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags

from fnet import compress, cost, models
from fnet import layers as nn
from fnet import training as tr

WIDTH = flags.DEFINE_integer("prune_width", 8, "channels of the first stage of ResNet9")
DATA = flags.DEFINE_enum(
    "prune_data", "digits", tr.datasets.NAMES, "the images; digits: the last 20 % are the test"
)
SEEDS = flags.DEFINE_integer(
    "prune_seeds", 3, "runs, with different initial parameters and batches"
)
STEPS = flags.DEFINE_integer("prune_steps", 600, "training steps before pruning")
RATIOS = flags.DEFINE_list(
    "prune_ratios", ["0.7", "0.5", "0.3", "0.15"], "FLOPs after pruning, of those before"
)
SCORE = flags.DEFINE_string("prune_score", "magnitude", "magnitude or activations")
NAMES = flags.DEFINE_list("prune_models", [], "some of the models; default: all")
PLOT = flags.DEFINE_string("prune_plot", None, "the PNG to write")
BATCH = 128

MODELS = {
    "MLP 784-512-256-10": (models.MLP((512, 256, 10)), (32, 784)),
    "CNN 28 x 28": (models.CNN(10, (32, 64)), (32, 28, 28, 1)),
    "ResNet9 32 x 32": (models.ResNet9(width=32), (8, 32, 32, 3)),
    "ResNet-50": (models.ResNet.preset("resnet50"), (1, 224, 224, 3)),
    "MobileNetV2": (models.MobileNetV2(), (1, 224, 224, 3)),
    "AlexNet": (models.AlexNet(), (1, 224, 224, 3)),
    "ViT 192 x 12": (models.ViT(192, 12, 3, classes=1000, patch=16, size=224), (1, 224, 224, 3)),
    "GPT 256 x 6": (models.GPT(8000, 256, 6, 8, context=128), (4, 128)),
    "Llama 288 x 6 with 2 key/value heads": (
        models.Decoder(8000, 288, 6, 6, 2, 768, context=128),
        (4, 128),
    ),
    "BERT 384 x 6": (models.Bert(8000, 384, 6, 12, 1536, context=128), (4, 128)),
    "LSTM 256 x 2": (models.LSTMLanguageModel(5000, 256), (8, 64)),
}


def halves() -> None:
    """Prints the table of models that `compress.shrink` cuts with `fraction=0.5`."""
    print(
        "| model | parameters | after | FLOPs | after | time | after | shrink "
        "|\n|---|---|---|---|---|---|---|---|"
    )
    for name in NAMES.value or MODELS:
        model, shape = MODELS[name]
        x = (
            jnp.zeros(shape, jnp.int32)
            if len(shape) == 2 and not isinstance(model, models.MLP)
            else jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
        )
        params, state = model.init(jax.random.key(0), x)
        options = {"state": state} if state else {}
        began = time.perf_counter()
        shrunk = compress.shrink(model, params, x, fraction=0.5, **options)
        took = time.perf_counter() - began
        before = _milliseconds(functools.partial(model, **options), params, x)
        after = _milliseconds(
            functools.partial(shrunk.f, **({"state": shrunk.state} if state else {})),
            shrunk.params,
            x,
        )
        report = shrunk.report
        cells = [
            name,
            *(f"{n:,}" for n in report.parameters),
            *(f"{n / 1e6:,.1f} M" for n in report.flops),
            f"{before:.1f} ms",
            f"{after:.1f} ms",
            f"{took:.1f} s",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


def _milliseconds(f, *args) -> float:
    """Returns the median milliseconds of a compiled call."""
    run, times = jax.jit(f), []
    jax.block_until_ready(run(*args))
    end = time.perf_counter() + 1
    while len(times) < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def train(f, params, state, data, *, steps: int, peak: float, seed: int):
    """Trains a function with Adam on augmented images, and returns (parameters, state)."""
    tx = tr.optimizer("adam", tr.schedule("cosine", peak, steps, warmup=0.1))
    train_state = tr.TrainState.create(params, tx, state=state)

    def step(train_state, batch):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), train_state.step))
        images = tr.random_shift(keys[0], batch["image"], max(1, batch["image"].shape[1] // 8))
        images = tr.random_flip(keys[1], images) if DATA.value == "cifar10" else images

        def loss(params):
            logits, new = f(params, _standard(images), state=train_state.state, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            ).mean(), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(train_state.params)
        return train_state.apply(tx, grads, state=new), {"loss": value}

    run = jax.jit(step, donate_argnums=0)
    batches = tr.Batches(
        {"image": data.train_images, "label": data.train_labels}, batch_size=BATCH, seed=seed
    )
    train_state = jax.tree.map(jnp.array, train_state)
    for i in range(steps):
        train_state, _ = run(train_state, batches(i))
    return train_state.params, train_state.state


def _standard(images):
    return (jnp.asarray(images, jnp.float32) / 255 - 0.47) / 0.25


def accuracy(f, params, state, data) -> float:
    classify = jax.jit(lambda images: f(params, _standard(images), state=state)[0].argmax(-1))
    guesses = np.concatenate(
        [classify(data.test_images[i : i + 500]) for i in range(0, len(data.test_images), 500)]
    )
    return float((guesses == data.test_labels).mean())


def compare(data, seed: int) -> dict[str, tuple]:
    """Returns {network: (FLOPs of an image, number of parameters, accuracy before fine-tuning or
    None, accuracy)}."""
    model, x = (
        models.ResNet9(classes=len(data.classes), width=WIDTH.value),
        _standard(data.train_images[:1]),
    )
    steps, more = STEPS.value, STEPS.value // 4
    params, state = model.init(jax.random.key(seed), x)
    params, state = train(model, params, state, data, steps=steps, peak=5e-3, seed=seed)
    whole, size = cost.count(model, params, x, state=state).flops, nn.count_parameters(params)
    rows = {
        f"ResNet9, width {WIDTH.value}": (whole, size, None, accuracy(model, params, state, data))
    }
    for ratio in map(float, RATIOS.value):
        shrunk = compress.shrink(
            model, params, x, state=state, flops=ratio * whole, score=SCORE.value
        )
        at_once = accuracy(shrunk.f, shrunk.params, shrunk.state, data)
        tuned = train(shrunk.f, shrunk.params, shrunk.state, data, steps=more, peak=2e-3, seed=seed)
        rows[f"pruned to {ratio:.0%} of the FLOPs"] = (
            shrunk.report.flops[1],
            shrunk.report.parameters[1],
            at_once,
            accuracy(shrunk.f, *tuned, data),
        )
    small = dataclasses.replace(model, width=WIDTH.value // 2)
    params, state = train(
        small, *small.init(jax.random.key(seed), x), data, steps=steps + more, peak=5e-3, seed=seed
    )
    rows[f"ResNet9, width {WIDTH.value // 2}, not pruned"] = (
        cost.count(small, params, x, state=state).flops,
        nn.count_parameters(params),
        None,
        accuracy(small, params, state, data),
    )
    return rows


def accuracies() -> None:
    """Prints the table of accuracy and FLOPs, and draws it if a file is requested."""
    split = {"split": "last20"} if DATA.value == "digits" else {}
    data, began = tr.datasets.load(DATA.value, **split), time.perf_counter()
    runs = [compare(data, seed) for seed in range(SEEDS.value)]
    print(
        f"{DATA.value}, {STEPS.value} steps of {BATCH} images, {STEPS.value // 4} after pruning by "
        f"{SCORE.value}, {SEEDS.value} seeds, {time.perf_counter() - began:.0f} s in total\n"
    )
    print(
        "| network | MFLOP of an image | parameters | accuracy at first | accuracy "
        "|\n|---|---|---|---|---|"
    )
    points = []
    for name, (flops, size, before, _) in runs[0].items():
        final = [run[name][3] for run in runs]
        at_once = "" if before is None else f"{statistics.mean(run[name][2] for run in runs):.2%}"
        print(
            f"| {name} | {flops / 1e6:.3f} | {size:,} | {at_once} | {statistics.mean(final):.2%} "
            f"({min(final):.2%} to {max(final):.2%}) |"
        )
        points.append((flops / 1e6, 100 * statistics.mean(final)))
    if PLOT.value:
        draw(points, PLOT.value)


def draw(points, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.subplots()
    *pruned, small = points
    axes.plot(*zip(*sorted(pruned)), "o-", label="pruned and fine-tuned")
    axes.plot(*small, "s", label="half the channels from the start")
    axes.set(xlabel="MFLOP for an image", ylabel="test accuracy, %", title=f"ResNet9, {DATA.value}")
    axes.set_xlim(0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    app.run(lambda arguments: {"models": halves, "accuracy": accuracies}[arguments[1]]())

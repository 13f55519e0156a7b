"""Trains a network to classify images: digits, MNIST, Fashion-MNIST or CIFAR-10.

    python experiments/image_classification.py                        # scikit-learn's digits
    python experiments/image_classification.py --dataset=fashion_mnist --seed=1
    python experiments/image_classification.py --model=mlp --optimizer=adam --schedule=constant
    python experiments/image_classification.py --wrapper=sam --optimizer=momentum
    python experiments/image_classification.py --devices=local                  # all attached devices
    python experiments/image_classification.py --plan=v5e:2x4 --batch_size=512  # prints a plan and exits

The run's folder (--workdir, else runs/DATASET) receives config.json, metrics.jsonl, a TensorBoard
log, checkpoints, curves.png, confusion.png, and predictions for `fnet report`. The same command
resumes an interrupted run. If the run is already complete, the command evaluates the last
checkpoint. --restart starts again from the first step.

The data set digits has no official test set. The test set is a fixed, stratified random fifth of
the images. A second network is trained on the first 80 % of the file and tested on the last 20 %.
This conventional split is harder, because other writers wrote the last 20 %. --nolast20 omits the
second network.
"""

import dataclasses
import math
import time

import _common as common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import export, models
from fnet import hardware as hw
from fnet import training as tr
from fnet import transforms as ft

option = tr.flags.option
WRAPPERS = ("none", "lookahead", "sam")
AUGMENTATIONS = ("none", "shift", "affine", "flip", "flip_crop", "flip_crop_cutout")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The hyperparameters, which determine the result of a run, and the path data_dir, which does
    not."""

    dataset: str = option(
        "digits",
        "name of the data set: digits, mnist, fashion_mnist or cifar10",
        choices=tr.datasets.NAMES,
    )
    data_dir: str | None = option(
        None,
        "folder of the data set's files, to which missing files are downloaded; if not "
        "given, fnet's cache",
        decides=False,
    )
    split: str = option(
        "random",
        "test images of digits: random, or last20 (the last 20 % of the file)",
        choices=("random", "last20"),
    )
    model: str = option("cnn", "model: cnn or mlp", choices=("cnn", "mlp"))
    width: int | None = option(
        None,
        "number of channels in the first stage of the CNN; each later stage has twice as many",
        within="[1, 8192]",
    )
    depth: int = option(
        1,
        "number of convolutions in the first stage of the CNN; the other stages have two",
        within="[1, 128]",
    )
    dropout: float = option(
        0.2,
        "dropout rate, before the last layer of the CNN or after each hidden layer of the MLP",
        within="[0, 1)",
    )
    epochs: float | None = option(
        None, "number of passes over the training images", within="(0, 1000000]"
    )
    steps: int | None = option(
        None, "number of training steps; replaces --epochs", within=tr.flags.STEPS
    )
    batch_size: int | None = option(None, "number of images in a batch", within="[1, 1048576]")
    optimizer: str = option(
        "nesterov", f"name of the optimizer: {', '.join(tr.OPTIMIZERS)}", choices=tr.OPTIMIZERS
    )
    wrapper: str = option(
        "none", f"transformation of the optimizer: {', '.join(WRAPPERS)}", choices=WRAPPERS
    )
    sam_radius: float = option(
        0.05,
        "with --wrapper=sam: distance from the weights at which the gradient is computed",
        within="(0, 1000]",
    )
    schedule: str = option(
        "cosine", f"schedule of the learning rate: {', '.join(tr.SCHEDULES)}", choices=tr.SCHEDULES
    )
    learning_rate: float | None = option(None, "largest learning rate", within="(0, 1000]")
    warmup: float = option(
        0.15,
        "fraction of the training steps during which the learning rate increases",
        within="[0, 1)",
    )
    weight_decay: float | None = option(
        None,
        "coefficient of the weight decay, which applies to kernels but not to "
        "biases and norm scales",
        within="[0, 1000]",
    )
    label_smoothing: float = option(
        0.0,
        "fraction of each label's probability that is distributed equally over all classes",
        within="[0, 1)",
    )
    augment: str | None = option(
        None,
        "augmentation of the images: none, shift, affine, flip, flip_crop or flip_crop_cutout",
        choices=AUGMENTATIONS,
    )
    ema: float = option(
        0.99,
        "decay rate of the moving average of the weights, which is evaluated instead of the "
        "weights; 0: no average",
        within="[0, 1)",
    )
    early_stop: int = option(
        0,
        "number of evaluations without improvement after which the training stops; a tenth of "
        "the training images is held out for these evaluations; 0: no early stopping",
        within="[0, 1000000]",
    )
    precision: str = option(
        "auto",
        "dtype of matrix products and convolutions: auto (chosen for the chip), float32, "
        "bfloat16 or float16",
        choices=common.PRECISIONS,
    )
    seed: int = option(
        0,
        "random seed of the initial weights, the order of the images, the augmentation and dropout",
        within=tr.flags.SEED,
    )


PRESETS = tr.presets.IMAGE_CLASSIFICATION

AUGMENT = {
    "none": lambda key, images: images,
    "shift": lambda key, images: tr.random_shift(key, images, max(1, images.shape[1] // 14)),
    "affine": lambda key, images: tr.random_affine(key, images, degrees=10, scale=0.1, shift=0.08),
    "flip": tr.random_flip,
    "flip_crop": lambda key, images: flip_and_crop(key, images),
    "flip_crop_cutout": lambda key, images: tr.cutout(key, flip_and_crop(key, images), 8),
}


def flip_and_crop(key, images):
    keys = jax.random.split(key)
    return tr.random_crop(keys[0], tr.random_flip(keys[1], images), images.shape[1] // 8)


def make_optimizer(config, rate, axes):
    tx = tr.optimizer(config.optimizer, rate, weight_decay=config.weight_decay, axes=axes)
    if config.wrapper == "lookahead":
        return tr.lookahead(tx)
    if config.wrapper == "sam":  # two gradients for each step
        ascent = optax.chain(optax.contrib.normalize(), optax.sgd(config.sam_radius))
        return optax.contrib.sam(tx, ascent, opaque_mode=True)
    return tx


def make_model(config, classes, size):
    if config.model == "mlp":
        return models.MLP((512, 256, classes), config.dropout)
    if size < 16:  # digits are 8 × 8
        return models.CNN(classes, (config.width, 2 * config.width), 2, dropout=config.dropout)
    widths = tuple(config.width * 2**i for i in range(3))
    return models.CNN(classes, widths, (config.depth, 2, 2), stem=(5, 2), dropout=config.dropout)


def train(config, workdir, policy, **fit_options):
    """Trains a model, or resumes an interrupted run. A run that is already complete is only
    evaluated. Returns the results of the evaluation of the last state."""
    data = tr.datasets.load(config.dataset, config.data_dir, split=config.split, announce=print)
    classes, (height, width, channels) = len(data.classes), data.train_images.shape[1:]
    train_set = {"image": data.train_images, "label": data.train_labels}
    test_set = {"image": data.test_images, "label": data.test_labels}
    held_out = None
    if config.early_stop:
        train_set, held_out = tr.split(train_set, 0.1, seed=config.seed)
    batches = tr.Batches(train_set, batch_size=config.batch_size, seed=config.seed)
    steps = config.steps or common.check_steps(batches.steps(config.epochs))

    pixels = train_set["image"][:10_000].astype(np.float32) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))  # [channels]
    standard = lambda images: (images - mean[None, None, None]) / std[None, None, None]
    augment = AUGMENT[config.augment]
    model = make_model(config, classes, height)
    rate = tr.schedule(config.schedule, config.learning_rate, steps, warmup=config.warmup)
    axes = model.spec(jax.ShapeDtypeStruct((1, height, width, channels), jnp.float32))
    tx = ft.loss_scale(make_optimizer(config, rate, axes), policy)

    def step(state, batch):
        key, dropout = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.step))
        images = standard(augment(key, batch["image"].astype(jnp.float32) / 255))
        target = optax.smooth_labels(
            jax.nn.one_hot(batch["label"], classes), config.label_smoothing
        )

        def loss(params):
            logits, new = model(params, images, state=state.state, key=dropout, train=True)
            return optax.softmax_cross_entropy(logits, target).mean(), (logits, new)

        gradient = ft.autocast(ft.scaled_value_and_grad(loss, has_aux=True), policy)
        (value, (logits, new)), grads = gradient(state.opt_state, state.params)
        correct = logits.argmax(-1) == batch["label"]
        metrics = {"loss": value, "accuracy": tr.mean(correct), "learning_rate": rate(state.step)}
        if scaler := ft.loss_scale_state(state.opt_state):
            metrics |= {"loss_scale": scaler.scale, "skipped": scaler.skipped.astype(jnp.float32)}
        at = lambda params, _: ft.autocast(jax.grad(loss, has_aux=True), policy)(params)[0]
        extra = {"grad_fn": at} if config.wrapper == "sam" else {}
        return state.apply(tx, grads, state=new, **extra), metrics

    def measure(state, batch):
        images = standard(batch["image"].astype(jnp.float32) / 255)
        logits, _ = ft.autocast(model, policy)(state.averaged, images, state=state.state)
        label, weight, guess = batch["label"], batch["weight"], logits.argmax(-1)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return {
            "loss": tr.mean(loss, weight),
            "accuracy": tr.mean(guess == label, weight),
            "confusion": tr.confusion(label, guess, classes, weight),
        }

    evaluate = {"test": tr.evaluator(measure, test_set, batch_size=500)}
    stop = None
    if held_out:
        evaluate["validation"] = tr.evaluator(measure, held_out, batch_size=500)
        stop = tr.EarlyStop(metric="validation/accuracy", patience=config.early_stop)

    example = jax.ShapeDtypeStruct((1, height, width, channels), jnp.float32)

    def init(key):
        params, variables = model.init(key, example)
        return tr.TrainState.create(params, tx, state=variables, ema=config.ema or None)

    features = (
        config.width if config.model == "cnn" else channels
    )  # of each pixel of the first activation
    common.check_memory(
        init, 4 * config.batch_size * height * width * features, "--batch_size, --width or --depth"
    )
    plan = common.plan(step, init, batches(0))
    state = (plan.init if plan else init)(jax.random.key(config.seed))
    count = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    split = f" ({config.split} split)" if config.dataset == "digits" else ""
    print(
        f"{config.dataset}{split}: {batches.length} training images, {len(data.test_labels)} test "
        f"images, {height} x {width} x {channels}, {classes} classes"
    )
    print(f"{config.model}: {count:,} parameters, {steps} steps of {config.batch_size} images")

    every = max(math.ceil(steps / 20), 10)
    common.start(
        workdir, "curves.png", "confusion.png", "model.json", "predictions.json", "summary.json"
    )
    export.record(
        workdir,
        model,
        labels=data.classes,
        standardize={"mean": mean, "std": std},
        x=export.spec(f"b, {height}, {width}, {channels}"),
    )
    began = time.perf_counter()
    state = tr.fit(
        step,
        state,
        batches,
        steps=steps,
        workdir=workdir,
        evaluate=evaluate,
        every=every,
        log_every=every,
        early_stop=stop,
        progress=tr.Progress(),
        config=config,
        notes={"policy": str(policy)},
        plan=plan,
        **fit_options,
    )
    rows = tr.read_metrics(workdir)
    speed = common.median_speed(rows)
    print(
        f"trained to step {int(state.step)} in {tr.duration(time.perf_counter() - began)}, "
        f"{speed:.1f} steps/s, {speed * config.batch_size:.0f} images/s"
    )

    values = evaluate["test"](state)
    title = f"{config.dataset}, {config.model}: test accuracy {values['accuracy']:.4f}"
    tr.plots.curves(rows, workdir / "curves.png", title=title)
    tr.plots.confusion_matrix(
        values["confusion"], data.classes, workdir / "confusion.png", title=title
    )
    if jax.process_count() == 1:
        probabilities = predict(ft.autocast(model, policy), state, test_set["image"], standard)
        tr.save_predictions(
            workdir,
            probabilities,
            test_set["label"],
            classes=data.classes,
            images=test_set["image"],
        )
        common.save_summary(workdir, model, example)
    print(
        f"{workdir}: config.json, metrics.jsonl, tensorboard, checkpoints, curves.png, "
        f"confusion.png"
    )
    print(f"export the model: fnet export {workdir} --to=bundle,onnx")
    print(f"show the run: fnet report {workdir}")
    return values


def predict(model, state, images, standard, batch_size=500):
    """Returns the probabilities of the classes, [images, classes]."""

    @jax.jit
    def probabilities(params, variables, images):
        logits, _ = model(params, standard(images.astype(jnp.float32) / 255), state=variables)
        return jax.nn.softmax(logits.astype(jnp.float32))

    size, found = min(batch_size, len(images)), []
    for start in range(0, len(images), size):
        rows = np.minimum(
            np.arange(start, start + size), len(images) - 1
        )  # the last batch repeats an image
        found.append(np.asarray(probabilities(state.averaged, state.state, images[rows])))
    return np.concatenate(found)[: len(images)]


def define_flags():
    tr.flags.define(Config, flags.FLAGS, by="dataset")
    flags.DEFINE_string("workdir", None, "folder of the run (default: runs/DATASET)")
    common.define_run_flags()
    common.define_device_flags()
    flags.DEFINE_bool(
        "last20",
        True,
        "for digits: also train and test with the conventional split, in which the last "
        "20 % are the test images",
    )


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    common.no_arguments(argv, "--dataset=digits")
    return checked(tr.flags.read(Config, flags.FLAGS, PRESETS, by="dataset"))


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    if config.split != "random" and config.dataset != "digits":
        raise tr.ConfigError(
            f"--split={config.split}: it is for --dataset=digits, {config.dataset} has a fixed "
            f"split"
        )
    tr.optimizer(config.optimizer, 0.1, weight_decay=config.weight_decay)
    return config


def main(argv):
    config = configured(argv)
    common.needs("matplotlib")
    workdir = common.user_path("workdir", flags.FLAGS.workdir or f"runs/{config.dataset}")
    policy, config = common.decided(
        config, workdir, workdir / "last20", restart=flags.FLAGS.restart
    )
    if config.wrapper == "sam" and policy.loss_scale is not None:
        raise tr.ConfigError(
            "--wrapper=sam: its second gradient has no loss scale; use --precision=float32"
        )
    runs = {workdir: config}
    if config.dataset == "digits" and config.split == "random" and flags.FLAGS.last20:
        runs = {workdir / "last20": dataclasses.replace(config, split="last20")} | runs
    if not common.only_planned() and not flags.FLAGS.restart:
        for folder, each in runs.items():
            tr.same_config(each, folder, but=("data_dir",))

    chip = hw.detect()
    print(f"chip: {chip}")
    print(f"policy: {policy}")
    results = {
        each.split: train(each, folder, policy, **common.fit_options())
        for folder, each in runs.items()
    }
    if len(results) == 2:
        print(f"accuracy on the last 20 % of the file {results['last20']['accuracy']:.4f}")
    print(f"test accuracy {results[config.split]['accuracy']:.4f}")


if __name__ == "__main__":
    define_flags()
    common.run(main)

"""Trains a small network (the student) to match the probabilities, and optionally the features, of
a large network (the teacher).

    python experiments/image_classification.py --workdir=runs/digits             # the teacher
    python experiments/distil.py --teacher=runs/digits --width=4                 # the student
    python experiments/distil.py --teacher=runs/digits --width=4 --weight=0      # the same without the teacher
    python experiments/distil.py --teacher=runs/digits --width=4 --hidden=1 --swa=0.25

--teacher is the folder of a run of experiments/image_classification.py. The student has the data
set, the augmentation and the architecture of this run, but another width. The loss is
compress.distillation_loss. --hidden adds a loss for the difference between the features before the
last layer; a trained matrix projects the student's features to the teacher's number of features.
--swa averages the weights of the last part of the run, and recomputes the statistics of BatchNorm.

The run's folder (--workdir, else runs/distil) receives config.json, metrics.jsonl, a TensorBoard
log, checkpoints and curves.png. The same command resumes an interrupted run; --restart starts again
from the first step.
"""

import dataclasses
import math
import time

import _common as common
import image_classification as base
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import compress
from fnet import hardware as hw
from fnet import training as tr
from fnet import transforms as ft

option = tr.flags.option
FEATURES = "pool"  # the site of a CNN whose values --hidden compares


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The hyperparameters, which determine the result of a run, and the path of the teacher, which
    does not."""

    teacher: str = option(
        "runs/digits", "folder of the teacher's run of image_classification.py", decides=False
    )
    width: int = option(
        4,
        "number of channels in the first stage of the student; each later stage has twice as many",
        within="[1, 8192]",
    )
    temperature: float = option(
        4.0,
        "temperature by which the logits of teacher and student are divided",
        within="[0.1, 1000]",
    )
    weight: float = option(
        0.9,
        "weight of the loss for the teacher's probabilities; the loss for the labels has the "
        "remaining weight",
        within="[0, 1]",
    )
    hidden: float = option(
        0.0,
        "weight of the loss for the difference between the features of teacher and student; 0: "
        "no such loss",
        within="[0, 1000000]",
    )
    swa: float = option(
        0.0,
        "fraction of the training steps, at the end of the run, over which the weights are "
        "averaged; 0: no average",
        within="[0, 1)",
    )
    epochs: float = option(40.0, "number of passes over the training images", within="(0, 1000000]")
    steps: int | None = option(
        None, "number of training steps; replaces --epochs", within=tr.flags.STEPS
    )
    batch_size: int = option(64, "number of images in a batch", within="[1, 1048576]")
    optimizer: str = option(
        "nesterov", f"name of the optimizer: {', '.join(tr.OPTIMIZERS)}", choices=tr.OPTIMIZERS
    )
    schedule: str = option(
        "cosine", f"schedule of the learning rate: {', '.join(tr.SCHEDULES)}", choices=tr.SCHEDULES
    )
    learning_rate: float = option(0.05, "largest learning rate", within="(0, 1000]")
    warmup: float = option(
        0.15,
        "fraction of the training steps during which the learning rate increases",
        within="[0, 1)",
    )
    weight_decay: float = option(
        1e-3,
        "coefficient of the weight decay, which applies to kernels but not to biases "
        "and norm scales",
        within="[0, 1000]",
    )
    precision: str = option(
        "auto",
        "dtype of matrix products and convolutions: auto (chosen for the chip), float32, "
        "bfloat16 or float16",
        choices=common.PRECISIONS,
    )
    seed: int = option(
        0,
        "random seed of the initial weights, the order of the images and the augmentation",
        within=tr.flags.SEED,
    )


def read_teacher(folder):
    """Returns (the configuration, the last saved state) of a run of image_classification.py.

    Raises:
      FileNotFoundError: the folder contains no run.
      ConfigError: the network is not a CNN.
    """
    config = tr.load_config(base.Config, folder / "config.json")
    if config.model != "cnn":
        raise tr.ConfigError(
            f"--teacher={folder}: expected a run with --model=cnn, got --model={config.model}"
        )
    return config, tr.load(folder)


def train(config, workdir, policy, **fit_options):
    """Trains the student, or resumes an interrupted run. A run that is already complete is only
    evaluated.

    Returns:
      The accuracies on the test images: {"accuracy": student, "teacher": teacher, "averaged":
      student with averaged weights, or None without --swa}.
    """
    taught, snapshot = read_teacher(common.user_path("teacher", config.teacher))
    data = tr.datasets.load(taught.dataset, taught.data_dir, split=taught.split, announce=print)
    classes, shape = len(data.classes), data.train_images.shape[1:]
    train_set = {"image": data.train_images, "label": data.train_labels}
    test_set = {"image": data.test_images, "label": data.test_labels}
    batches = tr.Batches(train_set, batch_size=config.batch_size, seed=config.seed)
    steps = config.steps or common.check_steps(batches.steps(config.epochs))
    pixels = train_set["image"][:10_000].astype(np.float32) / 255
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))  # [channels]
    standard = lambda images: (images - mean[None, None, None]) / std[None, None, None]
    augment = base.AUGMENT[taught.augment]

    teacher = base.make_model(taught, classes, shape[0])
    student = base.make_model(
        dataclasses.replace(taught, width=config.width, dropout=0.0), classes, shape[0]
    )
    rate = tr.schedule(config.schedule, config.learning_rate, steps, warmup=config.warmup)
    axes = {"student": student.spec(jax.ShapeDtypeStruct((1, *shape), jnp.float32))}
    if config.hidden:
        axes["projection"] = "in out"
    tx = tr.optimizer(config.optimizer, rate, weight_decay=config.weight_decay, axes=axes)
    if config.swa:
        first = max(1, math.ceil(steps * (1 - config.swa)))
        tx = optax.chain(
            tx,
            tr.average_weights(
                start=first, every=max(1, len(data.train_labels) // config.batch_size)
            ),
        )
    tx = ft.loss_scale(tx, policy)

    def step(state, batch):
        key, dropout = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), state.step))
        images = standard(augment(key, batch["image"].astype(jnp.float32) / 255))
        known, variables = state.state["teacher"], state.state["student"]
        (wanted, _), features = ft.capture(teacher, FEATURES)(
            known["params"], images, state=known["state"]
        )

        def loss(params):
            (logits, new), mine = ft.capture(student, FEATURES)(
                params["student"], images, state=variables, key=dropout, train=True
            )
            value = compress.distillation_loss(
                logits, wanted, batch["label"], temperature=config.temperature, weight=config.weight
            ).mean()
            if config.hidden:
                value += config.hidden * compress.hidden_loss(
                    mine, features, {FEATURES: FEATURES}, {FEATURES: params["projection"]}
                )
            return value, (logits, new)

        gradient = ft.autocast(ft.scaled_value_and_grad(loss, has_aux=True), policy)
        (value, (logits, new)), grads = gradient(state.opt_state, state.params)
        accuracy = tr.mean(logits.argmax(-1) == batch["label"])
        metrics = {"loss": value, "accuracy": accuracy, "learning_rate": rate(state.step)}
        return state.apply(tx, grads, state={**state.state, "student": new}), metrics

    def accuracy(model, params, variables, batch):
        images = standard(batch["image"].astype(jnp.float32) / 255)
        logits, _ = ft.autocast(model, policy)(params, images, state=variables)
        return tr.mean(logits.argmax(-1) == batch["label"], batch["weight"])

    def measure(state, batch):
        return {
            "accuracy": accuracy(student, state.params["student"], state.state["student"], batch)
        }

    def init(key):
        one, two = jax.random.split(key)
        params, variables = student.init(one, jax.ShapeDtypeStruct((1, *shape), jnp.float32))
        params = {"student": params}
        if config.hidden:
            sizes = [
                tree["head"]["kernel"].shape[0] for tree in (params["student"], snapshot.params)
            ]
            params["projection"] = jax.random.normal(two, sizes) / math.sqrt(sizes[0])
        # The teacher is a part of the state, because arrays that a step closes over are constants
        # of its program.
        known = {"params": snapshot.averaged, "state": snapshot.state}
        return tr.TrainState.create(params, tx, state={"student": variables, "teacher": known})

    evaluate = {"test": tr.evaluator(measure, test_set, batch_size=500)}
    common.check_memory(init, 4 * config.batch_size * math.prod(shape), "--batch_size or --width")
    state = init(jax.random.key(config.seed))
    large, small = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (snapshot.params, state.params["student"])
    )
    print(
        f"{taught.dataset}: {batches.length} training images, {len(data.test_labels)} test images, "
        f"{classes} classes"
    )
    print(
        f"teacher: {large:,} parameters; student: {small:,}, {steps} steps of {config.batch_size} "
        f"images"
    )
    common.start(workdir, "curves.png")
    every, began = max(math.ceil(steps / 20), 10), time.perf_counter()
    state = tr.fit(
        step,
        state,
        batches,
        steps=steps,
        workdir=workdir,
        evaluate=evaluate,
        every=every,
        log_every=every,
        progress=tr.Progress(),
        config=config,
        notes={"policy": str(policy)},
        **fit_options,
    )
    print(f"trained to step {int(state.step)} in {tr.duration(time.perf_counter() - began)}")
    score = lambda model, *arrays: tr.evaluator(
        lambda arrays, batch: {"accuracy": accuracy(model, *arrays, batch)},
        test_set,
        batch_size=500,
    )(arrays)["accuracy"]
    known, variables = state.state["teacher"], state.state["student"]
    values = {
        "accuracy": evaluate["test"](state)["accuracy"],
        "averaged": None,
        "teacher": score(teacher, known["params"], known["state"]),
    }
    if config.swa:
        averaged = tr.averaged_weights(state.opt_state)["student"]
        images = [
            standard(batches(i)["image"].astype(np.float32) / 255) for i in range(min(steps, 50))
        ]
        variables = tr.batch_statistics(
            student, averaged, variables, images, key=jax.random.key(config.seed)
        )
        values["averaged"] = score(student, averaged, variables)
    title = f"{taught.dataset}: test accuracy {values['accuracy']:.4f} of {small:,} parameters"
    tr.plots.curves(tr.read_metrics(workdir), workdir / "curves.png", title=title)
    print(f"{workdir}: config.json, metrics.jsonl, tensorboard, checkpoints, curves.png")
    return values


def define_flags():
    tr.flags.define(Config, flags.FLAGS)
    flags.DEFINE_string("workdir", None, "folder of the run (default: runs/distil)")
    common.define_run_flags()


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    common.no_arguments(argv, "--teacher=runs/digits")
    return checked(tr.flags.read(Config, flags.FLAGS))


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid."""
    tr.flags.check(config)
    tr.optimizer(config.optimizer, 0.1, weight_decay=config.weight_decay)
    return config


def main(argv):
    config = configured(argv)
    common.needs("matplotlib")
    workdir = common.user_path("workdir", flags.FLAGS.workdir or "runs/distil")
    policy, config = common.decided(config, workdir, restart=flags.FLAGS.restart)
    if not flags.FLAGS.restart:
        tr.same_config(config, workdir, but=("teacher",))
    print(f"chip: {hw.detect()}")
    print(f"policy: {policy}")
    values = train(config, workdir, policy, **common.fit_options())
    print(f"teacher's test accuracy {values['teacher']:.4f}")
    if values["averaged"] is not None:
        print(f"test accuracy of the averaged weights {values['averaged']:.4f}")
    print(f"test accuracy {values['accuracy']:.4f}")


if __name__ == "__main__":
    define_flags()
    common.run(main)

"""Fine-tunes a pretrained network on images or text: a linear probe, all weights, or low-rank
adapters (LoRA).

    python experiments/finetune.py --model=mobilenet_v2 --dataset=cifar10
    python experiments/finetune.py --model=resnet50 --mode=full --dataset=photos --data_dir=DIR
    python experiments/finetune.py --model=vit_s_16 --lora=8 --base=int4                    # QLoRA
    python experiments/finetune.py --model=stories15m --dataset=text --lora=8 --base=int4   # The Tempest
    python experiments/finetune.py --weights=FOLDER --dataset=photos --data_dir=DIR    # of transformers or timm
    python experiments/finetune.py --weights=HuggingFaceTB/SmolLM2-135M --dataset=text --lora=8

--weights names a file, a folder or a repository of the Hugging Face Hub. Without --model, the
config.json of transformers or timm beside the weights describes the model. Without --weights, the
program searches for the weights of --model in ~/.cache/fnet and in Hugging Face's cache, and
otherwise downloads them. Checkpoints record the path of the weights and, for weights from the
Hugging Face Hub, their commit (shown by `fnet report`). For
--dataset=photos, there are two possible layouts of the folder DIR. If the photos are DIR/CLASS/*, a
fifth of the photos of each class forms the test set. If the photos are DIR/train/CLASS/* and
DIR/test/CLASS/*, the folder DIR/test is the test set. For --dataset=text, the text is DIR/*.txt.
DIR is --data_dir; without --data_dir, the text is The Tempest.

With --mode=linear, the features of every image are computed once, and a new last layer is trained
on the features. With --mode=full, all weights are trained; for images, the last layer is new. With
--mode=lora, low-rank changes of the kernels are trained. For images, a new last layer is also
trained. The pretrained kernels are frozen, and stored in the format --base. --lora=RANK is the rank
of the changes. If --mode is not given, --lora=RANK selects --mode=lora.

The run's folder (--workdir, else runs/finetune) receives config.json, metrics.jsonl, a TensorBoard
log, checkpoints, and curves.png. For images, it also receives confusion.png, labels.json, and
model.safetensors with the names of the original weights. experiments/classify_image.py
--weights=runs/finetune reads these files. For a text, the best weights are in runs/finetune/merged,
and experiments/generate.py --weights=runs/finetune/merged reads them. So are the last weights of an
image classifier that a config.json describes, for `pretrained.load` and its own library. With --mode=lora, the
low-rank factors are in runs/finetune/adapter, in PEFT's format. The same command resumes an
interrupted run; --restart starts again from the first step.
"""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path

import _adapters as adapters
import _common as common
import _photos as photos
import _texts as texts
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from fnet import hardware as hw
from fnet import layers as nn
from fnet import models
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = tr.flags.option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The hyperparameters, which determine the result of a run, and the paths data_dir and weights,
    which do not."""

    mode: str = option(
        "linear",
        "linear (train only a new last layer), full (train all weights) or lora (train "
        "low-rank changes); with --lora, the default is lora; for texts, it is full",
        choices=("linear", "full", "lora"),
    )
    lora: int = option(
        0, "rank of the low-rank changes; 0: no low-rank changes", within="[0, 4096]"
    )
    base: str = option(
        "none",
        "with --mode=lora: format of the frozen kernels: none (unchanged), int8, int4 or nf4",
        choices=tuple(adapters.FORMATS),
    )
    model: str | None = option(
        None,
        f"name of the model: {', '.join(photos.PRESETS)}; for texts {', '.join(texts.PRESETS)}; if "
        f"not given, the model that a config.json beside --weights describes, or else resnet50, "
        f"for texts stories15m",
        choices=(*photos.PRESETS, *texts.PRESETS),
    )
    weights: str | None = option(
        None,
        "file, folder or repository of the pretrained weights; if not given, those of --model",
        decides=False,
    )
    dataset: str = option(
        "digits",
        "name of the data set: digits, mnist, fashion_mnist, cifar10, photos (of "
        "--data_dir) or text",
        choices=(*tr.datasets.NAMES, "photos", "text"),
    )
    data_dir: str | None = option(
        None,
        "folder of the photos or of the text, or to which another data set is "
        "downloaded; if not given, fnet's cache",
        decides=False,
    )
    size: int | None = option(
        None,
        "height and width to which images are resized; if not given, the size for which "
        "the weights were trained",
        within="[1, 4096]",
    )
    context: int | None = option(
        None, "for texts: number of tokens in an example", within="[1, 1048576]"
    )
    epochs: float | None = option(
        None, "number of passes over the training images or text", within="(0, 1000000]"
    )
    steps: int | None = option(
        None, "number of training steps; replaces --epochs", within=tr.flags.STEPS
    )
    batch_size: int | None = option(
        None, "number of images or texts in a batch", within="[1, 1048576]"
    )
    optimizer: str | None = option(
        None, f"name of the optimizer: {', '.join(tr.OPTIMIZERS)}", choices=tr.OPTIMIZERS
    )
    schedule: str = option(
        "cosine", f"schedule of the learning rate: {', '.join(tr.SCHEDULES)}", choices=tr.SCHEDULES
    )
    learning_rate: float | None = option(None, "largest learning rate", within="(0, 1000]")
    warmup: float = option(
        0.1,
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
    augment: str = option(
        "none",
        "with --mode=full: augmentation of the images: none, flip or flip_crop",
        choices=("none", "flip", "flip_crop"),
    )
    freeze_norms: bool = option(
        False, "with --mode=full: keep the pretrained statistics of BatchNorm"
    )
    ema: float = option(
        0.0,
        "decay rate of the moving average of the weights, which is evaluated instead of the "
        "weights; 0: no average",
        within="[0, 1)",
    )
    early_stop: int = option(
        0,
        "number of evaluations without improvement after which the training stops; a tenth of "
        "the training images or text is held out for these evaluations; 0: no early stopping",
        within="[0, 1000000]",
    )
    precision: str = option(
        "auto",
        "dtype of matrix products and convolutions: auto (chosen for the chip), float32, "
        "bfloat16 or float16",
        choices=common.PRECISIONS,
    )
    residual: str = option(
        "auto",
        "dtype of the residual stream: auto (bfloat16 if the products are in bfloat16) or float32",
        choices=common.RESIDUALS,
    )
    seed: int = option(
        0,
        "random seed of the new layer, the order of the examples, the augmentation and dropout",
        within=tr.flags.SEED,
    )


PRESETS, TEXT_PRESETS = tr.presets.FINETUNE, tr.presets.FINETUNE_TEXT

AUGMENT = {
    "none": lambda key, images: images,
    "flip": tr.random_flip,
    "flip_crop": lambda key, images: tr.random_crop(
        jax.random.fold_in(key, 1), tr.random_flip(key, images), images.shape[1] // 8
    ),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A pretrained network. `names` is the framework that defines the array names in the file of
    the weights, `image` describes the preprocessing of the images, and `path` is the path of the
    weights."""

    model: models.Model
    params: dict
    state: dict
    names: str
    image: models.ImageInput
    path: Path

    def prepare(self, images):
        """Resizes and normalizes images, float32 [batch, height, width, 1 or 3] from 0 to 255, for
        the network."""
        size = self.image.size
        images = jnp.broadcast_to(images, (*images.shape[:3], 3))
        return self.image.normalize(
            jax.image.resize(images, (len(images), size, size, 3), "linear")
        )


def network(config):
    path = pretrained.find(config.weights or config.model)
    if config.model is None:
        return described_network(config, path)
    model = pretrained.model(config.model, path)
    names = pretrained.names_of(model, path)
    image = model.NAMES[names].image
    size = config.size or image.size
    if isinstance(model, (models.ViT, models.AlexNet)) and size != model.example().shape[1]:
        raise tr.ConfigError(
            f"--size={size}: {config.model} takes images of {model.example().shape[1]} pixels alone"
        )
    return Network(model, *pretrained.load(model, path), names, image.at(size), path)


def described_network(config, path):
    """Returns the network that the config.json beside the weights describes."""
    model, params, state = pretrained.load(path)
    if not hasattr(model, "features") or not hasattr(model, "classes"):
        advice = ": use --dataset=text" if hasattr(model, "cross_entropy") else ""
        raise tr.ConfigError(
            f"--weights={config.weights} has a {type(model).__name__}, but --dataset="
            f"{config.dataset} needs an image classifier{advice}"
        )
    names = pretrained.names_of(model, path)
    try:
        image = models.ImageInput.read(path if path.is_dir() else path.parent)
    except FileNotFoundError:
        image = model.NAMES[names].image.at(model.example().shape[1])
    size = config.size or image.size
    model.spec(jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))  # checks the size
    return Network(model, params, state, names, image.at(size), path)


def train(config, workdir, policy, **fit_options):
    """Trains a model, or resumes an interrupted run. A run that is already complete is only
    evaluated. After the training, the weights are written first, so that no later error can lose
    them.

    Returns:
      For images, a dict with the results of the last state on the test set.
      For a text, {"loss": the lowest validation loss}.
    """
    if config.dataset == "text":
        return texts.train(config, workdir, policy, **fit_options)
    held = network(config)
    data = load(config, held.image)
    classes = len(data.classes)
    model = dataclasses.replace(held.model, classes=classes)
    count = sum(leaf.size for leaf in jax.tree.leaves(held.params))
    size = held.image.size
    name = config.model or type(model).__name__
    print(f"{name}, {held.names} names: {count:,} parameters, images of {size} x {size}")
    print(
        f"{config.dataset}: {len(data.train_labels)} training images, {len(data.test_labels)} test "
        f"images, {classes} classes"
    )
    make = {"linear": probe, "full": everything, "lora": low_rank}[config.mode]
    inputs, params, state, forward = make(config, policy, held, model, data)

    train_set, test_set = (
        {"x": x, "label": y} for x, y in zip(inputs, (data.train_labels, data.test_labels))
    )
    held_out = None
    if config.early_stop:
        train_set, held_out = tr.split(train_set, 0.1, seed=config.seed)
    batches = tr.Batches(
        train_set, batch_size=min(config.batch_size, len(train_set["label"])), seed=config.seed
    )
    steps = config.steps or common.check_steps(batches.steps(config.epochs))
    rate = tr.schedule(config.schedule, config.learning_rate, steps, warmup=config.warmup)
    axes = model.spec(
        jax.eval_shape(held.prepare, jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))
    )
    tx = ft.loss_scale(
        tr.optimizer(config.optimizer, rate, weight_decay=config.weight_decay, axes=axes), policy
    )

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
        target = optax.smooth_labels(
            jax.nn.one_hot(batch["label"], classes), config.label_smoothing
        )

        def loss(params):
            logits, new = forward(params, state.state, batch["x"], key)
            return optax.softmax_cross_entropy(logits, target).mean(), (logits, new)

        gradient = ft.autocast(ft.scaled_value_and_grad(loss, has_aux=True), policy)
        (value, (logits, new)), grads = gradient(state.opt_state, state.params)
        accuracy = tr.mean(logits.argmax(-1) == batch["label"])
        metrics = {"loss": value, "accuracy": accuracy, "learning_rate": rate(state.step)}
        return state.apply(tx, grads, state=new), metrics

    def measure(state, batch):
        logits, _ = ft.autocast(forward, policy)(state.averaged, state.state, batch["x"], None)
        label, weight, guess = batch["label"], batch["weight"], logits.argmax(-1)
        return {
            "loss": tr.mean(optax.softmax_cross_entropy_with_integer_labels(logits, label), weight),
            "accuracy": tr.mean(guess == label, weight),
            "confusion": tr.confusion(label, guess, classes, weight),
        }

    evaluate, stop = {"test": tr.evaluator(measure, test_set, batch_size=config.batch_size)}, None
    if held_out:
        evaluate["validation"] = tr.evaluator(measure, held_out, batch_size=config.batch_size)
        stop = tr.EarlyStop(metric="validation/accuracy", patience=config.early_stop)
    init = lambda key: tr.TrainState.create(params, tx, state=state, ema=config.ema or None)
    pixels = 0 if config.mode == "linear" else 3 * size**2
    common.check_memory(init, 4 * batches.batch_size * pixels, "--batch_size or --size")
    common.start(
        workdir,
        "model.safetensors",
        "labels.json",
        "curves.png",
        "confusion.png",
        "predictions.json",
    )
    every = max(math.ceil(steps / 20), 10)
    state = tr.fit(
        step,
        init(None),
        batches,
        steps=steps,
        workdir=workdir,
        evaluate=evaluate,
        every=every,
        log_every=every,
        early_stop=stop,
        progress=tr.Progress(),
        config=config,
        notes={"policy": str(policy), **common.weights_notes(held.path)},
        **fit_options,
    )

    params, arrays = {**held.params, **state.averaged}, state.state or held.state
    if config.mode == "lora":
        adapted, arrays = nn.combine(state.averaged, state.state["frozen"]), state.state["state"]
        pretrained.save_adapter(model, adapted, workdir / "adapter", names=held.names)
        params = adapted
    pretrained.save(model, params, arrays, workdir / "model.safetensors", names=held.names)
    (workdir / "labels.json").write_text(json.dumps(data.classes))
    if config.model is None:
        save_folder(held, model, params, arrays, data.classes, workdir / "merged")
    values = evaluate["test"](state)
    title = f"{config.dataset}, {name}, {config.mode}: test accuracy {values['accuracy']:.4f}"
    tr.plots.curves(tr.read_metrics(workdir), workdir / "curves.png", title=title)
    tr.plots.confusion_matrix(
        values["confusion"], data.classes, workdir / "confusion.png", title=title
    )
    save_predictions(
        workdir, ft.autocast(forward, policy), state, test_set, data, min(config.batch_size, 64)
    )
    print(
        f"{workdir}: config.json, metrics.jsonl, tensorboard, checkpoints, curves.png, "
        "confusion.png, model.safetensors, labels.json"
        + (", merged" if config.model is None else "")
        + (", adapter" if config.mode == "lora" else "")
    )
    print(f"show the run: fnet report {workdir}")
    return values


def save_folder(held, model, params, state, classes, folder):
    """Writes a folder as that of the pretrained weights: with config.json, preprocessing and labels."""
    folder.mkdir(exist_ok=True)
    pretrained.save(model, params, state, folder, names=held.names)
    (folder / "labels.json").write_text(json.dumps(classes))
    source = held.path if held.path.is_dir() else held.path.parent
    if (preprocessing := source / "preprocessor_config.json").is_file():
        shutil.copyfile(preprocessing, folder / preprocessing.name)
    published, own = (json.loads((each / "config.json").read_text()) for each in (source, folder))
    if "pretrained_cfg" in published:  # timm's preprocessing
        own["pretrained_cfg"] = published["pretrained_cfg"] | {"num_classes": len(classes)}
        own |= {"label_names": list(classes)}
    else:
        own |= {
            "id2label": {str(i): name for i, name in enumerate(classes)},
            "label2id": {name: i for i, name in enumerate(classes)},
        }
    (folder / "config.json").write_text(json.dumps(own, indent=2))


def in_batches(f, x, size):
    """Returns f(x), evaluated on batches of `size` examples. The last batch is padded if necessary."""
    rows = []
    for at in range(0, len(x), size):
        batch = x[at : at + size]
        padded = np.pad(batch, ((0, size - len(batch)), *((0, 0),) * (x.ndim - 1)))
        rows.append(np.asarray(f(padded))[: len(batch)])
    return np.concatenate(rows)


def save_predictions(workdir, forward, state, test_set, data, size):
    """Writes a file for `fnet report`. The file contains the confusion matrix, and the wrong
    predictions with the highest probabilities. Large images are subsampled."""
    run = jax.jit(
        lambda x: jax.nn.softmax(
            forward(state.averaged, state.state, x, None)[0].astype(jnp.float32)
        )
    )
    stride = max(1, data.test_images.shape[1] // 96)
    tr.save_predictions(
        workdir,
        in_batches(run, test_set["x"], size),
        test_set["label"],
        classes=data.classes,
        images=data.test_images[:, ::stride, ::stride],
    )


def probe(config, policy, held, model, data):
    """Returns (inputs, params, state, forward) for --mode=linear. `inputs` contains the features of
    the training images and of the test images. `params` and `forward` are the parameters and the
    function of a new dense layer, which has no state."""

    @jax.jit
    def features(params, state, images):
        run = lambda params, images: held.model.features(params, held.prepare(images), state=state)[
            0
        ]
        return ft.autocast(run, policy)(params, images.astype(jnp.float32)).astype(jnp.float32)

    last_layer(config, held, model)
    began, size = time.perf_counter(), min(config.batch_size, 64)
    inputs = [
        in_batches(lambda images: features(held.params, held.state, images), images, size)
        for images in (data.train_images, data.test_images)
    ]
    print(
        f"features: {inputs[0].shape[1]} of each image, {len(inputs[0]) + len(inputs[1])} images "
        f"in {tr.duration(time.perf_counter() - began)}"
    )
    head = nn.Dense(model.classes)
    params, _ = head.init(jax.random.key(config.seed), inputs[0][:1])
    return (
        inputs,
        {"head": params},
        {},
        lambda params, state, x, key: (head(params["head"], x), state),
    )


def last_layer(config, held, model):
    """Returns the number of features that the last layer of a model reads.

    Raises:
      ConfigError: the classes change more than one dense layer at the end.
    """
    size = held.image.size
    spec = model.spec(jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)).params
    shapes = lambda tree: [(k, x.shape) for k, x in jax.tree.leaves_with_path(tree)]
    new = [name for name in spec if shapes(spec[name]) != shapes(held.params.get(name))]
    if set(new) - {"head"} or set(spec["head"]) != {"kernel", "bias"}:
        raise tr.ConfigError(
            f"--weights={config.weights}: a new last layer of {type(model).__name__} would replace "
            f"{', '.join(sorted(new))}; expected one dense layer, head"
        )
    return spec["head"]["kernel"].shape[0]


def everything(config, policy, held, model, data):
    """Returns (inputs, params, state, forward) for --mode=full. `inputs` contains the training
    images and the test images. `params`, `state` and `forward` are those of the whole network with
    a new last layer."""
    width = last_layer(config, held, model)
    fresh, _ = nn.Dense(model.classes).init(jax.random.key(config.seed), jnp.zeros((1, width)))
    augment = AUGMENT[config.augment]

    def forward(params, state, images, key):
        images, train = images.astype(jnp.float32), key is not None and not config.freeze_norms
        if key is not None:
            key, augmenting = jax.random.split(key)
            images = augment(augmenting, images)
        return model(params, held.prepare(images), state=state, key=key, train=train)

    inputs = data.train_images, data.test_images
    return inputs, {**held.params, "head": fresh}, held.state, forward


def low_rank(config, policy, held, model, data):
    """Returns (inputs, params, state, forward) for --mode=lora. `inputs` contains the training
    images and the test images. `params` contains the low-rank factors and a new last layer. `state`
    contains the frozen parameters and the state of the network. `forward` is the function of the
    whole network."""
    inputs, params, state, forward = everything(config, policy, held, model, data)
    trainable, frozen = adapters.adapted(
        jax.random.key(config.seed), params, config.lora, config.base
    )
    trainable, frozen = (
        trainable | {"head": params["head"]},
        frozen | {"head": jax.tree.map(lambda _: None, params["head"])},
    )
    print(f"base={config.base}: {adapters.count(trainable):,} parameters trained")
    run = ft.use_implicit_arrays(forward)

    def adapted(trainable, state, images, key):
        logits, new = run(nn.combine(trainable, state["frozen"]), state["state"], images, key)
        return logits, {**state, "state": new}

    return inputs, trainable, {"frozen": frozen, "state": state}, adapted


def load(config, image):
    if config.dataset != "photos":
        return tr.datasets.load(config.dataset, config.data_dir, announce=print)
    return photos.dataset(common.user_path("data_dir", config.data_dir), image)


def define_flags():
    tr.flags.define(Config, flags.FLAGS, by="mode")
    flags.DEFINE_string("workdir", None, "folder of the run (default: runs/finetune)")
    common.define_run_flags()


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    common.no_arguments(argv, "--dataset=digits")
    given = flags.FLAGS
    text = given.dataset == "text"
    if not given["mode"].present and (given.lora or text):
        given["mode"].value, given["mode"].present = "lora" if given.lora else "full", 1
    config = tr.flags.read(Config, given, TEXT_PRESETS if text else PRESETS, by="mode")
    if config.model is None and not described(config.weights):
        config = dataclasses.replace(config, model="stories15m" if text else "resnet50")
    return checked(config)


def described(weights):
    """Whether a config.json may describe the model of the weights: it is beside them, or they are not
    on this disk yet."""
    if weights is None:
        return False
    path = common.user_path("weights", weights)
    folder = path if path.is_dir() else path.parent
    return (folder / "config.json").is_file() or not path.exists()


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    if (config.mode == "lora") != bool(config.lora):
        raise tr.ConfigError(
            f"--mode={config.mode} --lora={config.lora}: --mode=lora needs a rank, such as "
            "--lora=8, and a rank needs --mode=lora"
        )
    if config.base != "none" and not config.lora:
        raise tr.ConfigError(
            f"--base={config.base} is the format of the frozen kernels of --lora=RANK"
        )
    if config.model is None and config.weights is None:
        raise tr.ConfigError("--model or --weights: name the model, or weights with a config.json")
    if config.model and (config.dataset == "text") != (config.model in texts.PRESETS):
        raise tr.ConfigError(
            f"--model={config.model} --dataset={config.dataset}: --dataset=text is for "
            f"{', '.join(texts.PRESETS)}, the others are for images"
        )
    if config.dataset == "text":
        if config.mode == "linear":
            raise tr.ConfigError("--mode=linear is for images: use --mode=full or --lora=8")
        images = [
            field
            for field in ("size", "augment", "freeze_norms", "label_smoothing")
            if getattr(config, field) != Config.__dataclass_fields__[field].default
        ]
        if images:
            raise tr.ConfigError(f"--{images[0]} is for images")
    elif config.context is not None:
        raise tr.ConfigError(f"--context={config.context} is for --dataset=text")
    if config.mode == "linear" and (config.augment != "none" or config.freeze_norms):
        raise tr.ConfigError(
            "--mode=linear sees each image once: --augment and --freeze_norms are for --mode=full"
        )
    if config.dataset == "photos" and config.data_dir is None:
        raise tr.ConfigError("--dataset=photos: --data_dir is the folder of DIR/CLASS/*.jpg")
    tr.optimizer(config.optimizer, 0.1, weight_decay=config.weight_decay)
    return config


def main(argv):
    config = configured(argv)
    common.needs("matplotlib")
    workdir = common.user_path("workdir", flags.FLAGS.workdir or "runs/finetune")
    policy, config = common.decided(config, workdir, restart=flags.FLAGS.restart)
    if not flags.FLAGS.restart:
        tr.same_config(config, workdir, but=("data_dir", "weights"))
    policy = common.with_residual(policy, config)
    print(f"chip: {hw.detect()}")
    print(f"policy: {policy}")
    values = train(config, workdir, policy, **common.fit_options())
    print(
        f"validation loss {values['loss']:.4f}"
        if config.dataset == "text"
        else f"test accuracy {values['accuracy']:.4f}"
    )


if __name__ == "__main__":
    define_flags()
    common.run(main)

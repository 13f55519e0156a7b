"""Classifies photos with pretrained networks, and prints the five most probable labels of each
photo.

    python experiments/classify_image.py photo.jpg                     # ResNet-50
    python experiments/classify_image.py --model=mobilenet_v2 *.jpg
    python experiments/classify_image.py --weights=google/vit-base-patch16-224 photo.jpg     # any folder or repository
    python experiments/classify_image.py --weights=runs/finetune photo.png                   # weights from finetune.py

--weights names a file, a folder or a repository. Without --weights, the program looks for the
weights of the model in ~/.cache/fnet and in Hugging Face's cache. Without --model, the model is
described by the config.json of transformers or timm in the folder of the weights. The preprocessing
of photos is described by preprocessor_config.json or by timm's config.json in the folder of the
weights. If the folder has neither file, photos are preprocessed as in the publisher's evaluation of
the pretrained weights. The labels are read from --labels, or else from labels.json or config.json
in the folder of the weights. If these have no labels, the labels are the 1,000 classes of ImageNet.
"""

import dataclasses
import json
import re
from pathlib import Path

import _common as common
import _photos as photos
import finetune
import jax
import numpy as np
from absl import flags

from fnet import hardware as hw
from fnet import models
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = tr.flags.option
IMAGENET = Path(__file__).parent / "data" / "imagenet_labels.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The flags: the weights, the labels and the precision."""

    model: str | None = option(
        None,
        f"name of the model: {', '.join(photos.PRESETS)}; if not given, the model of the "
        "weights, or resnet50",
        choices=photos.PRESETS,
    )
    weights: str | None = option(
        None, "file, folder or repository of the weights, or folder of a run of finetune.py"
    )
    labels: str | None = option(None, "file with the names of the labels: one per line, or JSON")
    size: int | None = option(
        None,
        "height and width of the model's input; if not given, the size for which the "
        "weights were trained",
        within="[1, 4096]",
    )
    top: int = option(5, "number of labels to print for each photo", within="[1, 1000000]")
    precision: str = option(
        "float32",
        "dtype of matrix products and convolutions: auto (chosen for the chip), "
        "float32, bfloat16 or float16",
        choices=common.PRECISIONS,
    )


def main(argv):
    files = argv[1:]
    with common.one_line_errors(ValueError, TypeError, OSError, ModuleNotFoundError):
        config = configured(argv)
        pictures = [photos.opened(file) for file in files]
        path = pretrained.find(config.weights or config.model or "resnet50")
        model, params, state, prepare, labels = read(config, path)
    policy = hw.policy() if config.precision == "auto" else hw.policy(config.precision)
    predict = jax.jit(
        ft.autocast(
            lambda params, state, x: jax.nn.softmax(model(params, x, state=state)[0]), policy
        )
    )
    print(
        f"{type(model).__name__} from {path}: {prepare.size} x {prepare.size} pixels, "
        f"{len(labels)} labels"
    )
    for file, picture in zip(files, pictures):
        x = prepare.normalize(prepare.crop(picture))[None]  # [1, height, width, 3]
        shares = np.asarray(predict(params, state, x), np.float32)[0]  # [labels]
        print(file)
        for index in np.argsort(-shares)[: config.top]:
            print(f"  {shares[index]:.3f}  {labels[index]}")


def read(config, path):
    """Returns (model, params, state, preprocessing, labels) for the weights at `path`, which may be
    a run of finetune.py."""
    folder, size, preset = path if path.is_dir() else path.parent, config.size, config.model
    described = (folder / "config.json").is_file()
    if described and (folder / "metrics.jsonl").is_file():
        run = tr.load_config(finetune.Config, folder / "config.json")
        if run.model is None and preset is None:  # a config.json described the model
            return read(dataclasses.replace(config, size=size or run.size), folder / "merged")
        preset, size, described = preset or run.model, size or run.size, False
    if described and preset is None:
        model, params, state = pretrained.load(path)
        example = model.example()
        if (
            getattr(model, "classes", None) is None
            or isinstance(example, tuple)
            or len(example.shape) != 4
        ):
            raise ValueError(
                f"{folder} has a {type(model).__name__} without classes of images; expected an "
                "image classifier"
            )
        labels = read_labels(config, path, model.classes)
    else:
        labels = read_labels(config, path)
        model = pretrained.model(preset or "resnet50", path, classes=len(labels))
        params, state = pretrained.load(model, path)
    try:
        prepare = models.ImageInput.read(folder)
    except FileNotFoundError:
        prepare = model.NAMES[pretrained.names_of(model, path)].image.at(model.example().shape[1])
    prepare = prepare.at(size or prepare.size)
    model.spec(
        jax.ShapeDtypeStruct((1, prepare.size, prepare.size, 3), np.float32)
    )  # checks the size
    return model, params, state, prepare, labels


def define_flags():
    tr.flags.define(Config, flags.FLAGS)


def configured(argv):
    """Returns the configuration that the flags describe.

    Raises:
      ValueError: a flag is missing or invalid, or flags contradict each other; the message names
          the flag.
    """
    if not argv[1:]:
        raise tr.ConfigError("no photo given: python experiments/classify_image.py photo.jpg")
    return checked(tr.flags.read(Config, flags.FLAGS))


def checked(config):
    """Returns the configuration. Raises ConfigError if a value is invalid or values contradict each
    other."""
    tr.flags.check(config)
    return config


def read_labels(config, path, classes=None):
    """Returns the name of each class, from --labels, from the folder of the weights, or from
    ImageNet. If none of these has names, the names are "class 0", "class 1", ...

    Raises:
      ValueError: a file has no labels, or the number of labels differs from the number of classes.
    """
    folder = path if path.is_dir() else path.parent
    if config.labels:
        tr.flags.regular_file("labels", config.labels)
        file = common.user_path("labels", config.labels)
    elif (folder / "labels.json").is_file():
        file = folder / "labels.json"
    elif (file := folder / "config.json").is_file() and re.search(
        '"(id2label|label_names)"', common.read_text(file)
    ):
        pass
    elif classes in (None, 1000):
        file = IMAGENET
    else:
        return [f"class {index}" for index in range(classes)]
    labels = common.read_text(file)
    try:
        labels = _labels(json.loads(labels)) if file.suffix == ".json" else labels.splitlines()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(
            f"{file} holds no labels: a list of names, or names by the numbers 0, 1, ..."
        ) from None
    if classes not in (None, len(labels)):
        raise ValueError(
            f"{file} has {len(labels)} labels, the model has {classes} classes; name others with "
            f"--labels"
        )
    return labels


def _labels(found):
    """Returns a list of labels. The argument `found` is the content of a JSON file: a list of
    labels, a dict
    {number: label}, or the config.json of transformers or timm."""
    if isinstance(found, dict) and "label_names" in found:
        descriptions = found.get("label_descriptions") or {}
        found = [descriptions.get(name, name) for name in found["label_names"]]
    found = found.get("id2label", found) if isinstance(found, dict) else dict(enumerate(found))
    names = {int(index): str(name).replace("_", " ") for index, name in found.items()}
    return [names[index] for index in range(len(names))]


if __name__ == "__main__":
    define_flags()
    common.run(main)

"""Classifies photos with published networks: prints five labels for each photo.

    python experiments/classify_image.py photo.jpg                     # ResNet-50
    python experiments/classify_image.py --model=mobilenet_v2 *.jpg
    python experiments/classify_image.py --weights=runs/finetune photo.png      # what finetune.py made

The weights are looked for where --weights says, else under the model's name in ~/.cache/fnet and Hugging Face's cache;
where there are none, the message says what to download. Each family of weights gets its photos prepared as it was
trained for. Labels are those that lie beside the weights (labels.json or config.json), else ImageNet's thousand.
"""

import dataclasses
import json
from pathlib import Path

import _common as common
import _photos as photos
import finetune
import jax
import numpy as np
from absl import flags

from fnet import hardware as hw
from fnet import training as tr
from fnet import transforms as ft
from fnet.models import pretrained

option = tr.flags.option
IMAGENET = Path(__file__).parent / "data" / "imagenet_labels.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The weights, and the number of labels."""

    model: str | None = option(None, f"one of {', '.join(photos.PRESETS)}; None: resnet50, or what the run trained",
                               choices=photos.PRESETS)
    weights: str | None = option(None, "file or folder of the weights, or the folder of a run of finetune.py")
    labels: str | None = option(None, "file of the labels: one a line, or JSON")
    size: int | None = option(None, "height and width of the input; None: what the weights were trained with",
                              within="[1, 4096]")
    top: int = option(5, "how many labels to print for a photo", within="[1, 1000000]")
    precision: str = option("float32", "auto (what suits the chip), float32, bfloat16 or float16",
                             choices=common.PRECISIONS)


def main(argv):
    files = argv[1:]
    with common.one_line_errors(ValueError, TypeError, OSError, ModuleNotFoundError):
        config = configured(argv)
        pictures = [photos.opened(file) for file in files]
        path = pretrained.find(config.weights or config.model or "resnet50")
        config = of_run(config, path)
        labels = read_labels(config, path)
        model = pretrained.model(config.model, path, classes=len(labels))
        names = pretrained.names_of(model, path)
        params, state = pretrained.load(model, path)
        prepare = model.NAMES[names].image
        prepare = prepare.at(config.size or prepare.size)
        model.spec(jax.ShapeDtypeStruct((1, prepare.size, prepare.size, 3), np.float32))    # says what does not fit
    policy = hw.policy() if config.precision == "auto" else hw.policy(config.precision)
    predict = jax.jit(ft.autocast(lambda params, state, x: jax.nn.softmax(model(params, x, state=state)[0]), policy))
    print(f"{config.model}, {names} names, from {path}: {prepare.size} x {prepare.size} pixels, {len(labels)} labels")
    for file, picture in zip(files, pictures):
        x = prepare.normalize(prepare.crop(picture))[None]                  # [1, height, width, 3]
        shares = np.asarray(predict(params, state, x), np.float32)[0]       # [labels]
        print(file)
        for index in np.argsort(-shares)[:config.top]:
            print(f"  {shares[index]:.3f}  {labels[index]}")


def of_run(config, path):
    """The configuration, with the model and the image size of the run if the weights come from a run of finetune.py."""
    folder, like = path if path.is_dir() else path.parent, Config(model="resnet50")
    if (folder / "metrics.jsonl").is_file() and (folder / "config.json").is_file():
        like = tr.load_config(finetune.Config, folder / "config.json")
    return dataclasses.replace(config, model=config.model or like.model, size=config.size or like.size)


def define_flags():
    tr.flags.define(Config, flags.FLAGS)


def configured(argv):
    """The configuration that the flags describe.

    Raises:
      ValueError: the flags cannot be used; the message names one of them.
    """
    if not argv[1:]:
        raise tr.ConfigError("no photo given: python experiments/classify_image.py photo.jpg")
    return checked(tr.flags.read(Config, flags.FLAGS))


def checked(config):
    """The configuration, if its values are possible and do not contradict each other; otherwise raises ConfigError."""
    tr.flags.check(config)
    return config


def read_labels(config, path):
    """The name of each class: from --labels, from the folder of the weights, or ImageNet's."""
    folder = path if path.is_dir() else path.parent
    if config.labels:
        tr.flags.regular_file("labels", config.labels)
        file = common.user_path("labels", config.labels)
    elif (folder / "labels.json").is_file():
        file = folder / "labels.json"
    elif "id2label" in _text(folder / "config.json"):
        file = folder / "config.json"
    else:
        file = IMAGENET
    text = common.read_text(file)
    if file.suffix != ".json":
        return text.splitlines()
    try:
        held = json.loads(text)
        held = held.get("id2label", held) if isinstance(held, dict) else dict(enumerate(held))
        names = {int(index): str(name).replace("_", " ") for index, name in held.items()}
        return [names[index] for index in range(len(names))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{file} holds no labels: a list of names, or names by the numbers 0, 1, ...") from None


def _text(file):
    return common.read_text(file) if file.is_file() else ""


if __name__ == "__main__":
    define_flags()
    common.run(main)

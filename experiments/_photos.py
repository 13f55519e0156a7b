"""Reads photos for networks with pretrained weights. Pillow is imported when the first photo is
opened."""

import warnings
from pathlib import Path

import numpy as np

from fnet import models
from fnet import training as tr

PRESETS = tuple(
    preset
    for cls in (models.AlexNet, models.ResNet, models.MobileNetV2, models.ViT)
    for preset in cls.PRESETS
)


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # no format that runs a program
PIXELS = 50_000_000


def opened(photo):
    """Returns the photo as a Pillow image in RGB, rotated as its EXIF orientation says.

    Raises:
      OSError: the file does not exist, or is not an image.
      ValueError: the file is damaged, has pixels in 32 bits, or has more than 50 million pixels.
      ModuleNotFoundError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "reading photos needs Pillow, which is not installed: pip install pillow"
        ) from None
    if Path(photo).exists() and not Path(photo).is_file():
        raise ValueError(f"{photo} is not a regular file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", Image.DecompressionBombWarning
            )  # the limit below is lower
            picture = Image.open(photo, formats=FORMATS)
        with picture:
            if picture.width * picture.height > PIXELS:
                raise ValueError(
                    f"it has {picture.width} x {picture.height} pixels, at most {PIXELS:,} are read"
                )
            return models.ImageInput.rgb(ImageOps.exif_transpose(picture))
    except OSError as error:
        if error.filename or str(photo) in str(error):
            raise
        raise ValueError(f"{photo}: {error}") from None
    except (
        Exception
    ) as error:  # Pillow raises SyntaxError, struct.error, DecompressionBombError and others
        raise ValueError(f"{photo}: {error}") from None


def dataset(folder, image):
    """Reads a folder of photos, with a subfolder for each class, as a `Dataset`.

    Args:
      folder: a folder with the files FOLDER/CLASS/*, or FOLDER/train/CLASS/* and
        FOLDER/test/CLASS/*. In the first case, every fifth photo of a class, in a fixed random
        order, belongs to the test set.
      image: the `ImageInput` that crops the photos.

    Raises:
      ValueError: there are fewer than two classes, a class has no photos for training or for
        testing, or train and test have different classes.
      OSError: a file is not an image.
    """
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        train, test = _classes(folder / "train"), _classes(folder / "test")
        if list(train) != list(test):
            raise ValueError(
                f"{folder}: train has the classes {', '.join(train)}, test has {', '.join(test)}"
            )
    else:
        train, test = {}, {}
        for name, files in _classes(folder).items():
            order = np.random.RandomState(0).permutation(len(files))
            test[name] = [files[i] for i in order[::5]]
            train[name] = [files[i] for i in order if files[i] not in test[name]]
    if len(train) < 2 or not all(map(len, (*train.values(), *test.values()))):
        found = ", ".join(
            f"{name} ({len(files)} + {len(test[name])})" for name, files in train.items()
        )
        raise ValueError(
            f"{folder}: photos are in FOLDER/CLASS/*, in two classes or more, two or more in each; "
            f"found {found or 'no folder'}"
        )
    arrays = []
    for part in (train, test):
        arrays.append(
            np.stack([image.crop(opened(file)) for files in part.values() for file in files])
        )
        arrays.append(
            np.repeat(np.arange(len(part), dtype=np.int32), [len(files) for files in part.values()])
        )
    return tr.datasets.Dataset("photos", *arrays, tuple(train))


def _classes(folder):
    """Returns {class: its files}. Classes and files are sorted by name."""
    folders = sorted(
        each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")
    )
    return {
        each.name: sorted(file for file in each.iterdir() if not file.name.startswith("."))
        for each in folders
    }

"""Image preprocessing for pretrained weights: size, crop, order of channels, mean and standard
deviation."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_RESAMPLE = {"bilinear": 2, "bicubic": 3}  # Pillow's constants


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """The preprocessing with which the publisher of weights evaluated them.

        prepare = model.NAMES["torchvision"].image                              # or models.ImageInput.read(folder)
        x = prepare.normalize(prepare.crop(photo))[None]                        # [1, height, width, 3]

    Args:
        size: height and width of the network's input in pixels.
        resize: length in pixels to which the shorter side of a photo is scaled before its center is
            cropped. None: the photo is scaled to the size of the input, without keeping its aspect
            ratio.
        resample: the interpolation, "bilinear" or "bicubic".
        mean, std: mean and standard deviation of each channel of the scaled pixel values, in the
            order `order`.
        scale: factor of the pixel values: 1 / 255 for inputs in 0..1, or 1 for inputs in 0..255.
        order: order of the channels in the network's input, "rgb" or "bgr".

    >>> import numpy as np
    >>> from fnet import models
    >>> image = models.ResNet.NAMES["torchvision"].image
    >>> image.normalize(np.zeros((224, 224, 3), np.uint8)).dtype
    dtype('float32')
    """

    size: int = 224
    resize: int | None = 256
    resample: str = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    scale: float = 1 / 255
    order: str = "rgb"

    @classmethod
    def read(cls, folder: str | os.PathLike) -> ImageInput:
        """Reads the preprocessing of a folder of weights, from preprocessor_config.json (of
        transformers) or from a config.json of timm.

            prepare = models.ImageInput.read("path/to/folder")
            x = prepare.normalize(prepare.crop(photo))[None]                        # [1, height, width, 3]

        Raises:
            FileNotFoundError: the folder has neither file.
            ValueError: a field has a value that `ImageInput` does not support; the message names
                the field.
        """
        from fnet.models.weights._json import read

        folder = Path(folder)
        path = folder / "preprocessor_config.json"
        if path.is_file():
            return cls(**_fields_of(path, read(path), _transformers))
        path = folder / "config.json"
        config = read(path).get("pretrained_cfg") if path.is_file() else None
        if not isinstance(config, dict):
            raise FileNotFoundError(
                f"{folder} has no preprocessor_config.json, and no config.json with pretrained_cfg"
            )
        return cls(**_fields_of(path, config, _timm))

    def at(self, size: int) -> ImageInput:
        """Returns the preprocessing for the input size `size`, with `resize` in proportion, so that
        the crop covers the same fraction of a photo.
        """
        resize = None if self.resize is None else max(size, round(self.resize * size / self.size))
        return dataclasses.replace(self, size=size, resize=resize)

    def crop(self, photo: Any) -> np.ndarray:
        """Scales and crops a `PIL.Image`.

        The orientation in the EXIF data is not applied; `PIL.ImageOps.exif_transpose` does that.

        Returns:
            A uint8 array [size, size, 3], with the channels in the order red, green, blue.

        Raises:
            ValueError: as for `rgb`.
        """
        photo = self.rgb(photo)
        if self.resize is None:
            return np.array(photo.resize((self.size, self.size), _RESAMPLE[self.resample]))
        width, height = photo.size
        short = min(width, height)
        # Sizes and corners are rounded as in torchvision, so that pixels are equal.
        wide, high = (int(self.resize * side / short) for side in (width, height))
        photo = photo.resize((wide, high), _RESAMPLE[self.resample])
        left, top = (round((side - self.size) / 2) for side in (wide, high))
        return np.array(photo.crop((left, top, left + self.size, top + self.size)))

    @staticmethod
    def rgb(photo: Any) -> Any:
        """Converts a `PIL.Image` to RGB with 8 bits for each channel.

        Pillow converts palettes, CMYK and gray levels of 8 bits; an alpha channel is dropped. Gray
        levels of 16 bits are scaled from 0..65535 to 0..255, where Pillow would clip them at 255
        and turn the image white.

        Raises:
            ValueError: the image has 32-bit integers or floating-point numbers, whose range is
                unknown.
        """
        from PIL import Image

        if photo.mode.startswith("I;16") or (
            photo.mode == "I" and photo.format == "PNG"
        ):  # PNG has no 32 bits
            levels = np.asarray(photo).astype(np.uint32)
            photo = Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))
        elif photo.mode in ("I", "F") or photo.mode.startswith(("I;", "F;")):
            raise ValueError(
                f"an image of mode {photo.mode!r} has 32-bit values of unknown range: scale them "
                "to 0..255, and pass Image.fromarray(values.astype(numpy.uint8))"
            )
        return photo.convert("RGB")

    def normalize(self, pixels: np.ndarray) -> np.ndarray:
        """Converts uint8 pixels [..., 3], a NumPy or JAX array in the order red, green, blue, to
        the network's input, a float32 array.
        """
        pixels = (pixels if self.order == "rgb" else pixels[..., ::-1]).astype(np.float32)
        lead = (1,) * (pixels.ndim - 1)
        mean, std = (
            np.array(value, np.float32).reshape(*lead, 3) for value in (self.mean, self.std)
        )
        return (pixels * np.float32(self.scale) - mean) / std


TORCHVISION = ImageInput()
AUGREG = ImageInput(resize=248, resample="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
CAFFE = ImageInput(
    resample="bicubic", mean=(103.939, 116.779, 123.68), std=(1.0, 1.0, 1.0), scale=1.0, order="bgr"
)


def _fields_of(path: Path, config: Mapping, fields: Callable) -> dict[str, Any]:
    try:
        return fields(config)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not describe a preprocessing that fnet supports: {error!r}"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{path} describes a preprocessing that fnet does not support: {error}"
        ) from None


# Fields that do not change the pixels of one image: names of classes, layouts of results, labels,
# provenance.
_IRRELEVANT = {
    "transformers": frozenset(
        """
        image_processor_type feature_extractor_type processor_class auto_map _processor_class _valid_processor_keys
        data_format input_data_format return_tensors device disable_grouping do_reduce_labels reduce_labels
        model_input_names name_or_path transformers_version
    """.split()
    ),
    "timm": frozenset(
        """
        url file state_dict hf_hub_id hf_hub_filename source architecture tag custom_load test_input_size min_input_size
        test_crop_pct num_classes label_names label_descriptions pool_size test_pool_size first_conv classifier license
        description origin_url paper_name paper_ids notes
    """.split()
    ),
}


def _expect(config, supported, used, kind):
    known = {*supported, *used, *_IRRELEVANT[kind]}
    for name, value in config.items():
        if name not in known and value not in (None, False):
            raise ValueError(f"the field {name!r} is {value!r:.100}, which may change the images")
    for name, values in supported.items():
        if name in config and not any(
            config[name] is each or config[name] == each for each in values
        ):
            raise ValueError(
                f"{name!r} is {config[name]!r}, expected {' or '.join(map(repr, values))}"
            )


def _side(value, name):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name!r} is {value!r}, expected a positive integer")
    return value


def _channels(config, name):
    value = config[name]
    if (
        not isinstance(value, list)
        or len(value) != 3
        or any(isinstance(each, bool) or not isinstance(each, int | float) for each in value)
    ):
        raise ValueError(f"{name!r} is {value!r}, expected three numbers")
    return tuple(map(float, value))


def _resample(value):
    names = {2: "bilinear", 3: "bicubic", "bilinear": "bilinear", "bicubic": "bicubic"}
    if isinstance(value, bool | float | list | dict) or value not in names:
        raise ValueError(f"the resampling is {value!r}, expected bilinear (2) or bicubic (3)")
    return names[value]


def _timm(config):
    _expect(
        config,
        {
            "crop_mode": ("center", None),
            "fixed_input_size": (True, False, None),
            "label_offset": (0, None),
        },
        ("input_size", "crop_pct", "interpolation", "mean", "std"),
        "timm",
    )
    channels, height, width = config["input_size"]
    if (channels, height) != (3, width):
        raise ValueError(f"'input_size' is {config['input_size']!r}, expected [3, size, size]")
    size, part = _side(height, "input_size"), config.get("crop_pct", 0.875)
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        raise ValueError(f"'crop_pct' is {part!r}, expected a number in (0, 1]")
    return dict(
        size=size,
        resize=math.floor(size / part),
        resample=_resample(config.get("interpolation", "bilinear")),
        mean=_channels(config, "mean"),
        std=_channels(config, "std"),
    )


def _square(value, name):
    """Returns the side of a square image in pixels. `value` is a number, or an object with equal
    height and width."""
    if (
        isinstance(value, dict)
        and value.keys() == {"height", "width"}
        and value["height"] == value["width"]
    ):
        value = value["height"]
    return _side(value, name)


def _transformers(config):
    _expect(
        config,
        {
            "do_resize": (True,),
            "do_rescale": (True,),
            "do_normalize": (True,),
            "do_pad": (False, None),
            "rescale_offset": (False, None),
            "include_top": (False, None),
            "do_convert_rgb": (True, None),
            "do_flip_channel_order": (False, None),
        },
        (
            "resample",
            "image_mean",
            "image_std",
            "rescale_factor",
            "size",
            "do_center_crop",
            "crop_pct",
            "crop_size",
            "default_to_square",
        ),
        "transformers",
    )
    fields = dict(
        resample=_resample(config.get("resample", 2)),
        mean=_channels(config, "image_mean"),
        std=_channels(config, "image_std"),
        scale=config.get("rescale_factor", 1 / 255),
    )
    size, crop = config["size"], config.get("do_center_crop", False)
    shortest = size.get("shortest_edge") if isinstance(size, dict) else None
    if "crop_pct" in config and config["crop_pct"] is not None:  # ConvNeXt's
        side = _side(shortest if shortest is not None else size, "size")
        part = config["crop_pct"]
        return fields | dict(size=side, resize=int(side / part) if side < 384 else None)
    if shortest is not None and not crop:
        raise ValueError("'size' is the shortest edge, expected do_center_crop true")
    if shortest is None and not crop:
        if not isinstance(size, dict) and config.get("default_to_square") is False:
            raise ValueError(
                "'default_to_square' is False, so 'size' is the shortest edge, expected "
                "do_center_crop true"
            )
        return fields | dict(size=_square(size, "size"), resize=None)
    if shortest is None:
        raise ValueError(f"'size' is {size!r} before a crop, expected the shortest_edge")
    return fields | dict(
        size=_square(config["crop_size"], "crop_size"), resize=_side(shortest, "size")
    )

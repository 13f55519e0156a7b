"""Preprocessing of photos for pretrained weights: size, crop, order of channels, mean and standard deviation."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

_RESAMPLE = {"bilinear": 2, "bicubic": 3}    # Pillow's constants


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """The preprocessing of a photo with which published weights were evaluated.

    Args:
        size: height and width of the network's input in pixels.
        resize: length in pixels to which the shorter side is scaled before the center is cropped. None: the photo is
            scaled to the size of the input without preserving its aspect ratio.
        resample: "bilinear" or "bicubic".
        mean, std: mean and standard deviation of each channel, in the order of the input, after `scale` was applied.
        scale: factor of the pixel values, 1 / 255 for inputs in 0..1, or 1 for inputs in 0..255.
        order: order of the channels, "rgb" or "bgr".

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

    def at(self, size: int) -> ImageInput:
        """Returns the preprocessing for another size of the input, with the same fraction of the photo."""
        resize = None if self.resize is None else max(size, round(self.resize * size / self.size))
        return dataclasses.replace(self, size=size, resize=resize)

    def crop(self, photo: Any) -> np.ndarray:
        """Scales and crops a `PIL.Image`: uint8 [size, size, 3], in the order red, green, blue."""
        photo = photo.convert("RGB")
        if self.resize is None:
            return np.array(photo.resize((self.size, self.size), _RESAMPLE[self.resample]))
        width, height = photo.size
        short = min(width, height)
        # Sizes and corners are rounded as in torchvision, so that pixels are equal.
        wide, high = (int(self.resize * side / short) for side in (width, height))
        photo = photo.resize((wide, high), _RESAMPLE[self.resample])
        left, top = (round((side - self.size) / 2) for side in (wide, high))
        return np.array(photo.crop((left, top, left + self.size, top + self.size)))

    def normalize(self, pixels: np.ndarray) -> np.ndarray:
        """Converts uint8 [..., 3] (red, green, blue; a NumPy or JAX array) to the network's input, float32."""
        pixels = (pixels if self.order == "rgb" else pixels[..., ::-1]).astype(np.float32)
        lead = (1,) * (pixels.ndim - 1)
        mean, std = (np.array(value, np.float32).reshape(*lead, 3) for value in (self.mean, self.std))
        return (pixels * np.float32(self.scale) - mean) / std


TORCHVISION = ImageInput()
AUGREG = ImageInput(resize=248, resample="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
CAFFE = ImageInput(resample="bicubic", mean=(103.939, 116.779, 123.68), std=(1.0, 1.0, 1.0), scale=1.0, order="bgr")

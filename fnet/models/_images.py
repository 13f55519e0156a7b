"""How published weights want their photos: size, crop, order of colors, mean and deviation."""

from __future__ import annotations

import dataclasses

import numpy as np

_RESAMPLE = {"bilinear": 2, "bicubic": 3}    # Pillow's numbers


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """The way from a photo to a network's input, as the weights were evaluated.

    Args:
        size: height and width of the input.
        resize: what the photo's shorter side is brought to before the middle is cut out; None: the whole photo is
            squashed into the input.
        resample: "bilinear" or "bicubic".
        mean, std: of each channel, in the order of the input; in units of 0..1, or of 0..255 where `scale` is 1.
        scale: what one step of a byte is worth.
        order: "rgb" or "bgr".
    """

    size: int = 224
    resize: int | None = 256
    resample: str = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    scale: float = 1 / 255
    order: str = "rgb"

    def at(self, size: int) -> ImageInput:
        """The same for another size of the input: it shows as much of a photo."""
        resize = None if self.resize is None else max(size, round(self.resize * size / self.size))
        return dataclasses.replace(self, size=size, resize=resize)

    def crop(self, photo) -> np.ndarray:
        """What the network sees of a `PIL.Image`: uint8 [size, size, 3], red, green, blue."""
        photo = photo.convert("RGB")
        if self.resize is None:
            return np.array(photo.resize((self.size, self.size), _RESAMPLE[self.resample]))
        width, height = photo.size
        short = min(width, height)
        # Sizes and corners are rounded as torchvision does, so that pixels are the same.
        wide, high = (int(self.resize * side / short) for side in (width, height))
        photo = photo.resize((wide, high), _RESAMPLE[self.resample])
        left, top = (round((side - self.size) / 2) for side in (wide, high))
        return np.array(photo.crop((left, top, left + self.size, top + self.size)))

    def normalize(self, pixels):
        """uint8 [..., 3], red, green, blue, to the network's input, float32; NumPy's or JAX's arrays alike."""
        pixels = (pixels if self.order == "rgb" else pixels[..., ::-1]).astype(np.float32)
        lead = (1,) * (pixels.ndim - 1)
        mean, std = (np.array(value, np.float32).reshape(*lead, 3) for value in (self.mean, self.std))
        return (pixels * np.float32(self.scale) - mean) / std


TORCHVISION = ImageInput()
AUGREG = ImageInput(resize=248, resample="bicubic", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
CAFFE = ImageInput(resample="bicubic", mean=(103.939, 116.779, 123.68), std=(1.0, 1.0, 1.0), scale=1.0, order="bgr")

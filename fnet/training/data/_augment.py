"""Augmentations: pure functions of a PRNG key and a batch of images, which can be jitted.

Each image of the batch is transformed with its own random values. Images are arrays
[batch, height, width, channels] of any dtype; the result has the same shape and dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _batch(images: jax.Array, who: str) -> tuple[int, int, int, int]:
    if images.ndim != 4:
        raise ValueError(
            f"{who} takes images of shape [batch, height, width, channels], not {images.shape}"
        )
    return images.shape


def random_crop(
    key: jax.Array, images: jax.Array, padding: int = 4, *, mode: str = "constant"
) -> jax.Array:
    """Pads each image on every side, and crops a window of the original size at a random position.

    Args:
      key: a PRNG key.
      images: [batch, height, width, channels].
      padding: the pixels added to each side. Default 4.
      mode: "constant" pads with zeros, "reflect" with a mirrored copy; or another mode of
        `jnp.pad`. Default "constant".

    Example:
      >>> random_crop(jax.random.key(0), jnp.ones((2, 8, 8, 1)), 2).shape
      (2, 8, 8, 1)
    """
    n, height, width, channels = _batch(images, "random_crop")
    p = padding
    padded = jnp.pad(images, ((0, 0), (p, p), (p, p), (0, 0)), mode=mode)
    corners = jax.random.randint(key, (n, 2), 0, 2 * p + 1)

    def cut(image, corner):
        return jax.lax.dynamic_slice(
            image, (corner[0], corner[1], jnp.zeros_like(corner[0])), (height, width, channels)
        )

    return jax.vmap(cut)(padded, corners)


def random_shift(key: jax.Array, images: jax.Array, pixels: int = 2) -> jax.Array:
    """Shifts each image by a random number of pixels along both axes, and fills the border with
    zeros.

    Args:
      key: a PRNG key.
      images: [batch, height, width, channels].
      pixels: the largest shift in each direction, in pixels. Default 2.

    >>> tr.random_shift(jax.random.key(0), jnp.ones((2, 8, 8, 1)), pixels=1).shape
    (2, 8, 8, 1)
    """
    return random_crop(key, images, pixels)


def random_flip(key: jax.Array, images: jax.Array) -> jax.Array:
    """Mirrors each image left to right with probability 1/2.

    Args:
      key: a PRNG key.
      images: [batch, height, width, channels].

    >>> tr.random_flip(jax.random.key(0), jnp.ones((2, 8, 8, 1))).shape
    (2, 8, 8, 1)
    """
    n, *_ = _batch(images, "random_flip")
    flip = jax.random.bernoulli(key, shape=(n, 1, 1, 1))
    return jnp.where(flip, images[:, :, ::-1], images)


def cutout(key: jax.Array, images: jax.Array, size: int = 8) -> jax.Array:
    """Sets the pixels in a square of each image to zero.

    The center is uniform over the image, so the square may reach beyond it.

    Args:
      key: a PRNG key.
      images: [batch, height, width, channels].
      size: the side of the square in pixels. 0 changes nothing. Default 8.

    Source: DeVries and Taylor (2017), Improved Regularization of Convolutional Neural Networks with
    Cutout.

    >>> images = jnp.ones((2, 8, 8, 1))
    >>> bool((tr.cutout(jax.random.key(0), images, size=4) == 0).any())
    True
    """
    n, height, width, _ = _batch(images, "cutout")
    rows, columns = jax.random.split(key)

    def covered(key, length):  # [batch, length]
        start = jax.random.randint(key, (n, 1), 0, length) - size // 2
        place = jnp.arange(length)[None]
        return (place >= start) & (place < start + size)

    hole = covered(rows, height)[:, :, None] & covered(columns, width)[:, None, :]
    return jnp.where(hole[..., None], jnp.zeros_like(images), images)


def random_affine(
    key: jax.Array,
    images: jax.Array,
    *,
    degrees: float = 10.0,
    scale: float = 0.1,
    shift: float = 0.1,
) -> jax.Array:
    """Rotates, scales and shifts each image by random amounts.

    The result is interpolated bilinearly; what comes from outside the image is zero.

    Args:
      key: a PRNG key.
      images: [batch, height, width, channels], floating point.
      degrees: the angle is uniform in [-degrees, degrees]. Default 10.
      scale: the scale factor is uniform in [1 - scale, 1 + scale]. Default 0.1.
      shift: the translation along each axis is uniform in [-shift, shift] times the image's size.
        Default 0.1.

    Raises:
      TypeError: the images are integers, which cannot be interpolated.

    >>> tr.random_affine(jax.random.key(0), jnp.ones((2, 8, 8, 1)), degrees=15.0).shape
    (2, 8, 8, 1)
    """
    n, height, width, _ = _batch(images, "random_affine")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(
            f"random_affine interpolates, so it needs floating images, not {images.dtype}: "
            "convert them first, for example images.astype(jnp.float32) / 255"
        )
    turn, grow, move = jax.random.split(key, 3)
    angle = jax.random.uniform(turn, (n,), minval=-1.0, maxval=1.0) * (degrees * jnp.pi / 180)
    factor = 1 + jax.random.uniform(grow, (n,), minval=-scale, maxval=scale)
    offset = jax.random.uniform(move, (n, 2), minval=-shift, maxval=shift)
    y = (jnp.arange(height, dtype=jnp.float32) - (height - 1) / 2)[None, :, None]
    x = (jnp.arange(width, dtype=jnp.float32) - (width - 1) / 2)[None, None, :]
    cos, sin = (f(angle)[:, None, None] / factor[:, None, None] for f in (jnp.cos, jnp.sin))
    down, right = offset[:, 0, None, None] * height, offset[:, 1, None, None] * width
    with jax.numpy_rank_promotion("allow"):
        source_y = cos * y - sin * x + down + (height - 1) / 2  # [batch, height, width]
        source_x = sin * y + cos * x + right + (width - 1) / 2
    return _bilinear(images, source_y, source_x)


def _bilinear(images: jax.Array, y: jax.Array, x: jax.Array) -> jax.Array:
    """Interpolates the images at the coordinates y and x, arrays [batch, height, width] in pixels.
    Values outside the image are 0."""
    n, height, width, channels = images.shape
    top, left = jnp.floor(y), jnp.floor(x)
    flat = images.reshape(n, height * width, channels)
    total = jnp.zeros_like(images)
    for down in (0, 1):
        for right in (0, 1):
            row, column = top + down, left + right
            share = (1 - jnp.abs(y - row)) * (1 - jnp.abs(x - column))
            inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            share = jnp.where(inside, share, 0.0)[..., None].astype(images.dtype)
            place = jnp.clip(row, 0, height - 1) * width + jnp.clip(column, 0, width - 1)
            place = place.astype(jnp.int32).reshape(n, height * width, 1)
            total += share * jnp.take_along_axis(flat, place, axis=1).reshape(images.shape)
    return total

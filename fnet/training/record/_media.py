"""Values for TensorBoard that are not scalars: histograms, images, text and hyperparameters."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np


class Histogram:
    """A histogram of an array, for TensorBoard.

    Pass it to `StepEnd.log`, or return it from an evaluation.

    Args:
      values: an array of any shape. NaN and infinite values are ignored.
      bins: the number of intervals between the smallest and the largest value. Default 64.

    >>> tr.Histogram(jnp.arange(100.0), bins=10).bins
    10
    """

    def __init__(self, values: Any, bins: int = 64):
        values = np.asarray(values).astype(np.float64).ravel()
        self.values = values[np.isfinite(values)]
        self.bins = bins

    def summaries(self, tag: str) -> list[Any]:
        """Returns the histogram as values of a TensorBoard event."""
        from tensorboardX.proto.summary_pb2 import HistogramProto, Summary

        if not self.values.size:
            return []
        counts, edges = np.histogram(self.values, self.bins)
        proto = HistogramProto(
            min=self.values.min(),
            max=self.values.max(),
            num=self.values.size,
            sum=self.values.sum(),
            sum_squares=self.values @ self.values,
            bucket_limit=edges.tolist(),
            bucket=[0, *counts.tolist()],
        )
        return [Summary.Value(tag=tag, histo=proto)]


class Image:
    """One picture or a grid of several, for TensorBoard.

    Pass it to `StepEnd.log`, or return it from an evaluation.

    Args:
      pixels: one picture [height, width] or [height, width, channels], or several [pictures,
        height, width, channels], with 1 channel (gray), 3 (RGB) or 4 (RGB and opacity). The values
        are uint8 from 0 to 255, or floating-point from 0 to 1, to which others are clipped.

    Raises:
      ValueError: `pixels` has an unsupported shape or dtype.

    >>> image = tr.Image(jnp.zeros((28, 28)))    # for StepEnd.log or the result of an evaluation
    """

    def __init__(self, pixels: Any):
        pixels = np.asarray(pixels)
        floating = pixels.dtype.kind == "f" or pixels.dtype.name == "bfloat16"
        shape = (*pixels.shape, 1) if pixels.ndim == 2 else pixels.shape
        if (
            len(shape) not in (3, 4)
            or shape[-1] not in (1, 3, 4)
            or 0 in shape
            or not (floating or pixels.dtype == np.uint8)
        ):
            raise ValueError(
                "Image: expected pixels [height, width], [height, width, channels] or [pictures, "
                "height, width, channels] with 1, 3 or 4 channels, uint8 or floating-point from 0 "
                f"to 1, got {pixels.dtype.name}{list(pixels.shape)}"
            )
        if floating:
            pixels = (
                (np.nan_to_num(pixels.astype(np.float32)).clip(0, 1) * 255).round().astype(np.uint8)
            )
        pixels = pixels.reshape(shape)
        self.pixels = _grid(pixels) if pixels.ndim == 4 else pixels  # [height, width, channels]

    def summaries(self, tag: str) -> list[Any]:
        """Returns the picture as values of a TensorBoard event."""
        from tensorboardX.proto.summary_pb2 import Summary

        height, width, channels = self.pixels.shape
        image = Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=_png(self.pixels)
        )
        return [Summary.Value(tag=tag, image=image)]


class Text:
    """A text in Markdown, for TensorBoard. Pass it to `StepEnd.log`, or return it from an
    evaluation.

    >>> text = tr.Text("a **text** in Markdown")    # for StepEnd.log or the result of an evaluation
    """

    def __init__(self, text: str):
        self.text = str(text)

    def summaries(self, tag: str) -> list[Any]:
        """Returns the text as values of a TensorBoard event."""
        from tensorboardX import summary

        return list(summary.text(tag, self.text).value)


MEDIA = Histogram | Image | Text


def hyperparameters(values: Mapping[str, Any], metrics: Collection[str]) -> list[Any]:
    """Returns the values of a TensorBoard event that shows the hyperparameters of a run in the tab
    HPARAMS.

    Args:
      values: a dict {name: hyperparameter}. The hyperparameters have JSON types; lists and dicts
          are shown as JSON.
      metrics: the names of the scalars that the tab HPARAMS shows for each run, for a comparison of
          runs.
    """
    from tensorboardX import summary

    shown = {
        name: json.dumps(value) if isinstance(value, list | dict) else value
        for name, value in values.items()
    }
    experiment, start, _ = summary.hparams(shown, dict.fromkeys(metrics))
    return [*experiment.value, *start.value]


def _grid(pictures: np.ndarray) -> np.ndarray:
    """Arranges pictures [pictures, height, width, channels] in a grid with about as many rows as
    columns."""
    count, height, width, channels = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    blank = np.zeros((rows * columns - count, height, width, channels), pictures.dtype)
    grid = np.concatenate([pictures, blank]).reshape(rows, columns, height, width, channels)
    return grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)


def _png(pixels: np.ndarray) -> bytes:
    """Encodes uint8 [height, width, channels] as a PNG file (https://www.w3.org/TR/png)."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    # Filter 0: none.
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes()))
        + chunk(b"IEND", b"")
    )

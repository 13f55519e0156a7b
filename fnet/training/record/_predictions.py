"""Predictions of a classifier for a test set, saved in the run's folder for `fnet report`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fnet.training.checkpoints._storage import write_whole
from fnet.training.record._media import Image, _png

PREDICTIONS = "predictions.json"


def save_predictions(
    workdir: str | os.PathLike,
    probabilities: Any,
    labels: Any,
    *,
    classes: Sequence[str] | None = None,
    images: Any = None,
    worst: int = 24,
) -> Path:
    """Writes predictions.json for `fnet report`: the confusion matrix, and the wrong predictions
    with the highest probabilities.

    Args:
      workdir: the folder of the run, a local path.
      probabilities: the predicted probabilities, [examples, classes].
      labels: the true classes, integers [examples].
      classes: the names of the classes. Default None: "0", "1" and so on.
      images: the images of the examples, [examples, height, width, channels], uint8 from 0 to 255
        or floating-point from 0 to 1. Default None.
      worst: how many wrong predictions to save at most. Default 24.

    Returns:
      The path of the file.

    Raises:
      ValueError: the shapes do not match, a probability is NaN, or a label is not an integer index
          of `classes`.

    Example:
      >>> save_predictions("runs/digits", probabilities, labels)           # doctest: +SKIP
    """
    probabilities, labels = np.asarray(probabilities, np.float64), np.asarray(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise ValueError(
            "save_predictions: expected probabilities [examples, classes] and labels [examples], "
            f"got {list(probabilities.shape)} and {list(labels.shape)}"
        )
    count = probabilities.shape[1]
    names = [str(name) for name in (range(count) if classes is None else classes)]
    if len(names) != count:
        raise ValueError(f"save_predictions: {len(names)} names of {count} classes")
    if labels.dtype.kind not in "biu":
        raise ValueError(f"save_predictions: expected labels to be integers, got {labels.dtype}")
    labels = labels.astype(np.int64)
    if labels.size and not (0 <= labels.min() and labels.max() < count):
        raise ValueError(
            f"save_predictions: expected labels from 0 to {count - 1}, got {labels.min()} to "
            f"{labels.max()}"
        )
    if images is not None and len(images) != len(labels):
        raise ValueError(f"save_predictions: {len(images)} images of {len(labels)} examples")
    if np.isnan(probabilities).any():
        first = int(np.isnan(probabilities).any(1).argmax())
        raise ValueError(
            f"save_predictions: a probability of example {first} is NaN: has the run diverged?"
        )
    guesses = probabilities.argmax(1)
    confusion = np.zeros((count, count), np.int64)
    np.add.at(confusion, (labels, guesses), 1)
    wrong = np.flatnonzero(guesses != labels)
    sureness = probabilities[np.arange(len(labels)), guesses]
    mistakes = []
    for i in wrong[np.argsort(-sureness[wrong], kind="stable")][:worst]:
        mistake = {
            "index": int(i),
            "label": int(labels[i]),
            "guess": int(guesses[i]),
            "probability": round(float(sureness[i]), 6),
        }
        if images is not None:
            png = _png(Image(np.asarray(images[i])).pixels)
            mistake["image"] = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        mistakes.append(mistake)
    path = Path(workdir) / PREDICTIONS
    text = json.dumps({"classes": names, "confusion": confusion.tolist(), "mistakes": mistakes})
    write_whole(path, text.encode())
    return path

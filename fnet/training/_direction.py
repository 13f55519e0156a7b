"""Whether the largest or the smallest value of a metric is the best."""

from __future__ import annotations

_LARGEST = (
    "accuracy",
    "auc",
    "auroc",
    "bleu",
    "f1",
    "iou",
    "map",
    "miou",
    "precision",
    "psnr",
    "r2",
    "recall",
    "rouge",
    "ssim",
    "top1",
    "top5",
)
_SMALLEST = (
    "cer",
    "error",
    "fid",
    "kl",
    "loss",
    "mae",
    "mape",
    "mse",
    "nll",
    "perplexity",
    "rmse",
    "wer",
)
DIRECTIONS = dict.fromkeys(_LARGEST, "max") | dict.fromkeys(_SMALLEST, "min")
_MEMBERS = ("mean", "min", "max")  # of a population: validation/accuracy/max


def direction(metric: str, mode: str | None, option: str) -> str:
    """Returns "max" or "min": `mode` if it is given, otherwise the direction of a metric in the
    table `DIRECTIONS`.

    Args:
      metric: the logged name of the metric, such as "validation/accuracy". Only its last part is
          looked up, as a whole.
      option: the name of the option with which the user states the direction, such as "mode=", for
          messages.

    Raises:
      ValueError: `mode` is neither "max" nor "min", or it is None and the table does not contain
          the metric.
    """
    if mode is not None:
        if mode not in ("max", "min"):
            raise ValueError(f"{option}'{mode}': the best value is the 'max' or the 'min'")
        return mode
    parts = metric.split("/")
    name = (
        parts[-2]
        if len(parts) > 1 and (parts[-1] in _MEMBERS or parts[-1].isdecimal())
        else parts[-1]
    )
    if name.lower() not in DIRECTIONS:
        raise ValueError(
            f"'{metric}': is its largest or its smallest value the best? Pass {option}max or "
            f"{option}min"
        )
    return DIRECTIONS[name.lower()]

"""The share of the chips' peak rate that a step uses, or the reason why this share is unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fnet import cost
from fnet import hardware as hw


def utilization(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[float], cost.MFU]:
    """Returns a function that computes the model FLOPs utilization (MFU) of a step. The operations
    of the step are counted, but the step is not run.

    Args:
      step: the training step.
      state: the first argument of the step, which is on the devices that run the step.
      batch: the second argument of the step.

    Returns:
      A function that takes the measured steps per second and returns a `cost.MFU`.
    """
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    devices = {device for leaf in arrays for device in leaf.devices()}
    chip = hw.detect(min(devices, key=lambda device: device.id))
    count = cost.count(step, state, batch)
    if count.dtype is None:
        return lambda rate: cost.MFU(None, "the step has no matrix product")
    return lambda rate: cost.mfu(count.model_flops, 1 / rate, chip, count.dtype, len(devices))

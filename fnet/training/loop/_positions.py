"""The positions of all processes in their data sources, for checkpoints."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fnet.parallel._gather import gather
from fnet.training.loop._fingerprint import ResumeWarning


def gathered(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the positions of all processes. The position of a process is its position in its own
    data source. Every process must call `gathered`, because the processes communicate.

    Args:
      position: the position of this process in its data source, the result of
          `batches.position(step)`.
    """
    if jax.process_count() == 1:
        return position
    text = np.frombuffer(json.dumps(position).encode(), np.uint8)
    most = int(gather(np.int32(text.size)).max())
    texts = gather(np.pad(text, (0, most - text.size)))
    return {"processes": [json.loads(bytes(each).rstrip(b"\0")) for each in texts]}


def own(saved: Mapping[str, Any] | None, step: int) -> Mapping[str, Any] | None:
    """Returns this process's position in its data source, from the positions in a checkpoint.

    If the number of processes has changed since the checkpoint was saved, `own` issues a
    `ResumeWarning` and returns the position of process 0 in every process. In the returned position
    of process 0, the internal state of the data source (the key "state") is replaced by None."""
    if saved is None:
        return None
    every, count = saved.get("processes", [saved]), jax.process_count()
    if len(every) == count:
        return every[jax.process_index()]
    warnings.warn(
        f"the data was read by {len(every)} processes and is now read by {count}: each one reads "
        f"its epoch from the start up to step {step}, and the batches differ from those of an "
        "uninterrupted run",
        ResumeWarning,
        stacklevel=5,
    )
    return {**every[0], "state": None}

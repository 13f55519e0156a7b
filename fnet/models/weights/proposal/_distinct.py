"""Arrays of a new module that hide mistakes, replaced for the time of a proof.

In a new module, all norms have the same arrays, cloned layers are equal, and some kernels are zero:
layers could be exchanged and every output would still agree. The weights that are loaded later
would then go to the wrong layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from fnet.models.weights.proposal._source import to_numpy

_STATISTICS = "running_mean", "running_var"


@contextlib.contextmanager
def distinct(module: Any, spared: Collection[str] = ()) -> Iterator[int]:
    """Gives other values to arrays that are constant or equal to another, and takes them back.

    Args:
        module: the torch.nn.Module.
        spared: keys that keep their values, because no layer of fnet reads them.

    Yields:
        The number of arrays that were changed.
    """
    torch = sys.modules["torch"]  # of the user, who has a module of it
    changed = [
        (key, value, value.detach().clone())
        for key, value in _without_differences(module)
        if key not in spared
    ]
    numbers = np.random.default_rng(0)
    with torch.no_grad():
        try:
            for key, value, before in changed:
                value.copy_(torch.from_numpy(_other(key, to_numpy(before), numbers)))
            yield len(changed)
        finally:
            for _, value, before in changed:
                value.copy_(before)


def _without_differences(module):
    """Yields (key, tensor) of the arrays that are constant or equal to an earlier one."""
    parameters = {key for key, _ in module.named_parameters()}
    seen = set()
    for key, value in module.state_dict(keep_vars=True).items():
        array = to_numpy(value)
        if key not in parameters and key.rpartition(".")[2] not in _STATISTICS:
            continue
        if not array.size or not np.issubdtype(array.dtype, np.floating):
            continue
        content = array.shape, hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
        if content in seen or (array == array.flat[0]).all():
            yield key, value
        seen.add(content)


def _other(key, array, numbers):
    """Random values of the same order of magnitude; those that must be positive stay positive."""
    factor = numbers.uniform(0.5, 1.5, array.shape)
    noise = 0.1 * numbers.standard_normal(array.shape)
    if key.endswith(("running_var", "weight_g", "original0")):
        noise = abs(noise)
    return np.asarray(array * factor + noise, array.dtype)

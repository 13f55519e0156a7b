"""What the layers of a PyTorch module receive and return in one call, and where the same numbers
stand in fnet's layouts."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fnet.models.weights.proposal._source import to_numpy


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a layer of PyTorch: arrays, None and other arguments.

    Attributes:
        inputs: the positional arguments.
        options: the keyword arguments.
        outputs: the arrays of the result.
        number: the number of the call in the run.
        module: the class of the module.
        batch_first: its attribute of this name, or False.
        leaf: whether it contains no other modules.
        plain: whether the class is PyTorch's own. The outputs of others, such as a norm with its
            activation, may be more than those of fnet's layer.
    """

    inputs: tuple
    options: Mapping[str, Any]
    outputs: tuple[np.ndarray, ...]
    number: int
    module: str = ""
    batch_first: bool = False
    leaf: bool = True
    plain: bool = True


@dataclasses.dataclass(frozen=True)
class Record:
    """One run of a module in eval mode.

    Attributes:
        calls: {path of a module: its calls}.
        outputs: the arrays of the result.
    """

    calls: Mapping[str, list[Call]]
    outputs: tuple[np.ndarray, ...]

    def order(self) -> dict[str, int]:
        """{path of a module: the number of its first call}."""
        return {name: calls[0].number for name, calls in self.calls.items()}

    def images(self) -> dict[tuple, None]:
        """(height, width, channels) of the images that layers return, the last ones first."""
        calls = [call for each in self.calls.values() for call in each]
        calls.sort(key=lambda call: -call.number)
        arrays = (array for call in calls for array in call.outputs if array.ndim == 4)
        return dict.fromkeys((*array.shape[2:], array.shape[1]) for array in arrays)

    def first_reader(self, x: np.ndarray) -> Call | None:
        """Returns the first call of a layer with the input `x`, or else with one of its shape."""
        calls = [call for each in self.calls.values() for call in each if call.leaf]
        calls = sorted(
            (call for call in calls if call.inputs and np.shape(call.inputs[0]) == x.shape),
            key=lambda call: call.number,
        )
        exact = (call for call in calls if np.array_equal(call.inputs[0], x))
        return next(exact, calls[0] if calls else None)


def record(module: Any, x: Any) -> Record:
    """Runs a module in eval mode on `x`, an input or a tuple of inputs, and records the calls of
    all modules in it."""
    torch = sys.modules["torch"]  # of the user, who has a module of it
    calls: dict[str, list[Call]] = {}
    count = iter(range(sys.maxsize))
    hooks = []

    def hook(name):
        def keep(layer, inputs, options, output):
            call = Call(
                tuple(map(_kept, inputs)),
                {key: _kept(value) for key, value in options.items()},
                tuple(_arrays(output)),
                next(count),
                type(layer).__name__.removeprefix("Parametrized"),
                bool(getattr(layer, "batch_first", False)),
                is_leaf(layer),
                _is_plain(layer),
            )
            calls.setdefault(name, []).append(call)

        return keep

    def is_leaf(layer):
        inner = [type(each).__name__ for each in layer.children()]
        return (
            all("Parametrization" in name for name in inner) or "Attention" in type(layer).__name__
        )

    inputs = tuple(_tensor(torch, value) for value in (x if isinstance(x, tuple) else (x,)))
    modes = [(each, each.training) for each in module.modules()]
    try:
        for name, each in module.named_modules():
            hooks.append(each.register_forward_hook(hook(name), with_kwargs=True))
        module.eval()
        with torch.no_grad():
            output = module(*inputs)
    finally:
        for each in hooks:
            each.remove()
        for each, training in modes:
            each.training = training
    return Record(calls, tuple(_arrays(output)))


def _is_plain(layer):
    return any(
        each.__module__.startswith("torch.nn.modules") and each.__name__ == name
        for each, name in [(type(layer), type(layer).__name__), *_parametrized(layer)]
    )


def _parametrized(layer):
    # torch.nn.utils.parametrize makes a class ParametrizedConv1d with the base Conv1d.
    name = type(layer).__name__
    if name.startswith("Parametrized"):
        yield from ((base, name.removeprefix("Parametrized")) for base in type(layer).__bases__)


def _tensor(torch, value):
    if isinstance(value, torch.Tensor) or value is None:
        return value
    value = np.asarray(value)
    return torch.from_numpy(np.array(value))


def _kept(value):
    # A copy, since activations may be computed in place.
    return np.array(to_numpy(value)) if hasattr(value, "detach") else value


def _arrays(output) -> Iterator[np.ndarray]:
    """The tensors of an output: a tensor, or tuples, lists and dicts of them."""
    if hasattr(output, "detach"):
        yield _kept(output)
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _arrays(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _arrays(value)


def layouts(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array of PyTorch in the layouts in which fnet may have it: the same, channels last,
    the batch before the time, and with its leading axes joined."""
    yield array
    if array.ndim > 2:
        yield np.moveaxis(array, 1, -1)
        yield array.swapaxes(0, 1)
        yield np.moveaxis(array, 0, 1).swapaxes(-1, -2) if array.ndim == 3 else array
        yield array.reshape(-1, array.shape[-1])


def matching(ours: Any, theirs: np.ndarray) -> tuple[float, float]:
    """Returns (the largest difference, the largest value) of an array of fnet and one of PyTorch,
    in the layout in which they are nearest; infinity if no shape is the same."""
    ours = np.asarray(ours, np.float32)
    theirs = np.asarray(theirs, np.float32)
    scale = float(np.abs(theirs).max(initial=0)) or 1.0
    best = float("inf")
    for each in layouts(theirs):
        if each.shape != ours.shape:
            if each.size != ours.size or each.shape[-1:] != ours.shape[-1:]:
                continue
            each = each.reshape(ours.shape)
        with contextlib.suppress(ValueError):
            difference = np.abs(ours - each)
            apart = float(difference.max(initial=0))
            best = min(best, apart if apart == apart else float("inf"))
    return best, scale

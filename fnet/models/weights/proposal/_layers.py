"""The layers of a model whose arrays a naming rule can fill, from its spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from fnet import layers as nn
from fnet.layers._spec import Copies, ParamSpec
from fnet.layers._spec import leaves as spec_leaves

# The first that fits decides, so subclasses come before their bases.
_KINDS = (
    (nn.LSTM, "lstm"),
    (nn.GRU, "gru"),
    (nn.RNN, "rnn"),
    (nn.Dense, "dense"),
    (nn.Conv, "conv"),
    (nn.DepthwiseConv, "conv"),
    (nn.ConvTranspose, "conv_transpose"),
    (nn.BatchNorm, "batch_norm"),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), "norm"),
    (nn.Embed, "embed"),
)
_QKV = ("query", "key", "value"), ("q", "k", "v")


@dataclasses.dataclass(frozen=True)
class Unit:
    """One layer of the model, or one copy of it in a stack.

    Attributes:
        paths: the path of the layer; three paths if query, key and value are one in the file.
        kind: the method of `torch` that names its arrays, or "array".
        leaves: {path of an array: its spec, of one copy}.
        layer: the layer, or None for an array of a layer that fnet does not know.
        index: which copy of a stack it is; () outside of stacks.
        stack: the path of the stack.
        order: when it is called, among the layers of the model.
    """

    paths: tuple[str, ...]
    kind: str
    leaves: Mapping[str, Any]
    layer: Any = None
    index: tuple[int, ...] = ()
    stack: str = ""
    order: tuple = ()

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def site(self) -> str:
        """The path with the number of the copy, as `capture` writes it."""
        if not self.index:
            return self.path
        numbers = "".join(f"[{number}]" for number in self.index)
        rest = self.path.removeprefix(self.stack).removeprefix("/")
        return f"{self.stack}{numbers}/{rest}" if rest else self.stack + numbers

    def _kernels(self) -> list[tuple[str, int]]:
        held = self.leaves.items()
        return [(path, spec.size) for path, spec in held if path.endswith("kernel")]

    def size(self) -> int:
        """The number of elements of the array by which files are compared."""
        names = ("kernel", "embedding", "mean", "scale")
        sizes = {path.rpartition("/")[2]: spec.size for path, spec in self.leaves.items()}
        if self.kind == "attention":
            return sum(size for path, size in self._kernels() if not path.endswith("out/kernel"))
        if self.kind == "dense":
            return sum(size for _, size in self._kernels())
        return next((sizes[name] for name in names if name in sizes), sum(sizes.values()))


def units(model: Any, inputs: tuple, form: str, taken: Any = ()) -> list[Unit]:
    """Returns the layers of a model, in the order in which they are called.

    Args:
        model: the model.
        inputs: its inputs, arrays or specs.
        form: what an attention is in the file: "whole", "fused" (query, key and value are one
            layer) or "separate".
        taken: paths of arrays that have rules already. What is left of a layer is single arrays.
    """
    record = model._record(inputs, {}, False)
    leaves = {
        "/".join(path): spec
        for kind in ("params", "state")
        for path, spec in spec_leaves(record[kind])
    }
    numbers = {"/".join(path): number for number, path in enumerate(record["layers"])}
    found: list[Unit] = []
    for number, (path, layers) in enumerate(record["layers"].items()):
        place = "/".join(path)
        for layer in layers:
            unit = _unit(place, layer, leaves, form)
            if unit is not None and not set(taken) & unit.leaves.keys():
                found.append(dataclasses.replace(unit, order=(number,)))
                for each in unit.leaves:
                    del leaves[each]
                break
    for path, spec in leaves.items():
        if path in taken:
            continue
        found.append(Unit((path,), "array", {path: spec}, order=(_above(path, numbers),)))
    if form == "fused":
        found = _fused(found)
    return sorted(
        (one for unit in found for one in _copies(unit, numbers)), key=lambda one: one.order
    )


def _unit(place, layer, leaves, form):
    below = lambda *names: {
        path: leaves[path]
        for name in names
        if (path := f"{place}/{name}" if place else name) in leaves
    }
    if isinstance(layer, nn.Attention):
        parts = (*_QKV[0], "out")
        own = below(*(f"{part}/{name}" for part in parts for name in ("kernel", "bias")))
        whole = all(f"{place}/{part}/kernel".lstrip("/") in own for part in parts)
        return Unit((place,), "attention", own, layer) if form == "whole" and whole else None
    kind = next((name for classes, name in _KINDS if isinstance(layer, classes)), None)
    if kind is None:
        return None
    names = ["kernel", "recurrent_kernel", "scale", "bias", "recurrent_bias", "embedding"]
    own = below(*names, "mean", "var")
    if kind in ("lstm", "gru", "rnn"):
        own |= below(*(f"{way}/{name}" for way in ("forward", "backward") for name in names))
    return Unit((place,), kind, own, layer) if own else None


def _fused(units):
    """Joins the layers query, key and value of each attention."""
    dense = {unit.path: unit for unit in units if unit.kind == "dense"}
    joined, gone = {}, set()
    for path in dense:
        for parts in _QKV:
            above = path.removesuffix(parts[0])
            paths = tuple(above + part for part in parts)
            if path.endswith(f"/{parts[0]}") and all(each in dense for each in paths):
                members = [dense[each] for each in paths]
                leaves = {key: spec for unit in members for key, spec in unit.leaves.items()}
                joined[path] = dataclasses.replace(members[0], paths=paths, leaves=leaves)
                gone |= {*paths[1:]}
    return [joined.get(unit.path, unit) for unit in units if unit.path not in gone]


def _above(path, numbers):
    """The number of the call of the layer that has an array."""
    while path:
        path = path.rpartition("/")[0]
        if path in numbers:
            return numbers[path]
    return len(numbers)


def _copies(unit, numbers):
    """The copies of a stacked layer, each with the specs of one; or the layer itself.

    The experts of a mixture are copies, too, whose arrays have the axis "layers" themselves.
    """
    path, spec = next(iter(unit.leaves.items()))
    stack = path
    if isinstance(spec, Copies):
        stack = "/".join(path.split("/")[: -spec.depth])
    leaves, counts = dict(unit.leaves), []
    while all(_one(each) is not None for each in leaves.values()):
        counts.append(next(iter(leaves.values())).shape[0])
        leaves = {path: _one(each) for path, each in leaves.items()}
    if not counts:
        return [unit]
    # All layers of one copy come before those of the next.
    first = numbers.get(stack, unit.order[0])
    return [
        dataclasses.replace(
            unit, leaves=leaves, index=index, stack=stack, order=(first, *index, *unit.order)
        )
        for index in np.ndindex(*counts)
    ]


def _one(spec):
    """The spec of one copy, or None if an array has no axis of copies."""
    if isinstance(spec, Copies):
        return spec.each
    if not spec.roles or spec.roles[0] != "layers":
        return None
    axes = None if spec.axes is None else spec.axes[1:]
    return ParamSpec(
        spec.shape[1:], spec.dtype, spec.init, axes, roles=spec.roles[1:], layer=spec.layer
    )

"""A line of `NAMES`: the rules that say which layer of the file is which of the model, and their
text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fnet import layers as nn
from fnet.models.weights import _key_map
from fnet.models.weights._weight_names import (
    CONV,
    DENSE,
    SAME,
    Layout,
    Names,
    Rule,
    flattened,
    pointwise,
    reshaped,
)
from fnet.models.weights._words import torch
from fnet.models.weights.proposal._layers import Unit
from fnet.models.weights.proposal._source import Group


@dataclasses.dataclass(frozen=True)
class Line:
    """The call that makes the rules of one layer.

    Attributes:
        method: the method of `torch`, or "" for a `Rule`.
        ours, theirs: its first two arguments.
        options: (text, value) of the further arguments.
        norm: the call of `torch.weight_norm` around it: its dim, parametrized and name, or None.
    """

    method: str
    ours: str | tuple[str, ...]
    theirs: str
    options: tuple[tuple[str, Any], ...] = ()
    norm: tuple[int | None, bool, str] | None = None

    def rules(self) -> tuple:
        arguments = {text.partition("=")[0]: value for text, value in self.options}
        if not self.method:
            return (Rule(self.ours, self.theirs, **arguments),)
        made = getattr(torch, self.method)(self.ours, self.theirs, **arguments)
        if self.norm is None:
            return made
        dim, parametrized, name = self.norm
        return torch.weight_norm(made, dim, parametrized=parametrized, name=name)

    def __str__(self) -> str:
        paths = (self.ours,) if isinstance(self.ours, str) else self.ours
        ours = ", ".join(map(json.dumps, paths))
        given = [
            ours if len(paths) == 1 else f"({ours})",
            json.dumps(self.theirs),
            *(text for text, _ in self.options),
        ]
        if not self.method:
            return f"pretrained.Rule({', '.join(given)})"
        text = f"pretrained.torch.{self.method}({', '.join(given)})"
        if self.norm is None:
            return text
        dim, parametrized, name = self.norm
        options = [
            *([] if dim == 0 else [f"dim={dim}"]),
            *(["parametrized=True"] if parametrized else []),
            *([] if name == "weight" else [f"name={json.dumps(name)}"]),
        ]
        return f"pretrained.torch.weight_norm({', '.join([text, *options])})"


def fitting(unit: Unit, group: Group, shapes: Mapping[str, tuple]) -> Line | None:
    """Returns the line that fills a layer of the model with the arrays of one of the file, or None
    if their shapes do not fit.

    Args:
        unit, group: the two layers.
        shapes: {key: shape} of the file.
    """
    for line in _candidates(unit, group, shapes):
        if fits(line, unit, group, shapes):
            return line
    return None


def fits(line: Line, unit: Unit, group: Group, shapes: Mapping[str, tuple]) -> bool:
    """Whether a line reads all arrays of a layer of the file into all of a layer of the model."""
    try:
        entries = _key_map.key_map(Names(line.rules()), "", unit.leaves, "").reads
    except ValueError:
        return False
    wanted = {key: shape for entry in entries for key, shape in entry.shapes().items()}
    return wanted.keys() == set(group.keys) and all(
        shapes[key] == shape for key, shape in wanted.items()
    )


def flattenings(line: Line, sizes: Any) -> Iterator[Line]:
    """Yields the line of a Dense for inputs that are flattened images of these (height, width)."""
    for height, width in sizes:
        value = flattened(height, width)
        text = f"layout=pretrained.flattened({height}, {width})"
        yield dataclasses.replace(line, options=((text, value),))


def _candidates(unit, group, shapes):
    if unit.kind == "array":
        if group.kind in ("array", "norm", "affine") and len(group.keys) == 1:
            yield from _arrays(unit, group.keys[0], shapes)
        return
    ours: Any = unit.paths if len(unit.paths) > 1 else unit.path
    if unit.kind in ("lstm", "gru", "rnn"):
        if group.kind == "recurrent":
            layer = () if group.layer == 0 else ((f"layer={group.layer}", group.layer),)
            yield _normed(Line(unit.kind, ours, group.name, layer), group)
        return
    kinds = {"dense": "affine", "conv": "affine", "conv_transpose": "affine", "embed": "affine"}
    if group.kind != kinds.get(unit.kind, unit.kind):
        return
    if unit.kind.startswith("conv") and group.module.startswith("Conv"):
        if ("Transpose" in group.module) != (unit.kind == "conv_transpose"):
            return
    options: tuple = ()
    if unit.kind == "conv_transpose" and unit.layer.groups > 1:
        options = ((f"groups={unit.layer.groups}", unit.layer.groups),)
    line = _normed(Line(unit.kind, ours, group.name, options), group)
    if unit.kind != "dense":
        yield line
        return
    window = max((shapes[key] for key in group.keys), key=len)[2:]
    if window:
        layout = _layout(f"pointwise({len(window)})", pointwise(len(window)))
        if set(window) == {1}:
            yield dataclasses.replace(line, options=layout)
        return
    same = dataclasses.replace(line, options=(("layout=pretrained.SAME", SAME),))
    # transformers' Conv1D is a linear layer with the kernel [in, out].
    yield from (same,) if group.module == "Conv1D" else (line, same)


def _arrays(unit, key, shapes):
    (spec,) = unit.leaves.values()
    theirs = shapes[key]
    if unit.path.endswith("kernel") and spec.layer is not None:  # what is left of a layer
        name, layout = ("DENSE", DENSE) if len(theirs) == 2 else ("CONV", CONV)
        if issubclass(spec.layer, (nn.Dense, nn.Conv, nn.DepthwiseConv, nn.LSTM, nn.GRU, nn.RNN)):
            yield Line("", unit.path, key, _layout(name, layout))
            return
    if spec.roles == ("in", "out") and len(theirs) == 2:
        yield Line("", unit.path, key, _layout("DENSE", DENSE))
        return
    if spec.shape == theirs:
        yield Line("", unit.path, key)
        return
    if len(theirs) == 2 and spec.shape == theirs[::-1]:
        yield Line("", unit.path, key, _layout("DENSE", DENSE))
    ones = lambda shape: tuple(size for size in shape if size != 1)
    if ones(spec.shape) == ones(theirs):
        layout = reshaped(spec.shape, theirs)
        yield Line("", unit.path, key, _layout(f"reshaped({spec.shape}, {theirs})", layout))


def _layout(text: str, layout: Layout) -> tuple:
    return ((f"layout=pretrained.{text}", layout),)


def _normed(line, group):
    if len(group.norms) != 1:  # a layer with two normed weights needs rules of its own
        return line
    ((name, (dim, parametrized)),) = group.norms
    return dataclasses.replace(line, norm=(dim, parametrized, name))

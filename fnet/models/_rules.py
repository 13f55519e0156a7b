"""How the arrays of a model are called in the files of others: rules that are data and read both ways.

A rule pairs a path of ours with a key of theirs, and names the layout that lies between the two:

    Rule("stage{s}/block{b}/conv1/kernel", "layer{s}.{b}.conv1.weight", CONV)

`{s}` stands for a number. In their key it may be moved (`{s+1}`) or written as a letter (`{b:letter}`: 0 is a). A
number that stands in their key alone counts copies that we keep stacked (`nn.Stack`): our array has an axis for it in
front. Several paths of ours for one key of theirs are parts of theirs along our last axis, as in a fused qkv.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fnet.models._images import ImageInput


class Layout(NamedTuple):
    """A reversible change of layout: their array as ours, and ours as theirs. Views, never copies."""

    name: str
    ours: Callable[[np.ndarray], np.ndarray]
    theirs: Callable[[np.ndarray], np.ndarray]


def _swap(array):
    return array.swapaxes(-1, -2)


def flattened(height: int, width: int) -> Layout:
    """A dense kernel behind a flattened image: theirs is [out, c h w], ours [h w c, out]."""

    def ours(array):
        return array.reshape(len(array), -1, height, width).transpose(2, 3, 1, 0).reshape(-1, len(array))

    def theirs(array):
        out = array.shape[-1]
        return array.reshape(height, width, -1, out).transpose(3, 2, 0, 1).reshape(out, -1)

    return Layout(f"flattened {height} x {width}", ours, theirs)


SAME = Layout("same", lambda array: array, lambda array: array)
DENSE = Layout("dense", _swap, _swap)                                        # [out, in]
CONV = Layout("conv", lambda array: np.moveaxis(array, (0, 1), (-1, -2)),    # [out, in, *window]
              lambda array: np.moveaxis(array, (-1, -2), (0, 1)))
DEPTHWISE = Layout("depthwise", _swap, _swap)                                # [*window, in, 1], Keras'


@dataclasses.dataclass(frozen=True)
class Rule:
    """One key of theirs for one path of ours, or for several that are its parts along our last axis.

    Args:
        ours: the path or paths, with fields for numbers.
        theirs: the key, with the same fields, and others that count stacked copies.
        layout: what lies between the two.
        beside: keys that may stand beside it, with its numbers.
    """

    ours: str | tuple[str, ...]
    theirs: str
    layout: Layout = SAME
    beside: tuple[Spare, ...] = ()


@dataclasses.dataclass(frozen=True)
class Spare:
    """A key that may stand in their file and holds nothing that the model needs.

    Args:
        theirs: the key.
        ours: the path beside which it stands, whose numbers it shares; None: the key has no numbers.
        write: what `save` writes there; None: nothing.
    """

    theirs: str
    ours: str | None = None
    write: Any = None


@dataclasses.dataclass(frozen=True)
class Tied:
    """A second key that may stand in their file for the array at `ours`: there it must hold the same numbers.

    It says nothing where the model has an array of its own for that key, by a `Rule`: logits that are tied or not.

    Args:
        theirs: the key.
        ours: the path of the array, which a `Rule` reads.
        layout: as in `Rule`.
        write: whether `save` writes it.
    """

    theirs: str
    ours: str
    layout: Layout = SAME
    write: bool = False


@dataclasses.dataclass(frozen=True)
class Names:
    """All rules of one framework's names for one class of models.

    Args:
        rules: `Rule`, `Spare` and `Tied`, nested in tuples as is convenient; the first that matches a path holds.
            They may cover paths that some configurations lack.
        prefixes: what may stand before every key; `save` writes the first.
        config: the fields of the model that these weights take for granted and no shape shows, as BatchNorm's
            epsilon.
        metadata: what `save` writes into the file's own notes.
        image: the way from a photo to the input that these weights were trained for.
        header: for llama2.c's model.bin: the header of a model; None: the file is safetensors.
    """

    rules: tuple
    prefixes: tuple[str, ...] = ("",)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: ImageInput | None = None
    header: Callable | None = None

    def flat(self) -> list:
        return list(_flat(self.rules))


class Words:
    """How one framework calls the arrays of its layers: makes the rules of a whole layer from its two names.

    torch = [out, in] and [out, in, *window], weight, running_mean; keras = our layouts, kernel, gamma, moving_mean.
    """

    def __init__(self, join, dense, conv, kernel, bias, norm, count=None):
        self._join, self._dense, self._conv = join, dense, conv
        self._kernel, self._bias, self._norm, self._count = kernel, bias, norm, count

    def dense(self, ours: str, theirs: str, layout: Layout | None = None) -> tuple:
        """kernel and bias of a Dense."""
        return self._affine(ours, theirs, layout or self._dense)

    def conv(self, ours: str, theirs: str) -> tuple:
        """kernel and bias of a Conv, depthwise in PyTorch's names too."""
        return self._affine(ours, theirs, self._conv)

    def norm(self, ours: str, theirs: str) -> tuple:
        """scale and bias of a LayerNorm, RMSNorm or GroupNorm."""
        return tuple(Rule(f"{ours}/{mine}", f"{theirs}{self._join}{name}") for mine, name in self._norm[:2])

    def batch_norm(self, ours: str, theirs: str) -> tuple:
        """scale, bias, mean and var of a BatchNorm, and PyTorch's count of batches, which nothing reads."""
        count = () if self._count is None else (Spare(f"{theirs}{self._join}{self._count}", write=np.int64(0)),)
        return tuple(Rule(f"{ours}/{mine}", f"{theirs}{self._join}{name}", beside=count if mine == "mean" else ())
                     for mine, name in self._norm)

    def embed(self, ours: str, theirs: str) -> tuple:
        """The table of an Embed."""
        name = "weight" if self._join == "." else "embeddings"
        return (Rule(f"{ours}/embedding", f"{theirs}{self._join}{name}"),)

    def _affine(self, ours, theirs, layout):
        return (Rule(f"{ours}/kernel", f"{theirs}{self._join}{self._kernel}", layout),
                Rule(f"{ours}/bias", f"{theirs}{self._join}{self._bias}"))


torch = Words(".", DENSE, CONV, "weight", "bias", (("scale", "weight"), ("bias", "bias"), ("mean", "running_mean"),
                                                  ("var", "running_var")), "num_batches_tracked")
keras = Words("/", SAME, SAME, "kernel", "bias", (("scale", "gamma"), ("bias", "beta"), ("mean", "moving_mean"),
                                                 ("var", "moving_variance")))


def _flat(rules):
    for rule in rules:
        if isinstance(rule, tuple):
            yield from _flat(rule)
        else:
            yield rule

"""Rules for the names of a model's arrays in the files of other frameworks, for reading and
writing.

A `Rule` connects the path of an array in fnet with its key in the file, and states how its layout
changes:

    Rule("stage{s}/block{b}/conv1/kernel", "layer{s}.{b}.conv1.weight", CONV)

A placeholder such as `{s}` matches an integer in the path. In the key, `{s}` is this integer,
`{s:letter}` a letter ("a" for 0, "b" for 1), and `{s+1}` or `{s-1:letter}` adds or subtracts a
constant first.

An `nn.Stack` keeps an array of all its layers as one, with the layer's index as leading axis, while
the file has one array for each layer. A placeholder that only the key contains is that index.
Several paths for one key, such as query, key and value, split the array of the file along its last
axis. Several keys for one path are arrays from which its layout computes one, such as PyTorch's two
biases of an LSTM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fnet.models.weights._images import ImageInput


class Layout(NamedTuple):
    """A reversible change of an array's layout: the order and the splitting of its axes.

    `ours` converts from the layout of the file to that of fnet, `theirs` converts back. Both return
    views. For a rule with several keys, `ours` takes an array for each, and `theirs` returns as many.

    >>> transpose = Layout("transpose", lambda x: x.T, lambda x: x.T)
    >>> transpose.ours(np.ones((10, 64))).shape                # [out, in] in the file, [in, out] in fnet
    (64, 10)
    """

    name: str
    ours: Callable[..., np.ndarray]
    theirs: Callable[[np.ndarray], Any]


def _swap(array):
    return array.swapaxes(-1, -2)


def flattened(height: int, width: int) -> Layout:
    """Returns the layout of a dense layer's kernel whose input is a flattened image.

    The file has it as [out, c * h * w], fnet as [h * w * c, out], for images of height h, width w
    and c channels.

    >>> flattened(7, 7).ours(np.ones((10, 3 * 7 * 7))).shape
    (147, 10)
    """

    def ours(array):
        return (
            array.reshape(len(array), -1, height, width)
            .transpose(2, 3, 1, 0)
            .reshape(-1, len(array))
        )

    def theirs(array):
        out = array.shape[-1]
        return array.reshape(height, width, -1, out).transpose(3, 2, 0, 1).reshape(out, -1)

    return Layout(f"flattened {height} x {width}", ours, theirs)


def reshaped(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Layout:
    """Returns the layout of an array that has another shape in the file, but the same order.

    >>> reshaped((4,), (1, 1, 4)).ours(np.ones((1, 1, 4))).shape
    (4,)
    """
    return Layout(
        f"reshaped from {theirs} to {ours}",
        lambda array: array.reshape(ours),
        lambda array: array.reshape(theirs),
    )


def pointwise(dims: int) -> Layout:
    """Returns the layout of a dense layer's kernel that is a convolution with a window of 1 in the
    file, of `dims` dimensions.

    >>> pointwise(2).ours(np.ones((10, 64, 1, 1))).shape
    (64, 10)
    """
    ones = (1,) * dims
    return Layout(
        f"pointwise {dims}",
        lambda array: array.reshape(array.shape[:2]).T,
        lambda array: array.T.reshape(*array.T.shape, *ones),
    )


def interleaved(heads: int) -> Layout:
    """The layout of query, key and value in one array that is interleaved by head, as in GPT-NeoX.

    A kernel has the shape [heads * 3 * head_dim, in] in the file and [in, 3 * heads * head_dim] in
    fnet. A bias has the shape [heads * 3 * head_dim] in the file and [3 * heads * head_dim] in
    fnet.

    >>> interleaved(4).ours(np.ones((4 * 3 * 8, 32))).shape
    (32, 96)
    """

    def ours(array):
        array = array.reshape(heads, 3, -1, *array.shape[1:]).swapaxes(0, 1)
        array = array.reshape(-1, *array.shape[3:])
        return _swap(array) if array.ndim > 1 else array

    def theirs(array):
        array = _swap(array) if array.ndim > 1 else array
        array = array.reshape(3, heads, -1, *array.shape[1:]).swapaxes(0, 1)
        return array.reshape(-1, *array.shape[3:])

    return Layout(f"interleaved by {heads} heads", ours, theirs)


SAME = Layout("same", lambda array: array, lambda array: array)
DENSE = Layout("dense", _swap, _swap)  # [out, in]
CONV = Layout(
    "conv",
    lambda array: np.moveaxis(array, (0, 1), (-1, -2)),  # [out, in, *window]
    lambda array: np.moveaxis(array, (-1, -2), (0, 1)),
)
DEPTHWISE = Layout("depthwise", _swap, _swap)  # [*window, in, 1], Keras


@dataclasses.dataclass(frozen=True)
class Rule:
    """Connects a key (the name of an array) in a file with the path of this array in fnet.

        Rule("blocks/fc/kernel", "layers.{i}.fc.weight", DENSE)

    Args:
        ours: the path in fnet, where a placeholder in braces, such as `{s}` in "stage{s}", stands
            for an integer. Several paths split the array of the file along its last axis.
        theirs: the key in the file, with the placeholders of the path. One that the path lacks
            stands for an index along a leading axis of fnet's array, such as the layer index in an
            `nn.Stack`. Several keys are arrays from which `layout` computes one.
        layout: the change of layout between the file and fnet. Default: no change.
        beside: `Spare` objects for keys that the file may contain although the model does not need
            them, with the same placeholders.
        layers: the classes of fnet's layers for which the rule is right. Arrays of another of
            fnet's layers are an error, because a shape that fits proves nothing: a ConvTranspose
            with as many outputs as inputs has the kernel of a Conv. Default (): any layer. The
            methods of `torch` and `keras` set it.

    >>> rule = models.pretrained.Rule("blocks/fc/kernel", "layers.{i}.fc.weight", models.pretrained.DENSE)
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    layout: Layout = SAME
    beside: tuple[Spare, ...] = ()
    layers: tuple[type, ...] = ()


@dataclasses.dataclass(frozen=True)
class Spare:
    """A key (name of an array) that a file may contain although the model does not need it.

    Args:
        theirs: the key in the file.
        ours: a path in fnet with placeholders as in `Rule`. For each array whose path matches, the
            key has the integers of that path, such as layer numbers, in place of its placeholders.
            None: the key has no placeholders.
        write: the array that `save` writes under the key. None: it writes none.
        refused: why a file with this key cannot be read. Default None: it can.

    >>> Spare("{s}.bn.num_batches_tracked", "{s}/bn/mean").theirs
    '{s}.bn.num_batches_tracked'
    """

    theirs: str
    ours: str | None = None
    write: Any = None
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Tied:
    """A second key (name) that a file may contain for the array at the path `ours`.

    `Tied` has no effect if a `Rule` of the model already reads this key. So the same rules serve
    models that compute the logits with the embedding table and models with a separate output layer.
    If a file contains two different arrays under the two keys, reading it raises a `ValueError`
    with the second key and the path.

    Args:
        theirs: the second key in the file.
        ours: the path of the array in fnet. The model must also have a `Rule` for this path.
        layout: as in `Rule`.
        write: whether `save` writes the array a second time, under the key `theirs`. Default False.

    >>> Tied("lm_head.weight", "embed/embedding").ours
    'embed/embedding'
    """

    theirs: str
    ours: str
    layout: Layout = SAME
    write: bool = False


@dataclasses.dataclass(frozen=True)
class Names:
    """All naming rules for one class of models and one framework.

        NAMES = {"torch": Names((torch.dense("fc", "layers.0"), torch.dense("head", "layers.2")))}

    Args:
        rules: `Rule`, `Spare` and `Tied` objects in tuples, which may be nested. Of several rules
            for a path, the first counts; rules may name paths that some configurations of the model
            lack. If the layout of an array depends on the model, a function from the model to such
            a tuple.
        prefixes: possible prefixes of the keys. `save` writes the first for a model without a head,
            and the last for one with a head.
        heads: rules whose keys have none of the `prefixes`, such as those for a head after an
            encoder.
        aliases: {end of a key in older files: end of the same key in newer files}.
        config: {field of the model: value that the framework's weights require}, for values that
            shapes do not show, such as BatchNorm's epsilon.
        metadata: the metadata that `save` writes into the file.
        image: the `ImageInput` with which the publisher evaluated the weights.
        only_named: whether `save` uses these names only if you select them with `names=` or
            `like=`.
        inputs: inputs of the model, arrays or `jax.ShapeDtypeStruct`s, for a model without a method
            `example`.

    >>> names = models.pretrained.Names((models.pretrained.torch.dense("head", "fc"),), metadata={"format": "pt"})
    """

    rules: tuple | Callable[[Any], tuple]
    prefixes: tuple[str, ...] = ("",)
    heads: tuple = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: ImageInput | None = None
    only_named: bool = False
    inputs: tuple = ()

    def of(self, model: Any) -> Names:
        """Returns a copy of `Names` in which `rules` is the tuple of naming rules for a model."""
        return dataclasses.replace(self, rules=self.rules(model)) if callable(self.rules) else self

    def flat(self) -> list:
        return list(flat(self.rules))

    def flat_heads(self) -> list:
        return list(flat(self.heads))


def flat(rules: tuple) -> Iterator:
    """Yields the rules in tuples that may be nested."""
    for rule in rules:
        if isinstance(rule, tuple):
            yield from flat(rule)
        else:
            yield rule

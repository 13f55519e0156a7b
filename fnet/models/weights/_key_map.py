"""The key map of one model, which results from applying naming rules to the arrays of the model."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from fnet import layers as nn
from fnet.models.weights._weight_names import CONV, DEPTHWISE, Names, Rule, Spare, Tied

_FIELD = re.compile(r"\{(\w+)([+-]\d+)?(:letter)?\}")


class Entry(NamedTuple):
    """The result of applying a naming rule to a model: paths of the model's arrays, and their keys
    in a file.

    Attributes:
        rule: the rule.
        paths: the path of an array of the model, or the paths of several arrays that are one array
            in the file.
        specs: the shape and dtype of each array in `paths`.
        copies: the sizes of the stacked axes. The stacked axes, such as the layer axis of an
            `nn.Stack`, are the leading axes of the model's arrays. The arrays in the file are not
            stacked: the file contains a separate array for each index along the stacked axes.
        keys: the keys (array names in the file), those of the rule for each index along the stacked
            axes, in row-major order. If `copies` is empty, `keys` contains only those of the rule.
    """

    rule: Rule | Spare | Tied
    paths: tuple[str, ...]
    specs: tuple
    copies: tuple[int, ...]
    keys: tuple[str, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns {key: the shape of this array in the file}."""
        shapes = [spec.shape[len(self.copies) :] for spec in self.specs]
        whole = (
            (*shapes[0][:-1], sum(shape[-1] for shape in shapes)) if len(shapes) > 1 else shapes[0]
        )
        arrays = self.rule.layout.theirs(np.broadcast_to(np.int8(0), whole))
        arrays = arrays if self.is_joined() else (arrays,)
        return dict(zip(self.keys, itertools.cycle(array.shape for array in arrays)))

    def is_joined(self) -> bool:
        """Whether the model's arrays are computed from several arrays of the file."""
        return not isinstance(self.rule.theirs, str)

    def layers(self) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
        """Yields (index along the stacked axes, keys) for each layer of a stack, or once."""
        width = len(self.rule.theirs) if self.is_joined() else 1
        for number, index in enumerate(np.ndindex(self.copies)):
            yield index, self.keys[number * width : (number + 1) * width]


class KeyMap(NamedTuple):
    """The keys (names in a file) of all arrays of a model, and further keys that the file may
    contain."""

    reads: list[Entry]
    beside: list[Entry]

    def keys(self) -> dict[str, Entry]:
        return {key: entry for entry in self.reads for key in entry.keys}


def key_map(
    names: Names, prefix: str, leaves: Mapping[str, Any], who: str, *, whole: bool = True
) -> KeyMap:
    """Applies naming rules to the arrays of a model.

    Args:
        names: the rules.
        prefix: the prefix of the keys, one of the prefixes in `names`.
        leaves: {path: spec} of parameters and state.
        who: the model and the framework, for error messages.
        whole: whether every array needs a rule. Default True.

    Raises:
        ValueError: no rule matches an array, or two arrays have the same key (name in the file).
    """
    reads, beside, taken = [], [], set()
    for rule, start in [
        *((rule, prefix) for rule in names.flat()),
        *((rule, "") for rule in names.flat_heads()),
    ]:
        if rule.ours is None:
            beside.append(Entry(rule, (), (), (), (start + rule.theirs,)))
            continue
        for place in _places(rule, leaves, who):
            if not isinstance(rule, Rule):
                beside.append(_entry(rule, start, *place))
            elif place[0][0] not in taken:
                _check_layers(rule, place[0], leaves, who)
                taken.update(place[0])
                reads.append(_entry(rule, start, *place))
                beside += [_entry(spare, start, *place) for spare in rule.beside]
    lacking = [path for path in leaves if path not in taken]
    if lacking and whole:
        raise ValueError(
            f"{who}: no rule matches {', '.join(map(repr, lacking[:4]))}"
            + (f" and {len(lacking) - 4} more" if len(lacking) > 4 else "")
        )
    owners = {}
    for entry in reads:
        for key in entry.keys:
            if owners.setdefault(key, entry) is not entry:
                raise ValueError(
                    f"{who}: the rules use {key!r} for {owners[key].paths[0]!r} and "
                    f"{entry.paths[0]!r}"
                )
    if prefix:  # keys that the model does not need may have no prefix
        bare = [dataclasses.replace(entry.rule, write=None) for entry in beside]
        beside += [
            entry._replace(rule=rule, keys=tuple(key.removeprefix(prefix) for key in entry.keys))
            for entry, rule in zip(beside, bare)
        ]
    return KeyMap(reads, [entry for entry in beside if owners.keys().isdisjoint(entry.keys)])


def prefix_to_write(names: Names, leaves: Mapping[str, Any]) -> str:
    """Returns the prefix of the keys (array names) that `save` writes for a model with the arrays
    `leaves`."""
    headed = any(
        True
        for rule in names.flat_heads()
        if isinstance(rule, Rule)
        for _ in _places(rule, leaves, "")
    )
    return names.prefixes[-1 if headed else 0]


def _places(rule, leaves, who):
    """Yields a tuple (paths, specs, numbers) for each match of a naming rule.

    `paths` are the paths of arrays of the model, and `specs` are the shapes and dtypes of these
    arrays. The dict `numbers` maps the name of each placeholder in the naming rule, such as `s` in
    "stage{s}", to the integer in the path.
    """
    first, *others = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    pattern = _pattern(first)
    for path in leaves:
        if found := pattern.fullmatch(path):
            numbers = {name: int(number) for name, number in found.groupdict().items()}
            paths = (path, *(_written(other, numbers) for other in others))
            if not _joinable(leaves[each] for each in paths if each in leaves):
                continue
            lacking = [each for each in paths if each not in leaves]
            if lacking:
                raise ValueError(
                    f"{who}: the rule for {rule.theirs!r} needs {lacking[0]!r} in addition to "
                    f"{path!r}, but the model has no such array"
                )
            yield paths, tuple(leaves[each] for each in paths), numbers


def _joinable(specs):
    """Whether arrays can be parts of one, along the last axis."""
    return len({spec.shape[:-1] for spec in specs}) == 1


# The layers whose arrays are known to belong to them. What others do with an array is theirs to
# know.
_AFFINE = nn.Dense, nn.Conv, nn.DepthwiseConv, nn.ConvTranspose
_NORMS = nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm
_RECURRENT = nn.RNN, nn.LSTM, nn.GRU
_LAYERS = *_AFFINE, *_NORMS, *_RECURRENT, nn.Maxout, nn.Embed
# Arrays of one shape that other frameworks keep under these names: {path in fnet: other arrays of
# the same layer}.
_OTHERS = {
    "mean": ("var", "variance", "weight", "bias", "gamma", "beta"),
    "scale": ("mean", "var", "bias", "beta"),
    "var": ("mean", "weight", "bias", "gamma", "beta"),
    "bias": ("mean", "var", "weight", "gamma", "kernel"),
}


_TORCH_RECURRENT = re.compile(r"weight_(ih|hh)(?:_l\d+)?(_reverse)?(?:$|[._])")
_METHODS = {  # of `torch`
    nn.Dense: "dense",
    nn.ConvTranspose: "conv_transpose",
    nn.Conv: "conv",
    nn.DepthwiseConv: "conv",
    nn.BatchNorm: "batch_norm",
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), "norm"),
    nn.RNN: "rnn",
    nn.LSTM: "lstm",
    nn.GRU: "gru",
    nn.Embed: "embed",
}


def _check_layers(rule, paths, leaves, who):
    """Checks that a rule is for the layer that uses the array. The shapes may fit by coincidence."""
    keys = " and ".join(map(repr, _keys(rule)))
    for path in paths:
        layer, name = leaves[path].layer, path.rpartition("/")[2]
        if layer is None or not issubclass(layer, _LAYERS):
            continue
        what = f"{who}: the rule for {keys} reads {path!r}, an array of a {layer.__name__}"
        if rule.layers and not issubclass(layer, rule.layers):
            wanted = " or ".join(each.__name__ for each in rule.layers)
            raise ValueError(
                f"{what}, but it is right for {wanted} only. {_advice(layer)} a Rule with a "
                "Layout that converts this layer's arrays"
            )
        if rule.layout in (CONV, DEPTHWISE) and issubclass(layer, nn.ConvTranspose):
            raise ValueError(
                f"{what}, with the layout of a convolution. Frameworks store the kernels of "
                "transposed convolutions in another layout; for PyTorch's, use torch.conv_transpose"
            )
        for key in _keys(rule):
            if _is_of_another(name, key, layer, path):
                raise ValueError(
                    f"{what}, but the name in the file is that of another array of the layer"
                )
        if (
            name in ("bias", "recurrent_bias")
            and issubclass(layer, _RECURRENT)
            and isinstance(rule.theirs, str)
            and re.search(r"bias_[ih]h", rule.theirs)
        ):
            raise ValueError(
                f"{what}, which is the sum of PyTorch's bias_ih and bias_hh (of a GRU: for two of "
                f"the three gates). {_advice(layer)} a Rule with both keys and a Layout that adds them"
            )


def _is_of_another(name, key, layer, path):
    """Whether the last word of a key is the name of another array of a layer than `name`."""
    word = re.split(r"[._/]", key)[-1]
    if issubclass(layer, (*_AFFINE, *_NORMS)):
        return word in _OTHERS.get(name, ())
    if not (issubclass(layer, _RECURRENT) and (found := _TORCH_RECURRENT.search(key))):
        return False
    source, reverse = found.groups()
    direction = re.search(r"(?:^|/)(forward|backward)/", path)
    return name == {"ih": "recurrent_kernel", "hh": "kernel"}[source] or (
        direction is not None and bool(reverse) != (direction[1] == "backward")
    )


def _advice(layer):
    """What to use instead, to be continued by "a Rule with a Layout"."""
    method = next((each for kind, each in _METHODS.items() if issubclass(layer, kind)), None)
    return "Write" if method is None else f"For PyTorch's, use torch.{method}; for others, write"


def _entry(rule, prefix, paths, specs, numbers):
    theirs = _keys(rule)
    fields = _FIELD.findall(" ".join(theirs))
    free = list(dict.fromkeys(name for name, *_ in fields if name not in numbers))
    copies = specs[0].shape[: len(free)]
    keys = (
        prefix + _written(key, numbers | dict(zip(free, each)))
        for each in itertools.product(*map(range, copies))
        for key in theirs
    )
    return Entry(rule, paths, specs, copies, tuple(keys))


def _keys(rule):
    return (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs


def _pattern(ours):
    """Converts a path to a regular expression with a group for each placeholder in braces, such as
    `{s}`."""
    parts, at = [], 0
    for field in _FIELD.finditer(ours):
        parts += [re.escape(ours[at : field.start()]), rf"(?P<{field[1]}>\d+)"]
        at = field.end()
    return re.compile("".join(parts) + re.escape(ours[at:]))


def _written(theirs, numbers):
    def one(field):
        number = numbers[field[1]] + int(field[2] or 0)
        return chr(ord("a") + number) if field[3] else str(number)

    return _FIELD.sub(one, theirs)

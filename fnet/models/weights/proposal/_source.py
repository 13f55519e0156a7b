"""The arrays that are to be brought in, and the layers of PyTorch to which they belong."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fnet.models.weights import _tensors

_PARAMETRIZED = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)\.original([01])")
_RECURRENT = re.compile(r"(weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)(?:_l(\d+)(?:_reverse)?)?")
_ATTENTION = {"in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
_COUNT = "num_batches_tracked"


@dataclasses.dataclass(frozen=True)
class Group:
    """The arrays of one layer in the file.

    Attributes:
        name: the prefix of the keys, which is the path of the module in PyTorch.
        kind: "affine" (a weight of two or more axes), "norm", "batch_norm", "recurrent",
            "attention" or "array" (one array that belongs to none of these).
        keys: the keys, without those of arrays that no layer of fnet has.
        size: the number of elements of the first array.
        layer: of a recurrent layer, its number in the module; None for a cell.
        norms: {name of a weight with weight norm: (dim, whether it is parametrized)}.
        module: the class of the module in PyTorch, or "".
    """

    name: str
    kind: str
    keys: tuple[str, ...]
    size: int
    layer: int | None = None
    norms: tuple[tuple[str, tuple[int | None, bool]], ...] = ()
    module: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """What `pretrained.names` reads: {key: array}, and the module that has them, if there is one.

    Attributes:
        arrays: {key: array}.
        tied: {key: an earlier key of the same array}.
        module: the torch.nn.Module, or None.
    """

    arrays: Mapping[str, np.ndarray]
    tied: Mapping[str, str]
    module: Any = None

    @classmethod
    def of(cls, given: Any, *, copied: bool = False) -> Source:
        """Reads a torch.nn.Module, a dict of arrays, or a safetensors file or folder.

        Args:
            given: where the arrays are.
            copied: whether they stay the same if those of the module change.
        """
        if isinstance(given, str | os.PathLike):
            return cls(_tensors.read(Path(given).expanduser()).arrays, {})
        module = given if is_module(given) else None
        held = module.state_dict(keep_vars=True) if module is not None else given
        if not isinstance(held, Mapping):
            raise TypeError(
                "pretrained.names: expected a torch.nn.Module, its state_dict, a dict of arrays or "
                f"a safetensors file; got a {type(given).__name__}"
            )
        tied, first = {}, {}
        for key, value in held.items():
            same = first.setdefault(_place(value), key)
            if same != key:
                tied[key] = same
        arrays = {key: to_numpy(value) for key, value in held.items()}
        if copied:
            arrays = {key: np.array(array) for key, array in arrays.items()}
        return cls(arrays, tied, module)

    def groups(self, read: Any = ()) -> list[Group]:
        """Returns the layers in the order in which PyTorch defines them, without the keys `read`."""
        classes = {}
        if self.module is not None:
            classes = {name: _class(module) for name, module in self.module.named_modules()}
        return [
            dataclasses.replace(group, module=classes.get(group.name, ""))
            for group in _groups(
                {key: array.shape for key, array in self.arrays.items() if key not in read}
            )
        ]

    def buffers(self) -> set[str]:
        """Returns the keys of arrays that the module does not train, running statistics aside."""
        if self.module is None:
            return set()
        trained = {key for key, _ in self.module.named_parameters()}
        return {
            key
            for key in self.arrays
            if key not in trained
            and self.tied.get(key) not in trained
            and key.rpartition(".")[2] not in ("running_mean", "running_var")
        }

    def unread(self, keys: Any) -> list[str]:
        """Returns the keys that are not in `keys`, without PyTorch's counts of batches."""
        return [key for key in self.arrays if key not in keys and key.rpartition(".")[2] != _COUNT]


def is_module(value: Any) -> bool:
    """Whether a value is a torch.nn.Module: PyTorch is never imported here."""
    return all(hasattr(value, name) for name in ("state_dict", "named_modules", "eval"))


def to_numpy(value: Any) -> np.ndarray:
    """Returns a tensor of PyTorch or an array as a NumPy array."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    value = value.detach().cpu()
    if str(value.dtype) == "torch.bfloat16":  # NumPy has no such dtype
        import ml_dtypes

        return value.float().numpy().astype(ml_dtypes.bfloat16)
    return value.numpy()


def _place(value):
    """Where the array lies: two keys with the same place are one parameter."""
    if hasattr(value, "data_ptr") and value.numel():
        return value.data_ptr(), tuple(value.shape), tuple(value.stride())
    return id(value)


def _class(module):
    """The name of a module's class, without the prefix that a parametrization adds."""
    return type(module).__name__.removeprefix("Parametrized")


def _groups(shapes: Mapping[str, tuple]) -> Iterator[Group]:
    layers: dict[str, dict[str, tuple]] = collections.defaultdict(dict)
    norms: dict[str, dict] = collections.defaultdict(dict)
    keys: dict[tuple, list] = collections.defaultdict(list)
    for key in shapes:
        prefix, leaf, norm = _parsed(key, shapes)
        keys[prefix, leaf].append(key)
        if norm is None:
            layers[prefix].setdefault(leaf, shapes[key])
        else:
            g, v, parametrized = norm
            norms[prefix][leaf] = _axis(shapes[g], shapes[v]), parametrized
            layers[prefix][leaf] = shapes[v]
    absorbed = {
        f"{prefix}.out_proj" if prefix else "out_proj"
        for prefix, leaves in layers.items()
        if _ATTENTION & leaves.keys()
    }

    def group(prefix, kind, leaves, layer=None):
        normed = tuple((leaf, norms[prefix][leaf]) for leaf in leaves if leaf in norms[prefix])
        held = tuple(key for leaf in leaves for key in keys[prefix, leaf] if leaf != _COUNT)
        size = int(np.prod(layers[prefix][leaves[0]], dtype=np.int64))
        return Group(prefix, kind, held, size, layer, normed)

    for prefix, leaves in layers.items():
        if prefix in absorbed:
            continue
        rest = list(leaves)
        if _ATTENTION & leaves.keys():
            own = [leaf for leaf in rest if leaf in _ATTENTION or leaf in ("bias_k", "bias_v")]
            whole = group(prefix, "attention", own)
            out = f"{prefix}.out_proj" if prefix else "out_proj"
            more = tuple(key for leaf in layers.get(out, ()) for key in keys[out, leaf])
            yield dataclasses.replace(whole, keys=(*whole.keys, *more))
            rest = [leaf for leaf in rest if leaf not in own]
        numbers: dict[Any, list] = collections.defaultdict(list)
        for leaf in rest:
            if found := _RECURRENT.fullmatch(leaf):
                numbers[None if found[2] is None else int(found[2])].append(leaf)
        for number, own in numbers.items():
            yield group(prefix, "recurrent", own, number)
            rest = [leaf for leaf in rest if leaf not in own]
        kind, own = _plain(leaves, rest)
        if own:
            yield group(prefix, kind, own)
        for leaf in rest:
            if leaf not in own and leaf != _COUNT:
                yield dataclasses.replace(
                    group(prefix, "array", [leaf]), name=keys[prefix, leaf][0]
                )


def _parsed(key, shapes):
    """(prefix, name of the array, (key of g, key of v, whether parametrized) or None) of a key."""
    if found := _PARAMETRIZED.fullmatch(key):
        stem = key[:-1]
        if stem + "0" in shapes and stem + "1" in shapes:
            return found[1] or "", found[2], (stem + "0", stem + "1", True)
    prefix, _, leaf = key.rpartition(".")
    if leaf.endswith(("_g", "_v")):
        stem = key[:-2]
        if stem + "_g" in shapes and stem + "_v" in shapes:
            return prefix, leaf[:-2], (stem + "_g", stem + "_v", False)
    return prefix, leaf, None


def _axis(g, v):
    """The axis of a weight that keeps its norms, as torch.nn.utils.weight_norm calls it dim."""
    if not g:
        return None
    return next((axis for axis, size in enumerate(g) if size > 1), 0)


def _plain(shapes, leaves):
    """(kind, names of the arrays) of a layer with a weight or with running statistics."""
    held = [leaf for leaf in ("weight", "bias") if leaf in leaves]
    if "running_mean" in leaves and "running_var" in leaves:
        return "batch_norm", ["running_mean", "running_var", *held]
    if "weight" not in held:
        return "array", []
    return ("affine" if len(shapes["weight"]) > 1 else "norm"), held

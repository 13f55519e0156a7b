"""Weights that others published, in and out: by named rules, every key accounted for.

    model = ResNet.preset("resnet50")
    params, state = pretrained.load(model, "resnet50.safetensors")       # torchvision's or Keras' names, told apart
    pretrained.save(model, params, state, "back.safetensors")            # loads into the original framework

    model = pretrained.model("resnet50")            # by name, where ~/.cache/fnet or Hugging Face's cache holds it
    params, state = pretrained.load("resnet50")

Every key of the file is used, none is missing and none is left over, or an error lists them. Shapes are checked, dtypes
are the file's unless a cast is asked for. Files are mapped into memory and read array by array, each copied once, into
its place. Pickles are never opened.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from fnet.models import _config, _fit, _hub, _llama2c, _plan, _tensors
from fnet.models._model import Model
from fnet.models._rules import (
    CONV,
    DENSE,
    DEPTHWISE,
    SAME,
    Layout,
    Names,
    Rule,
    Spare,
    Tied,
    flattened,
    keras,
    torch,
)

__all__ = [
    "CONV", "DENSE", "DEPTHWISE", "SAME", "Layout", "Names", "Rule", "Spare", "Tied", "find", "flattened", "keras",
    "load", "model", "names_of", "save", "torch",
]


def load(model: Model | str, path: str | os.PathLike | None = None, *, dtype=None, names: str | None = None,
         check_config: bool = True) -> tuple[dict, dict]:
    """Reads `(params, state)` of a model from published weights.

    If a config.json (of transformers or timm) is beside the weights, the model is compared with it field by field:
    every field has the model's value, is known to have no effect on the forward pass, or raises an error.

    Args:
        model: the model; or the name of a preset (`"resnet50"`), for the model `pretrained.model(name, path)`.
        path: a safetensors file, a folder with one (or with shards and their index), llama2.c's model.bin, a folder's
            name in ~/.cache/fnet, or a repository of Hugging Face's hub that its cache holds; None: what the preset is
            called.
        dtype: what to cast floating-point arrays to; None: they keep the file's dtypes.
        names: whose names the file holds, one of the model's `NAMES`; None: told by the keys.
        check_config: whether a config.json beside the weights is compared with the model.

    Returns:
        params and state as `model.init` makes them, of `jax.Array`s. State is `{}` where the model has none.

    Raises:
        FileNotFoundError: where the weights are not on this disk: what to download and where to put it.
        ValueError: where the file is no weights file, or damaged; listing each key that is missing, is not expected or
            has another shape; listing each field of config.json that the model does not have, or that fnet does not
            know; where the file is for another configuration of the model.
        TypeError: where a dtype is no parameter's.
    """
    if isinstance(model, str):
        name, cls = model, _class_of(model)
        path = find(name if path is None else path)
        model = _variant(cls, name, path, {})
    elif path is None:
        raise TypeError(f"pretrained.load wants the path of the weights for this {type(model).__name__}: a file, a "
                        "folder or a name; only the name of a preset stands for both")
    tensors = _tensors.read(find(path))
    kinds, leaves = _fit.leaves_of(model)
    config = _config.check(model, tensors.path.parent) if check_config else None
    name, plan = _fit.told(model, leaves, tensors, names)
    if config and name not in config.names:
        raise ValueError(f"{tensors.path} has the names of {name}, but config.json beside it describes weights with "
                         f"the names of {' or '.join(config.names)}: move one of them to another folder")
    _fit.check_config(model, name, tensors.path, config.compared() if config else ())
    _fit.check_keys(model, name, plan, tensors)
    _fit.check_header(model, name, tensors.path)
    trees = {"params": {}, "state": {}}
    for entry in plan.reads:
        for place, array in zip(entry.paths, _read(entry, tensors, dtype)):
            *above, last = place.split("/")
            node = trees[kinds[place]]
            for part in above:
                node = node.setdefault(part, {})
            node[last] = array
    return trees["params"], trees["state"]


def save(model: Model, params: Mapping, state: Mapping, path: str | os.PathLike, *, names: str | None = None,
         like: str | os.PathLike | None = None) -> Path:
    """Writes params and state as a file that the original framework loads. The way back of `load`.

    Args:
        model: the model.
        params, state: as `load` or `model.init` gave them; state `{}` where the model has none.
        path: the file to write, *.safetensors (or a folder: model.safetensors in it); *.bin for llama2.c's names.
        names: whose names to write, one of the model's `NAMES`; None: the only ones that fit the model's
            configuration.
        like: a file with the same names, whose notes and spare keys (PyTorch's count of batches) are taken over.

    Returns:
        The path of the file.

    Raises:
        ValueError: where params or state are not the model's, by name and shape; where `names` does not tell what to
            write.
    """
    model.check(params, model.example(), state=state)
    kinds, leaves = _fit.leaves_of(model)
    if like is not None:
        source = _tensors.read(find(like))
        names, plan = _fit.told(model, leaves, source, names)
    else:
        source = None
        names = _fit.names_to_write(model) if names is None else names
        rules = _fit.rules_of(model, names)
        plan = _plan.plan(rules, rules.prefixes[0], leaves, _fit.who(model, names))
    rules, path = _fit.rules_of(model, names), Path(path).expanduser()
    _fit.check_config(model, names, path)
    kind = ".bin" if rules.header else ".safetensors"
    if path.is_dir() or not path.suffix:
        path = path / f"model{kind}"
    if path.suffix != kind:
        raise ValueError(f"pretrained.save writes *{kind} by the names of {names}; {path} is called otherwise")
    trees, arrays = {"params": params, "state": state}, {}
    for entry in (*plan.reads, *_beside(plan, source)):
        if isinstance(entry.rule, Spare):
            arrays |= {key: source.arrays[key] if source and key in source.arrays else np.asarray(entry.rule.write)
                       for key in entry.keys}
        else:
            arrays |= _written(entry, [np.asarray(_get(trees[kinds[place]], place)) for place in entry.paths])
    if rules.header:
        _llama2c.write(path, rules.header(model), arrays)
    else:
        _tensors.write(path, arrays, {**rules.metadata, **(source.metadata if source else {})})
    return path


def model(name: str, path: str | os.PathLike | None = None, **changes) -> Model:
    """The model of the weights that lie on this disk under the name of a preset.

    Published weights of one architecture may differ in what their shapes do not show: Keras' ResNet-50 has an epsilon
    of 1e-3 and strides of its own. The model is the preset with the fields that those weights take for granted.

    Args:
        name: the preset, as "resnet50".
        path: where the weights lie; None: what the preset is called.
        changes: further fields of the preset to change.

    Raises:
        FileNotFoundError: where the weights are not on this disk.
        ValueError: where no model has such a preset.
    """
    cls = _class_of(name)
    return _variant(cls, name, find(name if path is None else path), changes)


def names_of(model: Model, path: str | os.PathLike) -> str:
    """Whose names a file holds, one of the model's `NAMES`: by its keys.

        photos = model.NAMES[pretrained.names_of(model, path)].image       # how these weights want their photos

    Raises:
        ValueError: where the file holds nothing of this model.
    """
    return _fit.told(model, _fit.leaves_of(model)[1], _tensors.read(find(path)), None)[0]


def find(name: str | os.PathLike) -> Path:
    """Where the weights lie that `load` would read: a path, the name of a preset, or a repository's.

    Raises:
        FileNotFoundError: where they are not on this disk: where it looked, what to download and where to put it.
    """
    held = [cls.HUB.get(name, ()) for cls in _classes() if name in cls.PRESETS]
    return _hub.find(name, held[0] if held else ())


def _class_of(name):
    """The class of the models that have a preset of this name."""
    classes = _classes()
    cls = next((cls for cls in classes if name in cls.PRESETS), None)
    if cls is None:
        presets = [preset for cls in classes for preset in cls.PRESETS]
        near = difflib.get_close_matches(name, presets, 1)
        raise ValueError(f"no model has a preset {name!r}" + (f": did you mean {near[0]!r}?" if near else
                         f": there are {', '.join(presets)}"))
    return cls


def _variant(cls, name, path, changes):
    """The preset, changed as the weights at `path` want it."""
    made = cls.preset(name, **changes)
    told, _ = _fit.told(made, _fit.leaves_of(made)[1], _tensors.read(path), None)
    return dataclasses.replace(made, **{**made.NAMES[told].config, **changes})


def _classes():
    from fnet import models

    return [cls for cls in map(models.__dict__.get, models.__all__) if isinstance(cls, type) and issubclass(cls, Model)]


def _beside(plan, source):
    """The entries beside the model's own that a file gets: those that the source has, or that are always written."""
    for entry in plan.beside:
        held = source is not None and all(key in source.arrays for key in entry.keys)
        if held or (entry.rule.write is not None and entry.rule.write is not False):
            yield entry


def _read(entry, tensors, dtype):
    """Our arrays of one entry, each copied once: from the mapped file to its place."""
    held = {tensors.arrays[key].dtype for key in entry.keys}
    if len(held) > 1:
        raise TypeError(f"{tensors.path}: the parts of {_fit.ours(entry)} are of several dtypes, "
                        f"{', '.join(sorted(map(str, held)))}: give dtype=")
    (theirs,) = held
    if not jax.dtypes.issubdtype(theirs, np.floating):
        raise TypeError(f"{tensors.path}: {entry.keys[0]!r} is {theirs}; {_fit.ours(entry)} must be of floating point")
    wanted = np.dtype(theirs if dtype is None else dtype)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise TypeError(f"{tensors.path}: {entry.keys[0]!r} is {wanted}, which JAX holds with jax_enable_x64 alone: "
                        "give dtype=jnp.float32 to cast it")
    ours = [_tensors.aligned(spec.shape, wanted) for spec in entry.specs]
    for key, copy in zip(entry.keys, np.ndindex(entry.copies)):
        whole, at = entry.rule.layout.ours(tensors.arrays[key]), 0
        for array in ours:
            width = array.shape[-1] if array.ndim else 1
            part = whole[..., at:at + width] if len(ours) > 1 else whole
            np.copyto(array[copy] if copy else array, part, casting="unsafe")
            at += width
    return [jax.device_put(array) for array in ours]


def _written(entry, arrays):
    """{their key: array} of one entry."""
    whole = np.concatenate(arrays, -1) if len(arrays) > 1 else arrays[0]
    return {key: entry.rule.layout.theirs(whole[copy] if copy else whole)
            for key, copy in zip(entry.keys, np.ndindex(entry.copies))}


def _get(tree, place):
    for part in place.split("/"):
        tree = tree[part]
    return tree

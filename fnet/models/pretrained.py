"""Loads and saves pretrained weights with the parameter names of their original framework.

    model, params, state = pretrained.load("path/to/folder")             # config.json selects the model
    model, params, state = pretrained.load("resnet50")                   # a preset, from fnet's or Hugging Face's cache

    model = ResNet.preset("resnet50")
    params, state = pretrained.load(model, "resnet50.safetensors")       # detects the names of torchvision or Keras
    pretrained.save(model, params, state, "back.safetensors")            # loads into the original framework
    pretrained.save(model, params, state, "folder")                      # with config.json, for transformers

    proposal = pretrained.names(module, model, x)                        # of a torch.nn.Module and your model
    params, state = pretrained.load(model, module, names=proposal)

`load` accepts a file only if all of its keys (names of arrays) and all arrays of the model fit
together, shapes included; an error lists up to eight keys that do not. Arrays keep the dtypes of
the file unless you pass `dtype=`. Files are memory-mapped, each array is copied once, and pickles
are never opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fnet import compress
from fnet._util._nearest import did_you_mean
from fnet.models._model import Model
from fnet.models.weights import _folder, _hub, _match, _tensors
from fnet.models.weights._adapters import load_adapter, save_adapter
from fnet.models.weights._gguf import load_gguf
from fnet.models.weights._gguf_save import save_gguf
from fnet.models.weights._weight_names import (
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
    pointwise,
    reshaped,
)
from fnet.models.weights._weights import Weights
from fnet.models.weights._words import keras, torch
from fnet.models.weights.proposal._proof import Proof
from fnet.models.weights.proposal._proposal import Proposal, names
from fnet.models.weights.proposal._source import Source

__all__ = [
    "CONV",
    "DENSE",
    "DEPTHWISE",
    "SAME",
    "Layout",
    "Names",
    "Proof",
    "Proposal",
    "Rule",
    "Spare",
    "Tied",
    "find",
    "flattened",
    "keras",
    "load",
    "load_adapter",
    "load_gguf",
    "model",
    "names",
    "names_of",
    "pointwise",
    "reshaped",
    "revision",
    "save",
    "save_adapter",
    "save_gguf",
    "torch",
]


def load(
    model: Model | str | os.PathLike,
    path: str | os.PathLike | Mapping | Any = None,
    *,
    dtype=None,
    names: str | Names | Proposal | None = None,
    check_config: bool = True,
    revision: str | None = None,
) -> tuple:
    """Reads pretrained weights: `(params, state)` for a model, or `(model, params, state)` for a
    folder or a preset.

        model, params, state = pretrained.load("HuggingFaceTB/SmolLM2-135M")     # a repository or a folder
        model, params, state = pretrained.load("resnet50")                       # a preset
        params, state = pretrained.load(model, "model.safetensors")              # your model

    Weights that are not at a path are looked up in fnet's cache (~/.cache/fnet), then in Hugging
    Face's, and finally downloaded to the latter with `pip install huggingface_hub`: configurations,
    the files of the tokenizer and *.safetensors, but no pickles or code. Each downloaded file must
    have the checksum that the hub lists. HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are respected.

    For a folder or a repository, its config.json (of transformers or timm) determines the model. A
    model or a preset is compared with the config.json beside the weights, if there is one: every
    field must agree with the model, or be known to have no effect on the forward pass. The page
    "Models" of the guide lists what is supported.

    Args:
        model: a model, or the source of one: a folder with a config.json, a repository of Hugging
            Face's hub, or the name of a preset.
        path: the weights for a model (required) or a preset (default: its own): a safetensors file,
            a folder with one or with shards and their index, the name of a folder in ~/.cache/fnet,
            or a repository. For a model also a torch.nn.Module, its state_dict, or a dict of
            arrays. In a folder with several sets of weights, such as a new
            model.safetensors beside older shards, name the file or the index.
        dtype: the dtype to which floating-point arrays are cast. Default: the dtypes of the file.
        names: the framework that wrote the names in the file, a key of the model's `NAMES` such as
            "torchvision"; or the rules themselves, what `pretrained.names` proposes or a `Names`,
            for which the model needs no `NAMES`. Default: detected from the names.
        check_config: whether to compare the model with config.json.
        revision: a branch, tag or commit of the repository. Default: the revision in the cache, or
            else "main". `pretrained.revision(name)` returns the commit.

    Returns:
        `(params, state)` for a model, and `(model, params, state)` for a folder, a repository or a
        preset. Both trees have the structure that `model.init` returns, with `jax.Array`s. `state`
        is `{}` if the model has none.

    Raises:
        FileNotFoundError: the weights are not on this disk and cannot be downloaded; the message
            says what to download.
        OSError: a download was interrupted (the next call continues it and keeps complete files),
            or a checksum is wrong.
        ValueError: the file is damaged or no file of weights, has missing or unexpected keys, or an
            array of another shape; the folder has several sets of weights, or an incomplete
            download; config.json has unknown fields; or a field of the model differs from what
            config.json or the weights require.
        TypeError: `dtype` or the dtype of an array is not a floating-point dtype, or JAX does not
            support the resulting one (float64 without jax_enable_x64).

    >>> import tempfile
    >>> model = models.ResNet((1,), bottleneck=False, classes=2, width=4)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = models.pretrained.save(model, params, state, folder, names="torchvision")
    ...     params, state = models.pretrained.load(model, file)
    """
    _check_dtype(dtype)
    names = _rules(names)
    weights = _opened(model, path, names, revision)
    named = isinstance(names, Names)  # by the caller, so a config.json says nothing about them
    config = weights.compared() if check_config and not named else None
    weights = weights.matched(names)
    weights.check(config)
    params, state = weights.trees(dtype)
    if isinstance(model, str | os.PathLike):
        return weights.model, params, state
    return params, state


def save(
    model: Model,
    params: Mapping,
    state: Mapping,
    path: str | os.PathLike,
    *,
    names: str | Names | Proposal | None = None,
    like: str | os.PathLike | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes parameters and state to a file or folder that the original framework can load.

        pretrained.save(model, params, state, "folder", like="original/folder")      # for transformers or timm

    A folder also gets a config.json, if the format of transformers or timm can describe the model.
    From it, `load` creates the same model, except for fields that config.json does not contain,
    such as `dropout`. Arrays keep their dtypes.

    Args:
        model: the model.
        params, state: as returned by `load` or `model.init`; `state` is `{}` if the model has none.
            Implicit arrays, such as the quantized ones of `compress`, are written as the arrays
            that they represent.
        path: the folder, or the file *.safetensors to write.
        names: the framework whose names to write, a key of the model's `NAMES`, or the rules as in
            `load`. Default: the one
            that matches the model's configuration, if there is exactly one.
        like: a file or folder of weights (default: None), whose names and metadata the new file
            takes over, together with the arrays that the model does not need (such as
            num_batches_tracked in PyTorch). From folder to folder, `save` also copies
            generation_config.json, the files of the tokenizer, and the fields of config.json that
            do not affect the output.
        max_shard_size: the maximum size of a file in a folder, in bytes or as a string such as
            "5GB". Larger weights are split into shards with an index, model.safetensors.index.json;
            a larger array gets a file of its own.

    Returns:
        The path of the file, or of the index of the shards.

    Raises:
        ValueError: the names or shapes in `params` or `state` do not match the model; without
            `names` and `like`, no framework matches its configuration, or several do; or a
            config.json is in the way: that of a training run, or that of another model where no
            format describes the new one.

    >>> import tempfile
    >>> model = models.ResNet((1,), bottleneck=False, classes=2, width=4)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = models.pretrained.save(model, params, state, folder, names="torchvision")
    ...     restored, _ = models.pretrained.load(model, file)
    >>> jax.tree.structure(restored) == jax.tree.structure(params)
    True
    """
    params, names = compress.materialize(params), _rules(names)
    model.check(params, *_match.inputs_of(model, names), state=state)
    most = _folder.bytes_of(max_shard_size)
    source = None if like is None else find(like)
    if source is None:
        weights = Weights.new(model, names)
    else:
        weights = Weights.open(source).of(model, names).matched(names)
    framework, path = weights.framework, Path(path).expanduser()
    _match.check_config(model, framework, path, _match.described(model, framework))
    metadata = {**_match.rules_of(model, framework).metadata, **weights.metadata}
    trees = {"params": params, "state": state}
    if path.suffix and not path.is_dir():
        if path.suffix != ".safetensors":
            raise ValueError(
                f"pretrained.save: the names of {_match.label(framework)} need a "
                f"*.safetensors file; got {path}"
            )
        _tensors.write(path, weights.written(trees), metadata)
        return path
    source_folder = source if source is not None and source.is_dir() else None
    config = None
    if not isinstance(framework, Names):
        config = _folder.describe(model, framework, _folder.like(source_folder))
    _folder.check(path, config)
    written = _folder.write(path, weights.written(trees), metadata, most)
    if config is not None:
        _folder.write_config(path, config, params)
    if source_folder is not None:
        _folder.copy_beside(source_folder, path)
    return written


def model(name: str, path: str | os.PathLike | None = None, **changes) -> Model:
    """Returns the model of a preset, with the values of fields that its weights require.

    Shapes do not show these values: Keras' weights of ResNet-50 need an epsilon of 1e-3,
    torchvision's 1e-5.

    Args:
        name: the preset, such as "resnet50".
        path: the weights, as in `load`. Default: those of the preset.
        changes: values of fields, which override both the preset and the requirements of the
            weights.

    Returns:
        The model.

    Raises:
        FileNotFoundError: the weights are not on this disk and cannot be downloaded.
        ValueError: no model has a preset `name`.

    >>> import tempfile
    >>> small = models.ResNet((1,), bottleneck=False, width=4)
    >>> params, state = small.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = models.pretrained.save(small, params, state, folder, names="torchvision")
    ...     models.pretrained.model("resnet18", file, depths=(1,), width=4) == small
    True
    """
    _class_of(name)  # an unknown name raises before weights are searched or downloaded
    return _preset(name, find(name if path is None else path), changes).model


def names_of(model: Model, path: str | os.PathLike) -> str:
    """Detects which framework named the arrays in a file of weights: a key of the model's `NAMES`.

        image = model.NAMES[pretrained.names_of(model, path)].image       # the preprocessing for these weights

    Raises:
        ValueError: the file contains no arrays of the model.

    >>> import tempfile
    >>> model = models.ResNet((1,), bottleneck=False, classes=2, width=4)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = models.pretrained.save(model, params, state, folder, names="torchvision")
    ...     models.pretrained.names_of(model, file)
    'torchvision'
    """
    return Weights.open(find(path)).of(model).matched().framework


def find(name: str | os.PathLike, *, revision: str | None = None) -> Path:
    """Returns the local path of the weights that `load` would read, and downloads them as `load`
    does.

    `name` is a path, the name of a preset, or a repository of Hugging Face's hub.

    Raises:
        FileNotFoundError: the weights are not on this disk and cannot be downloaded; the message
            lists the paths that were searched, and says what to download.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pretrained_folder = models.pretrained.find(folder)
    ...     pretrained_folder == pathlib.Path(folder)
    True
    """
    repositories = next((cls.HUB.get(name, ()) for cls in _classes() if name in cls.PRESETS), ())
    return _hub.find(name, repositories, revision)


def revision(name: str | os.PathLike) -> str | None:
    """Returns the commit of weights from Hugging Face's hub, or None for other weights.

        path = pretrained.find("HuggingFaceTB/SmolLM2-135M")
        pretrained.revision(path)      # pass it as load(..., revision=) to read the same weights later

    `name` is a path, the name of a preset, or a repository, as in `find`.

    >>> models.pretrained.revision("/cache/models--org--name/snapshots/93efa2f097d58c2a74874c7e644dbc9b0cee75a2")
    '93efa2f097d58c2a74874c7e644dbc9b0cee75a2'
    """
    return _hub.commit(Path(name)) or _hub.commit(find(name))


def _rules(names):
    """The rules of a proposal, or `names` itself."""
    if isinstance(names, Proposal):
        names.check()
        return names.names
    return names


def _check_dtype(dtype):
    if dtype is not None and not jax.dtypes.issubdtype(dtype, np.floating):
        raise TypeError(
            f"pretrained.load: expected a floating-point dtype such as jnp.bfloat16; got "
            f"dtype={dtype!r}. To quantize weights, use fnet.compress.quantize"
        )


def _opened(source, path, names, revision):
    """Returns the weights that `load` reads, with their model: the given one, that of a preset, or
    the one that config.json describes."""
    if not isinstance(source, str | os.PathLike):
        if path is None:
            raise TypeError(
                f"pretrained.load: pass the path of the weights for this {type(source).__name__}, a "
                "file, a folder or a name; only a folder and the name of a preset imply them"
            )
        if not isinstance(path, str | os.PathLike):
            return Weights.of_arrays(Source.of(path).arrays).of(source, names)
        return Weights.open(find(path, revision=revision)).of(source, names)
    if isinstance(source, str) and any(source in cls.PRESETS for cls in _classes()):
        place = find(source if path is None else path, revision=revision)
        return _preset(source, place, {}, names)
    if path is not None:
        raise ValueError(
            f"pretrained.load: expected a model or the name of a preset before the path, got "
            f"{source!r}; a folder with a config.json is loaded without a second argument"
        )
    return _described(_existing(source, revision))


def _preset(name, path, changes, names=None):
    """Returns the weights at `path` with the preset, whose fields have the values that these
    weights require."""
    model = _class_of(name).preset(name, **changes)
    return Weights.open(path).of(model).matched(names).adjusted(changes)


def _described(path):
    """Returns the weights at `path` with the model that the config.json beside them describes."""
    weights = Weights.open(path)
    return weights.of(weights.configuration.model(_classes())).of_keys()


def _existing(name, revision):
    """Returns the path of a folder or a repository, or raises an error that knows the presets."""
    try:
        return find(name, revision=revision)
    except FileNotFoundError:
        if isinstance(name, str) and name.isidentifier():
            _class_of(name)  # raises, with the presets of similar names
        raise


def _class_of(name):
    """Returns the class of models that has the preset `name`."""
    classes = _classes()
    cls = next((cls for cls in classes if name in cls.PRESETS), None)
    if cls is None:
        presets = [preset for cls in classes for preset in cls.PRESETS]
        meant = did_you_mean(name, presets) or f"there are {', '.join(presets)}"
        raise ValueError(f"no model has a preset {name!r}; {meant}")
    return cls


def _classes():
    from fnet import models

    return [
        cls
        for cls in map(models.__dict__.get, models.__all__)
        if isinstance(cls, type) and issubclass(cls, Model)
    ]

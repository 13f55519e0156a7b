"""Loads and saves pretrained weights with the parameter names of their original framework.

    model, params, state = pretrained.load("path/to/folder")             # config.json selects the model
    model, params, state = pretrained.load("resnet50")                   # a preset, from fnet's or Hugging Face's cache

    model = ResNet.preset("resnet50")
    params, state = pretrained.load(model, "resnet50.safetensors")       # detects the names of torchvision or Keras
    pretrained.save(model, params, state, "back.safetensors")            # loads into the original framework
    pretrained.save(model, params, state, "folder")                      # with config.json, for transformers

`load` raises an error if the file lacks an array of the model or contains an unexpected key (name
of an array). The error lists up to eight missing or unexpected keys. `load` checks the shapes of
all arrays. The arrays keep the dtypes of the file unless you pass `dtype=`. Files are
memory-mapped, and each array is copied once. Pickles are never opened.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from fnet import compress
from fnet._util._nearest import did_you_mean
from fnet.layers._spec import put
from fnet.models._model import Model
from fnet.models.weights import _config, _folder, _hub, _key_map, _match, _tensors
from fnet.models.weights._adapters import load_adapter, save_adapter
from fnet.models.weights._gguf import load_gguf
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
    keras,
    torch,
)

__all__ = [
    "CONV",
    "DENSE",
    "DEPTHWISE",
    "SAME",
    "Layout",
    "Names",
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
    "names_of",
    "revision",
    "save",
    "save_adapter",
    "torch",
]


def load(
    model: Model | str | os.PathLike,
    path: str | os.PathLike | None = None,
    *,
    dtype=None,
    names: str | None = None,
    check_config: bool = True,
    revision: str | None = None,
) -> tuple:
    """Reads pretrained weights: `(params, state)` for a model, or `(model, params, state)` for a
    folder or a preset.

    If the weights are not given by a path, `load` searches fnet's cache (~/.cache/fnet) and Hugging
    Face's cache. If neither fnet's nor Hugging Face's cache has the weights, `load` downloads them
    from Hugging Face's hub into Hugging Face's cache (this needs `pip install huggingface_hub`). `load`
    downloads only config.json, generation_config.json, preprocessor_config.json, the files of the
    tokenizer and *.safetensors, but no pickles or code. The next call of `load` continues an
    interrupted download, without downloading complete files again. Each downloaded file must have
    the checksum that the hub lists. The environment variables HF_ENDPOINT, HF_HOME and
    HF_HUB_OFFLINE are respected.

    If you pass a folder or repository, its config.json (of transformers or timm) determines the
    model. If you pass a model or a preset, `load` compares it with the config.json next to the
    weights, if this file exists. Every field of config.json must agree with the model, or be known
    to have no effect on the forward pass.

    Args:
        model: a model, or the source of one: a folder with a config.json, a repository of
            Hugging Face's hub ("HuggingFaceTB/SmolLM2-135M"), or the name of a preset
            ("resnet50").
        path: the weights for a model or a preset: a safetensors file, a folder with a safetensors
            file or with shards and their index, a folder name in ~/.cache/fnet, or a repository of
            Hugging Face's hub. In a folder with several sets of weights, such as a new
            model.safetensors beside older shards, name the file or the index. A `Model` object
            requires `path`. For a preset, the default of `path` is the weights of the preset.
        dtype: the dtype to which floating-point arrays are cast. Default: the dtypes of the file.
        names: the framework that defines the parameter names in the file. The framework is a key of
            the model's `NAMES`, such as "torchvision". Default: the framework is detected from the
            names in the file.
        check_config: whether to compare the model with config.json.
        revision: a branch, tag or commit of the repository. Default: the revision in the cache, or
            "main" if the cache does not contain the repository. `pretrained.revision(name)` returns
            the commit.

    Returns:
        `(params, state)` for a model, and `(model, params, state)` for a folder, a repository or a
        preset. `params` and `state` have the structure that `model.init` returns, with
        `jax.Array`s. `state` is `{}` if the model has none.

    Raises:
        FileNotFoundError: the weights are not on this disk and cannot be downloaded; the message
            says what to download.
        OSError: a download was interrupted (the next call continues it), or the checksum of a
            downloaded file is wrong.
        ValueError: the file is damaged, is not a file of weights, has missing or unexpected keys,
            or has an array of another shape than in the model. Also if a folder has several sets of
            weights, or a download that is not complete. ValueError is also raised if config.json
            has unknown fields, or if a field
            of the model differs from the value that config.json or the weights require.
        TypeError: `dtype` or the dtype of an array of the file is not a floating-point dtype, or
            JAX does not support the resulting dtype (float64 without jax_enable_x64).

    >>> import tempfile
    >>> model = models.ResNet((1,), bottleneck=False, classes=2, width=4)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = models.pretrained.save(model, params, state, folder, names="torchvision")
    ...     params, state = models.pretrained.load(model, file)
    """
    if dtype is not None and not jax.dtypes.issubdtype(dtype, np.floating):
        raise TypeError(
            f"pretrained.load: expected a floating-point dtype such as jnp.bfloat16; got "
            f"dtype={dtype!r}. "
            "To quantize weights, use fnet.compress.quantize"
        )
    if not isinstance(model, str | os.PathLike):
        if path is None:
            raise TypeError(
                f"pretrained.load: pass the path of the weights for this {type(model).__name__}, a "
                f"file, "
                "a folder or a name; only a folder and the name of a preset imply them"
            )
        return _load(model, find(path, revision=revision), dtype, names, check_config)
    if isinstance(model, str) and any(model in cls.PRESETS for cls in _classes()):
        path = find(model if path is None else path, revision=revision)
        model = _variant(_class_of(model), model, path, {})
    elif path is not None:
        raise ValueError(
            f"pretrained.load: expected a model or the name of a preset before the path, got "
            f"{model!r}; "
            "a folder with a config.json is loaded without a second argument"
        )
    else:
        try:
            path = find(model, revision=revision)
        except FileNotFoundError:
            if isinstance(model, str) and model.isidentifier():
                _class_of(model)  # raises, with the presets of similar names
            raise
        model = _of_folder(path)
    return model, *_load(model, path, dtype, names, check_config)


def _load(model, path, dtype, names, check_config):
    """Reads `(params, state)` of a model from an existing path."""
    tensors = _match.renamed(model, _tensors.read(path))
    kinds, leaves = _match.leaves_of(model)
    config = _config.check(model, tensors.path.parent) if check_config else None
    name, key_map = _match.detect_names(model, leaves, tensors, names)
    if config and name not in config.names:
        raise ValueError(
            f"{tensors.path} has the names of {name}, but config.json next to it describes weights "
            f"with "
            f"the names of {' or '.join(config.names)}; move one of them to another folder"
        )
    _match.check_config(model, name, tensors.path, config.compared() if config else ())
    _match.check_keys(model, name, key_map, tensors)
    trees = {"params": {}, "state": {}}
    for entry in key_map.reads:
        for place, array in zip(entry.paths, _read(entry, tensors, dtype)):
            put(trees[kinds[place]], place.split("/"), array)
    return trees["params"], trees["state"]


def save(
    model: Model,
    params: Mapping,
    state: Mapping,
    path: str | os.PathLike,
    *,
    names: str | None = None,
    like: str | os.PathLike | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Writes the parameters and the state of a model to a file or folder that the original
    framework can load.

    `save` is the inverse of `load`. If `path` is a folder, `save` also writes a config.json,
    provided that the format of transformers or timm can describe the model. From this config.json,
    `load` creates a model with the same fields, except those that config.json does not contain,
    such as `dropout`. Arrays keep their dtypes.

    Args:
        model: the model.
        params, state: the parameters and the state, as returned by `load` or `model.init`. `state`
            is `{}` if the model has none. Implicit arrays, such as the quantized arrays of
            `compress`, are written as the arrays that they represent.
        path: the folder, or the file *.safetensors to write.
        names: the framework that defines the parameter names to write. The framework is a key of
            the model's `NAMES`. Default: the framework that matches the model's configuration, if
            exactly one framework does.
        like: a file or folder of weights, whose array names and metadata are used for the new file,
            or None (default). The new file also gets the arrays of `like` that the model does not
            need (such as num_batches_tracked in PyTorch). If `like` and `path` are folders, `save`
            also copies generation_config.json, the files of the tokenizer, and the fields of
            config.json that do not affect the output.
        max_shard_size: the maximum size of a weight file in a folder: a number of bytes, or a
            string such as "5GB". Weights larger than `max_shard_size` are split into several files
            (shards) with an index, model.safetensors.index.json. An array that is larger than
            `max_shard_size` has a file of its own.

    Returns:
        The path of the file, or of the index of the shards.

    Raises:
        ValueError: the names or shapes in `params` or `state` do not match the model. Without
            `names` and `like`, exactly one framework must match the model's configuration.
            ValueError is also raised if `save` would replace the config.json of a training run, or
            if the folder `path` has the config.json of another model and the formats of
            transformers and timm cannot describe the new model.

    >>> import tempfile
    >>> model = models.ResNet((1,), bottleneck=False, classes=2, width=4)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((1, 32, 32, 3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = models.pretrained.save(model, params, state, folder, names="torchvision")
    ...     restored, _ = models.pretrained.load(model, file)
    >>> jax.tree.structure(restored) == jax.tree.structure(params)
    True
    """
    params = compress.materialize(params)
    model.check(params, *_match.inputs_of(model), state=state)
    kinds, leaves = _match.leaves_of(model)
    most, source_folder = _folder.bytes_of(max_shard_size), None
    if like is not None:
        like = find(like)
        source_folder = like if like.is_dir() else None
        source = _match.renamed(model, _tensors.read(like))
        names, key_map = _match.detect_names(model, leaves, source, names)
    else:
        source = None
        names = _match.names_to_write(model) if names is None else names
        rules = _match.rules_of(model, names)
        prefix = _key_map.prefix_to_write(rules, leaves)
        key_map = _key_map.key_map(rules, prefix, leaves, _match.who(model, names))
    rules, path = _match.rules_of(model, names), Path(path).expanduser()
    _match.check_config(model, names, path, _match.described(model, names))
    folder = path if path.is_dir() or not path.suffix else None
    if folder is not None:
        path = path / "model.safetensors"
    if path.suffix != ".safetensors":
        raise ValueError(
            f"pretrained.save: the names of {names} need a *.safetensors file; got {path}"
        )
    described = None
    if folder is not None:
        described = _folder.describe(model, names, _folder.like(source_folder))
        _folder.check(folder, described)
    trees, arrays = {"params": params, "state": state}, {}
    for entry in (*key_map.reads, *_beside(key_map, source)):
        if isinstance(entry.rule, Spare):
            arrays |= {
                key: source.arrays[key]
                if source and key in source.arrays
                else np.asarray(entry.rule.write)
                for key in entry.keys
            }
        else:
            arrays |= _written(
                entry, [np.asarray(_match.get(trees[kinds[place]], place)) for place in entry.paths]
            )
    metadata = {**rules.metadata, **(source.metadata if source else {})}
    if folder is None:
        _tensors.write(path, arrays, metadata)
    else:
        path = _folder.write(folder, arrays, metadata, most)
        if described is not None:
            _folder.write_config(folder, described, params)
        if source_folder is not None:
            _folder.copy_beside(source_folder, folder)
    return path


def model(name: str, path: str | os.PathLike | None = None, **changes) -> Model:
    """Returns the model of the preset `name`, with the values of fields (such as epsilon) that the
    weights require.

    Weights from different frameworks may need different field values, which the shapes of the
    arrays do not show. For example, ResNet-50 needs an epsilon of 1e-3 for Keras' weights and of
    1e-5 for torchvision's weights.

    Args:
        name: the preset, such as "resnet50".
        path: the weights, as in `load`. Default: the weights of the preset.
        changes: new values of model fields, which override both the preset and the requirements of
            the weights.

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
    cls = _class_of(name)
    return _variant(cls, name, find(name if path is None else path), changes)


def names_of(model: Model, path: str | os.PathLike) -> str:
    """Detects the framework of the parameter names in a file of weights. Returns a key of the
    model's `NAMES`.

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
    return _match.detect_names(
        model, _match.leaves_of(model)[1], _match.renamed(model, _tensors.read(find(path))), None
    )[0]


def find(name: str | os.PathLike, *, revision: str | None = None) -> Path:
    """Returns the local path of the weights that `load` would read.

    `name` is a path, the name of a preset, or a repository of Hugging Face's hub. If a repository
    is neither in fnet's cache nor in Hugging Face's cache, `find` downloads it, as `load` does.

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
    """Returns the commit of weights from Hugging Face's hub, or None if the weights are not from
    the hub.

    `name` is a path, the name of a preset, or a repository, as in `find`.

        path = pretrained.find("HuggingFaceTB/SmolLM2-135M")
        pretrained.revision(path)      # pass it as load(..., revision=) to read the same weights later

    >>> models.pretrained.revision("/cache/models--org--name/snapshots/93efa2f097d58c2a74874c7e644dbc9b0cee75a2")
    '93efa2f097d58c2a74874c7e644dbc9b0cee75a2'
    """
    return _hub.commit(Path(name)) or _hub.commit(find(name))


def _of_folder(path):
    """Returns the model that config.json describes.

    Raises:
        FileNotFoundError: the folder contains no weights or no config.json.
        ValueError: fnet has no model that config.json describes.
    """
    tensors = _tensors.read(path)
    model = _config.model(path if path.is_dir() else path.parent, _classes())
    return model.of_keys(_match.renamed(model, tensors).arrays)


def _class_of(name):
    """Returns the class of models that has the preset `name`."""
    classes = _classes()
    cls = next((cls for cls in classes if name in cls.PRESETS), None)
    if cls is None:
        presets = [preset for cls in classes for preset in cls.PRESETS]
        meant = did_you_mean(name, presets) or f"there are {', '.join(presets)}"
        raise ValueError(f"no model has a preset {name!r}; {meant}")
    return cls


def _variant(cls, name, path, changes):
    """Returns the preset with the field values that the weights at `path` require."""
    made = cls.preset(name, **changes)
    names, _ = _match.detect_names(
        made, _match.leaves_of(made)[1], _match.renamed(made, _tensors.read(path)), None
    )
    return dataclasses.replace(made, **{**made.NAMES[names].config, **changes})


def _classes():
    from fnet import models

    return [
        cls
        for cls in map(models.__dict__.get, models.__all__)
        if isinstance(cls, type) and issubclass(cls, Model)
    ]


def _beside(key_map, source):
    """Yields an `Entry` (paths and keys) for each array that `save` writes but the model does not
    need. An array that the model does not need is written if the file `source` contains it, or if a
    naming rule requires it."""
    for entry in key_map.beside:
        present = source is not None and all(key in source.arrays for key in entry.keys)
        if present or (entry.rule.write is not None and entry.rule.write is not False):
            yield entry


def _read(entry, tensors, dtype):
    """Reads the model's arrays for `entry`, and copies each array once, from the memory-mapped
    file."""
    dtypes = {tensors.arrays[key].dtype for key in entry.keys}
    if len(dtypes) > 1:
        raise TypeError(
            f"{tensors.path}: the parts of {_match.ours(entry)} have different dtypes, "
            f"{', '.join(sorted(map(str, dtypes)))}; pass dtype="
        )
    (theirs,) = dtypes
    if not jax.dtypes.issubdtype(theirs, np.floating):
        raise TypeError(
            f"{tensors.path}: {entry.keys[0]!r} has dtype {theirs}, but {_match.ours(entry)} needs "
            f"a "
            "floating-point dtype"
        )
    wanted = np.dtype(theirs if dtype is None else dtype)
    if jax.dtypes.canonicalize_dtype(wanted) != wanted:
        raise TypeError(
            f"{tensors.path}: {entry.keys[0]!r} has dtype {wanted}, which JAX supports only with "
            "jax_enable_x64; pass dtype=jnp.float32 to cast it"
        )
    ours = [_tensors.aligned(spec.shape, wanted) for spec in entry.specs]
    for key, copy in zip(entry.keys, np.ndindex(entry.copies)):
        whole, at = entry.rule.layout.ours(tensors.arrays[key]), 0
        for array in ours:
            width = array.shape[-1] if array.ndim else 1
            part = whole[..., at : at + width] if len(ours) > 1 else whole
            np.copyto(array[copy] if copy else array, part, casting="unsafe")
            at += width
    return [jax.device_put(array) for array in ours]


def _written(entry, arrays):
    """Converts arrays of a model to the layout of the file. Returns {key (array name in the file):
    array}."""
    whole = np.concatenate(arrays, -1) if len(arrays) > 1 else arrays[0]
    return {
        key: entry.rule.layout.theirs(whole[copy] if copy else whole)
        for key, copy in zip(entry.keys, np.ndindex(entry.copies))
    }

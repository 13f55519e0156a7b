"""Folders of weights as transformers writes them: config.json, shards and their index, and related
files."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fnet._util import _tokenizer_files
from fnet._util._files import replacing, write_json
from fnet.models.weights import _config, _tensors

CONFIG = "config.json"
# The files that generation, tokenizers and preprocessing need in addition to config.json and the
# weights.
BESIDE = (*_tokenizer_files.NAMES, "preprocessor_config.json")
_FREE = ("dropout", "stacked", "pooler")  # fields of models that config.json does not describe
_SHARD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(size: int | str) -> int:
    """Returns the number of bytes of a size such as "5GB".

    Raises:
        ValueError: `size` is neither a positive number nor a string such as "5GB".

    >>> bytes_of("1.5GB")
    1500000000
    """
    found = re.fullmatch(r"([0-9.]+) ?([KMG]I?B)", size.upper()) if isinstance(size, str) else None
    try:
        count = int(float(found[1]) * _UNITS[found[2]]) if found else int(size)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise ValueError(f'expected max_shard_size in bytes, or as "5GB" or "500MB"; got {size!r}')
    return count


def describe(model, names: str, like: Mapping) -> dict[str, Any] | None:
    """Returns the content of config.json for a model, or None if no config.json can describe the
    model.

    Args:
        model: the model.
        names: a key of the model's `NAMES`, such as "huggingface": the framework whose array names
            are in the file of weights.
        like: the content of an existing config.json, or {}. If a config.json with the `model_type`
            of `like` can describe the model, the result has the same `model_type`, and also the
            fields of `like` that do not affect the output of the model.
    """
    kinds = sorted(model.CONFIGS, key=lambda kind: kind != _config.kind_of(like))
    for kind in kinds:
        table = model.CONFIGS[kind]
        if _config.names_for(table, model) != names:
            continue
        try:
            config = table.write(model)
            restored = _config.made(type(model), table, config)
        except (ValueError, TypeError):
            continue
        entries = {
            entry.field: entry for entry in table.fields.values() if isinstance(entry, _config.Use)
        }
        if all(
            _config.fits(
                entries.get(field.name),
                model,
                getattr(restored, field.name),
                getattr(model, field.name),
            )
            for field in dataclasses.fields(model)
            if field.name not in _FREE
        ):
            for (
                name,
                value,
            ) in like.items():  # keeps other names of the same value, for example of an activation
                if (
                    kind == _config.kind_of(like)
                    and isinstance(value, str)
                    and isinstance(config.get(name), str)
                ):
                    try:
                        if _config.made(type(model), table, config | {name: value}) == restored:
                            config[name] = value
                    except ValueError:
                        pass
            copied = {
                name: like[name]
                for name in like
                if name in table.irrelevant and kind == _config.kind_of(like)
            }
            if config.get("id2label") and len(like.get("id2label") or ()) == len(
                config["id2label"]
            ):
                config["id2label"] = like["id2label"]
            return ({} if kind == "timm" else {"model_type": kind}) | config | copied
    return None


def check(folder: Path, config: Mapping | None) -> None:
    """Checks whether a model may be saved into a folder.

    Raises:
        ValueError: saving would replace the config.json of a training run. ValueError is also
            raised if the folder contains the config.json of another model, and the new model has no
            config.json (`config` is None).
    """
    path = folder / CONFIG
    if not path.is_file():
        return
    if (folder / "metrics.jsonl").is_file():
        if config is not None:
            raise ValueError(
                f"{path} belongs to a training run, and would be replaced; save into another "
                f"folder, or only the weights, into {folder / 'model.safetensors'}"
            )
    elif config is None:
        raise ValueError(
            f"{path} describes another model than this one, which no config.json describes; save "
            "into another folder"
        )


def like(folder: Path | None) -> dict:
    """Returns the content of the config.json of a folder, or {} if there is none."""
    return (
        _config.read(folder / CONFIG) if folder is not None and (folder / CONFIG).is_file() else {}
    )


def write_config(folder: Path, config: Mapping, params: Mapping) -> None:
    """Writes config.json. In the format of transformers, config.json also contains the dtype of the
    parameters."""
    config = dict(config)
    if "model_type" in config:
        config.pop("torch_dtype", None)
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
        config["dtype"] = dtypes.pop() if len(dtypes) == 1 else "float32"
    write_json(folder / CONFIG, config)


def is_beside(name: str) -> bool:
    """Returns whether a file name, such as tokenizer.json, matches one of the patterns in `BESIDE`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in BESIDE)


def copy_beside(source: Path, folder: Path) -> None:
    """Copies files such as generation_config.json and tokenizer.json (see `BESIDE`) from `source`
    to `folder`."""
    if source.resolve() == folder.resolve():
        return
    for path in sorted(each for each in source.rglob("*") if each.is_file()):
        name = path.relative_to(source).as_posix()
        if is_beside(name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def write(
    folder: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str], most: int
) -> Path:
    """Writes model.safetensors, or shards and their index if the arrays have more than `most`
    bytes.

    Existing weight files with the same names are replaced. If `write` is interrupted, the folder
    contains the old weights, or shards without an index, or both model.safetensors and shards.
    `read` loads neither of the last two.

    Returns:
        The path of model.safetensors, or of the index of the shards.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for key, array in arrays.items():
        if size + array.nbytes > most and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][key] = array
        size += array.nbytes
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    )
    index = folder / _tensors.INDEX
    if len(shards) == 1:
        _tensors.write(folder / names[0], shards[0], metadata)
        index.unlink(missing_ok=True)
    else:
        # All shards are complete before the first of them gets its name.
        with contextlib.ExitStack() as stack:
            for name, shard in zip(names, shards):
                _tensors.write(stack.enter_context(replacing(folder / name)), shard, metadata)
            index.unlink(missing_ok=True)
        total = sum(array.nbytes for array in arrays.values())
        where = {key: name for name, shard in zip(names, shards) for key in shard}
        write_json(
            index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        )
    for old in folder.glob("model*.safetensors"):
        if old.name not in names and _SHARD.fullmatch(old.name):
            old.unlink()
    return folder / names[0] if len(shards) == 1 else index

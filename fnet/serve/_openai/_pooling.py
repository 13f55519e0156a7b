"""How the features of a text's tokens become one vector: the files of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fnet.models import sentence_embedding
from fnet.models.weights._files import SMALL, contents
from fnet.models.weights._json import read

_MODES = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}
_TRUNCATION = {"max_seq_length", "do_lower_case"}


class Pooling(NamedTuple):
    """The last steps of an encoder.

    Attributes:
        mode: "mean" of all tokens, or "cls", the first token.
        normalized: whether vectors are scaled to length 1.
        longest: the most tokens of a text, or None for the model's context.
    """

    mode: str = "mean"
    normalized: bool = True
    longest: int | None = None

    def __call__(self, hidden: jax.Array, lengths: jax.Array) -> jax.Array:
        """Returns the vectors [batch, width] of features [batch, time, width]."""
        if self.mode == "mean" and self.normalized:
            return sentence_embedding(hidden, lengths)
        hidden = hidden.astype(jnp.float32)
        vectors = hidden[:, 0]
        if self.mode == "mean":
            real = jnp.arange(hidden.shape[1], dtype=jnp.int32)[None] < lengths[:, None]
            sums = jnp.where(real[..., None], hidden, 0).sum(1)
            vectors = sums / lengths[:, None].astype(jnp.float32)
        if self.normalized:
            norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
            vectors = vectors / jnp.maximum(norms, 1e-12)
        return vectors


def pooling(folder: Path) -> Pooling:
    """Reads the pooling from a folder of sentence-transformers: modules.json and what it names. A
    folder without one gets the mean, scaled to length 1.

    Raises:
        ValueError: the files describe something else, such as another dense layer.
    """
    if not (folder / "modules.json").is_file():
        return Pooling()
    mode, normalized = None, False
    for module in _modules(folder / "modules.json"):
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            mode = _mode(folder / _inside(folder, module["path"]) / "config.json")
        elif kind == "Normalize":
            normalized = True
        elif kind != "Transformer" or module["path"] != "":
            raise ValueError(
                f"{folder / 'modules.json'}: the module {module['type']!r} is not supported; "
                "expected Transformer, Pooling and Normalize"
            )
    if mode is None:
        raise ValueError(f"{folder / 'modules.json'} has no pooling, so there is no vector")
    return Pooling(mode, normalized, _longest(folder / "sentence_bert_config.json"))


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        held = json.loads(contents(path, most=SMALL))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    strings = lambda each: all(isinstance(each.get(name), str) for name in ("type", "path"))
    if not isinstance(held, list) or not all(isinstance(x, dict) and strings(x) for x in held):
        raise ValueError(f'{path}: expected a list of {{"type": ..., "path": ...}}')
    return held


def _inside(folder: Path, name: str) -> str:
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder / 'modules.json'}: the path {name!r} leaves the folder")
    return name


def _mode(path: Path) -> str:
    config = read(path)
    used = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    found = [mode for mode, name in _MODES.items() if used == [name]]
    if not found:
        raise ValueError(
            f"{path}: expected {' or '.join(_MODES.values())} alone, got {', '.join(used) or 'none'}"
        )
    return found[0]


def _longest(path: Path) -> int | None:
    if not path.is_file():
        return None
    config = read(path)
    if unknown := sorted(set(config) - _TRUNCATION):
        raise ValueError(f"{path}: the field {unknown[0]!r} is not known")
    if config.get("do_lower_case"):
        raise ValueError(f"{path}: do_lower_case belongs to the tokenizer; expected false")
    longest = config.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ValueError(f"{path}: expected max_seq_length as a number of tokens, got {longest!r}")
    return longest

"""Weights: a file of pretrained weights, opened once, and what is known about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fnet._util._nearest import nearest
from fnet.layers._spec import put
from fnet.models.weights import _key_map, _match, _tensors
from fnet.models.weights._config import LISTED, Config, Configuration
from fnet.models.weights._key_map import Entry, KeyMap
from fnet.models.weights._weight_names import Names, Rule, Spare, Tied


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """A file of weights, the configuration beside it, and the names of the arrays in both worlds.

    `open` maps the file into memory. `of` says for which model it is, and `matched` finds out which
    framework wrote it. Then `check` compares it with the model, and `trees` copies the arrays.

    Attributes:
        path: the safetensors file, or the index of its shards.
        tensors: {key: view of the file}. From `of` on, the keys are the current names.
        metadata: the texts in the file.
        configuration: the config.json beside the file, which is read when it is first needed.
        model: the model, from `of` on.
        framework: a key of the model's `NAMES`, or the `Names` that the caller passed, from `matched`
            on.
        key_map: the keys of the model's arrays, from `matched` on.
        kinds: {path of an array of the model: "params" or "state"}, from `matched` on.
    """

    path: Path
    tensors: Mapping[str, Any]
    metadata: Mapping[str, str]
    configuration: Configuration
    model: Any = None
    framework: str | Names = ""
    key_map: KeyMap = dataclasses.field(default_factory=lambda: KeyMap([], []))
    kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Weights:
        """Opens a safetensors file, an index of shards, or the one that a folder contains.

        Raises:
            FileNotFoundError: `path` does not exist or contains no weights.
            ValueError: the file is damaged or has an unsupported format.
        """
        path, arrays, metadata = _tensors.read(path)
        return cls(path, arrays, metadata, Configuration(path.parent))

    @classmethod
    def new(cls, model: Any, names: str | Names | None) -> Weights:
        """Returns the weights of a model before there is a file: without tensors, but with the
        framework and the key map.

        Args:
            model: the model.
            names: the framework. Default: the one that matches the model's configuration.

        Raises:
            ValueError: no framework matches, or several do.
        """
        framework = _match.names_to_write(model) if names is None else names
        rules = _match.rules_of(model, framework)
        kinds, leaves = _match.leaves_of(model, framework)
        prefix = _key_map.prefix_to_write(rules, leaves)
        key_map = _key_map.key_map(rules, prefix, leaves, _match.who(model, framework))
        nowhere = Path()
        return cls(nowhere, {}, {}, Configuration(nowhere), model, framework, key_map, kinds)

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, Any]) -> Weights:
        """Returns the weights in a dict of arrays."""
        return cls(Path("the arrays"), arrays, {}, Configuration(Path()))

    def of(self, model: Any, names: str | Names | None = None) -> Weights:
        """Returns the weights of a model, with current names in place of those of older files.

        Raises:
            TypeError: the model has no `NAMES`, and `names` are none.
        """
        known = (names,) if isinstance(names, Names) else _match.known_names(model).values()
        return dataclasses.replace(self, model=model, tensors=_renamed(known, self.tensors))

    def of_keys(self) -> Weights:
        """Returns the weights of the model with the fields that only the keys determine."""
        return dataclasses.replace(self, model=self.model.of_keys(self.tensors))

    def compared(self) -> Config | None:
        """Compares the model with the config.json, if there is one; see `Configuration.check`. A
        model that was made from it is compared, too: two fields may contradict each other."""
        return self.configuration.check(self.model)

    def matched(self, names: str | Names | None = None) -> Weights:
        """Returns the weights with the framework of their names, and the key map.

        Args:
            names: the framework, or the rules. Default: the one whose rules match the most keys.

        Raises:
            ValueError: the file contains no arrays of the model.
        """
        if self.framework:
            return self
        kinds, leaves = _match.leaves_of(self.model, names)
        framework, key_map = _detected(self.model, leaves, self.tensors, names, self.path)
        return dataclasses.replace(self, framework=framework, key_map=key_map, kinds=kinds)

    def adjusted(self, changes: Mapping[str, Any]) -> Weights:
        """Returns the weights of the model whose fields have the values that the framework requires.

        Args:
            changes: fields of the model and their values, which override the requirements.
        """
        required = {**_match.rules_of(self.model, self.framework).config, **changes}
        model = dataclasses.replace(self.model, **required)
        if model == self.model:
            return self
        return dataclasses.replace(self, model=model, framework="").matched(self.framework)

    def check(self, config: Config | None) -> None:
        """Compares the framework, the fields, the keys and the shapes with those of the model.

        Args:
            config: the description of the config.json that was compared with the model, or None.

        Raises:
            ValueError: the weights are not those of the model.
        """
        if config is not None and self.framework not in config.names:
            raise ValueError(
                f"{self.path} has the names of {self.framework}, but config.json next to it "
                f"describes weights with the names of {' or '.join(config.names)}; move one of them "
                "to another folder"
            )
        compared = set() if config is None else config.compared()
        _match.check_config(self.model, self.framework, self.path, compared)
        _check_keys(self.model, self.framework, self.key_map, self.tensors, self.path)

    def trees(self, dtype: Any = None) -> tuple[dict, dict]:
        """Copies the arrays, each once. Returns `(params, state)`.

        Args:
            dtype: the dtype of the results. Default: the dtypes of the file.

        Raises:
            TypeError: a dtype is not a floating-point dtype, or JAX does not support it.
        """
        trees: dict[str, dict] = {"params": {}, "state": {}}
        for entry in self.key_map.reads:
            arrays = self._copied(entry, self._dtype(entry, dtype))
            for path, array in zip(entry.paths, arrays):
                put(trees[self.kinds[path]], path.split("/"), jax.device_put(array))
        return trees["params"], trees["state"]

    def written(self, trees: Mapping[str, Mapping]) -> dict[str, np.ndarray]:
        """Returns {key: array} for a new file: the arrays of the model, and those beside them that
        a rule requires or that this file contains.

        Args:
            trees: {"params": the parameters, "state": the state}.
        """
        kept = [path for path, kind in self.kinds.items() if kind == "state"]
        if kept and not trees["state"]:
            raise ValueError(
                f"pretrained: the model has a state, such as {kept[0]!r}, which save needs, too; got "
                f"{trees['state']!r}"
            )
        arrays = {}
        for entry in (*self.key_map.reads, *self.key_map.beside):
            if not self._is_written(entry):
                continue
            if isinstance(entry.rule, Spare):
                for key in entry.keys:
                    arrays[key] = self.tensors.get(key, np.asarray(entry.rule.write))
                continue
            parts = [np.asarray(_match.get(trees[self.kinds[path]], path)) for path in entry.paths]
            whole = np.concatenate(parts, -1) if len(parts) > 1 else parts[0]
            for layer, keys in entry.layers():
                theirs = entry.rule.layout.theirs(whole[(*layer, ...)])
                arrays.update(zip(keys, theirs if entry.is_joined() else (theirs,)))
        return arrays

    def _is_written(self, entry: Entry) -> bool:
        if isinstance(entry.rule, Rule):
            return True
        required = entry.rule.write is not None and entry.rule.write is not False
        return required or all(key in self.tensors for key in entry.keys)

    def _dtype(self, entry: Entry, dtype: Any) -> np.dtype:
        """Returns the dtype of the model's arrays for `entry`."""
        dtypes = {self.tensors[key].dtype for key in entry.keys}
        if len(dtypes) > 1:
            raise TypeError(
                f"{self.path}: the parts of {_match.ours(entry)} have different dtypes, "
                f"{', '.join(sorted(map(str, dtypes)))}; pass dtype="
            )
        (theirs,) = dtypes
        if not jax.dtypes.issubdtype(theirs, np.floating):
            raise TypeError(
                f"{self.path}: {entry.keys[0]!r} has dtype {theirs}, but {_match.ours(entry)} needs "
                "a floating-point dtype"
            )
        wanted = np.dtype(theirs if dtype is None else dtype)
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            raise TypeError(
                f"{self.path}: {entry.keys[0]!r} has dtype {wanted}, which JAX supports only with "
                "jax_enable_x64; pass dtype=jnp.float32 to cast it"
            )
        return wanted

    def _copied(self, entry: Entry, dtype: np.dtype) -> list[np.ndarray]:
        """Returns the model's arrays for `entry`. An array of the file is one layer of each, and is
        split along its last axis if there are several."""
        ours = [_tensors.aligned(spec.shape, dtype) for spec in entry.specs]
        for layer, keys in entry.layers():
            whole = entry.rule.layout.ours(*(self.tensors[key] for key in keys))
            if len(ours) == 1:
                np.copyto(ours[0][(*layer, ...)], whole, casting="unsafe")
                continue
            begin = 0
            for array in ours:
                end = begin + array.shape[-1]
                np.copyto(array[(*layer, ...)], whole[..., begin:end], casting="unsafe")
                begin = end
        return ours


def _renamed(known, arrays):
    """Returns the arrays of a file, with the names of older files (`Names.aliases`) replaced by the
    current names."""
    aliases = {old: new for names in known for old, new in names.aliases.items()}
    current = {}
    for key, array in arrays.items():
        old = next((old for old in aliases if key.endswith(old)), None)
        new = key if old is None else key.removesuffix(old) + aliases[old]
        current[key if new in arrays else new] = array
    return current


def _detected(model, leaves, arrays, name, path):
    """Returns the framework whose naming rules match the most array names in the file, and its key
    map.

    Args:
        model: the model.
        leaves: {path: spec} of its arrays.
        arrays: {key: array} of the file.
        name: the framework, or None.
        path: the file, for error messages.
    """
    best, unfit = None, None
    for framework in _match.known_names(model) if name is None else (name,):
        rules = _match.rules_of(model, framework)
        for prefix in rules.prefixes:
            try:
                key_map = _key_map.key_map(rules, prefix, leaves, _match.who(model, framework))
            except ValueError as error:  # this configuration has no rules for these names
                unfit = unfit or error
                continue
            hits = sum(key in arrays for key in key_map.keys())
            score = hits, not _match.differs(model, rules)
            if best is None or score > best[0]:
                best = score, framework, key_map
    if best is None:
        raise unfit
    (hits, _), framework, key_map = best
    if 10 * hits < len(key_map.keys()):
        held, wanted = (", ".join(map(repr, list(keys)[:3])) for keys in (arrays, key_map.keys()))
        frameworks = " or ".join(_match.known_names(model)) if name is None else _match.label(name)
        raise ValueError(
            f"{path} contains no weights of a {type(model).__name__} with the names of "
            f"{frameworks}: its keys are {held}, ...; expected {wanted}, ... for "
            f"{_match.label(framework)}"
        )
    return framework, key_map


def _check_keys(model, name, key_map, arrays, path):
    """Compares the keys and shapes of the arrays in a file with those of the key map."""
    wanted = key_map.keys()
    spare = {key: entry for entry in key_map.beside for key in entry.keys}
    extra = [key for key in arrays if key not in wanted and key not in spare]
    missing = [key for key in wanted if key not in arrays]
    problems = [_missing(key, wanted[key], extra) for key in missing]
    problems += [_unexpected(key, arrays[key], missing) for key in extra]
    for entry in key_map.reads:
        for key, shape in entry.shapes().items():
            if key in arrays and arrays[key].shape != shape:
                problems.append(
                    f"{key!r}: expected shape {shape} for {_match.ours(entry)}, got "
                    f"{arrays[key].shape}"
                )
    for key, entry in spare.items():
        if key in arrays and isinstance(entry.rule, Spare) and entry.rule.refused:
            problems.append(f"{key!r}: {entry.rule.refused}")
        if isinstance(entry.rule, Tied) and key in arrays and not _tied(key, entry, wanted, arrays):
            problems.append(
                f"{key!r} must equal {_match.ours(entry)}, because the model ties the two "
                "('tie_word_embeddings' in config.json)"
            )
    if problems:
        rest = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise ValueError(
            f"{path} does not match this {type(model).__name__} with the names of "
            f"{_match.label(name)}: {'; '.join(problems[:LISTED])}{rest}"
        )


def _missing(key, entry, extra):
    return (
        f"{key!r} is missing (for {_match.ours(entry)}{_near(key, extra, '; the file has {!r}')})"
    )


def _unexpected(key, array, missing):
    return f"{key!r} {array.shape} is not expected{_near(key, missing, ' (did you mean {!r}?)')}"


def _tied(key, entry, wanted, arrays):
    first = next(each for each in wanted.values() if each.paths == entry.paths)
    if any(each not in arrays for each in first.keys):
        return True  # already listed as missing
    array = arrays[key]
    return array.shape == entry.shapes()[key] and np.array_equal(
        entry.rule.layout.ours(array), first.rule.layout.ours(arrays[first.keys[0]])
    )


def _near(key, keys, text):
    near = nearest(key, keys, similar=0.7)
    return text.format(near[0]) if near else ""

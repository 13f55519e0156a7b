"""Identifies a run by its configuration, data and number of steps, so that no other run resumes its
checkpoints."""

from __future__ import annotations

import dataclasses
import json
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from fnet.training._config import LENGTHS, ConfigError


class ResumeWarning(UserWarning):
    """A resumed run may differ from an uninterrupted one, for the reason in the message.

    For example, the chip has changed, the data are read again from the beginning, or `fit` got no
    `config` to compare the hyperparameters with.

    >>> import tempfile, warnings
    >>> step = lambda state, batch: (state.apply(optax.sgd(0.1), {"w": batch}), {})
    >>> state = tr.TrainState.create({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = tr.fit(step, state, lambda i: jnp.ones(3), steps=1, workdir=folder)
    ...     with warnings.catch_warnings(record=True, action="always") as issued:
    ...         _ = tr.fit(step, state, lambda i: jnp.ones(3), steps=2, workdir=folder)      # resumed, without config=
    >>> issued[0].category.__name__
    'ResumeWarning'
    """


def as_dict(config: Any, name: str = "config") -> dict[str, Any] | None:
    """Converts a dataclass or a mapping to a dict of JSON types, and None to None.

    Raises:
      TypeError: `config` is neither a dataclass nor a mapping, or a value has no JSON type.
      ValueError: a value is NaN or infinite.
    """
    if config is None:
        return None
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    elif hasattr(config, "to_dict"):  # ml_collections.ConfigDict
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(
            f"{name} is a dataclass or a dict of JSON types; got a {type(config).__name__}"
        )
    values = {}
    for field, value in config.items():
        try:
            values[str(field)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{name}: '{field}' is {value!r}, which JSON does not hold ({error})"
            ) from None
    return values


def identity(batches: Callable[[int], Any], at: int, sample: Any) -> dict[str, Any]:
    """Returns a dict that identifies the data: the description of the source
    (`batches.identity()`), a digest of one batch, and of all data if the source has a method
    `digest`.

    Args:
      batches: as in `fit`.
      at: the integer i for which `sample` is `batches(i)`.
      sample: the batch `batches(at)`, or None if it is not known. `sample` is ignored if the source
        does not repeat its batches.
    """
    described = batches.identity() if hasattr(batches, "identity") else {}
    if sample is None or getattr(batches, "resume", None) == "none":
        return dict(described)
    digest = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(sample)[0]:
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        raw = (
            repr(leaf).encode() if array.dtype.hasobject else np.ascontiguousarray(array).tobytes()
        )
        head = f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}"
        digest = zlib.crc32(raw, zlib.crc32(head.encode(), digest))
    whole = {"digest of all examples": batches.digest()} if hasattr(batches, "digest") else {}
    return {**described, f"digest of batch {at}": f"{digest:08x}", **whole}


def compare(before: Mapping[str, Any], now: Mapping[str, Any], config: Any, where: Any) -> None:
    """Checks that the config and the data of a resumed run match its checkpoint, and that `steps`
    has not decreased.

    If the current call of `fit` or the checkpoint has no config, a `ResumeWarning` says that the
    configurations cannot be compared.

    Args:
      before: a dict with the keys "config", "data", "steps" and, for populations, "step", from the
          checkpoint.
      now: a dict with the same keys, for the current call of `fit`.
      config: the argument `config` of `fit`. A field of `config` that is not in the checkpoint must
        have its default value.
      where: the run's folder, for messages.

    Raises:
      ConfigError: `config` is given, and the config, the data or the steps do not match the
        checkpoint. The message lists the differences.
    """
    old, new = before.get("config"), now["config"]
    differences = []
    if new is not None and old is not None:
        differences += _differing_fields(old, new, config)
    differences += _differences(before.get("data") or {}, now["data"], "the data's ")
    differences += _differences(
        before.get("step") or {}, now.get("step") or {}, "the population's "
    )
    if now["steps"] < before.get("steps", 0):
        differences.append(
            f"steps was {before['steps']}, is {now['steps']}, and a run is only ever made longer"
        )
    if new is not None and differences:
        raise ConfigError(
            f"{where} holds a run with another configuration ({'; '.join(differences)}): use the "
            "old values, choose another workdir, or restart"
        )
    if new is None or old is None:
        which = "this call" if new is None else "the checkpoint"
        changed = f"{'; '.join(differences)}. " if differences else ""
        warnings.warn(
            f"{where}: {changed}{which} has no config=, so the model, the optimizer and their "
            "hyperparameters cannot be compared with those of the saved run. Pass fit(..., "
            "config=) each time",
            ResumeWarning,
            stacklevel=5,
        )


def _differing_fields(old: Mapping, new: Mapping, config: Any) -> list[str]:
    """Returns the differences between two configs, except fields that a resumed run may change."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    free = {*LENGTHS, *(field.name for field in fields if not field.compare)}
    old = {name: value for name, value in old.items() if name not in free}
    new = {name: value for name, value in new.items() if name not in free}
    defaults = {field.name: field.default for field in fields}
    return [*_missing(old, new, defaults), *_differences(old, new)]


def same_json(a: Any, b: Any) -> bool:
    """Whether two values are equal as JSON. In Python, 1 == 1.0 == True."""
    return json.dumps(a, sort_keys=True, default=repr) == json.dumps(
        b, sort_keys=True, default=repr
    )


def _differences(old, new, prefix=""):
    return [
        f"{prefix}{name} was {old[name]!r}, is {new[name]!r}"
        for name in old
        if name in new and not same_json(old[name], new[name])
    ]


def _missing(old, new, defaults):
    added = [
        f"{name} was not there, is {new[name]!r}"
        for name in new
        if name not in old and not (name in defaults and same_json(new[name], defaults[name]))
    ]
    return added + [f"{name} was {old[name]!r}, is not there" for name in old if name not in new]

"""The configuration of a run: a frozen dataclass, stored as JSON in the run's folder."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from fnet._util._nearest import did_you_mean
from fnet.training.checkpoints._storage import StorePath, location, write_whole

Config = TypeVar("Config")
CONFIG = "config.json"
LENGTHS = ("steps", "epochs")  # fields that state the length of a run, which may be increased


class ConfigError(ValueError):
    """A configuration is invalid, or is not the one of the run to resume. The message has one line.

    >>> try:
    ...     tr.from_dict(dict, {"rate": "fast"})
    ... except (tr.ConfigError, TypeError) as error:
    ...     print("refused")
    refused
    """


def from_dict(cls: type[Config], values: Mapping[str, Any], *, source: str = "") -> Config:
    """Returns a dataclass `cls` with the given values, and the defaults of its other fields.

    Args:
      cls: a dataclass. Its fields have the types bool, int, float or str, or one of these | None.
      values: the values, by field name.
      source: where they come from, such as a file name, for error messages. Default "".

    Raises:
      ConfigError: a name is not a field of `cls`, a value has another type than its field, or a
        field without a default has no value.

    Example:
      >>> @dataclasses.dataclass(frozen=True)
      ... class Run:
      ...     steps: int = 100
      >>> from_dict(Run, {"steps": 5})
      Run(steps=5)
    """
    where = f"{source}: " if source else ""
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    checked = {}
    for name, value in values.items():
        if name not in fields:
            meant = did_you_mean(name, fields) or f"there are {', '.join(fields)}"
            raise ConfigError(f"{where}{cls.__name__} has no field '{name}': {meant}")
        kinds = get_args(hints[name]) or (hints[name],)
        if float in kinds and type(value) is int:
            value = float(value)
        if type(value) not in kinds:
            wanted = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ConfigError(f"{where}'{name}' is {value!r}, it has to be {wanted}")
        checked[name] = value
    for name, field in fields.items():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if name not in checked and no_default:
            raise ConfigError(f"{where}{cls.__name__} needs a value for '{name}'")
    return cls(**checked)


def load_config(cls: type[Config], path: str | os.PathLike) -> Config:
    """Reads a configuration, a dataclass `cls`, from a JSON file, local or in an object store.

    Raises:
      ConfigError: there is no such file, or it does not contain a JSON object that `from_dict`
        accepts.

    >>> import dataclasses, tempfile
    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     rate: float = 0.1
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tr.load_config(Config, tr.save_config(Config(rate=0.2), folder))
    Config(rate=0.2)
    """
    path = location(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:  # not JSON, not text, or nested without end
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a JSON {type(values).__name__}, expected an object")
    return from_dict(cls, values, source=str(path))


def save_config(config: Any, workdir: str | os.PathLike) -> Path | StorePath:
    """Writes a configuration to `workdir/config.json`, and returns the path of this file.

    An existing config.json is replaced without a comparison; `same_config` compares. Another
    process that reads the file meanwhile finds the old or the new content, never a part.
    `fit(config=)` calls `save_config` after it has locked the folder of the run.

    Args:
      config: a dataclass, or a dict of JSON types.
      workdir: the folder of the run, a path or a URL. It is created if it does not exist.

    >>> import json, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     json.loads(tr.save_config({"rate": 0.2}, folder).read_text())
    {'rate': 0.2}
    """
    folder = location(workdir)
    values = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / CONFIG, f"{json.dumps(values, indent=2)}\n".encode())
    return folder / CONFIG


def same_config(config: Any, workdir: str | os.PathLike, *, but: tuple[str, ...] = ()) -> None:
    """Raises an error if the config.json in `workdir` differs from `config`.

    To compare before training, call this; `fit(config=)` itself compares with the configuration in
    the checkpoint that it resumes.

    Args:
      config: the current configuration, a dataclass.
      workdir: the folder of the run. Without a config.json there is no error.
      but: the names of fields that may differ. So may fields declared with `compare=False`, and
        `steps` and `epochs` may have grown. Default ().

    Raises:
      ConfigError: a field differs. The message has the old and the new value of each.

    >>> import dataclasses, tempfile
    >>> @dataclasses.dataclass(frozen=True)
    ... class Config:
    ...     rate: float = 0.1
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = tr.save_config(Config(rate=0.2), folder)
    ...     tr.same_config(Config(rate=0.2), folder)    # no error
    """
    path = location(workdir) / CONFIG
    if not path.exists():
        return
    old = dataclasses.asdict(load_config(type(config), path))
    new = dataclasses.asdict(config)
    free = {
        *but,
        *(field.name for field in dataclasses.fields(config) if not field.compare),
        *(k for k in LENGTHS if k in new and None not in (old[k], new[k]) and new[k] >= old[k]),
    }
    changed = [
        f"{k} was {old[k]!r}, is {new[k]!r}" for k in new if k not in free and old[k] != new[k]
    ]
    if changed:
        raise ConfigError(
            f"{workdir} holds a run with another configuration ({'; '.join(changed)}): "
            "use the old values, choose another workdir, or restart"
        )

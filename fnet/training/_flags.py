"""Command-line flags (absl) for the fields of a configuration, which is a frozen dataclass.

`option` declares a field with the help text and the allowed values of its flag.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        rate: float = tr.flags.option(0.1, "largest learning rate", within="(0, 1000]")

    tr.flags.define(Config, absl.flags.FLAGS)              # before the flags are parsed
    config = tr.flags.read(Config, absl.flags.FLAGS)       # after the flags have been parsed
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fnet.training._config import ConfigError, from_dict, load_config

if TYPE_CHECKING:
    from absl.flags import FlagValues

Config = TypeVar("Config")
SEED = "[0, 4294967295]"  # what jax.random.key takes
STEPS = "[1, 2147483647]"  # what an int32 counter holds


def option(
    default: Any,
    help: str,
    *,
    within: str | None = None,
    choices: Sequence[str] | None = None,
    decides: bool = True,
) -> Any:
    """Returns a field of a configuration, with the help and the allowed values of its flag.

    Args:
      default: the value without the flag. None leaves it to another source, such as a preset.
      help: the help text of the flag.
      within: the interval of allowed values, such as "[0, 1)" or "(0, 100]". Default None: any
        value.
      choices: the allowed values, a sequence of strings. Default None: any value.
      decides: whether the field affects the result of a run, so that a resumed run must have the
        same value. Default True.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Config:
    ...     rate: float = tr.flags.option(0.1, "learning rate", within="(0, 1]")
    >>> Config().rate
    0.1
    """
    metadata = {"help": help, "within": within, "choices": choices}
    return dataclasses.field(default=default, compare=decides, metadata=metadata)


def define(cls: type, values: FlagValues, *, by: str | None = None) -> None:
    """Defines a flag for every field of a dataclass, and --config, for a JSON file of such values.

    Args:
      cls: the dataclass. Its fields have the types bool, int, float or str, or one of these | None.
      values: the object in which the flags are defined, such as absl.flags.FLAGS.
      by: the field that selects a preset (a dict of field values). The help of each field with the
        default None then says so, for example "set by --mode", unless it says what holds "if not
        given". Default None: no presets.
    """
    from absl import flags

    flags.disclaim_key_flags()  # they are flags of the caller, whose --help lists them
    kinds = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = (typing.get_args(hints[field.name]) or (hints[field.name],))[0]
        default = f"set by --{by}" if field.default is None and by else field.default
        text = field.metadata.get("help", field.name)
        if "if not given" not in text:
            text += f" (default: {default})"
        kinds[kind](field.name, None, text, flag_values=values)
    flags.DEFINE_string(
        "config",
        None,
        "JSON file with values of the flags, such as config.json of another run",
        flag_values=values,
    )


def read(
    cls: type[Config],
    values: FlagValues,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    by: str | None = None,
) -> Config:
    """Returns the configuration that the flags describe.

    Each field takes its value from the first of these that has one: its flag, the file of --config,
    the preset, the field's default.

    Args:
      cls: the dataclass that was passed to `define`.
      values: the parsed flags.
      presets: values of the fields by the name of a preset, such as `presets.IMAGE_CLASSIFICATION`.
        Default None.
      by: the field whose value names the preset. Default None.

    Raises:
      ConfigError: the preset is unknown, or a value has the wrong type. The intervals and choices
        of `option` are checked by `check`, not here.
    """
    chosen = {}
    if values.config:
        regular_file("config", values.config)
        chosen = dataclasses.asdict(load_config(cls, values.config))
    names = [field.name for field in dataclasses.fields(cls)]
    chosen |= {name: values[name].value for name in names if values[name].present}
    if by is not None:
        choice = chosen.get(by, cls.__dataclass_fields__[by].default)
        if choice not in presets:
            raise ConfigError(f"--{by}={choice}: use {', '.join(presets)}")
        chosen = {
            **presets[choice],
            **{name: value for name, value in chosen.items() if value is not None},
        }
    return from_dict(cls, chosen)


def check(config: Any) -> None:
    """Raises ConfigError if a field has a value that its `option` does not allow: outside the
    interval `within`, or not one of the `choices`."""
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), field.metadata.get("choices")
        if value is None:
            continue
        if choices is not None and value not in choices:
            raise ConfigError(f"--{field.name}={value}: use {', '.join(choices)}")
        if field.metadata.get("within") is not None:
            check_within(field.name, value, field.metadata["within"])


def check_within(name: str, value: float, interval: str) -> None:
    """Raises ConfigError if a number is NaN or outside an interval.

    Args:
      name: the name of the flag, for the message.
      value: the number.
      interval: its bounds, such as "(0, 1]": a square bracket includes one, a parenthesis excludes
        it.

    >>> tr.flags.check_within("rate", 0.5, "(0, 1]")    # no error
    """
    low, high = map(float, interval[1:-1].split(","))
    above = low <= value if interval[0] == "[" else low < value
    below = value <= high if interval[-1] == "]" else value < high
    if not (above and below):
        raise ConfigError(f"--{name}={value}: expected a number in {interval}")


def regular_file(name: str, path: str | Path) -> None:
    """Raises ConfigError if the path is a pipe or a device, from which reading may never end.

    Args:
      name: the name of the flag, for the message.
      path: the path.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"--{name}={path}: expected a regular file")

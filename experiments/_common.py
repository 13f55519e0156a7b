"""What the experiments share: a dataclass as flags, and errors that are one line."""

import contextlib
import dataclasses
import sys
import typing

from absl import flags

from fnet import hardware as hw
from fnet import training as tr


def option(default, help):
    """A field of a configuration with its help text."""
    return dataclasses.field(default=default, metadata={"help": help})


def define_flags(cls, by="dataset"):
    """A flag for every field of a dataclass, and --config for a file of them; `by` decides what has no default."""
    define = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
    }
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = (typing.get_args(hints[field.name]) or (hints[field.name],))[0]
        default = f"by {by}" if field.default is None else field.default
        define[kind](field.name, None, f"{field.metadata['help']} (default: {default})")
    flags.DEFINE_string("config", None, "JSON file to take values from, such as another run's")


def config_from_flags(cls, presets=None, by=None):
    """Defaults, then the preset named by the field `by`, then --config, then the flags given.

    Raises:
      ConfigError: an unknown preset, or a value that the dataclass does not take.
    """
    values = {}
    if flags.FLAGS.config:
        values = dataclasses.asdict(tr.load_config(cls, flags.FLAGS.config))
    names = [field.name for field in dataclasses.fields(cls)]
    values |= {name: flags.FLAGS[name].value for name in names if flags.FLAGS[name].present}
    if by is not None:
        choice = values.get(by, cls.__dataclass_fields__[by].default)
        if choice not in presets:
            raise tr.ConfigError(f"no {by} is called '{choice}': use {', '.join(presets)}")
        values = presets[choice] | {k: v for k, v in values.items() if v is not None}
    return tr.from_dict(cls, values)


def decided(config, *workdirs, restart=False):
    """The policy, and the configuration with its type for good: a run that goes on keeps what it began with."""
    if config.precision != "auto":
        return hw.policy(config.precision), config
    policy = hw.policy()
    begun = [] if restart else [path for folder in workdirs if (path := folder / "config.json").exists()]
    if begun and (precision := tr.load_config(type(config), begun[0]).precision) != policy.compute.name:
        policy = dataclasses.replace(hw.policy(precision), reason="the run in this folder was begun with it")
    return policy, dataclasses.replace(config, precision=policy.compute.name)


def parse_flags(argv):
    """absl's parser, except that a wrong flag is one line and exit 2."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        stop(f"{' '.join(str(error).split())} (--help lists the flags)")


def stop(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


@contextlib.contextmanager
def one_line_errors(*kinds):
    """Exceptions of these kinds end the script with their message and exit 2, without a traceback."""
    try:
        yield
    except kinds as error:
        stop(error)

"""What the experiments share: a dataclass as flags, errors that are one line, and exit codes.

0: done, or told to stop and saved. 1: the loss was no longer finite, or something that should not happen. 2: what was
given cannot be used. 130: interrupted where there was nothing to save.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import typing

import jax
from absl import app, flags, logging

from fnet import hardware as hw
from fnet import parallel
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
      ConfigError: an unknown preset, a value that the dataclass does not take, or no finite number.
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
    config = tr.from_dict(cls, values)
    for name in names:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise tr.ConfigError(f"--{name}={value}: it has to be a finite number")
    if not 0 <= getattr(config, "seed", 0) < 2**32:
        raise tr.ConfigError(f"--seed={config.seed}: it has to be between 0 and 2^32 - 1")
    return config


def decided(config, *workdirs, restart=False):
    """The policy, and the configuration with its type for good: a run that goes on keeps what it began with.

    With --plan it is that of the chips asked about."""
    if config.precision != "auto":
        return hw.policy(config.precision), config
    if only_planned():
        kind = flags.FLAGS.plan.partition(":")[0]
        chip = hw.systems[kind].chip if kind in hw.systems else f"TPU {kind}" if f"TPU {kind}" in hw.chips else kind
        policy = hw.policy(chip if chip != "local" else None)
        return policy, dataclasses.replace(config, precision=policy.compute.name)
    policy = hw.policy()
    begun = [] if restart else [path for folder in workdirs if (path := folder / "config.json").exists()]
    if begun and (precision := tr.load_config(type(config), begun[0]).precision) != policy.compute.name:
        policy = dataclasses.replace(hw.policy(precision), reason="the run in this folder was begun with it")
    return policy, dataclasses.replace(config, precision=policy.compute.name)


def positive(config, *names):
    """Holds fields to numbers above 0, where they have a value."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise tr.ConfigError(f"--{name}={value}: it has to be more than 0")


def define_run_flags():
    """How a training run is gone about; `fit_options` hands it to `training.fit`."""
    flags.DEFINE_bool("restart", False, "remove the run in workdir first")
    flags.DEFINE_bool("nojit", False, "run op by op, to step through in a debugger")
    flags.DEFINE_enum("nonfinite", "stop", ["stop", "skip", "rollback"], "where the loss or a parameter becomes NaN or "
                      "infinite: stop, skip the step, or go back to the last checkpoint and on with other batches")


def fit_options():
    given = flags.FLAGS
    return {"jit": not given.nojit, "nonfinite": given.nonfinite, "debug": given.debug}


def define_device_flags():
    """On what a run goes; `plan` makes of it what `training.fit` takes."""
    flags.DEFINE_string("devices", "1", "how many devices: a number, or local for all, those of the run's other "
                        "processes included")
    flags.DEFINE_string("plan", None, "print how a step would be spread over chips that need not be here, such as "
                        "v5e:16x16, and exit")


def only_planned():
    return "plan" in flags.FLAGS and bool(flags.FLAGS.plan)


def begin():
    """Finds the run's other processes and holds --devices to what there is; before anything is computed.

    Raises:
      ConfigError: there are not so many.
    """
    logging.set_verbosity(logging.WARNING)                 # JAX reports every accelerator it does not find
    wanted = flags.FLAGS.devices if "devices" in flags.FLAGS else "1"
    if wanted == "local":
        parallel.initialize()
    elif not wanted.isdecimal() or int(wanted) < 1:
        raise tr.ConfigError(f"--devices={wanted}: use a number, or local for all")
    elif int(wanted) > 1 and int(wanted) > len(jax.devices()):
        raise tr.ConfigError(f"--devices={wanted}: this run has {len(jax.devices())} (a CPU is taken for as many with "
                             f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} in the environment)")


def plan(step, init, batch):
    """How the step is spread over --devices, None on one of them; with --plan it is printed, and that is all."""
    if only_planned():
        print(parallel.plan(step, init, batch, devices=flags.FLAGS.plan))
        sys.exit(0)
    wanted = flags.FLAGS.devices
    if wanted == "1" or len(jax.devices()) == 1:
        return None
    made = parallel.plan(step, init, batch, devices=jax.devices()[:None if wanted == "local" else int(wanted)])
    print(made)
    return made


def run(main):
    """`absl.app.run`, except that whatever goes wrong is a line and an exit code; --debug shows where it came from."""
    flags.DEFINE_bool("debug", False, "show tracebacks; where a run breaks, replay it and name the layer")
    app.run(functools.partial(_said, main), flags_parser=parse_flags)


def _said(main, argv):
    try:
        begin()
        main(argv)
    except tr.Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(0)
    except KeyboardInterrupt:
        stop("interrupted; a run goes on from its last checkpoint", 130)
    except Exception as error:
        if flags.FLAGS.debug:
            raise
        stop(sentence(error), 2 if isinstance(error, _GIVEN) else 1)


_GIVEN = (ValueError, TypeError, OSError, LookupError, OverflowError, MemoryError, ModuleNotFoundError,
          tr.CheckpointError, tr.PeerLost)


def sentence(error):
    """What an exception says, in a line; those that list leaves keep their lists."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    if isinstance(error, tr.CheckpointError | tr.Diverged):
        return text
    first = (text.splitlines() or [type(error).__name__])[0]
    return first if isinstance(error, _GIVEN) and text == first else f"{first} (--debug shows where)"


def parse_flags(argv):
    """absl's parser, except that a wrong flag is one line and exit 2."""
    try:
        return flags.FLAGS(argv)
    except (flags.Error, ValueError, OSError) as error:      # the last two: of a --flagfile
        stop(f"{' '.join(str(error).split())} (--help lists the flags)")


def stop(message, code=2):
    print("error:", " ".join(str(message).splitlines()).strip(), file=sys.stderr)    # an argument may hold a line break
    sys.exit(code)


@contextlib.contextmanager
def one_line_errors(*kinds):
    """Exceptions of these kinds end the script with their message and exit 2, without a traceback."""
    try:
        yield
    except kinds as error:
        if flags.FLAGS.debug:
            raise
        stop(sentence(error))

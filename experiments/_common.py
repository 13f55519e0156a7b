"""Code shared by the experiments. This module defines common flags, prints errors in one line, and
sets the exit code.

The exit code is 0 if the run finished, or if a signal stopped it and the state was saved. The exit
code is 1 if the loss is not finite or an unexpected error occurred. The exit code is 2 if the flags
or the files are invalid. The exit code is 130 if the script was interrupted when there was nothing
to save.
"""

import contextlib
import dataclasses
import errno
import functools
import importlib.util
import json
import math
import os
import re
import statistics
import sys
from pathlib import Path

import jax
from absl import app, flags, logging

from fnet import hardware as hw
from fnet import introspect, parallel
from fnet import training as tr
from fnet.cli import no_device

flags.disclaim_key_flags()  # those of this module belong to the script, whose --help lists them

PRECISIONS = ("auto", "float32", "bfloat16", "float16")
RESIDUALS = ("auto", "float32")


def check_temperature(value):
    """Raises ConfigError unless the temperature is 0 or in [0.001, 1000]. At temperature 0, the
    most probable token is selected."""
    if value != 0:
        tr.flags.check_within("temperature", value, "[0.001, 1000]" if value >= 0 else "[0, 1000]")


def user_path(name, path):
    """Returns the path, with ~ replaced by the home directory.

    Raises:
      ConfigError: the home directory is unknown, or `path` is a URL.
    """
    if "://" in str(path):
        raise tr.ConfigError(
            f"--{name}={path}: expected a local path; fit(workdir=) of your own program takes URLs"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise tr.ConfigError(
            f"--{name}={path}: there is no such home directory; give the whole path"
        ) from None


def read_text(path):
    """Returns the content of a text file.

    Raises:
      ValueError: the file is not encoded in UTF-8, or is larger than 4 GiB.
      OSError: the file cannot be read.
    """
    if path.stat().st_size > 1 << 32:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes: expected a text of at most 4 GiB"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from None


def needs(*modules):
    """Raises ModuleNotFoundError if a module is not installed. The experiments call this function
    at the start for modules that they use at the end."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is missing: pip install {name}")


def check_memory(init, batch_bytes, advice):
    """Raises ConfigError if the parameters, optimizer state, gradients and batch exceed the memory
    of the devices.

    Args:
      init: a function that takes a PRNG key and returns the initial state. It is traced, not run.
      batch_bytes: a lower bound of the size of a batch and its activations, in bytes.
      advice: the flags that determine the sizes, for the error message.

    Raises:
      ConfigError: the memory is too small.
    """
    if only_planned():
        return  # the plan for other devices states whether the run fits
    state = jax.eval_shape(init, jax.random.key(0))
    count = lambda tree: sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )
    need = count(state) + count(state.params) + batch_bytes  # with the gradients
    chip = hw.detect()
    chips = 1 if chip.kind == "cpu" else max(1, jax.device_count() // chip.jax_devices_per_chip)
    if chip.memory_bytes and need > chip.memory_bytes * chips:
        raise tr.ConfigError(
            f"this run needs at least {need / 2**30:,.0f} GiB of memory for its parameters, "
            f"optimizer and batch, and there are {chip.memory_bytes * chips / 2**30:,.0f} GiB: "
            f"make {advice} smaller"
        )


def median_speed(rows):
    """Returns the median of the training speeds, in steps per second, that a run has logged in
    metrics.jsonl.

    The result is NaN if the run was too short to log a speed. `rows` is the content of
    metrics.jsonl.
    """
    speeds = [row["time/steps_per_second"] for row in rows if "time/steps_per_second" in row]
    return statistics.median(speeds) if speeds else math.nan


def save_summary(workdir, model, *inputs):
    """Writes summary.json: shapes, parameters and FLOPs of a model by path, for `fnet report`."""
    (workdir / "summary.json").write_text(json.dumps(introspect.summary(model, *inputs).data()))


def check_steps(steps):
    """Returns `steps`. Raises ConfigError if the number is too large for the int32 step counter."""
    tr.flags.check_within("steps", steps, tr.flags.STEPS)
    return steps


def weights_notes(path):
    """Returns a dict for the argument `notes` of `fit`, which stores the dict in each checkpoint of
    a run.

    The returned dict contains the path of the pretrained weights. For weights from the Hugging Face
    Hub, the returned dict also contains the commit of the weights.
    """
    from fnet.models import pretrained  # here, because most scripts load no models

    commit = pretrained.revision(path)
    return {"weights": str(path)} | ({} if commit is None else {"weights_revision": commit})


def restarting():
    return "restart" in flags.FLAGS and flags.FLAGS.restart


def start(workdir, *outputs):
    """Creates the run's folder. With --restart, also removes the files of the old run that `fit`
    does not remove.
    The flags and files must have been checked before.

    Args:
      workdir: the run's folder.
      outputs: names of the files that the experiment writes to the folder, and that --restart
          removes.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if restarting():
        with tr.Checkpoints(workdir / "checkpoints") as checkpoints:
            checkpoints.lock()  # raises an error if another run is active
            for name in outputs:
                (workdir / name).unlink(missing_ok=True)


def decided(config, *workdirs, restart=False):
    """Returns the precision policy, and the configuration with the dtype of the policy in place of
    "auto". A resumed run keeps the dtype with which it was started. With --plan, the policy is that
    of the chips in the plan."""
    if config.precision != "auto":
        return hw.policy(config.precision), config
    if only_planned():
        kind = flags.FLAGS.plan.partition(":")[0]
        chip = (
            hw.systems[kind].chip
            if kind in hw.systems
            else f"TPU {kind}"
            if f"TPU {kind}" in hw.chips
            else kind
        )
        policy = hw.policy(chip if chip != "local" else None)
        return policy, dataclasses.replace(config, precision=policy.compute.name)
    policy = hw.policy()
    begun = (
        []
        if restart
        else [path for folder in workdirs if (path := folder / "config.json").exists()]
    )
    if (
        begun
        and (precision := tr.load_config(type(config), begun[0]).precision) != policy.compute.name
    ):
        policy = dataclasses.replace(
            hw.policy(precision), reason="the run in this folder was started with it"
        )
    return policy, dataclasses.replace(config, precision=policy.compute.name)


def with_residual(policy, config):
    """Returns a copy of `policy` with a bfloat16 residual stream if `config.residual` is "auto" and
    `policy.compute` is bfloat16. Otherwise returns `policy`."""
    if config.residual == "auto" and policy.compute.name == "bfloat16":
        return dataclasses.replace(policy, residual=policy.compute)
    return policy


def define_run_flags():
    """Defines the flags of a training run that are not in its configuration. `fit_options` returns
    them for `fit`."""
    flags.DEFINE_bool("restart", False, "delete an earlier run in --workdir first")
    flags.DEFINE_bool(
        "nojit", False, "run the step without compilation, one operation at a time, for a debugger"
    )
    flags.DEFINE_enum(
        "nonfinite",
        "stop",
        ["stop", "skip", "rollback"],
        "what to do if the loss or a parameter becomes NaN or infinite: stop the run, skip the "
        "update of this step, or roll back to the last checkpoint and continue with later batches",
    )


def fit_options():
    given = flags.FLAGS
    return {
        "jit": not given.nojit,
        "nonfinite": given.nonfinite,
        "debug": given.debug,
        "restart": given.restart,
    }


def define_device_flags():
    """Defines the flags that select the devices of a run; `plan` converts them to the argument
    `plan` of `training.fit`."""
    flags.DEFINE_string(
        "devices",
        "1",
        "number of devices to use, or local for all devices of all processes of the run",
    )
    flags.DEFINE_string(
        "plan",
        None,
        "print a plan for a step on these devices, which need not be attached, such as "
        "v5e:16x16, and exit",
    )


def only_planned():
    return "plan" in flags.FLAGS and bool(flags.FLAGS.plan)


def no_arguments(argv, example):
    """Raises ConfigError if there is a positional argument."""
    if argv[1:]:
        raise tr.ConfigError(f"{argv[1]}: flags begin with --, as in {example}")


def begin_comparison(methods, limits):
    """Checks the flags of a script that compares several --methods, and creates the folder for its
    table and figure.

    Args:
      methods: the allowed names in --methods.
      limits: {flag: interval of allowed values}.

    Returns:
      The folder.

    Raises:
      ConfigError: a flag has an invalid value.
    """
    given = flags.FLAGS
    for name, within in limits.items():
        tr.flags.check_within(name, given[name].value, within)
    if wrong := set(given.methods) - set(methods):
        raise tr.ConfigError(f"--methods={','.join(sorted(wrong))}: use {', '.join(methods)}")
    needs("matplotlib")
    workdir = user_path("workdir", given.workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    return workdir


def begin():
    """Checks the devices and --devices before anything is computed. With --devices=local, also
    connects to the other processes of the run.

    Raises:
      ConfigError: --devices is invalid, or JAX finds no device or fewer devices than --devices.
    """
    logging.set_verbosity(logging.WARNING)  # JAX reports every accelerator it does not find
    wanted = flags.FLAGS.devices if "devices" in flags.FLAGS else "1"
    if wanted != "local" and not re.fullmatch("[1-9][0-9]{0,8}", wanted):
        raise tr.ConfigError(f"--devices={wanted}: use a number, or local for all")
    if wanted == "local":
        parallel.initialize()
    try:
        count = len(jax.devices())
    except (RuntimeError, AssertionError) as error:
        raise tr.ConfigError(no_device(error)) from None
    if wanted != "local" and int(wanted) > max(count, 1):
        raise tr.ConfigError(
            f"--devices={wanted}: this run has {count} (to emulate them on a CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted} in the environment)"
        )


def plan(step, init, batch):
    """Returns the `parallel.plan` for --devices, or None for one device. With --plan, prints the
    plan and exits."""
    if only_planned():
        print(parallel.plan(step, init, batch, devices=flags.FLAGS.plan))
        sys.exit(0)
    wanted = flags.FLAGS.devices
    if wanted == "1" or len(jax.devices()) == 1:
        return None
    made = parallel.plan(
        step, init, batch, devices=jax.devices()[: None if wanted == "local" else int(wanted)]
    )
    print(made)
    return made


def run(main):
    """Runs the function `main` with `absl.app.run`. If `main` raises an exception, `run` prints an
    error message and exits with one of the exit codes in the docstring of this module. With
    --debug, `run` prints the traceback."""
    flags.DEFINE_bool(
        "debug",
        False,
        "show the traceback of an error; if a value becomes NaN or infinite, replay the "
        "step and name the layer",
    )
    sys.stdout, sys.stderr = _Stream(sys.stdout, 1), _Stream(sys.stderr, 2)
    with tr.compilation_cache():
        app.run(functools.partial(_said, main), flags_parser=parse_flags)


class _Stream:
    """A standard stream that may be closed during the run. The run then continues without output.

    For example, `| head` causes no error, and a long run continues after its terminal was closed.
    Characters that the stream cannot encode are written as escape sequences.
    """

    def __init__(self, stream, number):
        self._stream, self._number = stream or open(os.devnull, "w"), number  # None: it was closed
        if hasattr(self._stream, "reconfigure"):
            with contextlib.suppress(OSError):  # a stream that was replaced since it was opened
                self._stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        return self._quietly(self._stream.write, text)

    def flush(self):
        self._quietly(self._stream.flush)

    def _quietly(self, function, *args):
        try:
            return function(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            null = os.open(
                os.devnull, os.O_WRONLY
            )  # what is still buffered goes there when Python ends
            os.dup2(null, self._number)
            os.close(null)
            return len(args[0]) if args else None


def _said(main, argv):
    try:
        begin()
        main(argv)
        sys.stdout.flush()
    except tr.Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(0)
    except KeyboardInterrupt:
        stop("interrupted; the same command resumes a run from its last checkpoint", 130)
    except Exception as error:
        if flags.FLAGS.debug:
            raise
        stop(sentence(error), 2 if isinstance(error, _GIVEN) else 1)


_GIVEN = (
    ValueError,
    TypeError,
    OSError,
    LookupError,
    OverflowError,
    MemoryError,
    ModuleNotFoundError,
    tr.CheckpointError,
    tr.PeerLost,
)


def sentence(error):
    """Returns the first line of the message of an exception, with a hint to --debug if lines are
    omitted or the error is unexpected. For `CheckpointError`, `Diverged` and `OutOfMemory`, returns
    all lines of the message, because the further lines can list leaves or arrays."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    if isinstance(error, tr.CheckpointError | tr.Diverged | tr.OutOfMemory):
        return text
    first = (text.splitlines() or [type(error).__name__])[0]
    return (
        first if isinstance(error, _GIVEN) and text == first else f"{first} (--debug shows where)"
    )


def parse_flags(argv):
    """Parses the flags with absl. For an unknown flag or an invalid value, prints a one-line error
    and exits with code 2."""
    try:
        for flag, value in zip(
            argv, [*argv[1:], ""]
        ):  # absl reads a flag file to its end: a pipe may have none
            if flag.lstrip("-").partition("=")[0] == "flagfile":
                tr.flags.regular_file("flagfile", flag.partition("=")[2] or value)
        rest = flags.FLAGS(argv)
        for name in flags.FLAGS:
            value = flags.FLAGS[name].value
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"--{name}={value}: expected a finite number")
        return rest
    except (flags.Error, ValueError, OSError) as error:  # the last two: of a --flagfile
        stop(f"{' '.join(str(error).split())} (--help lists the flags)")


def stop(message, code=2):
    print(
        "error:", " ".join(str(message).splitlines()).strip(), file=sys.stderr
    )  # an argument may hold a line break
    sys.exit(code)


@contextlib.contextmanager
def one_line_errors(*kinds):
    """Converts exceptions of these types to a one-line error and exit code 2. With --debug, they
    are raised."""
    try:
        yield
    except kinds as error:
        if flags.FLAGS.debug:
            raise
        stop(sentence(error))

"""`fnet lock step.py:make`: writes down what a training step computes, for `fnet diff`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fnet.cli import _plan
from fnet.cli._console import still

_DESCRIPTION = (
    __doc__
    + """

The function has no arguments and returns (step, init, batch), as for `fnet plan`. The file, step.lock, is text: the
equations of each layer, in a form that does not depend on the version of JAX, their FLOPs, the estimated peak memory,
and a few numbers that say which values leave each layer. Keep it in version control. After an upgrade of JAX, or a
refactoring, `fnet diff step.lock` names the first equation that changed.
"""
)


def define(commands: Any) -> None:
    """Adds the command `lock` to the parser of `fnet`."""
    lock = commands.add_parser(
        "lock",
        help="write down what a training step computes",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
    )
    lock.add_argument("-o", "--output", help="the file (default: step.lock for step.py:make)")
    add_options(lock)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what identifies a lock: the function, and how its step runs."""
    parser.add_argument(
        "function", help="function that returns the step, as module:function or file.py:function"
    )
    parser.add_argument(
        "--no-values", action="store_true", help="do not run the step; record no values"
    )
    parser.add_argument(
        "--devices", help="also record the plan for these devices, such as v5e:4x4 (see fnet plan)"
    )
    parser.add_argument("--strategy", default="auto", help="strategy of the plan (default: auto)")


def run(args: argparse.Namespace) -> int:
    """Writes the lock file.

    Raises:
        ValueError: the function or the devices are invalid.
    """
    where = args.function.rpartition(":")[0].removesuffix(".py")
    path = Path(args.output or f"{Path(where).name.rpartition('.')[2]}.lock")
    lock = locked(args, "lock")
    lock.save(path)
    print(f"{path}: {lock}")
    return 0


def locked(args: argparse.Namespace, command: str) -> Any:
    """Returns the lock of the step that the options name."""
    import jax

    from fnet import introspect, parallel
    from fnet.introspect._lock._lock import step_arguments

    with still(command, f"running {args.function}") as heartbeat:
        step, init, batch = _plan.found(args.function)
        plan = None
        if args.devices:
            heartbeat.begin("planning")
            plan = parallel.plan(
                step, init, batch, devices=args.devices, strategy=args.strategy, compile=False
            )
        heartbeat.begin("reading the step" if args.no_values else "running the step")
        key = jax.random.key(0)
        state = jax.eval_shape(init, key) if args.no_values else init(key)
        return introspect.lock(
            step,
            *step_arguments(step, state, batch),
            plan=plan,
            values=not args.no_values,
            target=_target(args),
        )


def _target(args: argparse.Namespace) -> list[str]:
    words = [args.function]
    words += ["--no-values"] if args.no_values else []
    words += [f"--devices={args.devices}", f"--strategy={args.strategy}"] if args.devices else []
    return words

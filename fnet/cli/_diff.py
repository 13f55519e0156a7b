"""`fnet diff step.lock`: names the first equation of a training step that has changed since `fnet
lock`."""

from __future__ import annotations

import argparse
from typing import Any

from fnet.cli import _lock

_DESCRIPTION = (
    __doc__
    + """

With one file, the step of today is compared with it: the function that `fnet lock` was called with runs again, so that
a lock file is as trustworthy as the step that it names. With two files, nothing but the files is read.

    fnet diff step.lock
    fnet diff step.lock other.py:make
    fnet diff old.lock new.lock

The exit code is 0 if nothing changed, 1 if something did, and 2 for an error.
"""
)


def define(commands: Any) -> None:
    """Adds the command `diff` to the parser of `fnet`."""
    diff = commands.add_parser(
        "diff",
        help="name the first equation of a step that has changed since fnet lock",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
    )
    diff.add_argument("old", help="the lock file")
    diff.add_argument(
        "new",
        nargs="?",
        help="what to compare with it: a lock file, module:function or file.py:function "
        "(default: the function of the lock file)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the changes, and returns 1 if there are any.

    Raises:
        ValueError: a file is no lock file, or the step cannot be read.
    """
    from fnet import introspect

    old = introspect.read_lock(args.old)
    if args.new is not None and ":" not in args.new:
        new = introspect.read_lock(args.new)
    else:
        new = _today(old.target, args)
    changes = introspect.diff(old, new)
    print(changes)
    return 1 if changes else 0


def _today(target: tuple[str, ...], args: argparse.Namespace) -> Any:
    """Returns the lock of the step as it is now."""
    if not target and args.new is None:
        raise ValueError(
            f"{args.old} was not written by `fnet lock`, so that it names no function: compare it "
            "with step.py:make or with another lock file"
        )
    parser = argparse.ArgumentParser(prog="fnet diff", exit_on_error=False)
    _lock.add_options(parser)
    words = [args.new or target[0], *target[1:]]
    try:
        return _lock.locked(parser.parse_args(words), "diff")
    except (ValueError, OSError):
        raise
    except Exception as error:  # of the step: an exit code of 1 would mean a change
        if args.debug:
            raise
        raise ValueError(f"{words[0]} cannot be run: {type(error).__name__}: {error}") from error

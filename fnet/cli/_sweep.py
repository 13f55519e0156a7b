"""`fnet sweep SCRIPT --space FILE`: searches for hyperparameters of an experiment."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

_DESCRIPTION = (
    __doc__
    + """

SCRIPT is an experiment with absl flags and --workdir, whose run writes metrics.jsonl, as all experiments of fnet do.
The space is a JSON file:

    {"learning_rate": {"log_uniform": [0.001, 1]}, "width": {"integer": [8, 64]},
     "optimizer": {"choice": ["adam", "nesterov"]}, "dropout": {"uniform": [0, 0.5]}}

Each trial has a folder with its flags, output, result and run. The same command continues a sweep: trials that were
interrupted or killed resume from their checkpoints. Several workers, also on other machines that share the folder, may
run the same command; each trial runs once. Further flags of the script follow after --.

    fnet sweep experiments/image_classification.py --space space.json --budget 30m -- --epochs=10 --early_stop=5
"""
)


def define(commands: Any) -> None:
    """Adds the command `sweep` to the parser of `fnet`."""
    parser = commands.add_parser(
        "sweep",
        help="search for the hyperparameters of an experiment",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("script", help="Python file of the experiment")
    parser.add_argument(
        "--space", required=True, help="JSON file with the hyperparameters and their ranges"
    )
    parser.add_argument(
        "--budget",
        default="30m",
        help="time limit of this worker, such as 90s, 30m or 2h (default: %(default)s)",
    )
    parser.add_argument("--trials", type=int, help="maximum number of trials of the sweep")
    parser.add_argument(
        "--workdir", default="runs/sweep", help="folder of the sweep (default: %(default)s)"
    )
    parser.add_argument(
        "--metric",
        help="metric by which the trials are compared (default: validation/accuracy if the "
        "run logs it, otherwise another accuracy or loss of validation or test data)",
    )
    parser.add_argument(
        "--mode",
        choices=["max", "min"],
        help="whether the largest or the smallest value of "
        "the metric is the best (default: known for accuracy, loss, error, mae and other common "
        "metrics; needed for any other)",
    )
    parser.add_argument(
        "--sampler",
        choices=["sobol", "random", "bayesian"],
        default="sobol",
        help="method that selects the hyperparameters; bayesian needs optuna (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the sampler (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="number of processes that run trials on this machine (default: %(default)s)",
    )
    parser.epilog = "-- FLAG ...: flags that are passed to the script in every trial"


def run(args: argparse.Namespace) -> int:
    from fnet.search.sweep import _sweep

    if args.workers < 1 or (args.trials is not None and args.trials < 1):
        raise ValueError(
            f"expected at least one worker and one trial; got {args.workers} and {args.trials}"
        )
    return _sweep.run(
        args.script,
        args.space,
        args.workdir,
        seconds=budget(args.budget),
        trials=args.trials,
        metric=args.metric,
        mode=args.mode,
        sampler=args.sampler,
        seed=args.seed,
        flags=args.flags,
        workers=args.workers,
    )


def separate(argv: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Splits a command line of `fnet sweep` or `fnet run` at --. Returns the arguments before --,
    which are those of `fnet`, and the arguments after --, which are those of the program that it
    starts."""
    if not {"sweep", "run"} & set(argv) or "--" not in argv:
        return argv, []
    at = list(argv).index("--")
    return argv[:at], list(argv[at + 1 :])


def budget(text: str) -> float:
    """Converts a duration such as 30m to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not match or float(match[1]) == 0:
        raise ValueError(f"--budget={text}: expected a time such as 90s, 30m or 2h")
    return float(match[1]) * {"s": 1, "": 1, "m": 60, "h": 3600}[match[2]]

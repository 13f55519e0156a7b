"""Which rules of `ft.tune` make a step faster with the installed XLA: each rule alone, compared
with the plain step.

    python -m benchmarks.rules gpt cnn mlp
    python -m benchmarks.rules cnn --without          # each rule disabled, compared with all rules
    python -m benchmarks.rules cnn --dtype=mixed      # for convolutions of bfloat16

Each rule is combined with the rule `convolution_kernels`, which sets compiler options, because the
other rules were written for these options. `convolution_kernels` itself is compared with the plain
step. A rule makes a step faster if the ratio of times is below 1 in 90 % of the rounds and its
median is at least 2 % below 1 (5 % with fewer than nine rounds).
"""

from __future__ import annotations

import statistics
import sys

from benchmarks._harness import header
from benchmarks._live import PeerError
from benchmarks.peers._compare import PACKAGES, compare, parser, tables
from fnet.transforms._tune._tune import RULES

KERNELS = "convolution_kernels"


def main(arguments=None) -> None:
    made = parser(prog="python -m benchmarks.rules", description=__doc__.split("\n")[0])
    made.add_argument(
        "--peer",
        choices=("jax", "fnet", "linen", "equinox"),
        default="jax",
        help="library of the step",
    )
    made.add_argument("--without", action="store_true", help="disable each rule in turn instead")
    options = made.parse_args(arguments)
    names = [rule.name for rule in RULES["cpu"]]
    plain, base = {"peer": options.peer}, "all" if options.without else KERNELS
    variants = {"plain": plain, "all": {**plain, "rules": dict.fromkeys(names, True)}}
    for name in names:
        rules = {
            other: other != name if options.without else other in (name, KERNELS) for other in names
        }
        variants["without " * options.without + name] = {**plain, "rules": rules}
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.rules {command}", options.rounds, PACKAGES))
    for workload, mode, dtype in tables(options):
        figures, text = compare(
            variants, workload, mode, dtype, options, bases=("plain", base), required=True
        )
        print(text)
        for name in names:
            tried = "without " * options.without + name
            other = "plain" if tried == KERNELS else base
            on, off = (
                (figures[other], figures[tried])
                if options.without
                else (figures[tried], figures[other])
            )
            print(f"{name} {verdict(on, off)}")
        print(flush=True)


def verdict(on: list[float], off: list[float]) -> str:
    """Returns a text about the effect of a rule on the time of a step, from the times with and
    without the rule."""
    ratios = sorted(a / b for a, b in zip(on, off))
    median, most = statistics.median(ratios), max(1, len(ratios) * 9 // 10)
    margin = 0.02 if len(ratios) >= 9 else 0.05
    if median < 1 - margin and sum(ratio < 1 for ratio in ratios) >= most:
        return f"pays: {median:.2f} of the time"
    if median > 1 + margin and sum(ratio > 1 for ratio in ratios) >= most:
        return f"costs: {median:.2f} of the time"
    return f"makes no difference that shows: {median:.2f} of the time"


if __name__ == "__main__":
    try:
        main()
    except PeerError as error:
        sys.exit(f"benchmarks.rules: {error}")

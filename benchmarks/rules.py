"""Which rules of `ft.tune` pay on the XLA that is installed: each alone, with all others off, beside the plain step.

    python -m benchmarks.rules gpt cnn mlp
    python -m benchmarks.rules cnn --without          # each off, with all others on, beside all of them
    python -m benchmarks.rules cnn --dtype=mixed      # for convolutions of bfloat16

Alone, a rule stands beside `convolution_kernels` (compiler options), which the others were made for, and that beside
the plain step. A rule pays where it takes less time than the step without it in nine rounds of ten and in the median
2 % less; 5 % less where there were fewer than nine rounds.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks._harness import header
from benchmarks._live import PeerError
from benchmarks.peers._compare import PACKAGES, compare, parser, tables
from fnet.transforms._tune import RULES

KERNELS = "convolution_kernels"


def main(arguments=None) -> None:
    made = parser(prog="python -m benchmarks.rules", description=__doc__.split("\n")[0])
    made.add_argument("--peer", choices=("jax", "fnet", "linen", "equinox"), default="jax", help="whose step is tuned")
    made.add_argument("--without", action="store_true", help="each rule off and all others on, instead")
    options = made.parse_args(arguments)
    names = [rule.name for rule in RULES["cpu"]]
    plain, base = {"peer": options.peer}, "all" if options.without else KERNELS
    variants = {"plain": plain, "all": {**plain, "rules": dict.fromkeys(names, True)}}
    for name in names:
        rules = {other: other != name if options.without else other in (name, KERNELS) for other in names}
        variants["without " * options.without + name] = {**plain, "rules": rules}
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    print(header(f"python -m benchmarks.rules {command}", options.rounds, PACKAGES))
    for workload, mode, dtype in tables(options):
        figures, text = compare(variants, workload, mode, dtype, options, bases=("plain", base), required=True)
        print(text)
        for name in names:
            tried = "without " * options.without + name
            other = "plain" if tried == KERNELS else base
            on, off = (figures[other], figures[tried]) if options.without else (figures[tried], figures[other])
            print(f"{name} {verdict(on, off)}")
        print(flush=True)


def verdict(on: list[float], off: list[float]) -> str:
    """What a rule does to the time of a step, from its rounds with the rule and without."""
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

"""Injects faults into runs and checkpoints, and prints the results.

Run it with:

    python -m tests.torture                     # make torture: all of it
    python -m tests.torture --scale=0.05 --fuzz=2000 --only=SIGKILL,fuzz
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.torture import damage, harms, stores


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of all counts but the fuzz's")
    parser.add_argument("--fuzz", type=int, default=100_000, help="inputs for the readers")
    parser.add_argument(
        "--only", default="", help="parts of the names of the rows that are wanted, by commas"
    )
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    # A background process may have inherited that these are ignored, and its victims would inherit
    # it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    seed = random.randrange(10**6) if options.seed is None else options.seed
    many = lambda n: max(1, round(n * options.scale))
    rows = harms.every(many) + stores.every(many)
    apart = lambda function: lambda count, folder, rng: damage.apart(function, count, folder, seed)
    rows += [
        ("one bit flipped", many(1000), apart("damage.flips")),
        ("a file cut, deleted, exchanged", many(100), apart("damage.files")),
        ("fuzz: seven readers", options.fuzz, apart("fuzz.run")),
        ("random flags, each experiment", many(1000), apart("flags.combinations")),
        ("two steps with random flags", many(30), apart("flags.runs")),
    ]
    wanted = [word for word in options.only.split(",") if word]
    base = Path(tempfile.mkdtemp(prefix="torture-"))
    print(
        f"seed {seed}\n{'harm':34} {'tried':>7} {'survived':>9} {'lost':>5} {'seconds':>8}",
        flush=True,
    )
    failed = False
    try:
        for name, count, harm in rows:
            if wanted and not any(word in name for word in wanted):
                continue
            folder, began = (
                base / name.replace(" ", "_").replace(",", "").replace(":", ""),
                time.monotonic(),
            )
            folder.mkdir(mode=0o777)
            tried, survived, said = harm(count, folder, random.Random(f"{seed} {name}"))
            print(
                f"{name:34} {tried:7} {survived:9} {tried - survived:5} "
                f"{time.monotonic() - began:8.0f}",
                flush=True,
            )
            for line in said[:5]:
                print(f"    {line}", flush=True)
            failed |= tried != survived
            if tried == survived:
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        if not failed:
            shutil.rmtree(base, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

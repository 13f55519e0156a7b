"""A child process that aborts or hangs, in place of `fnet.parallel._sanitizer._child`. The inputs
of a case's name say what happens: XLA's own aborts would end with another release of it."""

import json
import os
import sys
import time


def main(job_file, results_file):
    with open(job_file) as stream:
        job = json.load(stream)
    items = list(job["cases"].items())
    with open(results_file, "a") as results:

        def write(line):
            results.write(json.dumps(line) + "\n")
            results.flush()

        for start in range(0, len(items), job["size"]):
            batch = items[start : start + job["size"]]
            write({"begin": [int(i) for i, _ in batch]})
            names = [case[0] for _, case in batch]
            if "aborts" in names:
                print(
                    "F0000 file.cc:1] Check failed: a == b (1 vs. 2)", file=sys.stderr, flush=True
                )
                os.abort()
            if "hangs" in names:
                time.sleep(600)
            for i, _ in batch:
                write({"id": int(i), "status": "right"})


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The elastic drill: hosts are killed, told to leave, and started, while `fnet run` trains on them.

    python -m tests.training.elastic_drill gpt --changes=20

The run begins on 8 devices of four hosts, in as many processes, and continues on 6, 4, 1 and again
more. Its state at the end is compared with that of a run in one process that nobody disturbed: with
`ft.invariant` they must have the same bits. With --plain it is not used, and the largest difference,
of the largest element of each array, must be below 1e-6 a step. `python -m benchmarks.invariant`
measures what `ft.invariant` costs.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROGRAM = Path(__file__).with_name("elastic_program.py")
DEVICES = (4, 2, 1, 1)  # of each host
SETS = ((0, 1, 2, 3), (0, 1), (0,), (2,), (1, 2, 3), (0, 2))  # with 8, 6, 4, 1, 4, 5 devices
PYTHON = sys.executable
LOST_AFTER = 5


def environment(devices):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "FNET_PROBE": "0", "XLA_FLAGS": flags}


class Drill:
    def __init__(self, folder, model, steps, options):
        self.folder, self.model, self.hosts = folder, model, {}
        self.program = [PYTHON, str(PROGRAM), model, str(folder / "run"), str(steps), *options]

    def start(self, i):
        options = [f"--elastic={self.folder / 'hosts'}", f"--lost-after={LOST_AFTER}"]
        command = [PYTHON, "-m", "fnet.cli", "run", *options, "--", *self.program]
        with open(self.folder / f"host{i}.log", "a") as log:
            self.hosts[i] = subprocess.Popen(
                command, env=environment(DEVICES[i]), stdout=log, stderr=log, start_new_session=True
            )

    def end(self, i, number):
        host = self.hosts.pop(i)
        host.send_signal(number)
        return host

    def step(self):
        """The last step that the run has logged."""
        try:
            lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
            return int(lines[-1].split('"step":')[1].split(",")[0])
        except (OSError, IndexError, ValueError):
            return 0

    def change(self, chosen, draw):
        """Lets the hosts be the chosen ones. Returns what was done."""
        done = []
        for i in sorted(set(self.hosts) - set(chosen)):
            number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            self.end(i, number)
            done.append(f"host {i} {number.name}")
        for i in sorted(set(chosen) - set(self.hosts)):
            self.start(i)
            done.append(f"host {i} started")
        return ", ".join(done)


def drill(folder, model, changes, steps, options, seed):
    run, draw = Drill(folder, model, steps, options), random.Random(seed)
    now = SETS[0]
    for i in now:
        run.start(i)
    try:
        for change in range(changes):
            until = steps * (change + draw.uniform(0.3, 1)) / (changes + 1)
            while run.step() < until and any(host.poll() is None for host in run.hosts.values()):
                time.sleep(0.1)
            assert any(host.poll() is None for host in run.hosts.values()), (
                "the run has ended early"
            )
            now = draw.choice([each for each in SETS if each != now])
            print(f"  step {run.step()}: {run.change(now, draw)}", flush=True)
        codes = [host.wait(600) for host in run.hosts.values()]
    finally:
        for i in list(run.hosts):
            run.end(i, signal.SIGKILL)
    assert codes == [0] * len(codes), codes
    return dict(np.load(folder / "run" / "final.npz"))


def undisturbed(folder, model, steps, options):
    command = [PYTHON, str(PROGRAM), model, str(folder / "alone"), str(steps), *options]
    log = (folder / "alone.log").open("w")
    subprocess.run(command, env=environment(1), stdout=log, stderr=log, check=True)
    return dict(np.load(folder / "alone" / "final.npz"))


def main(arguments):
    made = argparse.ArgumentParser(prog="python -m tests.training.elastic_drill")
    made.add_argument("models", nargs="*", default=["gpt", "cnn", "nnx"])
    made.add_argument("--changes", type=int, default=20)
    made.add_argument("--steps", type=int, default=0, help="default: 20 for each change")
    made.add_argument("--plain", action="store_true", help="without ft.invariant")
    made.add_argument("--seed", type=int, default=0)
    options = made.parse_args(arguments)
    steps, failed = options.steps or 20 * (options.changes + 1), 0
    more = [] if options.plain else ["--invariant"]
    for model in options.models:
        folder = Path(tempfile.mkdtemp(prefix=f"fnet-elastic-{model}-"))
        print(f"{model}: {steps} steps, {options.changes} changes", flush=True)
        found = drill(folder, model, options.changes, steps, [*more, "--pause=0.2"], options.seed)
        alone = undisturbed(folder, model, steps, more)
        equal = [name for name in alone if found[name].tobytes() == alone[name].tobytes()]
        worst = max(
            float(np.abs(found[n] - x).max() / max(np.abs(x).max(), 1e-30))
            for n, x in alone.items()
            if x.dtype == np.float32
        )
        good = len(equal) == len(alone) if more else worst / steps < 1e-6
        failed += not good
        print(
            f"  {len(equal)} of {len(alone)} arrays have the same bits; largest difference {worst:.1e}"
        )
        if good:
            shutil.rmtree(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

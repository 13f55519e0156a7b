"""The process of one peer: builds its model and runs it on request. `python -m
benchmarks.peers._worker {...}`"""

from __future__ import annotations

import importlib
import json
import math
import runpy
import sys
import time
from pathlib import Path

from benchmarks._live import serve

PEERS = {
    "fnet": ("_fnet", {}),
    "fnet-tuned": ("_fnet", {"rules": {}}),
    "jax": ("_handwritten", {}),
    "jax-tuned": ("_handwritten", {"rules": {}}),
    "linen": ("_linen", {}),
    "linen-tuned": ("_linen", {"rules": {}}),
    "equinox": ("_equinox", {}),
    "equinox-tuned": ("_equinox", {"rules": {}}),
    "nnx": ("_nnx", {}),
    "keras": ("_keras", {}),
    "torch": ("_torch", {}),
    "torch-compile": ("_torch", {"compiled": True}),
}


def allocator(kind: str) -> None:
    """Selects the memory allocator. "tuned" calls fnet's `cpu_allocator`. It is loaded from its
    file, because
    `import fnet` would import JAX in PyTorch's process."""
    file = Path(__file__).parents[2] / "fnet" / "hardware" / "_allocator.py"
    if kind == "tuned" and not runpy.run_path(str(file))["cpu_allocator"]():
        raise RuntimeError("--allocator=tuned needs the GNU C library on Linux")


class Worker:
    """Answers the questions to the process."""

    def __init__(self, *, peer, workload, size, mode, mixed, checked, allocator, **how):
        self.names, self.how = (peer, workload, size), how
        self.train, self.mixed, self.checked, self.allocator = (
            mode == "train",
            mixed,
            checked,
            allocator,
        )

    def prepare(self):
        """Imports the packages of the peer. Returns {"platform": a platform such as "cpu"}, or
        {"missing": a package that is not installed}."""
        allocator(self.allocator)
        module, self.options = PEERS[self.names[0]]
        self.options = {**self.options, **self.how}
        try:
            self.module = importlib.import_module(f"benchmarks.peers.{module}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("benchmarks"):
                raise
            return {"missing": error.name}
        return {"platform": self.module.Run.platform()}

    def start(self):
        """Builds and compiles the step. Returns the seconds of the first step, the first losses,
        the platform and the device.

        Training uses the same batch in each step, so that errors in the update change the next
        loss. Inference uses several batches.
        """
        from benchmarks.peers import _workloads as spec

        workload = spec.workload(*self.names[1:])
        batches = spec.batches(workload)
        self.run = self.module.build(
            workload,
            spec.weights(workload),
            batches,
            train=self.train,
            mixed=self.mixed,
            **self.options,
        )
        seconds, values = [], []
        for i in range(self.checked + 1):
            begun = time.perf_counter()
            values.append(self._step(0 if self.train else i))
            seconds.append(time.perf_counter() - begun)
        first, self.each = seconds[0], seconds[-1]
        values = [self.run.numpy(value) for value in values[: self.checked]]
        losses = (
            map(float, values)
            if self.train
            else map(spec.cross_entropy, values, (y for _, y in batches))
        )
        return {
            "first": first,
            "losses": list(losses),
            "platform": self.run.platform(),
            "device": self.run.device(),
        }

    def time(self, budget):
        """Returns the seconds per step, over about `budget` seconds and at least two steps."""
        return self.clocks(budget)[0]

    def clocks(self, budget):
        """Returns the seconds per step, and the processor's seconds per step."""
        if self.each < 0.05:
            self._step(0)  # not timed, because the previous peer has changed the CPU's caches
        steps = max(2, math.ceil(budget / self.each))
        begun, used = time.perf_counter(), time.process_time()
        for i in range(steps):
            value = self.run.step(i)
            if not self.train:
                self.run.wait(value)  # otherwise, independent calls would overlap
        self.run.wait(value)
        self.each = (time.perf_counter() - begun) / steps
        return self.each, (time.process_time() - used) / steps

    def memory(self):
        """Returns the peak bytes of the process, and of the device if the device reports them."""
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return {
            "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
            "device": self.run.memory(),
        }

    def _step(self, batch):
        value = self.run.step(batch)
        self.run.wait(value)
        return value


if __name__ == "__main__":
    worker = Worker(**json.loads(sys.argv[1]))
    serve(
        {
            "prepare": worker.prepare,
            "start": worker.start,
            "time": worker.time,
            "clocks": worker.clocks,
            "memory": worker.memory,
        }
    )

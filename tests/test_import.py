"""`import fnet` is cheap: JAX, and nothing else that is heavy."""

import subprocess
import sys

HEAVY = ("flax", "optax", "orbax", "tensorboardX", "tensorflow", "torch", "matplotlib", "sklearn", "rich",
         "safetensors", "chex", "pandas")
TIMER = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"


def _run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_nothing_heavy():
    loaded = _run(f"import sys, fnet; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_import_costs_at_most_100_ms_more_than_jax():
    # Processor time, in fresh processes that take turns: the machine may be busy, and only the difference counts.
    times = {module: [] for module in ("fnet", "jax")}
    for _ in range(5):
        for module, each in times.items():
            each.append(float(_run(TIMER.format(module))))
    assert min(times["fnet"]) - min(times["jax"]) < 0.1, times

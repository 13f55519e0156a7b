"""`import fnet` is cheap: JAX, and nothing else that is heavy."""

import statistics
import subprocess
import sys

HEAVY = ("flax", "optax", "orbax", "tensorboardX", "tensorflow", "torch", "matplotlib", "sklearn", "rich",
         "safetensors", "chex", "pandas")
TIMER = "import time; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"


def _run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_loads_nothing_heavy():
    loaded = _run(f"import sys, fnet; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_training_and_models_load_on_first_use():
    code = ("import sys, fnet; before = 'fnet.training' in sys.modules; fnet.training.TrainState; fnet.models; "
            "late = ('orbax.checkpoint', 'tensorboardX', 'matplotlib', 'rich'); "
            "print(before, [name for name in late if name in sys.modules])")
    assert _run(code) == "False []"


def test_import_costs_at_most_100_ms_more_than_jax():
    # Pairs in turn, each in a fresh process: the machine may be busy, and only the difference counts.
    extra = [float(_run(TIMER.format("fnet"))) - float(_run(TIMER.format("jax"))) for _ in range(5)]
    assert statistics.median(extra) < 0.1, extra

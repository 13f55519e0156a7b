"""`import fnet` is cheap: JAX, and nothing else that is heavy."""

import subprocess
import sys

import pytest

HEAVY = (
    "flax",
    "optax",
    "orbax",
    "tensorboardX",
    "tensorflow",
    "torch",
    "matplotlib",
    "sklearn",
    "rich",
    "safetensors",
    "chex",
    "pandas",
)


def _run(code):
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.exhaustive
def test_every_public_package_is_an_attribute():
    code = """
import sys, fnet
lazy = [name for name in fnet.__all__ if f"fnet.{name}" not in sys.modules]
assert set(fnet.__all__) <= set(dir(fnet))
print(lazy, [getattr(fnet, name).__name__ for name in lazy])
"""
    names = [
        "compress",
        "cost",
        "export",
        "federated",
        "introspect",
        "models",
        "parallel",
        "report",
        "search",
        "serve",
        "training",
    ]
    assert _run(code) == f"{names} {[f'fnet.{name}' for name in names]}"


@pytest.mark.exhaustive
def test_import_loads_nothing_heavy_and_few_modules_that_jax_does_not():
    code = f"""
import sys, jax
before = set(sys.modules)
import fnet
print([name for name in {HEAVY} if name in sys.modules], "fnet.training" in sys.modules)
print(len([name for name in sys.modules if name not in before and not name.startswith("fnet")]))
"""
    heavy, count = _run(code).splitlines()
    assert heavy == "[] False" and int(count) < 60  # 29; of Optax, 160

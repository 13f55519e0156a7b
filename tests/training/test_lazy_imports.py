"""What is heavy loads on first use."""

import subprocess
import sys

import pytest


def loaded(program, *names):
    program += f"\nimport sys; print([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.exhaustive
def test_training_does_not_load_orbax_tensorboard_or_plots():
    heavy = ("orbax.checkpoint", "tensorboardX", "matplotlib", "sklearn", "tensorstore")
    assert loaded("import fnet.training", *heavy) == "[]"

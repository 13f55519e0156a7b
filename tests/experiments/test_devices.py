"""The experiments on several devices, and planned for chips that are not there: nothing but a flag
is different."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from fnet import training as tr

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).parents[2]


def run(name, *flags, code=0):
    drop = ("JAX_NUMPY_DTYPE_PROMOTION", "JAX_NUMPY_RANK_PROMOTION")
    environment = {k: v for k, v in os.environ.items() if k not in drop}  # its eight devices stay
    environment |= {"FNET_PROBE": "0", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *flags],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.mark.exhaustive
def test_eight_devices_have_the_numbers_of_one(tmp_path):
    """With dropout and a moving average; BatchNorm, loss scales and keys: test_fit_plan.py,
    test_restore.py."""
    flags = [
        "--steps=12",
        "--model=mlp",
        "--batch_size=32",
        "--nolast20",
        "--precision=float32",
        "--augment=none",
    ]
    said = {
        count: run(
            "image_classification", f"--devices={count}", f"--workdir={tmp_path / count}", *flags
        )
        for count in ("1", "8")
    }
    assert "8 x " in said["8"] and "chosen" in said["8"] and "chosen" not in said["1"]
    one, eight = (
        [
            {key: value for key, value in row.items() if "/" in key and not key.startswith("time/")}
            for row in tr.read_metrics(tmp_path / count)
        ]
        for count in ("1", "8")
    )
    assert [row.keys() for row in one] == [row.keys() for row in eight] and len(one) >= 2
    for a, b in zip(one, eight):
        for key in a:
            np.testing.assert_allclose(
                np.asarray(b[key]), np.asarray(a[key]), rtol=1e-3, err_msg=key
            )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name, flags",
    [
        ("image_classification", ["--batch_size=64", "--width=4"]),
        pytest.param(
            "language_model",
            ["--width=32", "--depth=1", "--heads=2", "--context=32"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_plan_is_printed_and_nothing_else_happens(tmp_path, name, flags):
    said = run(name, "--plan=v5e:2x2", f"--workdir={tmp_path / 'none'}", *flags)
    assert re.search(r"^4 x TPU v5e, 16\.0 GiB each: ", said, re.M) and "fsdp+pins" in said
    assert (
        "compute bfloat16" in said and "TPU v5e: its matrix units" in said
    )  # the policy is that of the chips
    assert not (tmp_path / "none").exists() and "steps of" not in said


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flag, message",
    [
        (
            "--devices=9",
            "error: --devices=9: this run has 8 (to emulate them on a CPU, set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=9 in the environment)\n",
        ),
        ("--devices=all", "error: --devices=all: use a number, or local for all\n"),
    ],
)
def test_errors(tmp_path, flag, message):
    assert run("language_model", flag, f"--workdir={tmp_path}", code=2) == message


@pytest.mark.exhaustive
def test_the_plan_in_readme_is_what_the_experiment_prints():
    printed = run("plan_flax")
    [shown] = re.findall(r"```\n(16 x TPU v5e.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    first, *rows = shown.splitlines()
    assert printed.startswith(first.removesuffix(" ...")) and len(rows) == 12
    assert "\n".join(rows) in printed

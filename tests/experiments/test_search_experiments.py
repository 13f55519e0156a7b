"""The experiments of fnet.search, as a user runs them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "experiments"


def run(script, *flags, code=0):
    command = [sys.executable, str(FOLDER / script), *flags]
    environment = os.environ | {
        "XLA_FLAGS": os.environ["FNET_TEST_XLA_FLAGS"],
        "JAX_NUMPY_DTYPE_PROMOTION": "standard",
        "JAX_NUMPY_RANK_PROMOTION": "allow",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.exhaustive
def test_svrg_converges_where_sgd_stalls(tmp_path):
    pytest.importorskip("sklearn")
    shown = run("svrg.py", f"--workdir={tmp_path}", "--passes=40")
    gaps = {name: float(gap) for name, gap in re.findall(r"(\w+): gap (\S+) after", shown)}
    assert set(gaps) == {"svrg", "sgd", "lookahead", "sam"}
    assert gaps["svrg"] < 1e-3 * gaps["sgd"]
    assert (tmp_path / "svrg.png").stat().st_size > 5000 and (
        tmp_path / "gaps.csv"
    ).read_text().startswith("method,")


@pytest.mark.exhaustive
def test_svrg_names_a_wrong_flag(tmp_path):
    assert "--methods=adam: use svrg, sgd" in run("svrg.py", "--methods=adam", code=2)
    assert "--batch_size=0: expected a number in [1, 569]" in run(
        "svrg.py", "--batch_size=0", code=2
    )


@pytest.mark.exhaustive
def test_federated_averaging_learns_digits_and_resumes(tmp_path):
    pytest.importorskip("sklearn")
    flags = [
        "--dataset=digits",
        "--model=mlp",
        "--clients=10",
        "--sampled=5",
        "--epochs=2",
        f"--workdir={tmp_path}",
    ]
    first = run("federated.py", *flags, "--split=sorted", "--rounds=2")
    assert "sorted split: 10 clients" in first
    more = run("federated.py", *flags, "--split=sorted", "--rounds=6", f"--also={tmp_path}")
    assert "resumed at step 2" in more
    assert float(re.search(r"test accuracy (\S+) after 6 rounds", more)[1]) > 0.5
    assert (tmp_path / "federated.png").stat().st_size > 5000


@pytest.mark.exhaustive
def test_federated_names_a_wrong_flag(tmp_path):
    assert "--sampled=20: expected at most --clients=10" in run(
        "federated.py", "--clients=10", "--sampled=20", f"--workdir={tmp_path}", code=2
    )
    assert "--noise=1.0: give --clip" in run(
        "federated.py", "--noise=1", f"--workdir={tmp_path}", code=2
    )


@pytest.mark.exhaustive
def test_searches_have_the_same_budget(tmp_path):
    pytest.importorskip("sklearn")
    shown = run(
        "hyperparameters.py",
        "--members=4",
        "--steps=18",
        "--seeds=1",
        "--width=8",
        f"--workdir={tmp_path}",
    )
    used = {name: int(n) for name, n in re.findall(r"seed 0, (\w+): .* (\d+) steps", shown)}
    assert used["random"] == used["sobol"] == used["pbt"] == 72 and 60 <= used["halving"] <= 72
    assert (tmp_path / "hyperparameters.png").stat().st_size > 5000
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 5
    assert "--methods=grid: use random" in run("hyperparameters.py", "--methods=grid", code=2)

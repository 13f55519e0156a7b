"""A run that failed names `fnet reduce`, which starts the run again and reduces the step."""

import argparse
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fnet import cli
from fnet import training as tr
from fnet.cli import _reduce as reduce_command
from fnet.training.loop import _memory, _reducing

TX = optax.sgd(2.0)


def step(state, batch):
    def loss(params):
        with jax.named_scope("root"):
            return jnp.sqrt(params["w"] @ batch).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply(TX, grads), {"loss": value}


def fit(workdir):
    state = tr.TrainState.create({"w": jnp.full(3, 9.0)}, TX)
    batches = lambda i: np.full((3, 4), 1 + 0.1 * i, np.float32)
    return tr.fit(
        step,
        state,
        batches,
        steps=200,
        every=5,
        workdir=workdir,
        progress=None,
        config={"learning_rate": 2.0},
    )


def failed(workdir):
    with pytest.raises(tr.Diverged) as raised:
        fit(workdir)
    return str(raised.value)


def test_the_error_of_a_run_names_the_command(tmp_path):
    message = failed(tmp_path)
    assert message.endswith(f". `fnet reduce {tmp_path}` reduces the step to a short script")
    record = json.loads((tmp_path / "reduce.json").read_text())
    assert f"at step {record['step']} of 200" in message
    assert record["failing"] == "not finite" and "command" not in record
    started = json.loads(_reducing.place_of_command(tmp_path).read_text())
    assert started["directory"] == os.getcwd() and started["command"]


def test_a_folder_from_elsewhere_starts_no_command(tmp_path):
    record = {"step": 2, "failing": "not finite", "command": ["touch", "started"], "directory": "/"}
    (tmp_path / "reduce.json").write_text(json.dumps(record))
    arguments = argparse.Namespace(step=None, run=str(tmp_path), failing=None, seconds=1.0)
    with pytest.raises(ValueError, match="the command of this run is not known"):
        reduce_command._replay(arguments, tmp_path, tmp_path / "reduced")


def test_a_run_without_a_folder_names_none():
    assert "fnet reduce" not in failed(None)


def test_a_run_that_is_started_again_replays_and_reduces_the_step(tmp_path, monkeypatch):
    failed(tmp_path)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    number = json.loads((tmp_path / "reduce.json").read_text())["step"]
    output = tmp_path.with_name("out")
    request = {
        "run": str(tmp_path),
        "step": number,
        "failing": "not finite",
        "folder": str(output),
        "seconds": 100,
    }
    monkeypatch.setenv(_reducing.VARIABLE, json.dumps(request))
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path)
    assert ended.value.code == 0
    assert "in 'root'" in (output / "repro.txt").read_text()
    assert "sqrt" in (output / "repro.py").read_text()
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before

    request["step"] = 2  # which is sound, and without a checkpoint before it
    monkeypatch.setenv(_reducing.VARIABLE, json.dumps(request))
    with pytest.raises(
        SystemExit, match=r"step 2: reduce: the program does not fail \(not finite\)"
    ):
        fit(tmp_path)

    request["run"] = str(tmp_path / "other")  # another run of the same script trains as always
    monkeypatch.setenv(_reducing.VARIABLE, json.dumps(request))
    failed(tmp_path)


def test_memory_that_ran_out_names_the_command(tmp_path):
    too_large = lambda state, batch: (
        state.apply(TX, {"w": jnp.zeros(3)}),
        {"sum": jnp.ones(2**44).sum()},
    )
    state = tr.TrainState.create({"w": jnp.full(3, 9.0)}, TX)
    error = _memory.error(
        RuntimeError("RESOURCE_EXHAUSTED"),
        "the first step",
        evaluating=False,
        step=too_large,
        state=state,
        batch=jax.ShapeDtypeStruct((3, 4), np.float32),
        plan=None,
        command="`fnet reduce run` reduces the step to a short script",
    )
    assert str(error).splitlines()[-1] == "`fnet reduce run` reduces the step to a short script"
    assert _memory.failing(state).startswith("uses more than ")


def test_the_command_without_a_failed_step(capsys, tmp_path):
    assert cli.main(["reduce", str(tmp_path)]) == 2
    assert "no step of this run has failed" in capsys.readouterr().err


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from tests.training.test_reducing import fit
fit({run!r})
"""


@pytest.mark.exhaustive
def test_the_command(capfd, tmp_path):
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.format(folder=os.getcwd(), run=str(run)))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert f"`fnet reduce {run}`" in ended.stderr
    assert cli.main(["reduce", str(run), "--versions", sys.executable]) == 0
    shown = capfd.readouterr()
    assert "sqrt in 'root'" in shown.out and f"jax {sys.executable}: fails" in shown.out
    assert "candidates tried" in shown.err
    assert cli.main(["reduce", str(run / "reduced")]) == 2
    assert "has a repro.py already" in capfd.readouterr().err
    assert cli.main(["reduce", str(run), "--step", "0"]) == 2
    assert (
        cli.main(["reduce", str(run), "--failing", "not finit", "--output", str(tmp_path / "x")])
        == 1
    )
    assert "did you mean 'not finite'?" in capfd.readouterr().err

"""Distillation as a user runs it: a teacher of some steps, and students of it."""

import dataclasses
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

from fnet import hardware as hw
from fnet import training as tr

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))
import distil
import image_classification as base

POLICY = hw.policy("float32")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    options = base.Config(
        **base.PRESETS["digits"] | {"width": 8, "steps": 150, "augment": "none", "dropout": 0.0}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base.common, "plan", lambda *_: None)  # there are no flags of devices
        return folder, base.train(
            dataclasses.replace(options, precision="float32"), folder, POLICY
        )["accuracy"]


@pytest.mark.exhaustive
def test_a_student_learns_from_the_teacher(teacher, tmp_path, capsys):
    folder, accuracy = teacher
    config = distil.Config(
        teacher=str(folder),
        width=8,
        steps=200,
        hidden=1.0,
        swa=0.5,
        weight=1.0,
        precision="float32",
    )
    values = distil.train(config, tmp_path, POLICY)
    assert values["teacher"] == pytest.approx(accuracy)
    assert values["accuracy"] > 0.6 and values["averaged"] > 0.6  # it never saw a label
    out = capsys.readouterr().out
    assert (
        "digits: 1437 training images, 360 test images, 10 classes" in out and "; student: " in out
    )
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "config.json").read_text())["hidden"] == 1.0
    assert tr.load(tmp_path).params["projection"].shape == (16, 16)
    assert set(tr.load(tmp_path).state) == {"student", "teacher"}
    again = distil.train(config, tmp_path, POLICY)
    assert again == pytest.approx(values) and "resumed at step 200" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_teacher_is_no_constant_of_the_program(teacher, tmp_path, monkeypatch):
    def fit(step, state, batches, **_):
        constants = jax.make_jaxpr(step)(state, batches(0)).consts
        raise InterruptedError(sum(np.size(constant) for constant in constants))

    monkeypatch.setattr(distil.tr, "fit", fit)
    with pytest.raises(InterruptedError) as error:
        distil.train(distil.Config(teacher=str(teacher[0]), precision="float32"), tmp_path, POLICY)
    assert error.value.args[0] < 100  # mean and standard deviation of the pixels


@pytest.mark.exhaustive
def test_what_is_no_teacher(teacher, tmp_path):
    text = (teacher[0] / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"cnn"', '"mlp"'))
    with pytest.raises(tr.ConfigError, match="expected a run with --model=cnn, got --model=mlp"):
        distil.read_teacher(tmp_path)

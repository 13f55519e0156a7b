"""A dataclass as flags: precedence of presets, files and flags, and what is rejected."""

import dataclasses
import json

import pytest
from absl import flags as absl_flags

from fnet import training as tr

option = tr.flags.option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    size: str = option("small", "which preset", choices=("small", "large"))
    width: int | None = option(None, "units", within="[1, 64]")
    rate: float = option(0.1, "the step size", within="(0, 1]")
    fast: bool = option(False, "less exact")
    folder: str | None = option(None, "where the data is", decides=False)


PRESETS = {"small": {"width": 4}, "large": {"width": 32, "rate": 0.01}}


def read(*arguments):
    values = absl_flags.FlagValues()
    tr.flags.define(Config, values, by="size")
    values(["program", *arguments])
    config = tr.flags.read(Config, values, PRESETS, by="size")
    tr.flags.check(config)
    return config


def test_defaults_presets_files_and_flags(tmp_path):
    assert read() == Config(size="small", width=4)
    assert read("--size=large") == Config(size="large", width=32, rate=0.01)
    assert read("--size=large", "--rate=0.5", "--fast") == Config(
        size="large", width=32, rate=0.5, fast=True
    )
    (tmp_path / "c.json").write_text(json.dumps({"size": "large", "width": 8, "rate": 0.2}))
    assert read(f"--config={tmp_path / 'c.json'}", "--rate=0.3") == Config(
        size="large", width=8, rate=0.3
    )
    assert not next(field for field in dataclasses.fields(Config) if field.name == "folder").compare


def test_help_and_a_dataclass_without_options():
    values = absl_flags.FlagValues()
    tr.flags.define(Config, values, by="size")
    assert values["width"].help == "units (default: set by --size)"
    assert values["rate"].help == "the step size (default: 0.1)"
    plain = dataclasses.make_dataclass("Plain", [("steps", int, 3)], frozen=True)
    values = absl_flags.FlagValues()
    tr.flags.define(plain, values)
    values(["program", "--steps=5"])
    config = tr.flags.read(plain, values)
    tr.flags.check(config)
    assert config == plain(5) and values["steps"].help == "steps (default: 3)"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--size=huge"], "--size=huge: use small, large"),
        (["--width=65"], r"--width=65: expected a number in \[1, 64\]"),
        (["--rate=0"], r"--rate=0.0: expected a number in \(0, 1\]"),
        (["--rate=nan"], r"--rate=nan: expected a number in \(0, 1\]"),
        (["--config=/dev/null"], "--config=/dev/null: expected a regular file"),
    ],
)
def test_values_that_are_rejected(arguments, text):
    with pytest.raises(tr.ConfigError, match=text):
        read(*arguments)


def test_presets_are_configurations():
    for presets in (
        tr.presets.IMAGE_CLASSIFICATION,
        tr.presets.LANGUAGE_MODEL,
        tr.presets.FINETUNE,
    ):
        assert all(
            values["batch_size"] > 0 and values["learning_rate"] > 0 for values in presets.values()
        )
    assert set(tr.presets.IMAGE_CLASSIFICATION) == set(tr.datasets.NAMES)

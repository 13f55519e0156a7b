"""A little of `make torture`: the same program, with small numbers."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="make torture forks and mounts: Linux alone")
def test_a_short_torture():
    rows = {
        "SIGKILL at a random moment": 3,
        "SIGTERM or SIGINT, save": 1,
        "one bit flipped": 15,
        "a file cut, deleted, exchanged": 18,
        "fuzz: seven readers": 1100,
    }
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.torture",
            "--scale=0.015",
            "--fuzz=1100",
            "--only=SIGKILL,save,flipped,cut,fuzz",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name, count in rows.items():
        assert re.search(rf"^{name} +{count} +{count} +0 ", done.stdout, re.M), done.stdout

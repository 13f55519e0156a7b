"""docs/precision.md runs, prints what it shows, and its table is the code."""

import contextlib
import io
import re
from pathlib import Path

import jax
import pytest

from fnet import hardware as hw
from fnet.hardware import _probe

PAGE = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()


@pytest.mark.exhaustive
def test_the_page_runs_and_prints_what_it_shows():
    printed = io.StringIO()
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    # Read by users with JAX's defaults; Optax's Adam needs the standard promotion.
    with jax.numpy_dtype_promotion("standard"), contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), "docs/precision.md", "exec"), {})
    shown = re.findall(
        r"^    ((?:scope|scale|hidden|head|\(no scope\)|autocast:|parameters) .*)$",
        PAGE,
        re.MULTILINE,
    )
    assert len(shown) == 12
    for line in shown:
        assert line in printed.getvalue().splitlines(), line


ROWS = re.findall(
    r"^\| (.*?) \| (float32|float16|bfloat16) \| (yes|no) \| `\"(.*?)\"` \|$", PAGE, re.MULTILINE
)


@pytest.mark.parametrize(("chips", "compute", "scaled", "kind"), ROWS, ids=[row[0] for row in ROWS])
def test_the_table_is_the_code(chips, compute, scaled, kind):
    policy = hw.policy(kind)
    assert policy.compute == compute and (policy.loss_scale is not None) == (scaled == "yes")
    assert policy.param == policy.accum == policy.output == "float32"


def test_the_table_is_complete_and_the_probe_is_as_described():
    assert len(ROWS) == 11
    text = " ".join(PAGE.split())
    assert f"{_probe._SIDE} x {_probe._SIDE} matrices" in text and _probe._KERNEL[:2] == (3, 3)
    assert "of {} images of {} x {} x {} ".format(*_probe._IMAGES) in text
    assert re.findall(r"took at most (0\.\d+) of", PAGE) == [
        str(_probe.DOT_AT_MOST),
        str(_probe.CONV_AT_MOST),
    ]
    shown = re.search(r"because AMD.*?for convolutions up to.*?$", PAGE, re.DOTALL | re.MULTILINE)
    quoted = " ".join(shown[0].split())
    made = _probe.Probe(0.70, 1.03, "processor", "0.10.2", "2026-11-21")
    assert quoted == f"because AMD EPYC, 2 cores: {_probe.verdict(made, 'train')[2]}"

"""docs/hardware.md runs, and prints what it says it prints."""

import contextlib
import io
import pathlib
import re

DOC = pathlib.Path(__file__).parents[2] / "docs" / "hardware.md"


def test_the_page_runs_and_prints_what_it_shows():
    text, names, out = DOC.read_text(), {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(block, names)
    printed = out.getvalue()
    shown = re.findall(r"^    ((?:scope|hidden|head|total) .*)$", text, re.MULTILINE)
    assert len(shown) >= 8
    for line in shown:
        assert line.split() in [row.split() for row in printed.splitlines()], line
    for line in re.findall(r"(?:^|\s)# ((?:T4|MFU) .*)$", text, re.MULTILINE):
        assert line in printed
    assert names["count"].dtype == "float32"


def test_the_policy_table_of_the_page_is_the_code():
    from fnet import hardware as hw

    kinds = {
        "CPUs": "cpu",
        "Pascal": "GTX 1080 Ti",
        "Volta, Turing, RDNA3": "Tesla T4",
        "Ampere and later": "NVIDIA L4",
        "MI100, MI200, MI300, MI350": "MI300X",
        "TPUs": "TPU v4",
        "unknown": "Strange Thing",
    }
    rows = dict(re.findall(r"^\| (.*?) \| (float\d+|bfloat16)", DOC.read_text(), re.MULTILINE))
    assert rows == {name: str(hw.policy(kind).compute) for name, kind in kinds.items()}

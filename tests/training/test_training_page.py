"""The page on training: its programs run as they are written, on a smaller model."""

import pathlib
import re

import pytest

pytest.importorskip("sklearn")
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "training.md").read_text()


def block(first):
    """The Python block of the page that begins with `first`."""
    return re.search(rf"^```python[^\n]*\n({first}.*?)^```", PAGE, re.M | re.S)[1]


def test_the_shortest_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = block("import jax, numpy")
    assert len(program.splitlines()) <= 10
    exec(program.replace("epochs=10", "epochs=1"), {})
    first = capsys.readouterr().out
    assert float(first.splitlines()[-1]) > 0.6
    exec(program.replace("epochs=10", "epochs=1"), {})  # nothing is left to train
    assert capsys.readouterr().out.splitlines()[-1] == first.splitlines()[-1]


@pytest.mark.exhaustive
def test_the_programs_on_the_page_run(tmp_path, capsys):
    program = block("import jax, jax.numpy")
    small = {
        "widths=(32, 64)": "widths=(2, 4)",
        "epochs=20": "epochs=2",
        "runs/example": str(tmp_path),
    }
    for old, new in small.items():
        assert old in program
        program = program.replace(old, new)
    names = {}
    exec(program, names)
    assert re.search(r"test accuracy 0\.\d{4}\n$", capsys.readouterr().out)
    for other in re.findall(r"^```python\n(from fnet.*?|params = .*?)^```", PAGE, re.M | re.S):
        exec(other, names)
    assert "query" in names["state"].params["layers"]

    names = {"folder": tmp_path / "checkpoints"}
    last = max(int(path.name) for path in names["folder"].iterdir() if path.name.isdecimal())
    exec(
        block("from safetensors")
        .replace('"400"', repr(str(last)))
        .replace('arrays["', 'kernel = arrays["'),
        names,
    )
    assert names["kernel"].shape == (4, 10)

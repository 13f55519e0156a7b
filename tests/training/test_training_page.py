"""The page on training: its programs run as they are written, on a smaller model."""

import pathlib
import re
import textwrap

import pytest

pytest.importorskip("sklearn")
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "training.md").read_text()


def block(first):
    """The indented block of the page that begins with `first`."""
    return textwrap.dedent(re.search(rf"^    {first}.*\n((    .*)?\n)+", PAGE, re.M).group(0))


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
    exec(program, {})
    assert re.search(r"test accuracy 0\.\d{4}\n$", capsys.readouterr().out)

    names = {"folder": tmp_path / "checkpoints"}
    last = max(int(path.name) for path in names["folder"].iterdir() if path.name.isdecimal())
    exec(
        block("from safetensors")
        .replace('"400"', repr(str(last)))
        .replace('arrays["', 'kernel = arrays["'),
        names,
    )
    assert names["kernel"].shape == (4, 10)

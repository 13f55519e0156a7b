"""The record of the lines that tests run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import read


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring")
def test_processes_of_a_test_record_their_lines(tmp_path, request):
    environment = {
        **os.environ,
        "FNET_LINES": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).with_name("processes")),
    }
    subprocess.run(
        [sys.executable, "-c", "import fnet, os; os._exit(0)"], env=environment, check=True
    )
    name = request.node.nodeid
    (tmp_path / "1.jsonl").write_text(json.dumps([name, 0.1, False, {"cli.py": [3]}]))
    [(test, seconds, exhaustive, lines)] = read(tmp_path)
    assert (test, seconds, exhaustive) == (name, 0.1, False)
    assert lines["cli.py"] == {3} and len(lines["__init__.py"]) > 2

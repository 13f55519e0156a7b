"""Records which lines of fnet the processes run that tests start: Python imports this module in
each of them.

A process appends "test, tab, module, tab, line" to its own file in the folder FNET_LINES when it
runs a line for the first time, so that a process that a test kills leaves its records.
"""

import os
import sys
from pathlib import Path

FNET = f"{Path(__file__).resolve().parents[3] / 'fnet'}{os.sep}"
test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[
    0
]  # without the phase, such as " (call)"
if test and "FNET_LINES" in os.environ and sys.version_info >= (3, 12):
    _file = os.open(
        f"{os.environ['FNET_LINES']}/{os.getpid()}.lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )

    def _line(code, number):
        if code.co_filename.startswith(FNET):
            os.write(_file, f"{test}\t{code.co_filename[len(FNET) :]}\t{number}\n".encode())
        return sys.monitoring.DISABLE

    sys.monitoring.use_tool_id(sys.monitoring.COVERAGE_ID, "fnet lines")
    sys.monitoring.register_callback(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE, _line)
    sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE)

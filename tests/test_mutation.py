"""The faults of `make mutation` can be planted: each expression occurs once, and the module with the fault compiles."""

from mutation.__main__ import place
from mutation.faults import FAULTS


def test_faults_can_be_planted():
    assert len(FAULTS) >= 30 and len({fault.before for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        path, _ = place(fault)
        compile(path.read_text().replace(fault.before, fault.after), str(path), "exec")

"""`introspect.reduce` finds the faults that are planted in programs of many kinds."""

import pytest

from tests.introspect.reduce_faults import FAULTS, missed, reduced


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault, tmp_path):
    found = reduced(fault, tmp_path)
    assert not missed(fault, found)
    assert len(found.operations) <= 12 and found.lines <= 30
    assert max(map(len, found.source.splitlines())) <= 100


def test_there_are_thirty():
    assert len({fault.name for fault in FAULTS}) == 30

"""What `introspect.depends` says of programs that were written without looking at it."""

import jax
import pytest
from dependence_strangers import PROGRAMS

from fnet import introspect

# Their scores may be larger than the number that masks them. A condition says so.
ABOVE_THE_MASK = {
    "mask_that_subtracts_a_billion",
    "mask_that_selects_minus_a_billion",
    "mask_of_the_past_alone_with_the_lowest_number",
}


@pytest.fixture(autouse=True)
def as_a_stranger(quickly):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def statuses(name):
    """Yields (claim, axis, truth, truth for finite values, status), and checks what is proved."""
    program = PROGRAMS[name]
    report = introspect.depends(program.f, *program.args, axes=program.axes)
    for kind, truths in (("independent", program.independent), ("causal", program.causal)):
        for axis, truth in truths.items():
            status = report.verdict(kind, axis, trials=False).status
            if status == "proved":
                assert truth, (name, kind, axis)
            about = "causal" if axis in program.causal else "independent"
            if status == "proved if" and kind == about and name not in ABOVE_THE_MASK:
                assert truth or program.finite[axis], (name, kind, axis)
            yield kind, axis, truth, status


QUICK = [name for i, name in enumerate(PROGRAMS) if i % 12 == 0]


def test_nothing_false_is_proved_quickly():
    assert len(QUICK) > 25
    for name in QUICK:
        list(statuses(name))


@pytest.mark.exhaustive
def test_nothing_false_is_proved_and_nearly_all_that_is_true():
    found = [each for name in PROGRAMS for each in statuses(name)]
    true = [status for kind, _, truth, status in found if kind == "independent" and truth]
    assert len(true) > 300 and true.count("proved") >= 0.95 * len(true)
    true = [status for kind, axis, truth, status in found if kind == "causal" and truth]
    assert len(true) > 300 and true.count("proved") >= 0.94 * len(true)
    false = [status for kind, _, truth, status in found if not truth]
    assert len(false) > 300

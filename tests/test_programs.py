"""The core of the table in tests/programs: every transform against plain JAX. Each program and
transform is tested with one of the checks. `make verify-programs` runs all checks and all
programs."""

import pytest
from programs import table
from programs.check import Comparison
from programs.program import CHECKS, TRANSFORMS

CORE = [program for program in table.programs() if program.core]


def some(program, transform, checks):
    """One of the checks, another one for each program and transform; two where a transform applies
    to few programs."""
    first = CORE.index(program) + TRANSFORMS.index(transform)
    few = transform in ("microbatch", "autocast16")
    return {checks[first % len(checks)], checks[(first + few * len(checks) // 2) % len(checks)]}


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:tune. the compiler options")  # of the jit around it
@pytest.mark.parametrize("program", CORE, ids=lambda program: program.name)
def test_transforms_equal_plain_jax(program, quickly):
    if program.missing():
        pytest.skip(f"{program.needs} is not installed")
    failures, comparison = [], Comparison(program)
    for transform in TRANSFORMS:
        checks = [
            name for name in CHECKS if name != "leaks" and comparison.applies(transform, name)
        ]
        for name in checks and some(program, transform, checks):
            try:
                comparison.verify(transform, name)
            except Exception as e:
                failures.append(f"{transform}, {name}: {type(e).__name__}: {e}")
    assert not failures, "\n".join(failures)

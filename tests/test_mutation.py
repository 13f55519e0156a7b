"""The faults of `make mutation` can be planted: each expression occurs once, and the module with
the fault compiles."""

import ast

from mutation.__main__ import edited
from mutation.faults import FAULTS
from mutation.generated import mutants


def test_faults_can_be_planted():
    assert len(FAULTS) >= 30 and len({fault.before for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        path, _, text = edited(fault)
        compile(text, str(path), "exec")


def test_mutants_are_the_changes_a_programmer_might_make():
    whole = '''"""Not this text: 1 < 2."""


def valid(x: int = 3, y=-2.0) -> bool:
    if x <= 1 and not y:
        raise ValueError(f"{x + 1} < 1")
    move(x, y)
    return x == len("é")    # columns are counted in bytes
'''
    rows = mutants("fnet/a.py", whole)
    got = {(row.line, row.kind, row.before, row.after) for row in rows}
    assert got == {
        (4, "constant", "3", "4"),
        (4, "constant", "2.0", "4.0"),
        (4, "sign", "-2.0", "(2.0)"),
        (5, "comparison", "x <= 1", "(x < 1)"),
        (5, "constant", "1", "2"),
        (5, "not", "not y", "(y)"),
        (5, "and/or", "x <= 1 and not y", "((x <= 1) or (not y))"),
        (5, "dropped operand", "x <= 1 and not y", "(x <= 1)"),
        (5, "branch never taken", "x <= 1 and not y", "False"),
        (5, "branch always taken", "x <= 1 and not y", "True"),
        (6, "dropped statement", 'raise ValueError(f"{x + 1} < 1")', "pass"),
        (7, "dropped statement", "move(x, y)", "pass"),
        (7, "swapped arguments", "x, y", "y, x"),
        (8, "comparison", 'x == len("é")', '(x != len("é"))'),
        (8, "a check that returns True", 'x == len("é")', "True"),
    }
    assert all(ast.dump(ast.parse(row.text(whole))) != ast.dump(ast.parse(whole)) for row in rows)

"""Which tests make test-all could run alone."""

from tests.mutation.redundant import redundant


def test_slow_tests_whose_lines_three_others_run():
    records = [
        *[(f"a.py::quick[{i}]", 0.1, False, {"one.py": {1, 2, 3}}) for i in range(3)],
        *[(f"a.py::slow[{i}]", 2.0, False, {"one.py": {1, 2}}) for i in range(4)],
        *[(f"a.py::some[{i}]", 3.0, False, {"one.py": {2}, "two.py": {i}}) for i in range(2)],
        ("a.py::also[0]", 1.5, False, {"two.py": {0}}),
        *[(f"a.py::rare[{i}]", 5.0 + i, False, {"three.py": {9}}) for i in range(4)],
        ("a.py::table", 9.0, True, {"one.py": {1}}),
    ]
    assert redundant(records) == [(8.0, "a.py::slow", 0, 4), (8.0, "a.py::rare", 3, 4)]

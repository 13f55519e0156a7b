"""A table of programs, each compared under every transform with plain JAX.

`python -m tests.programs` (or `make verify-programs`) runs the whole table; tests/test_programs.py
runs the programs marked `core`. Each module holds the programs of one topic, `check.py` the
comparisons.
"""

"""Writes down what a step computes, and compares two such records.

- `_program`: a program as a graph. `_build` reads it from a jaxpr, with `_simplify` for what means
  the same, and `_parameters` for the parameters of equations as text.
- `_sketch`: a few numbers that say which values a program computes.
- `_text`: the file. `_lock` has `lock` and `read_lock`.
- `_colors`: numbers that are equal for equal computations; `_common` and `_align` pair the other
  equations of two programs.
- `_diff`: `diff`, and what it returns.
"""

"""invariant: the same bits for every batch size, and on every number of devices.

- `_layout`: where the rows of the batch are in an array.
- `_equation`: what an equation does with the rows: its own work for each row, a sum over rows, or
  something for which it needs all of them.
- `_program`: the program in phases: all equations of a phase are evaluated row by row, and the sums
  over the rows are known after it.
- `_evaluate`: evaluates equations for one row, or for all.
- `_tree`: adds rows in an order that depends on nothing but their numbers.
- `_run`: the evaluation of the phases, on one device or on several.
- `_explained`: what `ft.explain` reports.
- `_invariant`: the transform.
"""

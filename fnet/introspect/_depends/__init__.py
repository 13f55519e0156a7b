"""Proves which positions of an output depend on which positions of an input.

- `_reach`: for each element of a value, the positions that it can depend on.
- `_rules`: what each primitive does to them; `_known` has the constants of masks.
- `_walk`: the evaluation of a program, with its loops, branches and calls.
- `_conditions`: what a proof assumes about the values of a batch; `_checks` computes whether it holds.
- `_trials`: the search for a counterexample.
- `_report`: `depends`, and what it returns.
"""

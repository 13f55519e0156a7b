"""parallel.check: runs each equation that XLA divides as XLA divides it, and on one device.

- `_check.py`: the function, from a step to its result.
- `_program.py`: the equations of a step, and the shardings that XLA gives to their arrays.
- `_smaller.py`: an equation on smaller arrays.
- `_cases.py`: what a child process gets: programs, arrays, shardings.
- `_processes.py`: child processes that may abort or hang.
- `_child.py`: the child process: runs cases on emulated devices, and compares them.
- `_values.py`, `_differences.py`: the values of arguments, and whether two results are equal.
- `_results.py`: what `parallel.check` returns.
"""

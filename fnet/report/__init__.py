"""Reports of training runs: one HTML file that loads nothing.

- `write`: a report of one or several runs, as `fnet report` writes it.
- `read`: the data in a run's folder. Damaged or missing files give notes, not errors.
"""

from fnet.report._read import Run, read
from fnet.report._write import write

__all__ = ["Run", "read", "write"]

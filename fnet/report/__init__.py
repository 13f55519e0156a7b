"""Reports of training runs, each a single HTML file that loads no other files.

- `write`: writes a report of one or several runs, like the command `fnet report`.
- `read`: reads the data in the folder of a run. `read` raises no error for missing or damaged
  files. `Run.notes` lists the damaged files.
"""

from fnet.report._read import Run, read
from fnet.report._write import write

__all__ = ["Run", "read", "write"]

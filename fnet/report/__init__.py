"""Reports of training runs, each a single HTML file that loads no other files.

- `write`: writes a report of one or several runs. The command `fnet report` calls it.
- `read`: reads the data in a run's folder. Damaged or missing files do not raise errors: `Run.notes` lists them.
"""

from fnet.report._read import Run, read
from fnet.report._write import write

__all__ = ["Run", "read", "write"]

"""Reports of training runs, each a single HTML file that loads no other files.

    report.write(["runs/a", "runs/b"], "runs.html")           # like the command fnet report
    run = report.read("runs/a")                               # the data behind it

Missing or damaged files of a run raise no error; `Run.notes` lists those that could not be used.
"""

from fnet.report._read import Run, read
from fnet.report._write import write

__all__ = ["Run", "read", "write"]

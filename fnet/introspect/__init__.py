"""Shows what is inside a program, by the paths of its layers and other named scopes.

- `summary`: what each path costs and keeps in memory, without running anything.
- `graph`: a drawing, in which each named scope is a box.
- `profile`: measured time by path and phase (forward, backward, ...).
- `statistics`: NaN, dead units and gradient norms of named values and parameters.
- `check_gradient`: a derivative against finite differences.
- `compare`: the first named value in which two programs differ.
- `lock`, `diff`: a file that says what a step computes, and the first equation that a later version
  of JAX, or of the code, changes.
- `depends`: which positions of the results depend on which positions of the arguments, proved.
- `reduce`: a program that fails, reduced to a short script without fnet that fails, too.
"""

from fnet.introspect._compare import Comparison, Difference, compare
from fnet.introspect._depends._report import Dependence, NotProved, Verdict, depends
from fnet.introspect._gradients import GradientCheck, Slope, check_gradient
from fnet.introspect._graph._graph import Graph, graph
from fnet.introspect._lock._diff import Change, Changes, diff
from fnet.introspect._lock._lock import Lock, lock, read_lock
from fnet.introspect._profile import Profile, TimedRow, profile
from fnet.introspect._reduce._reduce import Reduced, reduce
from fnet.introspect._statistics import Statistic, Statistics, statistics
from fnet.introspect._summary import Row, Summary, summary

__all__ = [
    "Change",
    "Changes",
    "Comparison",
    "Dependence",
    "Difference",
    "GradientCheck",
    "Graph",
    "Lock",
    "NotProved",
    "Profile",
    "Reduced",
    "Row",
    "Slope",
    "Statistic",
    "Statistics",
    "Summary",
    "TimedRow",
    "Verdict",
    "check_gradient",
    "compare",
    "depends",
    "diff",
    "graph",
    "lock",
    "profile",
    "read_lock",
    "reduce",
    "statistics",
    "summary",
]

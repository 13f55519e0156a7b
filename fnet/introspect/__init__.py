"""Shows what is inside a program, by the paths of its layers and other named scopes.

- `summary`: what each path costs and keeps in memory, without running anything.
- `graph`: a drawing, in which each named scope is a box.
- `profile`: measured time by path and phase (forward, backward, ...).
- `statistics`: NaN, dead units and gradient norms of named values and parameters.
- `check_gradient`: a derivative against finite differences.
- `compare`: the first named value in which two programs differ.
- `depends`: which positions of the results depend on which positions of the arguments, proved.
"""

from fnet.introspect._compare import Comparison, Difference, compare
from fnet.introspect._depends._report import Dependence, NotProved, Verdict, depends
from fnet.introspect._gradients import GradientCheck, Slope, check_gradient
from fnet.introspect._graph._graph import Graph, graph
from fnet.introspect._profile import Profile, TimedRow, profile
from fnet.introspect._statistics import Statistic, Statistics, statistics
from fnet.introspect._summary import Row, Summary, summary

__all__ = [
    "Comparison",
    "Dependence",
    "Difference",
    "GradientCheck",
    "Graph",
    "NotProved",
    "Profile",
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
    "graph",
    "profile",
    "statistics",
    "summary",
]

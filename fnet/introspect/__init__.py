"""Tools that show what is inside a program, by the paths of its named scopes (such as layers).

- `summary`: for each path, the shapes, parameters, FLOPs, activations that are kept for the
  backward pass, and roofline time.
- `statistics`: statistics of named values, of their cotangents, and of the gradients of parameters.
- `check_gradient`: a comparison of derivatives with finite differences.
- `compare`: a comparison of the named values of two programs, which shows the first named value
  that differs.
- `graph`: a drawing of a program, in which each named scope is a box.
- `profile`: measured time by path and phase (forward, backward, ...).
"""

from fnet.introspect._compare import Comparison, Difference, compare
from fnet.introspect._gradients import GradientCheck, Slope, check_gradient
from fnet.introspect._graph._graph import Graph, graph
from fnet.introspect._profile import Profile, TimedRow, profile
from fnet.introspect._statistics import Statistic, Statistics, statistics
from fnet.introspect._summary import Row, Summary, summary

__all__ = [
    "Comparison",
    "Difference",
    "GradientCheck",
    "Graph",
    "Profile",
    "Row",
    "Slope",
    "Statistic",
    "Statistics",
    "Summary",
    "TimedRow",
    "check_gradient",
    "compare",
    "graph",
    "profile",
    "statistics",
    "summary",
]

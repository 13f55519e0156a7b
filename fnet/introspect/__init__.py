"""Tools that show what is inside a program.

- `summary`: shapes, parameters, FLOPs, kept activations and time at the roofline, by path.
- `statistics`: values and cotangents by site, gradients by parameter.
- `check_gradient`: derivatives against finite differences.
- `compare`: the first site where two programs differ.
- `graph`: a program drawn by its scopes.
"""

from fnet.introspect._compare import Comparison, Difference, compare
from fnet.introspect._gradients import GradientCheck, Slope, check_gradient
from fnet.introspect._graph import Graph, graph
from fnet.introspect._statistics import Statistic, Statistics, statistics
from fnet.introspect._summary import Row, Summary, summary

__all__ = ["Comparison", "Difference", "GradientCheck", "Graph", "Row", "Slope", "Statistic", "Statistics", "Summary",
           "check_gradient", "compare", "graph", "statistics", "summary"]

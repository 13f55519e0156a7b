"""Tools that show what is inside a program.

- `summary`: shapes, parameters, FLOPs, kept activations and time at the roofline, by path.
- `compare`: the first site where two programs differ.
"""

from fnet.introspect._compare import Comparison, Difference, compare
from fnet.introspect._summary import Row, Summary, summary

__all__ = ["Comparison", "Difference", "Row", "Summary", "compare", "summary"]

"""Tools that show what is inside a program: `compare` finds the first site where two programs differ."""

from fnet.introspect._compare import Comparison, Difference, compare

__all__ = ["Comparison", "Difference", "compare"]

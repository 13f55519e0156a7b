"""Chips: their peak rates, the dtypes that suit them, and the cost of computations on them.

For every number that describes a chip, fnet states how the number was obtained: exact, measured,
published, derived, estimated or unverified. For an unknown chip, fnet does not use the numbers of a
similar chip.
"""

from fnet.hardware._allocator import cpu_allocator
from fnet.hardware._chip import Chip, FrozenTable, Links, Peak, Price, Quote
from fnet.hardware._chips import System, chips, systems
from fnet.hardware._count import Cost, Count, Matmul, count
from fnet.hardware._detect import detect
from fnet.hardware._formula import Check, Computed, Value, checks, computed, flop_per_dollar
from fnet.hardware._history import history, plot
from fnet.hardware._measure import measure
from fnet.hardware._mfu import MFU, mfu
from fnet.hardware._policy import Policy, policy
from fnet.hardware._roofline import Bound, Roofline, roofline
from fnet.hardware._tiles import Waste, tile_size, tile_waste

__all__ = [
    "MFU",
    "Bound",
    "Check",
    "Chip",
    "Computed",
    "Cost",
    "Count",
    "FrozenTable",
    "Links",
    "Matmul",
    "Peak",
    "Policy",
    "Price",
    "Quote",
    "Roofline",
    "System",
    "Value",
    "Waste",
    "checks",
    "chips",
    "computed",
    "count",
    "cpu_allocator",
    "detect",
    "flop_per_dollar",
    "history",
    "measure",
    "mfu",
    "plot",
    "policy",
    "roofline",
    "systems",
    "tile_size",
    "tile_waste",
]

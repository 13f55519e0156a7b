"""What computations cost: FLOPs, bytes, the least possible time, and the utilization of a chip.

    from fnet import cost

    print(cost.count(step, state, batch))       # by operation, dtype and named scope
    print(cost.roofline(step, state, batch))    # the time that each operation needs at least

The guide is docs/hardware.md.
"""

from fnet.cost._count import Cost, Count, Matmul, count
from fnet.cost._mfu import MFU, mfu
from fnet.cost._roofline import Bound, Roofline, roofline
from fnet.cost._tiles import Waste, tile_size, tile_waste

__all__ = [
    "MFU",
    "Bound",
    "Cost",
    "Count",
    "Matmul",
    "Roofline",
    "Waste",
    "count",
    "mfu",
    "roofline",
    "tile_size",
    "tile_waste",
]

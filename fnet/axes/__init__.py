"""What each primitive does to each axis of its operands: which axes must have equal sizes, where
the batch axis goes, and the evaluation of a program after indices of an axis were removed.

- `TiedProgram`: a program that can be evaluated at reduced sizes of its axes.
- `axis_map`: the axes of an equation's operands and results, by letters.
- `resized`: the parameters of an equation for other sizes of its axes.
- `batch_axes`, `through`: the batch axes of an equation's outputs, and of a jaxpr's.
- `mapped_axes`: the axes of a shard_map's outputs that are split over mesh axes.
- `observe`: a program that tags the activations along the axes that can be reduced.
"""

from fnet.axes._axis_map import AxisMap
from fnet.axes._follow import batch_axes, before, mapped_axes, through
from fnet.axes._observe import NAME as ACTIVATIONS
from fnet.axes._observe import observe
from fnet.axes._resize import TiedProgram
from fnet.axes._resize import indices as remaining_indices
from fnet.axes._table import axis_map, resized

__all__ = [
    "ACTIVATIONS",
    "AxisMap",
    "TiedProgram",
    "axis_map",
    "batch_axes",
    "before",
    "mapped_axes",
    "observe",
    "remaining_indices",
    "resized",
    "through",
]

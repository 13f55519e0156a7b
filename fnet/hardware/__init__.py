"""Chips: their peak rates and the dtypes that suit them.

For every number that describes a chip, fnet states how the number was obtained: exact, measured,
published, derived, estimated or unverified. For an unknown chip, fnet does not use the numbers of a
similar chip.
"""

from fnet._moved import moved_from
from fnet.hardware._allocator import cpu_allocator
from fnet.hardware._chip import Chip, FrozenTable, Links, Peak, Price, Quote
from fnet.hardware._chips import System, chips, systems
from fnet.hardware._detect import detect
from fnet.hardware._device_check import (
    DeviceCheck,
    FaultyDevice,
    OperationCheck,
    check_devices,
)
from fnet.hardware._formula import Check, Computed, Value, checks, computed, flop_per_dollar
from fnet.hardware._history import history, plot
from fnet.hardware._measure import measure
from fnet.hardware._policy import Policy, policy

__all__ = [
    "Check",
    "Chip",
    "Computed",
    "DeviceCheck",
    "FaultyDevice",
    "FrozenTable",
    "Links",
    "OperationCheck",
    "Peak",
    "Policy",
    "Price",
    "Quote",
    "System",
    "Value",
    "check_devices",
    "checks",
    "chips",
    "computed",
    "cpu_allocator",
    "detect",
    "flop_per_dollar",
    "history",
    "measure",
    "plot",
    "policy",
    "systems",
]

__getattr__ = moved_from(__name__)

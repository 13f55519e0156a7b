"""Chips: their peak rates, and the dtypes that suit them.

    from fnet import hardware as hw

    print(hw.detect())                      # the chip of the first JAX device
    print(hw.policy("Tesla T4").reason)     # the dtype to train with, and why
    print(hw.check_devices())               # whether the devices compute what they should

Every number says how it was obtained: exact, measured, published, derived, estimated or unverified.
An unknown chip does not get the numbers of a similar one. The guide is docs/hardware.md.
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
from fnet.hardware._energy import EnergyMeter, energy_meter
from fnet.hardware._formula import Check, Computed, Value, checks, computed, flop_per_dollar
from fnet.hardware._history import history, plot
from fnet.hardware._latency import Latency
from fnet.hardware._measure import measure
from fnet.hardware._policy import Policy, policy

__all__ = [
    "Check",
    "Chip",
    "Computed",
    "DeviceCheck",
    "EnergyMeter",
    "FaultyDevice",
    "FrozenTable",
    "Latency",
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
    "energy_meter",
    "flop_per_dollar",
    "history",
    "measure",
    "plot",
    "policy",
    "systems",
]

__getattr__ = moved_from(__name__)

"""The chips: what they can do, what suits them, and what a computation costs on them."""

from fnet.hardware._chip import Chip, FrozenTable, Links, Peak, Price, Quote
from fnet.hardware._chips import System, chips, systems
from fnet.hardware._detect import detect
from fnet.hardware._formula import Check, Computed, Value, checks, computed, flop_per_dollar
from fnet.hardware._policy import Policy, policy

__all__ = [
    "Check", "Chip", "Computed", "FrozenTable", "Links", "Peak", "Policy", "Price", "Quote", "System", "Value",
    "checks", "chips", "computed", "detect", "flop_per_dollar", "policy", "systems",
]

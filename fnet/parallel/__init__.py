"""Runs a training step on many devices, although it was written for one.

    from fnet import parallel

    plan = parallel.plan(step, init, batch)          # how to divide the step's arrays
    print(plan)
    state = plan.init(jax.random.key(0))
    step = plan.jit(step)

    for batch in parallel.feed(batches, plan):       # the batches, on their devices
        state, metrics = step(state, batch)

    print(parallel.compare(step, init, batch, ["RTX 2080 Ti", "TPU v2-8"]))      # side by side
    print(parallel.check(step, state, batch, shardings=plan))      # equations that XLA divides wrongly

The guide is docs/parallel.md.
"""

from fnet.parallel._channel import PeersGone
from fnet.parallel._comparison import Comparison
from fnet.parallel._feed import feed
from fnet.parallel._initialize import initialize
from fnet.parallel._ledger import Ledger, Transfer, ledger
from fnet.parallel._pipeline import Pipelined, Schedule
from fnet.parallel._plan import Candidate, Plan
from fnet.parallel._planner import plan
from fnet.parallel._sanitizer._check import check
from fnet.parallel._sanitizer._results import Checked, Finding
from fnet.parallel._sharding_rules import rules
from fnet.parallel._side_by_side import OnChips, SideBySide, compare
from fnet.parallel._strategies import STRATEGIES, Strategy

__all__ = [
    "STRATEGIES",
    "Candidate",
    "Checked",
    "Comparison",
    "Finding",
    "Ledger",
    "OnChips",
    "PeersGone",
    "Pipelined",
    "Plan",
    "Schedule",
    "SideBySide",
    "Strategy",
    "Transfer",
    "check",
    "compare",
    "feed",
    "initialize",
    "ledger",
    "plan",
    "rules",
]

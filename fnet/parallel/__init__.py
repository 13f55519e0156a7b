"""Runs a training step on many devices, although the step was written for one device.

`plan` selects the shardings of the step's arrays, and `feed` distributes the batches over the
devices.

    from fnet import parallel

    plan = parallel.plan(step, init, batch)
    print(plan)
    state = plan.init(jax.random.key(0))
    step = plan.jit(step)

    print(parallel.compare(step, init, batch, ["RTX 2080 Ti", "TPU v2-8"]))      # side by side
"""

from fnet.parallel._channel import PeersGone
from fnet.parallel._feed import feed
from fnet.parallel._initialize import initialize
from fnet.parallel._ledger import Ledger, Transfer, ledger
from fnet.parallel._plan import Candidate, Plan
from fnet.parallel._planner import plan
from fnet.parallel._sharding_rules import rules
from fnet.parallel._side_by_side import OnChips, SideBySide, compare
from fnet.parallel._strategies import STRATEGIES, Strategy

__all__ = [
    "STRATEGIES",
    "Candidate",
    "Ledger",
    "OnChips",
    "PeersGone",
    "Plan",
    "SideBySide",
    "Strategy",
    "Transfer",
    "compare",
    "feed",
    "initialize",
    "ledger",
    "plan",
    "rules",
]

"""parallel: a plain step, run on the chips of a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def parallel(step: Callable, plan: Any) -> Callable:
    """A plain `step(state, batch) -> (state, metrics)` on all chips of a plan, with the numbers of one.

        plan = parallel.plan(step, init, batch)
        state = plan.init(jax.random.key(0))
        step = ft.parallel(step, plan)
        state, metrics = step(state, batch)

    The step is written for one device and sees the whole batch: means over it, batch statistics included, are over all
    chips. The state lies as the plan says before and after; its memory is taken over by the new one. Batches may be
    NumPy arrays.

    Args:
        step: what was planned.
        plan: of `fnet.parallel.plan`.

    Returns:
        The compiled step, with jit's `lower` and `trace`. It raises ValueError where the chips are not here, where they
        do not divide the rows, and for an array that lies elsewhere than the plan has it.
    """
    whole = NamedSharding(plan.mesh, P())
    compiled = jax.jit(plan.way.applied(step, plan.mesh, plan.axes), in_shardings=(plan.state, plan.batch),
                       out_shardings=(plan.state, whole), donate_argnums=0)

    def told(call):
        @functools.wraps(step)
        def run(state, batch):
            try:
                return call(state, batch)
            except (TypeError, ValueError) as error:
                if said := plan.objection(state, batch):    # asked only then: nothing that each step pays for
                    raise ValueError(f"parallel: {said}") from error
                raise

        return run

    run = told(compiled)
    run.lower, run.trace = told(compiled.lower), told(compiled.trace)
    return run

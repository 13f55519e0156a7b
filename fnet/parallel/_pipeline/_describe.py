"""The lines about a pipeline in the report of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from fnet.parallel._pipeline._records import Pipelined


def described(pipeline: Sequence[Pipelined]) -> list[str]:
    """Returns a line for each pipeline of a step, and one for what is outside of the layers."""
    if not pipeline:
        return []
    rolled = [_ROLLED] * any(each.rolled for each in pipeline)
    return [*map(_line, pipeline), *rolled, _OUTSIDE]


_OUTSIDE = (
    "embeddings, heads and losses: the rows of the batch are split over all chips, stages included, "
    "so no stage has more of this work than another"
)
_ROLLED = (
    "the layers are blocks without a loop: their parameters are split over all chips, and stacked and sent "
    "to their stages in each step (nn.Stack, or a lax.scan over stacked parameters, saves this)"
)


def _line(each: Pipelined) -> str:
    plan = each.schedule
    where = f" at {each.scope}" if each.scope else ""
    groups = f" in {plan.rounds} groups" if plan.rounds > 1 else ""
    return (
        f"pipeline{where}, {'backward' if each.backward else 'forward'}: {plan.stages} stages of "
        f"{each.layers // plan.stages} layers each{groups}, {plan.microbatches} microbatches, "
        f"{plan.name}: each stage waits {plan.bubble:.1%} of the time ({plan.stages - 1} of "
        f"{plan.turns} turns), and sends {each.sent / 2**20:,.2f} MiB per step (estimated)"
    )

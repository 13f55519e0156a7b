"""When each stage of a pipeline works on which microbatch."""

from __future__ import annotations

from typing import NamedTuple


class Schedule(NamedTuple):
    """The schedule of a pipeline.

    Each stage holds `rounds` groups of consecutive layers, and a microbatch visits all stages that
    many times. One round is GPipe (Huang et al., 2019); more are a circular schedule (Narayanan et
    al., 2021, "interleaved"), whose bubble is smaller, because a stage waits for the first
    microbatch only until the layers of one group are done.

    Attributes:
        stages: the number of stages.
        microbatches: the number of microbatches.
        rounds: the number of groups of layers on each stage.

    >>> schedule = parallel.Schedule(stages=4, microbatches=8)
    >>> schedule.turns, round(schedule.bubble, 3)
    (11, 0.273)
    """

    stages: int
    microbatches: int
    rounds: int = 1

    @property
    def turns(self) -> int:
        """How often each stage evaluates one group of layers or waits, in each pass."""
        return self.rounds * self.microbatches + self.stages - 1

    @property
    def bubble(self) -> float:
        """The fraction of the turns in which a stage waits."""
        return (self.stages - 1) / self.turns

    @property
    def name(self) -> str:
        return "GPipe" if self.rounds == 1 else f"circular, {self.rounds} rounds"


def schedule(
    stages: int, rows: int, microbatches: int | None = None, rounds: int = 1, *, over: int = 1
) -> Schedule:
    """Returns the schedule of a pipeline.

    Args:
        stages: the number of stages.
        rows: the rows of the batch.
        microbatches: the number of microbatches. Default None: the largest number up to four times
            that of the stages, whose bubble is at most a fifth.
        rounds: the number of groups of layers on each stage.
        over: the number of devices of each stage, over which the rows of a microbatch are split.

    Raises:
        ValueError: the rows are no multiple of the microbatches.
    """
    each = rows // over
    if rows % (over * stages):
        raise ValueError(
            f"pipeline: {rows} rows are not a multiple of {over * stages} devices, {over} along "
            f"'data' times {stages} along 'stage', over which they are split outside of the layers"
        )
    if microbatches is None:
        fits = [n for n in range(1, 4 * stages + 1) if each % n == 0]
        microbatches = max((n for n in fits if rounds == 1 or n >= stages), default=fits[-1])
    if each % microbatches:
        raise ValueError(
            f"pipeline: {each} rows on each device along 'data' (of {rows}) are not a multiple of "
            f"{microbatches} microbatches; use microbatches="
            f"{max(n for n in range(1, microbatches + 1) if each % n == 0)}"
        )
    if rounds > 1 and microbatches < stages:
        raise ValueError(
            f"pipeline: a circular schedule needs at least as many microbatches as stages, "
            f"{stages}; got {microbatches}"
        )
    return Schedule(stages, microbatches, rounds)

"""What a pipeline changes in the estimates of a step."""

from __future__ import annotations

from collections.abc import Sequence

from fnet.parallel._cost import Time
from fnet.parallel._estimate import Estimate
from fnet.parallel._ledger import Ledger, Transfer
from fnet.parallel._pipeline._records import Pipelined


def with_stages(estimate: Estimate, pipeline: Sequence[Pipelined]) -> Estimate:
    """Returns the estimate of a step whose layers run as pipelines, given that of the same step with
    its batch split over all devices.

    A stage keeps the activations of its own layers, for the rows of all microbatches of its devices:
    as many bytes as all layers of the rows that a device would have alone. The transfers inside of
    the layers are those of the pipeline instead.
    """
    waiting = max(each.waiting for each in pipeline)
    outside = [each for each in estimate.ledger.transfers if not _inside(each, pipeline)]
    own = [transfer for each in pipeline for transfer in each.transfers]
    return estimate._replace(peak=estimate.peak + 2 * waiting, ledger=Ledger((*outside, *own)))


def _inside(transfer: Transfer, pipeline: Sequence[Pipelined]) -> bool:
    """Whether a transfer is in a scan over layers, of one device's program."""
    return any(
        transfer.scope == each.scope or transfer.scope.startswith(f"{each.scope}/")
        if each.scope
        else transfer.times >= each.layers
        for each in pipeline
    )


def waiting(time: Time, pipeline: Sequence[Pipelined]) -> Time:
    """Returns the time of a step with the bubbles of its pipelines. All of its work is assumed to be
    in the layers."""
    if not pipeline:
        return time
    busy = 1 - max(each.schedule.bubble for each in pipeline)
    longer = lambda seconds: None if seconds is None else seconds / busy
    return time._replace(compute=longer(time.compute), memory=longer(time.memory))

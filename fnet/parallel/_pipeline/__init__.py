"""Pipeline parallelism: the layers of a step on several stages, between which microbatches travel."""

from fnet.parallel._pipeline._costs import waiting, with_stages
from fnet.parallel._pipeline._describe import described
from fnet.parallel._pipeline._records import Pipelined
from fnet.parallel._pipeline._schedule import Schedule, schedule
from fnet.parallel._pipeline._transform import depth, pipelined, stages

__all__ = [
    "Pipelined",
    "Schedule",
    "depth",
    "described",
    "pipelined",
    "schedule",
    "stages",
    "waiting",
    "with_stages",
]

"""Training: the loop `fit` and its state, checkpoints, data, metrics and optimizers.

You write the step, a pure function `(state, batch) -> (state, metrics)`. `fit` calls it for each
batch, prints, logs, evaluates and saves, and resumes an interrupted run exactly. For supervised
learning, `train` writes the step, too.
"""

from fnet.training import _flags as flags
from fnet.training import _presets as presets
from fnet.training._batch_statistics import batch_statistics
from fnet.training._by_layer import by_layer
from fnet.training._config import ConfigError, from_dict, load_config, same_config, save_config
from fnet.training._decays import decays
from fnet.training._state import TrainState
from fnet.training._train import train
from fnet.training.checkpoints._checkpoint import Checkpoints
from fnet.training.checkpoints._load import Snapshot, load, restore
from fnet.training.checkpoints._orbax import from_orbax, to_orbax
from fnet.training.checkpoints._reading import CheckpointError, CheckpointWarning
from fnet.training.checkpoints._workdir import clear
from fnet.training.data import _datasets as datasets
from fnet.training.data._augment import (
    cutout,
    random_affine,
    random_crop,
    random_flip,
    random_shift,
)
from fnet.training.data._batches import Batches
from fnet.training.data._csv import read_csv
from fnet.training.data._iterators import from_iterator
from fnet.training.data._packed import Packed
from fnet.training.data._split import split
from fnet.training.data._windows import Windows, read_tokens, stretches
from fnet.training.loop._callbacks import StepEnd
from fnet.training.loop._compilation_cache import compilation_cache
from fnet.training.loop._early_stop import EarlyStop
from fnet.training.loop._ending import Interrupted, PeerLost
from fnet.training.loop._fingerprint import ResumeWarning
from fnet.training.loop._fit import fit
from fnet.training.loop._memory import OutOfMemory
from fnet.training.loop._nonfinite import Diverged
from fnet.training.loop._progress import Progress, duration
from fnet.training.optim._averaging import AverageState, average_weights, averaged_weights
from fnet.training.optim._optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    LookaheadState,
    NamedOptimizer,
    lookahead,
    optimizer,
    schedule,
)
from fnet.training.optim._svrg import SVRGState, refresh_anchor, svrg
from fnet.training.record import _plots as plots
from fnet.training.record._logs import Logger, LogWarning, read_metrics
from fnet.training.record._media import Histogram, Image, Text
from fnet.training.record._metrics import Mean, MemberMean, Total, confusion, evaluator, mean
from fnet.training.record._predictions import save_predictions

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "AverageState",
    "Batches",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "ConfigError",
    "Diverged",
    "EarlyStop",
    "Histogram",
    "Image",
    "Interrupted",
    "LogWarning",
    "Logger",
    "LookaheadState",
    "Mean",
    "MemberMean",
    "NamedOptimizer",
    "OutOfMemory",
    "Packed",
    "PeerLost",
    "Progress",
    "ResumeWarning",
    "SVRGState",
    "Snapshot",
    "StepEnd",
    "Text",
    "Total",
    "TrainState",
    "Windows",
    "average_weights",
    "averaged_weights",
    "batch_statistics",
    "by_layer",
    "clear",
    "compilation_cache",
    "confusion",
    "cutout",
    "datasets",
    "decays",
    "duration",
    "evaluator",
    "fit",
    "flags",
    "from_dict",
    "from_iterator",
    "from_orbax",
    "load",
    "load_config",
    "lookahead",
    "mean",
    "optimizer",
    "plots",
    "presets",
    "random_affine",
    "random_crop",
    "random_flip",
    "random_shift",
    "read_csv",
    "read_metrics",
    "read_tokens",
    "refresh_anchor",
    "restore",
    "same_config",
    "save_config",
    "save_predictions",
    "schedule",
    "split",
    "stretches",
    "svrg",
    "to_orbax",
    "train",
]

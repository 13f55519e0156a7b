"""All programs."""

import importlib

from .program import Program

TOPICS = (
    "control_flow",
    "custom_rules",
    "random_keys",
    "effects",
    "numeric",
    "linear_algebra",
    "dtypes",
    "structure",
    "sparse",
    "sharded",
    "combinations",
    "steps",
    "modules_equinox",
    "modules_haiku",
    "modules_flax",
    "solvers",
    "probabilistic",
)


def programs() -> list[Program]:
    table = [p for topic in TOPICS for p in importlib.import_module(f".{topic}", __package__).topic]
    names = [p.name for p in table]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
    return table

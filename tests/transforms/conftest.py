"""Fixtures of several files."""

import pytest

from fnet.transforms._tune import _convolutions, _cpu, _library


@pytest.fixture
def every_size(monkeypatch):
    """Rules of tune that exclude small arrays apply to arrays of any size."""
    for module, values in (
        (_cpu, {"LARGE": 2, "EXAMPLES": 1, "CHANNELS": 1}),
        (_convolutions, {"WORK": 0}),
        (_library, {"LARGE": 0, "SMALL": 0}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

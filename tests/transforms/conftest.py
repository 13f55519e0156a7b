"""Fixtures of several files."""

import pytest

from fnet.transforms import _tune_convolutions, _tune_cpu, _tune_library


@pytest.fixture
def every_size(monkeypatch):
    """Rules of tune that exclude small arrays apply to arrays of any size."""
    for module, values in (
        (_tune_cpu, {"LARGE": 2, "EXAMPLES": 1, "CHANNELS": 1}),
        (_tune_convolutions, {"WORK": 0}),
        (_tune_library, {"LARGE": 0, "SMALL": 0}),
    ):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

"""Signals without a pause, and an S3 server for the tests of object stores."""

import pytest
import s3

from fnet.training.loop import _signals


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    """A run that a signal has ended does not wait for the signal's repeat."""
    monkeypatch.setattr(_signals, "REST", 0.0)


@pytest.fixture(scope="session")
def server():
    server = s3.Server()
    yield server
    server.close()


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """The URL of an empty prefix, with a space and a letter that is not ASCII."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.faults()
    yield f"s3://bucket/a run ü/{tmp_path.name}"
    server.faults()

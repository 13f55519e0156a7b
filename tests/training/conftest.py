"""An S3 server for the tests of object stores."""

import pytest
import s3


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

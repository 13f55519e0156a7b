"""What the tests of plans share."""

import socket

import pytest


@pytest.fixture
def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def standard_promotion():
    import jax  # once its environment is set

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield

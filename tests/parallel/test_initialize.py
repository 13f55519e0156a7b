"""initialize: nothing on one process, clear sentences where processes do not find each other. Two
that do: test_two_processes.py."""

import re
import subprocess
import sys

import jax
import pytest

from fnet import parallel


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)


def test_one_process_needs_nothing():
    jax.devices()
    assert parallel.initialize() is None
    assert parallel.initialize("127.0.0.1:1", 1, 0) is None
    assert not jax.distributed.is_initialized()


def test_a_process_of_fnet_run_finds_its_place(monkeypatch):
    monkeypatch.setenv("FNET_PROCESSES", "1")
    monkeypatch.setenv("FNET_PROCESS", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    assert parallel.initialize() is None
    monkeypatch.setenv("FNET_PROCESS", "1")
    monkeypatch.setenv("FNET_PROCESSES", "2")
    with pytest.raises(RuntimeError, match="JAX is already initialized"):
        parallel.initialize()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            ("127.0.0.1:1234", 2),
            ValueError,
            "initialize: expected process_id together with coordinator_address="
            "'127.0.0.1:1234', num_processes=2, because JAX detects no cluster here; pass all "
            "three, or none for a single",
        ),
        (
            (None, 2),
            ValueError,
            "initialize: expected coordinator_address and process_id together with num_processes=2",
        ),
        (
            ("127.0.0.1", 2, 0),
            ValueError,
            "initialize: coordinator_address must be host:port, such as "
            "'10.0.0.1:1234'; got '127.0.0.1'",
        ),
        (
            ("127.0.0.1:1234", 2, 2),
            ValueError,
            "initialize: process_id=2 with num_processes=2: expected 0 to 1",
        ),
        (
            ("127.0.0.1:1234", 2, 0),
            RuntimeError,
            "initialize: JAX is already initialized with the devices of this "
            "process; call initialize before creating an array and before jax.devices()",
        ),
    ],
)
def test_errors(arguments, kind, message):
    jax.devices()
    with pytest.raises(kind, match=re.escape(message)):
        parallel.initialize(*arguments)


def test_times_are_in_seconds():
    with pytest.raises(
        ValueError, match=r"initialize: heartbeat_timeout must be >= 1 second; got 0"
    ):
        parallel.initialize(heartbeat_timeout=0)


def test_the_environment_names_the_coordinator(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    with pytest.raises(
        ValueError, match=r"expected num_processes and process_id together with coord"
    ):
        parallel.initialize()


@pytest.mark.exhaustive
def test_nobody_there(free_port):
    """The process says where it waited, as which, and ends by itself with its own exit code."""
    where = f"127.0.0.1:{free_port}"
    code = (
        f"import sys; from fnet import parallel\ntry: parallel.initialize('{where}', 2, 1, "
        "initialization_timeout=1)\nexcept TimeoutError as error: print(error); sys.exit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert done.stdout == (
        f"initialize: process 1 of 2 waited 1 s at {where}, and nothing answers there; check that "
        "process 0 is running at that address and is reachable (to wait longer, increase "
        "initialization_timeout=)\n"
    )

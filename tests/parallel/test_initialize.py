"""initialize: nothing on one process, clear sentences where processes do not find each other. Two that do:
test_two_processes.py."""

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


@pytest.mark.parametrize(("arguments", "kind", "message"), [
    (("127.0.0.1:1234", 2), ValueError, "initialize: process_id missing beside coordinator_address='127.0.0.1:1234', "
     "num_processes=2, and JAX finds no cluster here to ask: give all three, or none on one process"),
    ((None, 2), ValueError, "initialize: coordinator_address and process_id missing beside num_processes=2"),
    (("127.0.0.1", 2, 0), ValueError, "initialize: coordinator_address='127.0.0.1': it is a host and a port, as in "
     "'10.0.0.1:1234'"),
    (("127.0.0.1:1234", 2, 2), ValueError, "initialize: process_id=2 of num_processes=2: they count from 0, to 1"),
    (("127.0.0.1:1234", 2, 0), RuntimeError, "initialize: JAX has begun already, with this process's devices alone: "
     "call initialize before any array is made and before jax.devices()"),
])
def test_errors(arguments, kind, message):
    jax.devices()
    with pytest.raises(kind, match=re.escape(message)):
        parallel.initialize(*arguments)


def test_times_are_in_seconds():
    with pytest.raises(ValueError, match=r"initialize: heartbeat_timeout=0: it is in seconds, at least 1"):
        parallel.initialize(heartbeat_timeout=0)


def test_the_environment_names_the_coordinator(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    with pytest.raises(ValueError, match=r"num_processes and process_id missing beside coordinator_address='10\.0"):
        parallel.initialize()


def test_nobody_there(free_port):
    """The process says where it waited, as which, and ends by itself with its own exit code."""
    where = f"127.0.0.1:{free_port}"
    code = (f"import sys; from fnet import parallel\ntry: parallel.initialize('{where}', 2, 1, "
            "initialization_timeout=1)\nexcept TimeoutError as error: print(error); sys.exit(7)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert done.stdout == (
        f"initialize: process 1 of 2 waited 1 s at {where}, and nothing answers there: is process 0 running at that "
        "address, and may it be reached? (initialization_timeout= gives them longer)\n")

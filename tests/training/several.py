"""Several processes of one run, on this machine."""

import json
import os
import socket
import subprocess
import sys


def processes(script, count, where):
    """What each of `python script PORT PROCESS COUNT WHERE` printed last, as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_RANK_PROMOTION"}
    env["XLA_FLAGS"] = os.environ["FNET_TEST_XLA_FLAGS"]
    every = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(i), str(count), where],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    ends = []
    for process in every:
        try:
            ends.append((*process.communicate(timeout=150), process.returncode))
        except subprocess.TimeoutExpired:
            process.kill()
            ends.append((*process.communicate(), None))
    assert [code for *_, code in ends] == [0] * count, [err[-1500:] for _, err, _ in ends]
    return [json.loads(out.splitlines()[-1]) for out, *_ in ends]

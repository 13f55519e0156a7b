"""A real server process on a free port, and requests to it with the standard library."""

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
CODES = {"float32": "FP32", "int32": "INT32", "uint8": "UINT8"}


@contextlib.contextmanager
def serving(*arguments, **environment):
    """The port and the process of `fnet serve`, once its programs are compiled."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    command = [sys.executable, "-m", "fnet.cli", "serve", "--port", "0", *map(str, arguments)]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(120, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("serving on http://127.0.0.1:"), process.communicate()[1]
        watchdog.cancel()
        yield int(line.rsplit(":", 1)[1]), process
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


class Client:
    """A connection that is kept open."""

    def __init__(self, port, **headers):
        self.connection, self.headers = (
            http.client.HTTPConnection("127.0.0.1", port, timeout=60),
            headers,
        )

    def __del__(self):
        self.connection.close()

    def __call__(self, path, body=None, method=None, **headers):
        """(status, headers, content)."""
        content = json.dumps(body) if isinstance(body, (dict, list)) else body
        names = {
            name.replace("_", "-"): value for name, value in {**self.headers, **headers}.items()
        }
        self.connection.request(method or ("GET" if body is None else "POST"), path, content, names)
        response = self.connection.getresponse()
        return response.status, response.headers, response.read()

    def json(self, path, body=None, **headers):
        status, _, content = self(path, body, **headers)
        return status, json.loads(content)

    def infer(self, name, **inputs):
        """The outputs for arrays, or the error."""
        status, response = self.json(f"/v2/models/{name}/infer", request(**inputs))
        if status != 200:
            return response["error"]
        return [np.array(y["data"]).reshape(y["shape"]) for y in response["outputs"]]


def request(**inputs):
    return {
        "inputs": [
            {
                "name": name,
                "shape": list(x.shape),
                "datatype": CODES[str(x.dtype)],
                "data": x.tolist(),
            }
            for name, x in inputs.items()
        ]
    }

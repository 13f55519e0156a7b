"""Starts tests/s3_server.py and talks to it."""

import contextlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import urllib.request

MISSING = [
    name
    for name in ("obstore", "moto", "flask", "flask_cors")
    if importlib.util.find_spec(name) is None
]
REASON = f"needs the packages of the extra dev: {', '.join(MISSING)} missing"


class Server:
    """A server with one bucket, named "bucket". `environment` has the variables that lead obstore
    to it."""

    def __init__(self):
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("AWS_")
        }
        self._process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("s3_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_REGION": "us-east-1",
        }
        self._send("PUT", "/bucket")

    def faults(self, *faults):
        self._send("POST", "/-/faults", json.dumps(faults).encode())

    def requests(self):
        """[method, path, range] of each request since the last call."""
        return json.loads(self._send("GET", "/-/requests"))

    def _send(self, method, path, body=None):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(
            urllib.request.Request(self.url + path, body, method=method), timeout=30
        ) as answer:
            return answer.read()

    def close(self):
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

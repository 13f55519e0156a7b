"""An S3 server on 127.0.0.1 (moto's) that fails when told to. Prints its port; ends when its
standard input does.

    python tests/s3_server.py              # --forever: until it is killed, whatever its standard input is

POST /-/faults with a JSON list replaces the faults: {"method": "PUT", "match": "manifest", "skip":
1, "count": 2, "chance": 0.5}, all of them optional, and one of "status": 503, "reset": "before"
(the connection is closed without an answer) or "reset": "after" (the request is carried out, and
the connection closed). GET /-/requests returns what was requested since the last call.
"""

import contextlib
import json
import logging
import os
import random
import socket
import sys
import threading
import urllib.parse
import warnings

warnings.simplefilter("ignore")

from moto.server import DomainDispatcherApplication, create_backend_app  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

FAULTS, REQUESTS, LOCK = [], [], threading.Lock()


def fault(method, path):
    with LOCK:
        for each in FAULTS:
            chosen = each.get("method", method) == method and each.get("match", "") in path
            if chosen and random.random() < each.get("chance", 1):
                if each.get("skip", 0) > 0:
                    each["skip"] -= 1
                elif each.get("count", 1) > 0:
                    each["count"] = each.get("count", 1) - 1
                    return each
    return None


def reset(environ, answer):
    """Closes the connection without an answer; what the application still sends goes nowhere."""
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    answer("500 Internal Server Error", [("Content-Length", "0")])
    return [b""]


class Faulty:
    def __init__(self, app):
        self.app = app

    def __call__(self, environ, answer):
        method, path = environ["REQUEST_METHOD"], urllib.parse.unquote(environ["PATH_INFO"])
        if path.startswith("/-/"):
            return self.control(environ, answer, path)
        path += f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else ""
        with LOCK:
            REQUESTS.append([method, path, environ.get("HTTP_RANGE", "")])
        if (harm := fault(method, path)) is not None:
            length = int(environ.get("CONTENT_LENGTH") or 0)
            if harm.get("reset") == "after":
                b"".join(self.app(environ, lambda *_: None))
                return reset(environ, answer)
            environ["wsgi.input"].read(length)
            if "reset" in harm:
                return reset(environ, answer)
            answer(f"{harm['status']} Injected", [("Content-Length", "0")])
            return [b""]
        return self.app(environ, answer)

    def control(self, environ, answer, path):
        with LOCK:
            if path == "/-/faults":
                FAULTS[:] = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
                body = b"{}"
            else:
                body = json.dumps(REQUESTS).encode()
                REQUESTS.clear()
        answer("200 OK", [("Content-Length", str(len(body)))])
        return [body]


def main():
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.setdefault(name, "test")
    server = make_server(
        "127.0.0.1", 0, Faulty(DomainDispatcherApplication(create_backend_app)), threaded=True
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stderr = open(os.devnull, "w")  # werkzeug reports connections that were closed
    if "--forever" in sys.argv:
        threading.Event().wait()
    sys.stdin.read()  # until the tests end
    os._exit(0)


if __name__ == "__main__":
    main()

"""A server on 127.0.0.1 with the part of Hugging Face's hub that downloads use: model info, and
files with ranges."""

import hashlib
import http.server
import json
import re
import threading
import urllib.parse

LARGE = 1 << 10  # files of this size are in LFS: the hub knows their SHA-256


class Hub:
    """Repositories {name: {commit: {file: bytes}}}, with branches {(name, branch): commit}.

    `requests` lists (method, path, Range header). `faults` is a list of (path suffix, what): the
    next GET of such a path is cut in half ("cut"), has a changed byte ("flip"), or is answered with
    a status (403).
    """

    def __init__(self):
        self.repositories, self.branches, self.requests, self.faults = {}, {}, [], []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def publish(self, name, files, branch="main"):
        """Adds a commit with these files and returns it."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(name, {})[commit] = dict(files)
        self.branches[name, branch] = commit
        return commit

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler):
        path = urllib.parse.unquote(urllib.parse.urlsplit(handler.path).path)
        self.requests.append((handler.command, path, handler.headers.get("Range")))
        if found := re.fullmatch("/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(handler, found[1], found[2] or "main")
        found = re.fullmatch("/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        commit = found and self._commit(found[1], found[2])
        if not commit:
            return self._error(handler, "RepoNotFound", 404)
        if found[3] not in self.repositories[found[1]][commit]:
            return self._error(handler, "EntryNotFound", 404)
        self._file(handler, path, commit, self.repositories[found[1]][commit][found[3]])

    def _commit(self, name, revision):
        commit = self.branches.get((name, revision), revision)
        return commit if commit in self.repositories.get(name, {}) else None

    def _info(self, handler, name, revision):
        if name == "org/gated":
            return self._error(handler, "GatedRepo", 403)
        if name not in self.repositories:
            return self._error(handler, "RepoNotFound", 404)
        commit = self._commit(name, revision)
        if commit is None:
            return self._error(handler, "RevisionNotFound", 404)
        files = []
        for file, content in self.repositories[name][commit].items():
            entry = {"rfilename": file, "size": len(content), "blobId": _git(content)}
            if len(content) >= LARGE:
                entry["lfs"] = {
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "size": len(content),
                    "pointerSize": 134,
                }
            files.append(entry)
        body = json.dumps(
            {
                "_id": "0",
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": False,
                "tags": [],
                "siblings": files,
            }
        ).encode()
        self._send(handler, 200, {"Content-Type": "application/json"}, body)

    def _file(self, handler, path, commit, content):
        etag = hashlib.sha256(content).hexdigest() if len(content) >= LARGE else _git(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if len(content) >= LARGE:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        faults = self.faults if handler.command == "GET" else []
        fault = next((each for each in faults if path.endswith(each[0])), None)
        if fault is not None:
            self.faults.remove(fault)
            if isinstance(fault[1], int):
                return self._error(handler, "Fault", fault[1])
        status, start = 200, 0
        if (asked := handler.headers.get("Range")) and handler.command == "GET":
            start = int(re.fullmatch(r"bytes=(\d+)-(\d*)", asked)[1])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if fault is not None and fault[1] == "flip":
            body = body[:-1] + bytes([body[-1] ^ 1])
        cut = len(body) // 2 if fault is not None and fault[1] == "cut" else None
        self._send(handler, status, headers, body, cut)

    def _error(self, handler, code, status):
        self._send(handler, status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}")

    def _send(self, handler, status, headers, body, cut=None):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            handler.wfile.flush()
            handler.close_connection = True


def _git(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

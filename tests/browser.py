"""Chromium for tests, driven through its DevTools pipe: no package is needed."""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
)
KEYS = {
    "Enter": 13,
    "Escape": 27,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Tab": 9,
    "Home": 36,
    "End": 35,
}


@contextlib.contextmanager
def chromium():
    """A browser. The test is skipped if there is none."""
    program = os.environ.get("FNET_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: expected one of {', '.join(NAMES)}, or its path in FNET_CHROMIUM")
    (from_browser, to_us), (from_us, to_browser) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (from_us, to_us)]
        quiet = [(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_WRONLY, 0) for each in (1, 2)]
        process = os.posix_spawn(
            program,
            [program, *FLAGS, f"--user-data-dir={profile}"],
            os.environ,
            file_actions=[
                *quiet,
                *((os.POSIX_SPAWN_DUP2, each, number) for each, number in zip(high, (3, 4))),
            ],
        )
        for each in (from_us, to_us, *high):
            os.close(each)
        try:
            yield Browser(from_browser, to_browser)
        finally:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(from_browser)
            os.close(to_browser)


class Browser:
    """A browser with one page.

    Attributes:
        problems: messages of the console and exceptions. requests: the addresses that the page
            asked for.
    """

    def __init__(self, read, write):
        self._read, self._write, self._rest, self._number, self._session = read, write, b"", 0, None
        self.problems, self.requests = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        method, found = message.get("method"), message.get("params", {})
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(found)
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        return message

    def open(self, path, width=1600, height=1000, dark=False, fragment=""):
        """Loads a file in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.requests.clear()
        self.call(
            "Page.navigate", url="about:blank"
        )  # else a change of the fragment alone loads nothing
        self.call("Page.navigate", url=path.resolve().as_uri() + fragment)
        while (
            self.js("document.readyState") != "complete" or self.js("location.protocol") != "file:"
        ):
            pass
        assert [
            url for url in self.requests if not url.startswith(("file:", "about:", "data:"))
        ] == []

    def visit(self, address, width=1000, height=800):
        """Loads a page from a server in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.requests.clear()
        self.call("Page.navigate", url=address)
        while self.js("document.readyState") != "complete" or not self.js(
            "location.href"
        ).startswith(address):
            pass

    def screenshot(self, path):
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )

    def js(self, expression):
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, element):
        """Clicks in the middle of what a JavaScript expression names."""
        x, y = self.js(
            f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'center', behavior: "
            "'instant'}); const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + "
            "Math.min(r.height / 2, 14)]; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            moved = kind == "mouseMoved"
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="none" if moved else "left",
                buttons=int(kind == "mousePressed"),
                clickCount=int(not moved),
            )
        self.js("new Promise(done => setTimeout(done, 20))")

    def press(self, key):
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = KEYS.get(key, ord(key[0]))
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def check(self):
        """Raises if the page has written to the console or thrown an exception."""
        assert self.problems == []

"""The page of the server in headless Chromium: draw an image, send it, read the classes; generate a
text."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from servers import serving
from test_serve import files  # noqa: F401 (a fixture)

pytest.importorskip("uvicorn")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("quickly"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]


class Browser:
    """Chromium, controlled by the DevTools protocol over a pipe."""

    def __init__(self, folder):
        (read, self.write), (self.read, write) = os.pipe(), os.pipe()
        move = f'exec 3<&{read} 4>&{write}; exec "$@"'
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                move,
                "bash",
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(read)
        os.close(write)
        self.count, self.rest = 0, b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def __call__(self, method, session=None, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                self.rest += os.read(self.read, 1 << 16)
            text, _, self.rest = self.rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self.count:
                return answer["result"]

    def open(self, address):
        self(
            "Emulation.setDeviceMetricsOverride",
            self.session,
            width=1000,
            height=1400,
            deviceScaleFactor=1,
            mobile=False,
        )
        self("Page.navigate", self.session, url=address)

    def until(self, expression, seconds=60):
        """The value of an expression once it is not false."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            result = self(
                "Runtime.evaluate", self.session, expression=expression, returnByValue=True
            )["result"]
            if result.get("value"):
                return result["value"]
            time.sleep(0.1)
        raise AssertionError(
            self(
                "Runtime.evaluate",
                self.session,
                expression="document.body.innerText",
                returnByValue=True,
            )["result"]
        )

    def run(self, script):
        self("Runtime.evaluate", self.session, expression=script)

    def drag(self, start, end):
        event = lambda kind, at, buttons: self(
            "Input.dispatchMouseEvent",
            self.session,
            type=kind,
            x=at[0],
            y=at[1],
            button="left",
            buttons=buttons,
            clickCount=1,
        )
        event("mousePressed", start, 1)
        event("mouseMoved", end, 1)
        event("mouseReleased", end, 0)

    def close(self):
        os.killpg(
            self.process.pid, signal.SIGKILL
        )  # Chromium is started by a script and starts others
        self.process.wait()
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def test_the_page(files, browser):  # noqa: F811
    with serving(files / "digits.fnet", files / "gpt.fnet", "--max-batch", 2) as (port, _):
        browser.open(f"http://127.0.0.1:{port}/")
        assert "float32[b, 8, 8, 1]" in browser.until(
            "document.getElementById('signature')?.textContent"
        )
        box = json.loads(
            browser.until(
                "JSON.stringify(document.getElementById('canvas').getBoundingClientRect())"
            )
        )
        browser.drag((box["x"] + 60, box["y"] + 60), (box["x"] + 200, box["y"] + 200))
        for at in 60, 200:
            assert browser.until(f"pen.getImageData({at}, {at}, 1, 1).data[0]") == 255
        browser.run("document.getElementById('send').click()")
        rows = browser.until(
            "[...document.querySelectorAll('#result tr')].map(row => row.innerText)"
        )
        assert len(rows) == 5 and all(row.split()[2] == "%" for row in rows)
        browser.run("""document.getElementById('model').value = 'generate:gpt';
                       document.getElementById('model').dispatchEvent(new Event('change'));
                       document.getElementById('prompt').value = 'abc'; document.getElementById('count').value = '5';
                       document.getElementById('send').click()""")
        text = browser.until(
            "(t => t && t.length === 8 && t)(document.querySelector('#result pre')?.textContent)"
        )
        assert text.startswith("abc") and set(text) <= set("abcdefghijk")
        browser.run(
            "document.getElementById('prompt').value = 'z'; document.getElementById('send').click()"
        )
        assert "not in the model's vocabulary" in browser.until(
            "document.getElementById('error').textContent"
        )

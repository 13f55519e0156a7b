"""Checks of HTML pages that fnet writes."""

import collections
import json
import re
from html.parser import HTMLParser


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.scripts, self.inside = collections.Counter(), [], [], None
        self.feed(text)
        self.close()
        assert not [tag for tag in self.open if tag not in ("meta", "input", "br", "path")]

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("srcset", "action"), (tag, name)
            assert name != "src" or value.startswith("data:image/png;base64,"), value
            assert name != "href" or value.startswith(("#", "data:")), value
        if tag not in ("meta", "input", "br", "path", "link", "img"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append(["", dict(attrs)])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1][0] += data


def check_page(text):
    """Raises unless a page is well formed, loads nothing, and has one script, which its policy
    allows by its hash."""
    page = Page(text)
    assert [attrs.get("type") for _, attrs in page.scripts] == ["application/json", None]
    assert "default-src 'none'" in text and "script-src 'sha256-" in text
    code = page.scripts[1][0].replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(
        r"https?:|[\"'`]//|\b(fetch|XMLHttpRequest|import|WebSocket|innerHTML|eval|document\.write|"
        r"insertAdjacentHTML)\b",
        code,
    )
    return json.loads(page.scripts[0][0])

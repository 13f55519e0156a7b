"""HTML pages: what is text stays text, and a page loads and runs nothing but what is in it."""

import base64
import hashlib
import json
import re

import pytest
from html_checks import Page

from fnet._util import _page

STYLE = "fnet._util/document.css"
SCRIPT = "fnet.serve/page.js"


def sha(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_a_page_without_a_script_allows_its_style_alone():
    text = _page.page("a < b", "<p>1</p>", style=STYLE)
    page = Page(text)
    assert page.tags["script"] == 0 and "<title>a &lt; b</title>" in text
    style = re.search("<style>(.*)</style>", text, re.DOTALL)[1]
    assert f"default-src 'none'; style-src {sha(style)}; img-src data:; base-uri" in text
    assert "script-src" not in text and "unsafe" not in text


def test_the_policy_names_the_script_of_the_page_and_what_is_allowed_besides():
    allow = {"connect-src": "'self'", "img-src": "blob:"}
    text = _page.page("t", "", style=STYLE, script=SCRIPT, allow=allow)
    script = re.search("<script>(.*)</script>", text, re.DOTALL)[1]
    style = re.search("<style>(.*)</style>", text, re.DOTALL)[1]
    policy = re.search('Policy" content="(.*?)"', text)[1]
    assert policy == _page.policy(STYLE, SCRIPT, allow)
    assert policy.split("; ") == [
        "default-src 'none'",
        f"script-src {sha(script)}",
        f"style-src {sha(style)}",
        "img-src data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
    ]


def test_data_cannot_end_its_element():
    hostile = {"name": "</script><script>alert(1)</script>", "line": "\u2028", "n": [1, None]}
    text = _page.page("t", "", style=STYLE, script=SCRIPT, data=hostile)
    page = Page(text)
    assert page.tags["script"] == 2 and json.loads(page.scripts[0][0]) == hostile
    with pytest.raises(ValueError):
        _page.page("t", "", style=STYLE, script=SCRIPT, data=float("nan"))


def test_a_name_that_is_no_text_does_not_stop_the_page():
    assert "<title>a?b</title>" in _page.page("a\udc80b", "", style=STYLE)

"""HTML pages that load no other files: one file contains style, script and data.

In the HTML pages, text such as parameter names is escaped, so that it cannot run as a script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib import resources
from typing import Any


def page(title: str, body: str, *, style: str, script: str, data: Any) -> str:
    """Returns an HTML page.

    The page's content security policy allows only the page's own style, script and images.

    Args:
        title: plain text.
        body: HTML, in which every text is escaped.
        style, script: names of files, separated by spaces, such as "fnet._util/page.css
            fnet.report/report.css".
        data: a value of JSON types, which the script of the page reads from the element with the id
            "data".
    """
    css, js = ("\n".join(_asset(name) for name in names.split()) for names in (style, script))
    allowed = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    text = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{escape(title)}</title>\n'
        f"<style>\n{css}</style>\n</head>\n<body>\n{body}\n"
        f'<script type="application/json" id="data">{as_json(data)}</script>\n<script>{js}</script>\n'
        "</body>\n</html>\n"
    )
    # Replaces lone surrogates, as in names of files.
    return text.encode("utf-8", "replace").decode()


def fill(name: str, **parts: str) -> str:
    """Returns the contents of an HTML file in which each {{name}} is replaced by the argument of
    this name."""
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], _asset(name))


def as_json(data: Any) -> str:
    """Returns JSON for a script element. "<" is escaped. NaN, which browsers cannot parse, raises a
    ValueError."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _asset(name: str) -> str:
    package, _, file = name.partition("/")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")

"""HTML pages that load no other files: one file contains style, script and data.

In the HTML pages, text such as parameter names is escaped, so that it cannot run as a script.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any


def page(
    title: str,
    body: str,
    *,
    style: str,
    script: str = "",
    data: Any = None,
    allow: Mapping[str, str] | None = None,
) -> str:
    """Returns an HTML page, which may load and run nothing but what is in it.

    Args:
        title: plain text.
        body: HTML, in which every text is escaped.
        style, script: names of files, separated by spaces, such as "fnet._util/page.css
            fnet.report/report.css". Default for `script`: the page has none.
        data: a value of JSON types, which the script of the page reads from the element with the id
            "data".
        allow: what the page may do besides, as for `policy`.
    """
    css, js = _joined(style), _joined(script)
    rules = escape(policy(style, script, allow), quote=False)
    scripts = f"<script>{js}</script>\n" if js else ""
    if data is not None:
        scripts = f'<script type="application/json" id="data">{as_json(data)}</script>\n{scripts}'
    text = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{css}</style>\n</head>\n<body>\n{body}\n{scripts}</body>\n</html>\n"
    )
    # Replaces lone surrogates, as in names of files.
    return text.encode("utf-8", "replace").decode()


def policy(style: str, script: str, allow: Mapping[str, str] | None = None) -> str:
    """Returns the content security policy of a page with this style and script (see `page`). The
    page's own style and script are allowed by their hashes, so nothing that slipped into the page
    as text can run.

    Args:
        allow: {directive: sources} that are allowed besides, such as {"connect-src": "'self'"} for
            a page that asks its server.
    """
    hashed = lambda text: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    rules = {"default-src": "'none'"}
    if script:
        rules["script-src"] = f"'sha256-{hashed(_joined(script))}'"
    rules["style-src"] = f"'sha256-{hashed(_joined(style))}'"
    rules["img-src"] = "data:"
    for directive, sources in (allow or {}).items():
        rules[directive] = f"{rules.get(directive, '')} {sources}".strip()
    rules |= {"base-uri": "'none'", "form-action": "'none'"}
    return "; ".join(f"{directive} {sources}" for directive, sources in rules.items())


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


def _joined(names: str) -> str:
    return "\n".join(_asset(name) for name in names.split())


@functools.cache
def _asset(name: str) -> str:
    package, _, file = name.partition("/")
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")

"""The page on which users try the models of the server: an HTML file that loads nothing from other
hosts."""

from fnet._util import _page

_STYLE, _SCRIPT = "fnet.serve/page.css", "fnet.serve/page.js"
_ALLOW = {"connect-src": "'self'", "img-src": "blob:"}  # the server, and images that users choose

HTML = _page.page(
    "fnet serve", _page.fill("fnet.serve/page.html"), style=_STYLE, script=_SCRIPT, allow=_ALLOW
)
# As a header too, because a page cannot forbid frames of itself.
POLICY = f"{_page.policy(_STYLE, _SCRIPT, _ALLOW)}; frame-ancestors 'none'"

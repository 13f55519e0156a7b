"""The page on which users try the models of the server: an HTML file that loads nothing from other
hosts."""

import base64
import hashlib
import re
from importlib import resources

HTML = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
_hash = lambda tag: base64.b64encode(
    hashlib.sha256(re.search(rf"<{tag}>(.*?)</{tag}>", HTML, re.S)[1].encode()).digest()
).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_hash('script')}'; style-src "
    f"'sha256-{_hash('style')}'; "
    "connect-src 'self'; img-src blob: data:; base-uri 'none'; form-action 'none'; frame-ancestors "
    "'none'"
)

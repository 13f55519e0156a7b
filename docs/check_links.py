"""Checks the links of the built site, without network access: python docs/check_links.py
docs/_build/html [--external]

Every link to a page, an anchor or a file of the site must have a target. External links are checked
for their form only (https, a host name, no spaces); `--external` lists them with the pages that
have them. Scripts, styles and images must be part of the site, so that it works offline.
"""

import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}
INSECURE = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)  # the server has no https


class Page(HTMLParser):
    """The ids of a page, and its links as (tag, attribute, target)."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[name] for name in ("id", "name") if attrs.get(name)}
        for name in ("href", "src"):
            if attrs.get(name):
                self.links.append((tag, name, attrs[name], attrs.get("rel", "")))


def check(root: Path) -> tuple[list[str], dict[str, set[str]], int]:
    """Returns the errors, the external links with their pages, and the number of internal links."""
    files = [
        path for path in root.rglob("*.html") if path.name != "webpack-macros.html"
    ]  # a template of the theme
    pages = {path.resolve(): Page(path) for path in files}
    errors, external, internal = [], defaultdict(set), 0
    for path, page in pages.items():
        at = path.relative_to(root.resolve())
        for tag, attribute, link, rel in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if (tag, attribute) in LOADED and rel != "canonical":
                    errors.append(f"{at}: loads {link} from the network")
                elif parts.scheme in ("http", "https"):
                    external[link].add(str(at))
                    if (
                        " " in link
                        or not parts.hostname
                        or "." not in parts.hostname
                        or (parts.scheme == "http" and link not in INSECURE)
                    ):
                        errors.append(f"{at}: {link} is not a valid https link")
                elif parts.scheme not in ("mailto", "data"):
                    errors.append(f"{at}: {link} has an unknown scheme")
                continue
            internal += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists():
                errors.append(f"{at}: {link} does not exist")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                errors.append(f"{at}: {link} has no such anchor")
    return errors, external, internal


def main(argv: list[str]) -> int:
    """Prints the errors and the numbers of links. Returns 1 if there are errors."""
    errors, external, internal = check(Path(argv[0]))
    print("\n".join(sorted(set(errors))), end="\n" if errors else "")
    if "--external" in argv:
        print(
            "\n".join(
                f"{link}  ({', '.join(sorted(pages))})" for link, pages in sorted(external.items())
            )
        )
    print(
        f"{internal:,} internal links checked, {len(external)} external links not opened, "
        f"{len(set(errors))} errors"
    )
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

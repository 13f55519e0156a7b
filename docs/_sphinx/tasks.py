"""Keeps the twenty tasks of `coming_from/*_tasks.py` on the pages, between `<!-- tasks: LIBRARY
... -->` and `<!-- end of tasks -->`.

The pages in the repository show the code one below the other, as a forge can render it; the built
site shows it in two columns. After a change of a `*_tasks.py`: python docs/_sphinx/tasks.py
"""

import re
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "coming_from"
_MARKED = re.compile(r"(<!-- tasks: (\w+)[^>]*-->).*?(<!-- end of tasks -->)", re.DOTALL)
LIBRARIES = {
    "pytorch": "PyTorch",
    "keras": "Keras",
    "linen": "Flax linen",
    "nnx": "Flax nnx",
    "equinox": "Equinox",
    "haiku": "Haiku",
}


def read(library: str) -> dict[str, str]:
    """Returns {title: code} of a library's tasks. The title "" has the imports and the data."""
    source = (FOLDER / f"{library}_tasks.py").read_text()
    source = (
        source[source.index('"""\n') + 4 :]
        if source.count('"""') == 1
        else source.split('"""\n', 1)[1]
    )
    parts = re.split(r"^# %% (.*)\n", source, flags=re.MULTILINE)
    return {
        "": parts[0].strip(),
        **{title: code.strip() for title, code in zip(parts[1::2], parts[2::2])},
    }


def sections(library: str, section: Callable[[str, str, str, str], str]) -> str:
    """Returns the part of a page with the tasks, as `section(heading, theirs, ours, name)` formats
    each of them."""
    theirs, ours, name = read(library), read("fnet"), LIBRARIES[library]
    return "\n".join(
        section(
            f"## {number}. {title}" if number else "## Imports and data", theirs[title], code, name
        )
        for number, (title, code) in enumerate(ours.items())
    )


def plain(heading: str, theirs: str, ours: str, name: str) -> str:
    """Formats a task for the page in the repository."""
    blocks = [
        f"{label}:\n\n```python no-run\n{code}\n```\n"
        for label, code in ((name, theirs), ("fnet", ours))
    ]
    return "\n".join([heading + "\n", *blocks])


def columns(heading: str, theirs: str, ours: str, name: str) -> str:
    """Formats a task for the site."""
    both = "".join(
        f":::{{grid-item}}\n**{label}**\n```python\n{code}\n```\n:::\n"
        for label, code in ((name, theirs), ("fnet", ours))
    )
    return f"{heading}\n\n::::{{grid}} 1 1 1 2\n:gutter: 2\n:margin: 0\n\n{both}::::\n"


def written(page: str) -> str:
    """Returns the text of a page with the present code of the tasks."""
    return _MARKED.sub(lambda match: f"{match[1]}\n\n{sections(match[2], plain)}\n{match[3]}", page)


def insert(app, name, source):
    """A handler of `source-read`."""
    source[0] = _MARKED.sub(lambda match: sections(match[2], columns), source[0])


if __name__ == "__main__":
    for page in FOLDER.glob("*.md"):
        page.write_text(written(page.read_text()))

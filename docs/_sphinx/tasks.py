"""Inserts the twenty tasks of `coming_from/*_tasks.py` into pages with the line `<!-- tasks:
LIBRARY -->`."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "coming_from"
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


def markdown(library: str) -> str:
    """Returns the sections of a page: for each task the library's code, and fnet's."""
    theirs, ours, name = read(library), read("fnet"), LIBRARIES[library]
    return "\n".join(
        _section(title or "Imports and data", number, theirs[title], ours[title], name)
        for number, title in enumerate(ours)
    )


def _section(title, number, theirs, ours, name):
    heading = f"## {number}. {title}" if number else f"## {title}"
    columns = "".join(
        f":::{{grid-item}}\n**{label}**\n```python\n{code}\n```\n:::\n"
        for label, code in ((name, theirs), ("fnet", ours))
    )
    return f"{heading}\n\n::::{{grid}} 1 1 1 2\n:gutter: 2\n:margin: 0\n\n{columns}::::\n"


def insert(app, name, source):
    """A handler of `source-read`."""
    source[0] = re.sub(r"<!-- tasks: (\w+) -->", lambda match: markdown(match[1]), source[0])

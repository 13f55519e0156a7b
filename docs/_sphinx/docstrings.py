"""Converts fnet's docstrings, which are Google style with indented code, to reStructuredText for
napoleon."""

import re

SECTIONS = (
    "Args:",
    "Returns:",
    "Raises:",
    "Yields:",
    "Attributes:",
    "Fields:",
    "Inputs:",
    "Example:",
    "Others:",
)
_SPECIAL = re.compile(r"(?<!\\)([*|\\])|(?<=\w)(_)(?!\w)")


def process(app, what, name, obj, options, lines):
    """A handler of `autodoc-process-docstring`: rewrites `lines` in place."""
    lines[:] = convert(lines)


def signature(app, what, name, obj, options, text, returns):
    """A handler of `autodoc-process-signature`: writes defaults that are functions as `...`."""
    return text and re.sub(r"<function [^,=]*?>(?=[,)])", "...", text), returns


def skip(app, what, name, obj, skipped, options):
    """A handler of `autodoc-skip-member`: leaves out defaults that are functions of JAX, and fields
    of named tuples."""
    foreign = callable(obj) and not (getattr(obj, "__module__", None) or "fnet").startswith("fnet")
    return True if foreign or (obj.__doc__ or "").startswith("Alias for field number") else None


def convert(lines: list[str]) -> list[str]:
    """Marks indented blocks of code as such, and escapes characters that reStructuredText
    interprets.

    >>> convert(["Doubles.", "", "    y = 2 * x", "", "kernel [*window, in]"])
    ['Doubles.', '', '.. code-block:: python', '', '    y = 2 * x', '', 'kernel [\\\\*window, in]']
    """
    result, section, block = [], False, False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if indent == 0 and line.strip():
            section, block = line.strip() in SECTIONS, False
        if (
            not line.strip()
            or line.lstrip().startswith((">>>", "..."))
            or _in_doctest(lines, number)
        ):
            result.append(line)
            continue
        if section or indent < 4:
            result.append(_escaped(line))
            continue
        if not block:
            if result and result[-1].strip():
                result.append(_escaped(line))  # the continuation of a list item
                continue
            result += [f".. code-block:: {_language(lines, number)}", ""]
            block = True
        result.append(line)
    return result


def _in_doctest(lines, number):
    """Whether the line is output of a doctest: only lines that are not empty lie between it and a
    prompt."""
    while number >= 0 and lines[number].strip():
        if lines[number].lstrip().startswith(">>>"):
            return True
        number -= 1
    return False


def _language(lines, start):
    text = "\n".join(lines[start : start + 3])
    code = re.search(r"[=(]|^\s*(@|class |def |for |import |from )", text, re.MULTILINE)
    return "python" if code and text.isascii() else "text"


def _escaped(line):
    parts = re.split(r"(``.*?``|`[^`]*`)", line)  # text and code alternate
    for i, part in enumerate(parts):
        if i % 2 == 0:
            part = _SPECIAL.sub(lambda match: "\\" + match[0], part)
            parts[i] = "\\ " + part if i and re.match(r"\w", part) else part  # `Array`s
    return "".join(parts)

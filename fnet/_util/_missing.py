"""The message of errors about packages that are not installed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_VERSION = re.compile(r"[^\w.-].*")  # of a requirement, such as "==2.*"


def message(
    subject: str,
    *requirements: str,
    error: Exception | None = None,
    options: Sequence[str] = (),
    note: str = "",
) -> str:
    """Returns what needs the packages, and the command that installs them.

    The command names the packages themselves, and not an extra of fnet. The index may have a
    distribution that is called fnet and is another project, or none that has fnet's name.

    Args:
        subject: the first words of the message, with their verb, such as "plots need".
        requirements: the packages, with a version where an extra in pyproject.toml fixes it, such
            as "ai-edge-litert==2.3.*".
        error: the error of the import. It names the module that is missing, which may be one of
            several, or one that an installed package needs.
        options: options of pip.
        note: the end of the message, after the command.

    >>> message("plots need", "matplotlib")
    'plots need the package matplotlib, which is not installed: pip install matplotlib'
    >>> message("exports need", "a", "b==2.*", error=ImportError("No module named 'b'"))
    "exports need the packages a and b (No module named 'b'): pip install a 'b==2.*'"
    """
    names = [_VERSION.sub("", requirement) for requirement in requirements]
    *first, last = names
    if first:
        packages, absent = f"packages {', '.join(first)} and {last}", "which are not installed"
    else:
        packages, absent = f"package {last}", "which is not installed"
    reason = f", {absent}" if error is None else f" ({error})"
    command = shlex.join(["pip", "install", *options, *requirements])
    return f"{subject} the {packages}{reason}: {command}{note}"

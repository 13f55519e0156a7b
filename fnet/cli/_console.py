"""Writes rows and tables to a terminal, and without colors and to 100 columns to a pipe or a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

from fnet._util._heartbeat import Heartbeat

_WIDTH = 100  # columns of output to a pipe or a file


def console() -> Any:
    from rich import console as rich_console

    class Console(rich_console.Console):
        def on_broken_pipe(self) -> None:  # rich's version ends the process with exit code 1
            raise BrokenPipeError

    if sys.stdout.isatty():
        return Console(file=sys.stdout, highlight=False)
    return Console(file=_Plain(), width=_WIDTH, no_color=True, highlight=False)


class _Plain:
    """A stream that removes the spaces at the ends of lines, and writes the text to standard
    output. `console`
    uses this stream if standard output is not a terminal."""

    def write(self, text: str) -> None:
        sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def still(command: str, stage: str) -> Heartbeat:
    """Returns a context that writes to standard error, every few seconds, what a command waits
    for."""
    say = lambda text: print(f"fnet {command}: {text}", file=sys.stderr, flush=True)
    return Heartbeat(say, stage)


def facts(console: Any, rows: Sequence[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(f"  {label}", _plain(text))
    console.print(table)
    console.print()


def table(
    console: Any, heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = ""
) -> None:
    from rich import box
    from rich.table import Table

    if title:
        console.print(title, style="italic", highlight=False, markup=False)
    columns = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        padding=(0, 1),
        pad_edge=console.is_terminal,
    )
    for i, head in enumerate(heads):
        number = all(
            row[i][:1].lstrip("~?+-$").isdigit()
            or row[i] in ("-", "")
            or row[i][:2].lstrip("~?+-$").isdigit()
            for row in rows
        ) and head not in ("formula", "chips", "chip", "date")
        columns.add_column(
            head, justify="right" if number else "left", no_wrap=number or i == 0, overflow="fold"
        )
    for row in rows:
        columns.add_row(*map(_plain, row))
    console.print(columns)
    console.print()


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)

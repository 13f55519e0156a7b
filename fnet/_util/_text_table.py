"""Tables as lines of plain text."""

from __future__ import annotations

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Returns the lines of a table. The columns of the table are separated by two spaces.

    Args:
        rows: the cells of each row.
        left: the indices of the columns that are aligned to the left. All columns that are not in
            `left` are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]

"""Text for people: tables readable in a pipe, ages, times and counts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime

from rich.cells import cell_len

from rollbridge.model.text import printable


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> str:
    """Return columns padded to their widest cell, two spaces apart.

    Cells may come from other users (labels, client names), so characters that could steer a terminal are replaced.

    Args:
        head: Headings.
        rows: Cells of each row, as many as there are headings.
        right: Headings of the columns that are aligned to the right.
    """
    cells = [list(head), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(cell_len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for row in cells:
        padded = []
        for heading, cell, width in zip(head, row, widths, strict=True):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if heading in right else cell + space)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def duration(milliseconds: int) -> str:
    """Return the two largest units: ``3d 4h``, ``12m 5s``, ``0.3s``; negative ones with a sign."""
    sign = "-" if milliseconds < 0 else ""
    left = abs(milliseconds) // 1000
    if left < 10:
        return f"{sign}{abs(milliseconds) / 1000:.1f}s"
    for (unit, size), (next_unit, next_size) in (
        (("d", 86_400), ("h", 3_600)),
        (("h", 3_600), ("m", 60)),
        (("m", 60), ("s", 1)),
    ):
        if left >= size:
            return f"{sign}{left // size}{unit} {left % size // next_size}{next_unit}"
    return f"{sign}{left}s"


def moment(milliseconds: int) -> str:
    """Return a point in time, UTC, to the second."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def counted(count: int, word: str) -> str:
    """Return ``1 record``, ``336,776 records``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"

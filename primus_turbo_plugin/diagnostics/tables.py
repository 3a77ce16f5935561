"""Plain text for reports: aligned tables and wrapped key-value lines, readable in a log file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 130


def table(rows: Iterable[Sequence[str]], *, indent: str = "  ") -> list[str]:
    """Rows with aligned columns; the last column is wrapped under itself at `WIDTH`."""
    rows = [[str(cell) for cell in row] for row in rows]
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        lead = indent + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths))
        room = max(WIDTH - len(lead), 40)
        wrapped = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append((lead + wrapped[0]).rstrip())
        lines += [" " * len(lead) + line for line in wrapped[1:]]
    return lines


def section(title: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """A title and its table; nothing where there are no rows."""
    lines = table(rows)
    return [title, *lines] if lines else []


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: `0-3, 7, 9-11`."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][-1:] = [parts[-1][-1], number] if len(parts[-1]) == 1 else [number]
        else:
            parts.append([number])
    return ", ".join("-".join(str(end) for end in part) for part in parts)

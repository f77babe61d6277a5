"""What a replay prints: the policies as a table that fits the terminal. Which columns are shown depends on the width; numbers are whole."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefetcher.replay.verdict import plain_number
from prefetcher.words import count

__all__ = ["hints_in_words", "policies_table", "scored_in_words"]

#: A column takes a border and a space on each side, and the table one border more.
_FRAME = 3


@dataclass(frozen=True, slots=True)
class _Column:
    """A heading, the key of the summary's figure, and when it is left out: the largest `rank` first."""

    head: str
    key: str
    rank: int


_COLUMNS = (
    _Column("policy", "policy", 0),
    _Column("cold starts", "cold_starts", 2),
    _Column("cold seconds", "cold_seconds", 1),
    _Column("p95 wait, s", "wait_p95_s", 5),
    _Column("p99 wait, s", "wait_p99_s", 6),
    _Column("GB·h held", "held_gb_h", 3),
    _Column("GB·h idle", "idle_gb_h", 7),
    _Column("GB·h wasted", "wasted_gb_h", 8),
    _Column("GB moved", "moved_gb", 4),
)


def policies_table(entries: Sequence[Mapping[str, Any]], width: int) -> Any:
    """A rich table of the summary's `entries` that is at most `width` columns wide, or has only policies and cold seconds."""
    from rich.table import Table

    cells = {c.key: [_cell(entry[c.key]) for entry in entries] for c in _COLUMNS}
    shown = list(_COLUMNS)
    while len(shown) > 2 and _width(shown, cells) > width:
        shown.remove(max(shown, key=lambda c: c.rank))
    whole = _FRAME * len(shown) + 1 + sum(max(len(c.head), *map(len, cells[c.key])) for c in shown) <= width
    table = Table()
    for column in shown:
        # Broken here, between words, so that it needs no more than its own width, and never elsewhere.
        head = column.head if whole else "\n".join(textwrap.wrap(column.head, _least(column, cells), break_long_words=False))
        table.add_column(head, justify="left" if column.key == "policy" else "right", no_wrap=True)
    for row in zip(*(cells[c.key] for c in shown), strict=True):
        table.add_row(*row)
    return table


def scored_in_words(requests: int, rows: int, hours: float) -> str:
    """How much of a log is scored: a line above the table."""
    span = f"{plain_number(hours / 24)} days" if hours >= 48 else f"{plain_number(hours)} hours"
    if hours < 1:
        span = f"{plain_number(hours * 60)} minutes"
    return f"scored: {requests:,} of {count(rows, 'request')}, the last {span}"


def hints_in_words(hints: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What hints there were and what they were worth to ours: a line above the table."""
    without = f"without prefetching {ours['hinted_cold_seconds_without']:,.0f} s"
    return (
        f"hints ({hints['what']}): {hints['hints']:,}, of which {hints['kept']:,} were kept; the {ours['hinted_requests']:,} scored"
        f" requests that were hinted wait {ours['hinted_cold_seconds']:,.0f} s, {without}"
    )


def _width(columns: Sequence[_Column], cells: Mapping[str, Sequence[str]]) -> int:
    return 1 + sum(_FRAME + _least(column, cells) for column in columns)


def _least(column: _Column, cells: Mapping[str, Sequence[str]]) -> int:
    return max(map(len, [*column.head.split(), *cells[column.key]]))


def _cell(value: float | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,.1f}" if isinstance(value, float) and abs(value) < 100 else f"{value:,.0f}"

"""The pool of minute lists: finding rows in them, and giving them room.

A minute list holds the minutes in which a model was used, rising, and the rows up to and with each; lists lie in one
pool, each with room to grow (`traffic_state.State`). What is appended to them, and when their beginnings are
forgotten, is the feature kernels' business.
"""

from __future__ import annotations

from typing import Any

from prefetcher.core.compiled import kernel

__all__ = ["copy_lists", "move_lists", "take_counts"]


@kernel
def _rows_before(state: Any, row: int, minute: int) -> int:
    low, high = 0, state.length[row]
    while low < high:
        middle = (low + high) // 2
        if state.pool_minute[state.start[row] + middle] < minute:
            low = middle + 1
        else:
            high = middle
    return int(state.pool_cum[state.start[row] + low - 1]) if low > 0 else int(state.base[row])


@kernel
def take_counts(state: Any, models: Any, from_minute: int, until_minute: int, out: Any) -> None:
    """Rows of `models` in minutes [from_minute, until_minute) into out[len(models)]."""
    for r in range(len(models)):
        row = models[r] + 1
        out[r] = max(0, _rows_before(state, row, until_minute) - _rows_before(state, row, from_minute))


@kernel
def move_lists(state: Any, rows: Any, room: Any, used: int) -> int:
    """Move minute lists to the pool's end, with new room each; the pool's end afterwards."""
    for x in range(len(rows)):
        row = rows[x]
        s, n = state.start[row], state.length[row]
        state.pool_minute[used : used + n] = state.pool_minute[s : s + n]
        state.pool_cum[used : used + n] = state.pool_cum[s : s + n]
        state.start[row] = used
        state.room[row] = room[x]
        used += room[x]
    return used


@kernel
def copy_lists(state: Any, fresh: Any, room: Any) -> None:
    """Copy all minute lists into the pool of `fresh`, one after the other, with new room each."""
    used = 0
    for row in range(len(state.start)):
        s, n = state.start[row], state.length[row]
        fresh.pool_minute[used : used + n] = state.pool_minute[s : s + n]
        fresh.pool_cum[used : used + n] = state.pool_cum[s : s + n]
        fresh.start[row] = used
        fresh.room[row] = room[row]
        used += room[row]

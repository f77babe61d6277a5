"""The pool of minute lists: finding rows in them, and copying them to where they have it.

A minute list holds the minutes in which a model was used, rising, and the rows up to and with each; lists lie in one
pool, each with room to grow (`traffic_state.State`). What is appended to them, and when their beginnings are
forgotten, is the feature kernels' business.
"""

from __future__ import annotations

from typing import Any

from prefetcher.core.compiled import kernel, kernel_part

__all__ = ["copy_lists", "take_counts"]


@kernel_part
def _rows_before(start: Any, length: Any, base: Any, pool_minute: Any, pool_cum: Any, row: int, minute: int) -> int:
    low, high = 0, length[row]
    while low < high:
        middle = (low + high) // 2
        if pool_minute[start[row] + middle] < minute:
            low = middle + 1
        else:
            high = middle
    return int(pool_cum[start[row] + low - 1]) if low > 0 else int(base[row])


@kernel
def take_counts(
    start: Any, length: Any, base: Any, pool_minute: Any, pool_cum: Any, models: Any, from_minute: int, until_minute: int, out: Any
) -> None:
    """Rows of `models` in minutes [from_minute, until_minute) into out[len(models)]."""
    for r in range(len(models)):
        row = models[r] + 1
        until = _rows_before(start, length, base, pool_minute, pool_cum, row, until_minute)
        out[r] = max(0, until - _rows_before(start, length, base, pool_minute, pool_cum, row, from_minute))


@kernel
def copy_lists(rows: Any, start: Any, length: Any, pool_minute: Any, pool_cum: Any, to: Any, to_pool_minute: Any, to_pool_cum: Any) -> None:
    """Copy the minute lists of `rows` to the places `to` of a pool, which may be the same one where they do not overlap."""
    for x in range(len(rows)):
        begin = start[rows[x]]
        for j in range(length[rows[x]]):
            to_pool_minute[to[x] + j] = pool_minute[begin + j]
            to_pool_cum[to[x] + j] = pool_cum[begin + j]

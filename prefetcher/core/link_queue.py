"""What is left of the loads of one link so long after they were told, and when each will be over. Pure.

For whoever knows a link by reports that grow old, and by what was sent there since. The link is served in Smith's order, and what runs
gives way (`core.planner.outranks`). Covers no bytes, no prefetch and no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefetcher.core.planner import outranks

__all__ = ["LinkLoad", "link_goes_on"]


class LinkLoad(NamedTuple):
    """A load that comes to the link at `at_s` for `rows` rows and takes `left_s` seconds of it."""

    at_s: float
    left_s: float
    rows: float


def link_goes_on(loads: Sequence[LinkLoad], now_s: float) -> list[tuple[float, float]]:
    """Of each load, in their order, the seconds that are left of it at `now_s`, and when it is over if nothing else comes.

    Of equals, the earlier in `loads` goes first.
    """
    left = [load.left_s for load in loads]
    at_now, end = list(left), [load.at_s for load in loads]
    waits = sorted(range(len(loads)), key=lambda i: (loads[i].at_s, i))
    there: list[int] = []
    time_s, noted = 0.0 if not loads else loads[waits[0]].at_s, False
    while waits or there:
        while waits and (not there or loads[waits[0]].at_s <= time_s):
            time_s = max(time_s, loads[waits[0]].at_s)
            there.append(waits.pop(0))
        if not noted and time_s >= now_s:
            at_now, noted = list(left), True
        there.sort()
        best = there[0]
        for i in there[1:]:
            if outranks(loads[i].rows, left[i], loads[best].rows, left[best]):
                best = i
        ends_s = time_s + left[best]
        until_s = min(ends_s, loads[waits[0]].at_s if waits else float("inf"), float("inf") if noted else max(now_s, time_s))
        if until_s >= ends_s:
            left[best], end[best] = 0.0, ends_s
            there.remove(best)
        else:
            left[best] -= until_s - time_s
        time_s = until_s
    if not noted:
        at_now = left
    return list(zip(at_now, end, strict=True))

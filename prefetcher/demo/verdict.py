"""What came of the demo, in sentences: how much waiting it saved and by what, and whether the machine let both sides be compared at all."""

from __future__ import annotations

from collections.abc import Sequence

from prefetcher.demo.side import Side
from prefetcher.words import count, reason

__all__ = ["verdict"]

#: The same work may take so much longer on one side than on the other before their waits are not compared: a run's own noise is below it.
FAIR_FACTOR = 1.25
#: The same for any two moments of the run, where both sides were as fast on the whole.
STEADY_FACTOR = 1.5
#: A difference in waiting below this share is called none.
_SAME_SHARE = 0.05
_REASONS_NAMED = 3


def verdict(sides: Sequence[Side], speed: float) -> list[str]:
    """`sides`: without and with prefetching, in the order in which they ran; `speed`: of the demo's clock."""
    without, with_it = sides
    unfair = _unfair(sides)
    before_s, after_s = without.cold_seconds, with_it.cold_seconds
    change = (after_s - before_s) / before_s if before_s else 0.0
    figures = f"cold waiting {after_s:.0f} s instead of {before_s:.0f} s ({change:+.0%})".replace("-", "\N{MINUS SIGN}")
    if unfair:
        return [unfair, f"Not to be relied on: {figures}.", *_by_what(with_it, speed)]
    if abs(change) < _SAME_SHARE:
        return [f"No difference that counts: {figures}.", *_by_what(with_it, speed)]
    return [f"With prefetching: {figures}.", *_by_what(with_it, speed)]


def _unfair(sides: Sequence[Side]) -> str:
    """'' or how much slower the machine was during one of the sides, or how much its speed changed within them."""
    first_s, second_s = (sum(side.reading_s) / 2.0 for side in sides)
    every_s = [seconds for side in sides for seconds in side.reading_s]
    if min(every_s) <= 0.0:
        return ""
    factor = max(first_s, second_s) / min(first_s, second_s)
    if factor > FAIR_FACTOR:
        which = "second" if second_s > first_s else "first"
        return f"This machine was {factor:.1f} times slower during the {which} side: run again when it is idle."
    if max(every_s) / min(every_s) > STEADY_FACTOR:
        return f"This machine was up to {max(every_s) / min(every_s):.1f} times slower at times: run again when it is idle."
    return ""


def _by_what(with_it: Side, speed: float) -> list[str]:
    """What the difference comes from, as far as the node can tell."""
    if not with_it.readings:
        return []
    last = with_it.readings[-1]
    why = sorted(last.not_ordered.items(), key=lambda item: -item[1])[:_REASONS_NAMED]
    reasons = "; ".join(f"{reason(code)} ({count(times, 'time')})" for code, times in why)
    if last.ordered:
        ordered = f"{last.ordered:,} {'prefetch was' if last.ordered == 1 else 'prefetches were'} ordered"
        said = f"{ordered}; what was used of it had loaded {last.ahead_s / speed:.1f} s ahead of its use."
        said += f" More were not: {reasons}." if reasons else ""
    else:
        said = f"No prefetch was ordered: {reasons or 'nothing was worth it'}."
    kept = f"{count(last.bypassed, 'request was', 'requests were')} read from disk without being kept, so that what is needed more stayed"
    return [said, f"The rest of the difference comes from what was kept: {kept}."]

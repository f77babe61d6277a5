"""The plain first line of a replay: whether it would have paid, and from how much memory on.

The comparison is with the best of what others have (no bypass, no knowledge of the future) in the same replay. Waiting
saved counts against the memory held beyond that rival's, at the operator's price of a GB held for an hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefetcher.replay.frontier import FrontierPoint, knows_future, least_gb_h, lower_hull

__all__ = ["Verdict", "best_rival", "judge", "plain_number"]

#: A saving below this share of the rival's waiting is within what another seed or week would change.
_LEAST_SHARE = 0.01
#: Fewer scored hours than this say nothing about a day.
_LEAST_HOURS = 1.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`line` is the sentence; `worth` whether to run it (None: can't be said). Figures are None where there is nothing
    to compare.

    `saved_s_per_h` are seconds of waiting saved per hour against `rival`, `held_gb` and `rival_held_gb` mean GB held,
    `floor_gb` the mean GB under which ours would wait longer than the rival.
    """

    line: str
    worth: bool | None
    rival: str | None = None
    saved_s_per_h: float | None = None
    held_gb: float | None = None
    rival_held_gb: float | None = None
    floor_gb: float | None = None


def best_rival(policies: Sequence[Mapping[str, Any]], ours: str = "ours") -> Mapping[str, Any] | None:
    """The entry with the fewest cold seconds that others could run; of equal ones the one that holds less, then the
    first by name.
    """
    rivals = [p for p in policies if p["policy"] != ours and not knows_future(p["policy"]) and not p["policy"].endswith("-bypass")]
    return min(rivals, key=lambda p: (p["cold_seconds"], p["held_gb_h"], p["policy"]), default=None)


def judge(
    policies: Sequence[Mapping[str, Any]],
    hours: float,
    *,
    price_s_per_gb_h: float = 0.0,
    frontier: Sequence[FrontierPoint] = (),
    ours: str = "ours",
) -> Verdict:
    """The verdict on `policies` (entries of the summary) over `hours` of scored time; `frontier` may hold ours at other
    prices.
    """
    mine = next((p for p in policies if p["policy"] == ours), None)
    rival = best_rival(policies, ours)
    if not policies:
        return Verdict("no policy was replayed, so there is nothing to compare", None)
    if mine is None or rival is None:
        only = mine or rival or policies[0]
        waits, held = _per_hour(only["cold_seconds"], hours), _per_hour(only["held_gb_h"], hours)
        missing = "no rival" if mine is not None else f"{ours} was not replayed"
        return Verdict(f"{only['policy']} waits {_s(waits)} an hour with {_gb(held)} held; {missing}, so nothing to compare", None)
    saved = _per_hour(rival["cold_seconds"] - mine["cold_seconds"], hours)
    held, rival_held = _per_hour(mine["held_gb_h"], hours), _per_hour(rival["held_gb_h"], hours)
    hull = lower_hull([p for p in frontier if p.policy == ours] + [FrontierPoint(ours, mine["held_gb_h"], mine["cold_seconds"])])
    floor_gb_h = least_gb_h(hull, rival["cold_seconds"])
    floor = None if floor_gb_h is None else _per_hour(floor_gb_h, hours)
    name = rival["policy"]
    figures = (name, saved, held, rival_held, floor)
    if hours < _LEAST_HOURS:
        return Verdict(f"cannot say: only {plain_number(hours * 60)} minutes are scored; replay a day or more", None, *figures)
    if rival["cold_seconds"] == 0:
        return Verdict(f"not worth it: with {name} no request waits, with {_gb(rival_held)} held", False, *figures)
    if saved <= 0:
        more = f"waits {_s(-saved)} an hour more than {name}" if saved < 0 else f"waits as long as {name}"
        return Verdict(f"not worth it: {more}, for {_gb(held)} held against {_gb(rival_held)}", False, *figures)
    share = saved / _per_hour(rival["cold_seconds"], hours)
    if share < _LEAST_SHARE:
        return Verdict(
            f"not worth it: saves {_s(saved)} of waiting an hour over {name}, {share:.1%} of it, for {_gb(held)} held",
            False,
            *figures,
        )
    extra = price_s_per_gb_h * max(0.0, held - rival_held)
    if extra >= saved:
        return Verdict(
            f"not worth it at this price: saves {_s(saved)} of waiting an hour over {name}, but the"
            f" {_gb(held - rival_held)} more that it holds are priced at {_s(extra)}",
            False,
            *figures,
        )
    line = f"saves {_s(saved)} of waiting an hour over {name} for {_gb(held)} held"
    if len(hull) > 1 and floor_gb_h is not None and floor is not None:
        tried = floor_gb_h > hull[0].held_gb_h
        line += f"; under {_gb(floor)} not worth it" if tried else f"; worth it down to the {_gb(floor)} that were tried"
    return Verdict(line, True, *figures)


def plain_number(value: float) -> str:
    """`value` for people: three digits that matter, thousands grouped, nothing in powers of ten."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 1 else 1 if abs(value) < 10 else 0
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        return f"under {10.0**-digits:g}" if value > 0 else f"above -{10.0**-digits:g}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _per_hour(value: float, hours: float) -> float:
    return value / hours if hours > 0 else 0.0


def _s(seconds: float) -> str:
    return f"{plain_number(seconds)} s"


def _gb(gb: float) -> str:
    return f"{plain_number(gb)} GB"

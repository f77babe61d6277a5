"""The plain first lines of a replay: whether it would have paid, against what, from how much memory on, and what earned it.

It is compared with LRU, which most run today, where that was replayed, and judged against the best of what others have (no bypass, no
knowledge of the future) in the same replay. Waiting saved counts against the memory held beyond that rival's, at the operator's price of
a GB held for an hour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefetcher.replay.frontier import FrontierPoint, knows_future, least_gb_h, lower_hull

__all__ = ["ModelsCompared", "Verdict", "best_rival", "judge", "named", "plain_number"]

#: A saving below this share of the rival's waiting is within what another seed or week would change; memory, reading and waits that
#: differ by less are called the same.
_LEAST_SHARE = 0.01
#: Fewer scored hours than this say nothing about a day.
_LEAST_HOURS = 1.0
_LRU = "lru"


@dataclass(frozen=True, slots=True)
class ModelsCompared:
    """How many models wait less than with `policy`, how many longer, and how many are served alike; `less_ratio` and `longer_ratio` are
    the shares of requests that the first two have.
    """

    policy: str
    less: int
    longer: int
    alike: int
    less_ratio: float
    longer_ratio: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`line` is the sentence, `why` the second one (empty where nothing is compared); `worth` whether to run it (None: can't be said).
    Figures are None where there is nothing to compare.

    `saved_s_per_h` are seconds of waiting saved per hour against `rival`, `held_gb` and `rival_held_gb` mean GB held,
    `floor_gb` the mean GB under which ours would wait longer than the rival, `ahead_s_per_h` what fetching ahead alone saves per hour:
    ours against its twin that never prefetches.
    """

    line: str
    worth: bool | None
    rival: str | None = None
    saved_s_per_h: float | None = None
    held_gb: float | None = None
    rival_held_gb: float | None = None
    floor_gb: float | None = None
    ahead_s_per_h: float | None = None
    why: str = ""


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
    models: Sequence[ModelsCompared] = (),
    ours: str = "ours",
) -> Verdict:
    """The verdict on `policies` (entries of the summary) over `hours` of scored time; `frontier` may hold ours at other
    prices, `models` how single models fare.
    """
    mine = next((p for p in policies if p["policy"] == ours), None)
    rival = best_rival(policies, ours)
    if not policies:
        return Verdict("no policy was replayed, so there is nothing to compare", None)
    if mine is None or rival is None:
        only = mine or rival or policies[0]
        waits, held = _per_hour(only["cold_seconds"], hours), _per_hour(only["held_gb_h"], hours)
        missing = "no rival" if mine is not None else f"{ours} was not replayed"
        line = f"{named(only['policy'])} waits {_s(waits)} an hour with {_gb(held)} held; {missing}, so nothing to compare"
        return Verdict(line, None)
    today = next((p for p in policies if p["policy"] == _LRU), rival)
    saved = _saved(mine, rival, hours)
    held, rival_held = _per_hour(mine["held_gb_h"], hours), _per_hour(rival["held_gb_h"], hours)
    hull = lower_hull([p for p in frontier if p.policy == ours] + [FrontierPoint(ours, mine["held_gb_h"], mine["cold_seconds"])])
    floor_gb_h = least_gb_h(hull, rival["cold_seconds"])
    floor = None if floor_gb_h is None else _per_hour(floor_gb_h, hours)
    ahead = _ahead(mine, hours)
    name = named(rival["policy"])
    parts = [_where_from(_saved(mine, today, hours), ahead, mine, today), *map(_models_in_words, models), _reading(mine, (today, rival))]
    figures = (rival["policy"], saved, held, rival_held, floor, ahead, "; ".join(filter(None, parts)))
    if hours < _LEAST_HOURS:
        return Verdict(f"cannot say: only {plain_number(hours * 60)} minutes are scored; replay a day or more", None, *figures)
    if rival["cold_seconds"] == 0:
        return Verdict(f"not worth it: with {name} no request waits, with {_gb(rival_held)} held", False, *figures)
    over_today = "" if today is rival or mine["cold_seconds"] >= today["cold_seconds"] else f"; saves {_over(mine, today, hours, 'LRU')}"
    if saved <= 0:
        more = f"waits {_s(-saved)} an hour more than {name}" if saved < 0 else f"waits as long as {name}"
        return Verdict(f"not worth it: {more}, for {_gb(held)} held against {_gb(rival_held)}{over_today}", False, *figures)
    share = saved / _per_hour(rival["cold_seconds"], hours)
    if share < _LEAST_SHARE:
        line = f"not worth it: saves {_s(saved)} of waiting an hour over {name}, {share * 100:.1f} % of it, for {_gb(held)} held"
        return Verdict(line + over_today, False, *figures)
    extra = price_s_per_gb_h * max(0.0, held - rival_held)
    if extra >= saved:
        return Verdict(
            f"not worth it at this price: saves {_s(saved)} of waiting an hour over {name}, but the"
            f" {_gb(held - rival_held)} more that it holds are priced at {_s(extra)}{over_today}",
            False,
            *figures,
        )
    if today is rival:
        line = f"worth it: saves {_over(mine, today, hours, name if rival['policy'] == _LRU else f'the best rival, {name}')}"
    else:
        line = f"worth it: saves {_over(mine, today, hours, 'LRU')} and {_s(saved)} over the best rival, {name} ({_change(mine, rival)})"
    line += f", for {_gb(held)} held, {_compared(mine['held_gb_h'], today['held_gb_h'])} {named(today['policy'])}"
    line += "".join(f"; {part}" for part in (_read_in_short(mine, today), _p95(mine, today)) if part)
    if len(hull) > 1 and floor_gb_h is not None and floor is not None:
        tried = floor_gb_h > hull[0].held_gb_h
        line += f"; under {_gb(floor)} not worth it" if tried else f"; worth it with {_gb(floor)} held too, the least that was tried"
    return Verdict(line, True, *figures)


def named(policy: str) -> str:
    """A policy's name in a sentence."""
    return "LRU" if policy == _LRU else policy


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


# --- parts of the first line ---


def _saved(mine: Mapping[str, Any], other: Mapping[str, Any], hours: float) -> float:
    return _per_hour(other["cold_seconds"] - mine["cold_seconds"], hours)


def _over(mine: Mapping[str, Any], other: Mapping[str, Any], hours: float, name: str) -> str:
    waits, waited = (plain_number(_per_hour(p["cold_seconds"], hours)) for p in (mine, other))
    of = f"{_s(_saved(mine, other, hours))} of waiting an hour over {name}"
    return f"{of} ({waits} instead of {waited}, {_change(mine, other)})"


def _change(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return f"{_percent(mine['cold_seconds'] / other['cold_seconds'] - 1)} %"


def _percent(ratio: float) -> str:
    return f"{ratio * 100:+.0f}" if abs(ratio) >= _LEAST_SHARE else f"{ratio * 100:+.1f}"


def _compared(mine: float, other: float) -> str:
    """`mine` as more or less than `other`, to be followed by a name."""
    if abs(mine - other) <= _LEAST_SHARE * other:
        return "the same as"
    if other <= 0:
        return f"{_gb(mine)} more than"
    return f"{abs(mine / other - 1) * 100:.0f} % {'more' if mine > other else 'less'} than"


def _read_in_short(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    reads, read = mine.get("moved_gb"), other.get("moved_gb")
    if reads is None or not read:
        return ""
    if abs(reads - read) <= _LEAST_SHARE * read:
        return "as much read"
    return f"{abs(reads / read - 1) * 100:.0f} % {'more' if reads > read else 'less'} read"


def _p95(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    waits, waited = mine.get("wait_p95_s"), other.get("wait_p95_s")
    if waits is None or waited is None:
        return ""
    if abs(waits - waited) <= _LEAST_SHARE * waited:
        return "p95 wait unchanged"
    return f"p95 wait {_s(waits)} instead of {plain_number(waited)}"


# --- parts of the second line ---


def _ahead(mine: Mapping[str, Any], hours: float) -> float | None:
    """Seconds an hour that fetching ahead saves, from the coverage; None where it is undefined, or where nothing waits any more, so that
    it does not tell how much waited before.
    """
    coverage = mine.get("coverage")
    if coverage is None or coverage >= 1:
        return None
    return _per_hour(mine["cold_seconds"] * coverage / (1 - coverage), hours)


def _where_from(saved: float, ahead: float | None, mine: Mapping[str, Any], today: Mapping[str, Any]) -> str:
    if ahead is None or saved <= 0:
        return ""
    rest = "keeping and bypassing the right models"
    of = f"of the {_s(saved)} over {named(today['policy'])}"
    share = f"{abs(mine['coverage']) * 100:.1f} % of what waits without it"
    if ahead < 0:
        return f"{of}, all comes from {rest}; fetching ahead costs {_s(-ahead)} ({share})"
    if ahead == 0:
        return f"{of}, all comes from {rest}, nothing from fetching ahead"
    if ahead >= saved:
        return f"{of}, all comes from fetching ahead, which saves {_s(ahead)} ({share})"
    return f"{of}, fetching ahead saves {_s(ahead)} ({share}), the rest comes from {rest}"


def _models_in_words(compared: ModelsCompared) -> str:
    if not compared.less and not compared.longer:
        return f"every model waits as long as with {named(compared.policy)}"
    less = f"{compared.less:,} {'model waits' if compared.less == 1 else 'models wait'} less than with {named(compared.policy)}"
    share, longer_share = (f"{ratio * 100:.0f} %" for ratio in (compared.less_ratio, compared.longer_ratio))
    return f"{less} ({share} of requests), {compared.longer:,} longer ({longer_share}), {compared.alike:,} as long"


def _reading(mine: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    reads = mine.get("moved_gb")
    against = {named(p["policy"]): p["moved_gb"] for p in others if p.get("moved_gb") is not None}
    if reads is None or not against:
        return ""
    return f"{_gb(reads)} read from disk, " + " and ".join(f"{_more(reads - read)} with {name}" for name, read in against.items())


def _more(gb: float) -> str:
    if abs(gb) < 1e-6:
        return "as much as"
    return f"{_gb(abs(gb))} {'more' if gb > 0 else 'less'} than"


def _per_hour(value: float, hours: float) -> float:
    return value / hours if hours > 0 else 0.0


def _s(seconds: float) -> str:
    return f"{plain_number(seconds)} s"


def _gb(gb: float) -> str:
    return f"{plain_number(gb)} GB"

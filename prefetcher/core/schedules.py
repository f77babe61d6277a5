"""When something is due by the clock on a wall, and which models batch jobs need at a node: staged before, in turn under a quota. Pure.

A schedule has a window on each of its weekdays, in its own time zone: from a local time on, for so many seconds. A local time that the
clock skips counts as if the clock had not been changed yet (02:30 is 03:30 then); one that comes twice counts the first time. What a quota
does not let in at once is staged in turn, in the order that it is named, each turn with its share of the window by its bytes. Covers
neither the worth of bytes (`controller.planning`) nor loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta, tzinfo

__all__ = ["DAYS", "MOST_WINDOW_S", "Need", "Needs", "Schedule", "Turn", "Window", "last_interval", "local_times", "needs", "next_window"]

#: Of a week, as `Schedule.days` numbers them.
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
#: A window that is longer would meet itself on the next day.
MOST_WINDOW_S = 86_400.0
_DAY_S = 86_400.0
#: Loads take longer than they did on an idle link.
_LOAD_FACTOR = 1.5
#: A job that runs is taken to use each of its models so often: what is used more often than that is worth more.
_USED_EVERY_S = 60.0
#: How long after a window its models are not fetched on a forecast that the window's own requests led to, unless asked for since.
_QUIET_S = _DAY_S


@dataclass(frozen=True, slots=True)
class Schedule:
    """A batch job needs `models` from `at_s` (seconds after local midnight in zone `tz`) for `for_s` seconds on `days` (0: Monday).

    `lead_s`: how long before they are staged, None for as long as loads take. `quota_bytes`: the most that they take on a node at a time,
    None for what the node gives to batch. `node`: '' for the nodes that the models are at home on. `by`, `set_s`: who said so, and when.
    """

    name: str
    models: tuple[str, ...]
    at_s: int
    for_s: float
    days: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6)
    tz: str = "UTC"
    lead_s: float | None = None
    quota_bytes: int | None = None
    node: str = ""
    by: str = ""
    set_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """One time that a schedule is open."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Models of one schedule that fit under the quota together: staged from `stage_s` on, needed from `start_s` to `end_s`."""

    schedule: str
    models: tuple[str, ...]
    stage_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Need:
    """A model is needed from `at_s` (now, where that has come) until `until_s`; `per_s` ranks its bytes, as a rate of next use."""

    schedule: str
    at_s: float
    until_s: float
    per_s: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What batch needs at a node now.

    `models`: by name. `waiting`: models whose turn it is and that are not staged, and why. `ended`: when the last window of a model ended,
    of those that none is open for. `next_s`: when this changes next, inf where it doesn't within a day.
    """

    models: Mapping[str, Need] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    next_s: float = math.inf


def local_times(at_s: int, days: Sequence[int], zone: tzinfo, since_s: float, until_s: float) -> list[float]:
    """The times in [since_s, until_s] at which a clock on the wall of `zone` shows `at_s` on one of `days`, in order."""
    day = datetime.fromtimestamp(since_s, zone).date() - timedelta(days=1)
    last = datetime.fromtimestamp(until_s, zone).date()
    found = []
    while day <= last:
        if day.weekday() in days:
            moment = (datetime.combine(day, time(), zone) + timedelta(seconds=at_s)).timestamp()
            if since_s <= moment <= until_s:
                found.append(moment)
        day += timedelta(days=1)
    return sorted(found)


def last_interval(every_s: float, now_s: float) -> float:
    """The last time up to `now_s` that a whole number of `every_s` had passed since 1970: the same for whoever asks."""
    return math.floor(now_s / every_s) * every_s


def _windows(schedule: Schedule, zone: tzinfo, since_s: float, until_s: float) -> list[Window]:
    """Those that start in [since_s, until_s]."""
    return [Window(at_s, at_s + schedule.for_s) for at_s in local_times(schedule.at_s, schedule.days, zone, since_s, until_s)]


def next_window(schedule: Schedule, zone: tzinfo, now_s: float) -> Window | None:
    """The window that is open at `now_s`, else the next one."""
    found = _windows(schedule, zone, now_s - schedule.for_s, now_s + 8 * _DAY_S)
    return next((window for window in found if window.end_s > now_s), None)


def _turns(
    schedule: Schedule,
    window: Window,
    models: Sequence[str],
    sizes: Mapping[str, int],
    load_s: Mapping[str, float],
    quota: float,
    spare_s: float,
) -> list[Turn]:
    """The window cut into turns of `models` that each fit under `quota`, at least one model each."""
    groups: list[list[str]] = []
    taken = math.inf
    for model in models:
        if taken + sizes[model] > quota:
            groups.append([])
            taken = 0.0
        groups[-1].append(model)
        taken += sizes[model]
    total = sum(max(1, sizes[model]) for model in models)
    found: list[Turn] = []
    start_s, done = window.start_s, 0
    for number, group in enumerate(groups):
        done += sum(max(1, sizes[model]) for model in group)
        end_s = window.end_s if number == len(groups) - 1 else window.start_s + (window.end_s - window.start_s) * done / total
        lead_s = schedule.lead_s
        if lead_s is None:
            lead_s = _LOAD_FACTOR * sum(load_s[model] for model in group) + spare_s
        # A later turn has the quota only once the one before it is over.
        found.append(Turn(schedule.name, tuple(group), start_s if number else start_s - lead_s, start_s, end_s))
        start_s = end_s
    return found


def needs(
    schedules: Iterable[Schedule],
    zone_of: Callable[[str], tzinfo],
    here: Callable[[Schedule, str], bool],
    sizes: Mapping[str, int],
    load_s: Mapping[str, float],
    quota_bytes: float,
    spare_s: float,
    now_s: float,
    leased: Mapping[str, int] | None = None,
) -> Needs:
    """What batch needs at one node at `now_s`.

    `here(schedule, model)`: whether this node is the one to have it; `sizes` (bytes) and `load_s` (measured) are of the models that the
    node can load; `quota_bytes` is what it gives batch at a time; `spare_s` is added to the lead for the queue. Of schedules that are open
    at once the one that began first comes first, then by name. `leased`: bytes by model that batch still has open there.
    """
    turns: list[Turn] = []
    waiting: dict[str, str] = {}
    ended: dict[str, float] = {}
    moments: list[float] = []
    for schedule in sorted(schedules, key=lambda s: s.name):
        zone = zone_of(schedule.tz)
        windows = _windows(schedule, zone, now_s - schedule.for_s - _QUIET_S, now_s + schedule.for_s + _DAY_S)
        quota = min(quota_bytes, math.inf if schedule.quota_bytes is None else schedule.quota_bytes)
        mine = [model for model in dict.fromkeys(schedule.models) if model in sizes and here(schedule, model)]
        models = [model for model in mine if sizes[model] <= quota]
        for window in windows:
            if window.end_s <= now_s:
                ended |= {model: max(window.end_s, ended.get(model, 0.0)) for model in mine}
                continue
            cut = _turns(schedule, window, models, sizes, load_s, quota, spare_s)
            turns += [turn for turn in cut if turn.stage_s <= now_s < turn.end_s]
            moments += [at for turn in cut for at in (turn.stage_s, turn.start_s, turn.end_s) if at > now_s]
            if window.start_s <= now_s:
                waiting |= {model: "over_quota" for model in mine if sizes[model] > quota}
                ended |= {model: turn.end_s for turn in cut if turn.end_s <= now_s for model in turn.models}
    found: dict[str, Need] = {}
    of_turns = {model for turn in turns for model in turn.models}
    taken = float(sum(size for model, size in (leased or {}).items() if model not in of_turns))
    for turn in sorted(turns, key=lambda t: (t.start_s, t.schedule)):
        at_s = max(now_s, turn.start_s)
        for model in turn.models:
            need = Need(turn.schedule, at_s, turn.end_s, 1.0 / max(_USED_EVERY_S, at_s - now_s))
            before = found.get(model)
            if before is not None:
                until_s = max(before.until_s, turn.end_s)
                found[model] = Need(before.schedule, min(before.at_s, at_s), until_s, max(before.per_s, need.per_s))
            elif taken + sizes[model] <= quota_bytes:
                taken += sizes[model]
                found[model] = need
            else:
                waiting[model] = "batch_quota"
    for model in found:
        waiting.pop(model, None)
        ended.pop(model, None)
    return Needs(found, waiting, ended, min(moments, default=math.inf))

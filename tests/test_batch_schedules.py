"""Batch schedules: windows by local time, turns under a quota, what they are worth in a plan, and that all of it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefetcher.core.schedules import Needs, Schedule, local_times, needs, next_window

EVERY_DAY = tuple(range(7))
#: A Wednesday.
MIDNIGHT = datetime(2026, 1, 7, tzinfo=UTC).timestamp()
TWO = MIDNIGHT + 7200.0
SIZES = {"a": 40, "b": 30, "c": 30, "d": 100}
LOADS = {"a": 4.0, "b": 3.0, "c": 3.0, "d": 10.0}


def nightly(*models: str, **more: Any) -> Schedule:
    return Schedule(**{"name": "nightly", "models": models, "at_s": 7200, "for_s": 1800.0, **more})


def at(
    now_s: float,
    *schedules: Schedule,
    quota: float = 1e9,
    spare_s: float = 0.0,
    leased: Mapping[str, int] | None = None,
    not_here: str = "",
) -> Needs:
    return needs(schedules, ZoneInfo, lambda schedule, model: model not in not_here, SIZES, LOADS, quota, spare_s, now_s, leased)


def moments(at_s: int, days: tuple[int, ...], zone: str, first: datetime, last: datetime) -> list[str]:
    found = local_times(at_s, days, ZoneInfo(zone), first.timestamp(), last.timestamp())
    return [f"{datetime.fromtimestamp(moment, UTC):%a %d %H:%M}" for moment in found]


@pytest.mark.parametrize(
    ("month", "day", "expected"),
    [
        # 02:30 is skipped on the 29th of March, and comes twice on the 25th of October.
        (3, 27, ["Sat 28 01:30", "Sun 29 01:30", "Mon 30 00:30"]),
        (10, 23, ["Sat 24 00:30", "Sun 25 00:30", "Mon 26 01:30"]),
    ],
)
def test_local_times_when_clocks_change(month: int, day: int, expected: list[str]) -> None:
    first, last = datetime(2026, month, day, 12, tzinfo=UTC), datetime(2026, month, day + 3, 12, tzinfo=UTC)
    assert moments(2 * 3600 + 1800, EVERY_DAY, "Europe/Berlin", first, last) == expected


def test_weekdays_are_those_of_the_zone() -> None:
    # 02:00 on Monday in Tokyo is Sunday in UTC.
    first, last = datetime(2026, 1, 7, tzinfo=UTC), datetime(2026, 1, 14, tzinfo=UTC)
    assert moments(7200, (0,), "Asia/Tokyo", first, last) == ["Sun 11 17:00"]
    weekdays = moments(7200, (0, 1, 2, 3, 4), "UTC", first, last)
    assert weekdays == ["Wed 07 02:00", "Thu 08 02:00", "Fri 09 02:00", "Mon 12 02:00", "Tue 13 02:00"]


@given(
    st.integers(0, 86_399),
    st.sets(st.integers(0, 6), min_size=1),
    st.sampled_from(["UTC", "Europe/Berlin", "America/St_Johns", "Pacific/Apia", "Australia/Lord_Howe"]),
    st.floats(1.0e9, 2.0e9),
)
def test_times_come_once_on_each_of_their_days(at_s: int, days: set[int], zone: str, since_s: float) -> None:
    until_s = since_s + 70 * 86_400.0
    found = local_times(at_s, tuple(days), ZoneInfo(zone), since_s, until_s)
    assert found == sorted(set(found))
    assert abs(len(found) - 10 * len(days)) <= 1
    for moment in found:
        local = datetime.fromtimestamp(moment, ZoneInfo(zone))
        shown = local.hour * 3600 + local.minute * 60 + local.second
        # It shows the time that was named, or, where that is skipped, one that is later by the change.
        assert shown == at_s or 0 < (shown - at_s) % 86_400 <= 3600
        assert local.weekday() in days or shown < at_s


def test_a_window_is_staged_before_it_opens_and_ends() -> None:
    schedule = nightly("a", "b", lead_s=60.0)
    before = at(TWO - 61.0, schedule)
    assert (dict(before.models), before.next_s) == ({}, TWO - 60.0)
    # That of the day before.
    assert before.ended == dict.fromkeys("ab", TWO - 86_400.0 + 1800.0)
    staged = at(TWO - 60.0, schedule)
    assert {model: (need.at_s, need.until_s) for model, need in staged.models.items()} == dict.fromkeys("ab", (TWO, TWO + 1800.0))
    assert staged.models["a"].per_s == pytest.approx(1 / 60.0)
    assert staged.next_s == TWO
    within = at(TWO + 900.0, schedule)
    assert within.models["a"].at_s == TWO + 900.0
    assert within.next_s == TWO + 1800.0
    over = at(TWO + 1800.0, schedule)
    assert (dict(over.models), dict(over.ended)) == ({}, dict.fromkeys("ab", TWO + 1800.0))
    assert over.next_s == TWO + 86_400.0 - 60.0


def test_the_lead_is_as_long_as_loads_and_the_queue() -> None:
    found = at(TWO - 3600.0, nightly("a", "b"), spare_s=20.0)
    assert found.next_s == TWO - 20.0 - 1.5 * 7.0


def test_a_schedule_of_some_days_is_closed_on_others() -> None:
    assert at(TWO + 60.0, nightly("a", days=(0, 1))).models == {}
    assert next_window(nightly("a", days=(0, 1)), UTC, TWO) is not None
    assert at(TWO + 60.0, nightly("a", days=(2,))).models != {}


def test_what_exceeds_the_quota_is_staged_in_turn_each_for_its_share() -> None:
    schedule = nightly("a", "b", "c", quota_bytes=70)
    turns = [(0.0, "ab"), (1259.0, "ab"), (1261.0, "c"), (1799.0, "c")]
    for after_s, models in turns:
        found = at(TWO + after_s, schedule)
        assert "".join(sorted(found.models)) == models, after_s
        assert sum(SIZES[model] for model in found.models) <= 70
    assert at(TWO + 1261.0, schedule).ended == dict.fromkeys("ab", TWO + 1260.0)
    assert at(TWO + 10.0, schedule).models["a"].until_s == TWO + 1260.0
    assert at(TWO + 10.0, schedule).next_s == TWO + 1260.0


def test_what_can_never_fit_says_so_and_keeps_nobody_waiting() -> None:
    found = at(TWO + 1.0, nightly("d", "a", quota_bytes=70))
    assert (set(found.models), dict(found.waiting)) == ({"a"}, {"d": "over_quota"})
    assert found.models["a"].until_s == TWO + 1800.0


def test_schedules_that_are_open_at_once_share_the_quota_of_the_node() -> None:
    early = nightly("a", "b", name="early", at_s=7000)
    late = nightly("b", "c", name="a-late")
    found = at(TWO + 10.0, early, late, quota=80)
    assert (set(found.models), dict(found.waiting)) == ({"a", "b"}, {"c": "batch_quota"})
    # The model that both need is kept for the later end.
    assert found.models["b"].until_s == TWO + 1800.0
    assert set(at(TWO + 1700.0, early, late, quota=80).models) == {"b", "c"}


def test_what_a_program_still_has_open_counts() -> None:
    schedule = nightly("a", "b", "c", quota_bytes=70)
    assert set(at(TWO + 1261.0, schedule, quota=70).models) == {"c"}
    assert at(TWO + 1261.0, schedule, quota=70, leased={"a": 40, "b": 30}).waiting == {"c": "batch_quota"}


def test_models_of_other_nodes_and_unknown_ones_are_left_out() -> None:
    assert set(at(TWO, nightly("a", "b", "x"), not_here="b").models) == {"a"}


@given(
    st.lists(
        st.builds(
            Schedule,
            name=st.text("xyz", min_size=1, max_size=3),
            models=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map(tuple),
            at_s=st.integers(0, 86_399),
            for_s=st.floats(1.0, 86_400.0),
            days=st.sets(st.integers(0, 6), min_size=1).map(lambda days: tuple(sorted(days))),
            tz=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
            lead_s=st.none() | st.floats(0.0, 7200.0),
            quota_bytes=st.none() | st.integers(1, 200),
        ),
        max_size=4,
        unique_by=lambda schedule: schedule.name,
    ),
    st.floats(1.7e9, 1.8e9),
    st.integers(20, 200),
)
def test_the_quota_holds_and_needs_change_only_when_they_say(schedules: list[Schedule], now_s: float, quota: int) -> None:
    found = at(now_s, *schedules, quota=quota)
    assert sum(SIZES[model] for model in found.models) <= quota
    assert all(need.until_s > now_s and need.at_s >= now_s and 0.0 < need.per_s <= 1 / 60.0 for need in found.models.values())
    assert not set(found.models) & (set(found.waiting) | set(found.ended))
    assert found.next_s > now_s
    just_before = min(found.next_s, now_s + 3600.0)
    later = at(math.nextafter(just_before, 0.0), *schedules, quota=quota)
    assert set(later.models) == set(found.models)

"""Features of starts and of the day's profile, against sums over the whole log by definition."""

from __future__ import annotations

import numpy as np
import pytest

from prefetcher.core.starts import _BELL, _FADES, _NEAR, _WIDE
from prefetcher.core.traffic import FEATURE_NAMES, Traffic
from prefetcher.core.traffic_state import IDLE_S, KEPT_STARTS, SLOT_S, SLOTS

DAY_S = 86400.0
#: A Thursday.
START_S = 1_699_488_000.0 + 1234.0


def column(name: str) -> int:
    return FEATURE_NAMES.index(name)


def beat_log(days: float) -> tuple[np.ndarray, np.ndarray]:
    """Model 0 every hour for some rows, model 1 at random in bursts, model 2 on working days at nine."""
    rng = np.random.default_rng(3)
    beats = np.arange(0.0, days * DAY_S, 3600.0)
    parts = [(beats[:, None] + np.array([0.0, 20.0, 90.0])).ravel()]
    bursts = rng.uniform(0.0, days * DAY_S, int(6 * days))
    parts.append((bursts[:, None] + rng.exponential(200.0, (len(bursts), 4)).cumsum(axis=1)).ravel())
    mornings = np.arange(int(days)) * DAY_S + 9 * 3600.0 - 1234.0 + rng.uniform(0.0, 600.0, int(days))
    weekday = ((START_S + mornings) // DAY_S + 3) % 7
    parts.append(mornings[(weekday < 5) & (mornings > 0.0)])
    ts = np.concatenate(parts)
    model = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
    order = np.argsort(ts, kind="stable")
    return START_S + ts[order], model[order].astype(np.int64)


def starts_of(rows: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.append(True, np.diff(rows) > IDLE_S))


def start_features(rows: np.ndarray, now_s: float) -> dict[str, float]:
    at = starts_of(rows)
    starts, age = rows[at], now_s - rows[-1]
    since = now_s - starts[-1]
    idle = (rows[at[1:]] - rows[at[1:] - 1])[-KEPT_STARTS:] if len(at) > 1 else np.zeros(0)
    apart = np.diff(starts)[-KEPT_STARTS:]
    # the first start has no pause before it but a place among those that are kept
    kept = starts[-KEPT_STARTS:]
    ahead = (kept - now_s) % DAY_S
    off = np.abs(apart - since - 300.0) / (apart + 600.0)
    return {
        "log_since_start": np.log(since + 1.0),
        "log_session": np.log(since - age + 1.0),
        "log_session_rows": np.log(len(rows) - at[-1]),
        "gaps_longer": (idle > age).sum(),
        "gap_ends_10min": ((idle > age) & (idle <= age + 600.0)).sum() / ((idle > age).sum() + 1.0),
        "starts_apart_longer": (apart > since).sum(),
        "start_due_10min": ((apart > since) & (apart <= since + 600.0)).sum() / ((apart > since).sum() + 1.0),
        "start_off_beat": off.min(initial=10.0),
        "starts_10min_of_hour": ((kept - now_s) % 3600.0 < 600.0).sum() / (len(kept) + 1.0),
        "starts_15min_of_day": (ahead < 900.0).sum() / (len(kept) + 1.0),
        "starts_1h_of_day": (ahead < 3600.0).sum() / (len(kept) + 1.0),
        "log_starts": np.log(len(starts)),
    }


def profile_features(ts: np.ndarray, rows: np.ndarray, now_s: float) -> list[float]:
    used, seen = np.zeros((2, SLOTS)), np.zeros((2, SLOTS))
    last = int(ts[ts < now_s][-1] // SLOT_S)
    taken = set((rows // SLOT_S).astype(int).tolist())
    for slot in range(int(ts[0] // SLOT_S), last):
        kind = 1 if (slot // SLOTS + 3) % 7 >= 5 else 0
        used[kind, slot % SLOTS] = used[kind, slot % SLOTS] * _FADES[kind] + (slot in taken)
        seen[kind, slot % SLOTS] = seen[kind, slot % SLOTS] * _FADES[kind] + 1.0
    slot = int((now_s + SLOT_S / 2) // SLOT_S)
    kind = 1 if (slot // SLOTS + 3) % 7 >= 5 else 0
    near, wide = (slot + np.arange(-_NEAR, _NEAR + 1)) % SLOTS, (slot + np.arange(-_WIDE, _WIDE + 1)) % SLOTS
    a, b = (_BELL * used[kind, near]).sum(), (_BELL * seen[kind, near]).sum()
    c, d = (_BELL * used[:, near]).sum(), (_BELL * seen[:, near]).sum()
    e, g = used[kind, wide].sum(), seen[kind, wide].sum()
    return [
        a / (b + 0.5) if b > 0 else -1.0,
        c / (d + 0.5) if d > 0 else -1.0,
        (a + 0.01) / (b + 0.5) / ((e + 0.05) / (g + 0.5)) if b > 0 else -1.0,
        e / (g + 0.5) if g > 0 else -1.0,
    ]


@pytest.fixture(scope="module")
def asked() -> tuple[np.ndarray, np.ndarray, list[tuple[float, np.ndarray]]]:
    ts, model = beat_log(12.0)
    traffic, at, answers = Traffic(3), 0, []
    for now_s in np.sort(np.random.default_rng(1).uniform(ts[0] + 3000.0, ts[-1], 60)):
        upto = int(np.searchsorted(ts, now_s))
        traffic.add(ts[at:upto], model[at:upto])
        at = upto
        answers.append((now_s, traffic.features(now_s)))
    return ts, model, answers


def test_features_of_starts_are_what_their_names_say(asked) -> None:
    ts, model, answers = asked
    for now_s, x in answers:
        for m in range(3):
            rows = ts[(model == m) & (ts < now_s)]
            if len(rows):
                for name, value in start_features(rows, now_s).items():
                    assert x[m, column(name)] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, m)


def test_the_profile_is_a_decayed_share_of_days(asked) -> None:
    ts, model, answers = asked
    first = column("profile_kind")
    for now_s, x in answers:
        for m in range(3):
            rows = ts[(model == m) & (ts < now_s)]
            if len(rows):
                assert x[m, first : first + 4].tolist() == pytest.approx(profile_features(ts, rows, now_s), rel=1e-4, abs=1e-4)


def test_a_beat_and_a_working_day_show() -> None:
    ts, model = beat_log(12.0)
    traffic = Traffic(3)
    traffic.add(ts, model)
    hour = ts[model == 0][-3] + 3600.0
    before, after = (traffic.features(hour + off)[0, column("start_due_10min")] for off in (-300.0, -1800.0))
    assert before > 0.9
    assert after == 0.0
    monday = (ts[-1] // DAY_S + 1.0) * DAY_S
    while (monday // DAY_S + 3) % 7:
        monday += DAY_S
    nine, noon = (traffic.features(monday + hours * 3600.0)[2, column("profile_kind")] for hours in (9, 12))
    saturday = traffic.features(monday + 5 * DAY_S + 9 * 3600.0)[2, column("profile_kind")]
    assert nine > 0.25
    assert noon == saturday == 0.0


def test_after_a_month_of_silence_the_profile_begins_anew() -> None:
    traffic = Traffic(1)
    traffic.add(START_S + np.arange(5) * DAY_S, np.zeros(5, np.int64))
    assert traffic.features(START_S + 4 * DAY_S + 60.0)[0, column("profile_3h")] > 0.0
    later = START_S + 40 * DAY_S
    traffic.add([later], [0])
    assert traffic.features(later + 1.0)[0, column("profile_3h")] == -1.0
    traffic.add([later + 100 * 365 * DAY_S], [0])

"""When models start and at which times of the day they are used: what the feature function knows beyond rates and gaps.

A start is a first row, or one after `IDLE_S` without any. The last ones say whether a model keeps a beat, how long its pauses
are and at which minutes it comes back; their pauses are compared one by one, where the histogram of gaps has half octaves. The
profile is, for each slot of ten minutes of the day, on how many of the last days a model was used then: decayed over about two
weeks, working days and weekends (UTC) apart. A slot is taken once a row came after its end, so that asking changes nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prefetcher.core.compiled import kernel_part
from prefetcher.core.traffic_state import IDLE_S, KEPT_STARTS, SLOT_S, SLOTS, State

__all__ = ["profile_features", "roll_slots", "start_features", "take_start"]

#: What a day weighs against the next one of its kind: a memory of ten working days, and of four days off.
_FADES = (0.9, 0.75)
#: After a silence of 30 days the profile begins anew.
_FORGET = 30 * SLOTS
#: Neighbouring slots count by their distance: a bell of a quarter of an hour.
_NEAR = 3
_BELL = np.exp(-0.5 * (np.arange(-_NEAR, _NEAR + 1) / 1.5) ** 2)
#: Slots before and after that make up the three hours around now.
_WIDE = 9
_AHEAD_S = 600.0


@kernel_part
def _is_off(slot: int) -> int:
    """1 for a slot of a Saturday or Sunday; slots are counted from 1970-01-01, a Thursday."""
    return 1 if (slot // SLOTS + 3) % 7 >= 5 else 0


@kernel_part
def roll_slots(state: State, now_s: float) -> None:
    """Take the slots that are over at `now_s` into the profiles. Before the first row, only the open slot is set."""
    slot = int(now_s // SLOT_S)
    open_slot = state.counters[4]
    if state.counters[3] == 0 or slot - open_slot > _FORGET:
        state.counters[4] = slot
        state.profile[:] = 0.0
        state.profile_days[:] = 0.0
        return
    while open_slot < slot:
        kind, place = _is_off(open_slot), open_slot % SLOTS
        fade = _FADES[kind]
        state.profile_days[kind, place] = state.profile_days[kind, place] * fade + 1.0
        for m in range(len(state.last_s)):
            used = state.total[m] > 0 and int(state.last_s[m] // SLOT_S) == open_slot
            state.profile[m, kind, place] = state.profile[m, kind, place] * fade + (1.0 if used else 0.0)
        open_slot += 1
    state.counters[4] = max(state.counters[4], slot)


@kernel_part
def take_start(state: State, m: int, t: float, gap: float) -> None:
    """A row of model m at t, `gap` seconds after its last one (inf for its first)."""
    if gap <= IDLE_S:
        state.session_rows[m] += 1.0
        return
    n = state.starts[m]
    at = n % KEPT_STARTS
    state.idle_gap_s[m, at] = gap if n > 0 else 0.0
    state.start_gap_s[m, at] = t - state.start_s[m, (n - 1) % KEPT_STARTS] if n > 0 else 0.0
    state.start_s[m, at] = t
    state.starts[m] = n + 1
    state.session_rows[m] = 1.0
    fade = math.exp(-max(0.0, t - state.all_starts[1]) / IDLE_S)
    state.all_starts[0] = state.all_starts[0] * fade + 1.0
    state.all_starts[1] = max(t, state.all_starts[1])


@kernel_part
def start_features(state: State, out: Any, i: int, m: int, t: float, age: float) -> int:
    """Features of model m's last starts at t into out[i:], `age` seconds after its last row; how many they are. m has been used."""
    n = state.starts[m]
    since = max(0.0, t - state.start_s[m, (n - 1) % KEPT_STARTS])
    longer, ends, apart, due, off, of_hour, of_day_15, of_day_60 = 0.0, 0.0, 0.0, 0.0, 10.0, 0.0, 0.0, 0.0
    kept = min(n, KEPT_STARTS)
    for k in range(kept):
        gap = state.idle_gap_s[m, k]
        if gap > age:
            longer += 1.0
            ends += 1.0 if gap <= age + _AHEAD_S else 0.0
        gap = state.start_gap_s[m, k]
        if gap > 0.0:
            off = min(off, abs(gap - since - 0.5 * _AHEAD_S) / (gap + _AHEAD_S))
            if gap > since:
                apart += 1.0
                due += 1.0 if gap <= since + _AHEAD_S else 0.0
        ahead = state.start_s[m, k] - t
        of_hour += 1.0 if ahead - 3600.0 * math.floor(ahead / 3600.0) < 600.0 else 0.0
        ahead -= 86400.0 * math.floor(ahead / 86400.0)
        of_day_15 += 1.0 if ahead < 900.0 else 0.0
        of_day_60 += 1.0 if ahead < 3600.0 else 0.0
    out[i] = math.log(since + 1.0)
    out[i + 1] = math.log(max(0.0, since - age) + 1.0)
    out[i + 2] = math.log(state.session_rows[m])
    out[i + 3] = longer
    out[i + 4] = ends / (longer + 1.0)
    out[i + 5] = apart
    out[i + 6] = due / (apart + 1.0)
    out[i + 7] = off
    out[i + 8] = of_hour / (kept + 1.0)
    out[i + 9] = of_day_15 / (kept + 1.0)
    out[i + 10] = of_day_60 / (kept + 1.0)
    out[i + 11] = math.log(float(n))
    out[i + 12] = math.log(1.0 + state.all_starts[0] * math.exp(-max(0.0, t - state.all_starts[1]) / IDLE_S))
    return 13


@kernel_part
def profile_features(state: State, out: Any, i: int, m: int, t: float) -> None:
    """Features of model m's profile around t into out[i:i + 4]; −1 before there is one."""
    slot = int((t + 0.5 * SLOT_S) // SLOT_S)
    kind, place = _is_off(slot), slot % SLOTS
    used, days, both, both_days, wide, wide_days = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(-_WIDE, _WIDE + 1):
        at = (place + k) % SLOTS
        here, seen = float(state.profile[m, kind, at]), state.profile_days[kind, at]
        wide += here
        wide_days += seen
        if -_NEAR <= k <= _NEAR:
            weight = _BELL[k + _NEAR]
            used += weight * here
            days += weight * seen
            both += weight * (here + state.profile[m, 1 - kind, at])
            both_days += weight * (seen + state.profile_days[1 - kind, at])
    out[i] = used / (days + 0.5) if days > 0.0 else -1.0
    out[i + 1] = both / (both_days + 0.5) if both_days > 0.0 else -1.0
    out[i + 2] = (used + 0.01) / (days + 0.5) / ((wide + 0.05) / (wide_days + 0.5)) if days > 0.0 else -1.0
    out[i + 3] = wide / (wide_days + 0.5) if wide_days > 0.0 else -1.0

"""The words of the traffic state: what is stored, at which time scales, and the names of the features.

No code runs here; `features` computes with it and `traffic` builds, stores and restores it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "FEATURE_NAMES",
    "GAP_BINS",
    "HISTORY_DAYS",
    "IDLE_S",
    "KEPT_STARTS",
    "LAG_MINUTES",
    "LATE_S",
    "SLOTS",
    "SLOT_S",
    "TAUS_S",
    "State",
]

#: Days of minute counts kept before the current UTC day: two weeks, so that "this hour last week" has two samples.
HISTORY_DAYS = 14
#: Time scales of the decayed row rates, in seconds.
TAUS_S = (120.0, 600.0, 1200.0, 3600.0, 10800.0, 21600.0, 86400.0, 604800.0)
#: Half-octave bins of the gap histogram: bin b holds gaps of 2^(b/2) to 2^((b+1)/2) seconds; the last one is open
#: (from 52 h).
GAP_BINS = 36
#: A model starts with its first row, or with one after this long without any; so many of its last starts are kept.
IDLE_S, KEPT_STARTS = 600.0, 16
#: A day's profile: whether a model was used, for each slot of so many seconds of the UTC day, working days and weekends apart.
SLOT_S, SLOTS = 600.0, 144
#: A row this much older than the newest one is dropped; a younger late row counts as if it came with its model's last
#: row.
LATE_S = 600.0
_DAY = 1440
#: (minutes back, minutes on from there): where windows of past counts begin and end. Each has a cursor per model.
_WINDOWS: tuple[tuple[int, int], ...] = (
    (60, 0),
    (60, 5),
    (_DAY + 60, 0),
    (_DAY, 10),
    (7 * _DAY, 10),
    (7 * _DAY, 360),
    (14 * _DAY, 0),
    (14 * _DAY, 60),
    (14 * _DAY, 360),
    *((k * _DAY, span) for k in range(1, 8) for span in (0, 15, 60, 240)),
)
#: Minutes back from now of every such point.
LAG_MINUTES = np.array([back - on for back, on in _WINDOWS], dtype=np.int64)

FEATURE_NAMES: tuple[str, ...] = tuple(
    """
    log_age
    log_rate_120s log_rate_600s log_rate_1200s log_rate_3600s
    log_rate_10800s log_rate_21600s log_rate_86400s log_rate_604800s
    log_gap_1 log_gap_2 log_gap_3 log_rate_lifetime log_total
    log_gap_tail gap_hazard_120s gap_hazard_600s gap_hazard_3600s gap_hazard_21600s
    yesterday_10min yesterday_1h yesterday_hour_before last_week_10min last_week_1h hour_ago_5min
    second_of_hour hour_of_day day_of_week all_10min_over_1h all_1h_over_1d
    follower_max follower_sum log_share_1h
    log_gap_mean log_gap_variance log_age_over_mean_gap log_age_over_last_gap
    days_mean_15min days_mean_1h days_mean_4h days_used_15min days_used_1h
    next_use_yesterday_min next_use_hour_ago_min weeks_mean_1h weeks_mean_6h
    is_row trend_10min_over_1d
    user_share_sum user_share_max user_share_now user_recent user_switch users_active
    mean_log_count
    log_since_start log_session log_session_rows gaps_longer gap_ends_10min starts_apart_longer start_due_10min start_off_beat
    starts_10min_of_hour starts_15min_of_day starts_1h_of_day log_starts log_all_starts
    profile_kind profile_all profile_peak profile_3h
    """.split()  # noqa: SIM905  (a name a line would be longer than all the rest)
)


class State(NamedTuple):
    """All of the traffic state. n models; minute lists have n + 1 rows, row 0 for all models together and row i + 1
    for model i.

    A minute list is a slice of the pool: the minutes with rows, rising, and the rows up to and with each of them.
    """

    # minute lists
    pool_minute: npt.NDArray[np.int32]
    pool_cum: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    room: npt.NDArray[np.int64]
    base: npt.NDArray[np.int64]
    decayed: npt.NDArray[np.float64]
    cursor: npt.NDArray[np.int32]
    # one row a model
    last_s: npt.NDArray[np.float64]
    first_s: npt.NDArray[np.float64]
    total: npt.NDArray[np.int64]
    gaps_s: npt.NDArray[np.float64]
    log_gap_mean: npt.NDArray[np.float64]
    log_gap_var: npt.NDArray[np.float64]
    log_count: npt.NDArray[np.float64]
    starts: npt.NDArray[np.int64]
    start_s: npt.NDArray[np.float64]
    idle_gap_s: npt.NDArray[np.float64]
    start_gap_s: npt.NDArray[np.float64]
    session_rows: npt.NDArray[np.float64]
    profile: npt.NDArray[np.float32]
    histogram: npt.NDArray[np.float64]
    slots: npt.NDArray[np.float64]
    last_slot: npt.NDArray[np.int64]
    follower: npt.NDArray[np.int32]
    follower_w: npt.NDArray[np.float64]
    switch: npt.NDArray[np.int32]
    switch_w: npt.NDArray[np.float64]
    switches: npt.NDArray[np.float64]
    # recent models and users
    recent: npt.NDArray[np.int32]
    recent_s: npt.NDArray[np.float64]
    active: npt.NDArray[np.int64]
    active_at: npt.NDArray[np.int64]
    active_s: npt.NDArray[np.float64]
    user_id: npt.NDArray[np.int64]
    user_s: npt.NDArray[np.float64]
    user_rows: npt.NDArray[np.float64]
    user_now: npt.NDArray[np.int32]
    user_model: npt.NDArray[np.int32]
    user_w: npt.NDArray[np.float64]
    user_at: npt.NDArray[np.float64]
    # days that the profile has seen, by kind and slot; decayed starts of all models, and when
    profile_days: npt.NDArray[np.float64]
    all_starts: npt.NDArray[np.float64]
    # [origin_s, newest_s] and [day, late rows, dropped rows, rows, open slot]
    times: npt.NDArray[np.float64]
    counters: npt.NDArray[np.int64]

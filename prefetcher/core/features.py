"""The feature function: kernels that take rows of a log into the traffic state and compute a model's feature row from
it.

One function, `_feature_row`, serves learning, replay and live operation; `take_block` runs it right after each row
and at each tick. The state (`State`) is arrays only and holds nothing that depends on the future or on decisions.
What `prefetcher.core.traffic` stores and what it derives is said there. Minutes and days are those of UTC.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prefetcher.core.compiled import kernel, kernel_part
from prefetcher.core.references import by_reference
from prefetcher.core.starts import profile_features, roll_slots, start_features, take_start
from prefetcher.core.traffic_state import GAP_BINS, HISTORY_DAYS, LAG_MINUTES, LATE_S, TAUS_S, State

__all__ = ["rebuild_rates", "take_block", "take_features", "take_rates"]

#: Used "together": a start (first use, or after a gap this long) within this many seconds of another model's use.
TOGETHER_S = 300.0
#: An active user's last row is at most this old.
ACTIVE_S = 3600.0
#: Where decayed counts of followers, switches and users are halved, so that habits that changed are forgotten.
HALVE_AT = 500.0
#: Weight of the newest gap in the running mean and variance of log gaps: a memory of about seven gaps.
GAP_WEIGHT = 0.15
#: The gap histogram is multiplied by 0.7 above this many gaps, for the same reason.
HISTOGRAM_GAPS = 200.0

_DAY = 1440
_L_HOUR, _L_HOUR_5, _L_EVE, _L_DAY_10, _L_WEEK_10, _L_WEEK_360, _L_FORTNIGHT = 0, 1, 2, 3, 4, 5, 6
_L_DAYS = 9
_N_TAUS = len(TAUS_S)
_TAUS = np.array(TAUS_S)
_DECAYS = np.exp(-60.0 * np.arange(512)[:, None] / _TAUS[None, :])


@kernel_part
def _gap_bin(gap_s: float) -> int:
    """The half-octave bin of a gap; gaps under a second share the first."""
    if gap_s < 1.0:
        return 0
    b = int(math.log2(gap_s) * 2.0)
    return GAP_BINS - 1 if b >= GAP_BINS else b


@kernel_part
def _scale(row: Any, factor: float) -> None:
    for j in range(len(row)):
        row[j] *= factor


@kernel_part
def _fill_nan(row: Any) -> None:
    for j in range(len(row)):
        row[j] = math.nan


@kernel_part
def _push(ids: Any, weights: Any, item: int) -> None:
    """Add 1 to `item` in a bounded table; a new one takes an empty place, else that of the lightest."""
    place, lightest = 0, math.inf
    for j in range(len(ids)):
        if ids[j] == item:
            weights[j] += 1.0
            return
        weight = weights[j] if ids[j] >= 0 else -1.0
        if weight < lightest:
            place, lightest = j, weight
    ids[place] = item
    weights[place] = 1.0


@kernel_part
def _weight(ids: Any, weights: Any, item: int) -> float:
    for j in range(len(ids)):
        if ids[j] == item:
            return float(weights[j])
    return 0.0


@kernel_part
def _oldest_or_same(ids: Any, times: Any, item: int) -> int:
    place, oldest = 0, math.inf
    for j in range(len(ids)):
        if ids[j] == item:
            return j
        t = times[j] if ids[j] >= 0 else -math.inf
        if t < oldest:
            place, oldest = j, t
    return place


@kernel_part
def _rebuild_row(start: Any, length: Any, base: Any, pool_minute: Any, pool_cum: Any, decayed: Any, row: int) -> None:
    """The decayed sums of one minute list from its entries: up to, and without, its last minute."""
    for k in range(_N_TAUS):
        decayed[row, k] = 0.0
    s, before = start[row], base[row]
    for j in range(s, s + length[row] - 1):
        rows = float(pool_cum[j] - before)
        before = pool_cum[j]
        step = pool_minute[j + 1] - pool_minute[j]
        for k in range(_N_TAUS):
            fade = _DECAYS[step, k] if step < 512 else math.exp(-60.0 * step / _TAUS[k])
            decayed[row, k] = (decayed[row, k] + rows) * fade


@kernel
def rebuild_rates(start: Any, length: Any, base: Any, pool_minute: Any, pool_cum: Any, decayed: Any) -> None:
    """All decayed sums from the minute lists."""
    for row in range(len(start)):
        _rebuild_row(start, length, base, pool_minute, pool_cum, decayed, row)


@kernel_part
def _roll_day(state: State, now_s: float) -> None:
    """On a new UTC day, forget minutes older than `HISTORY_DAYS` before it, so that rates depend on the kept minutes
    only.
    """
    day = int(now_s // 86400.0)
    if day <= state.counters[0]:
        return
    state.counters[0] = day
    keep_from = (day - HISTORY_DAYS) * _DAY
    for row in range(len(state.start)):
        s, n = state.start[row], state.length[row]
        gone = 0
        while gone < n and state.pool_minute[s + gone] < keep_from:
            gone += 1
        if gone == 0:
            continue
        state.base[row] = state.pool_cum[s + gone - 1]
        state.start[row] += gone
        state.length[row] -= gone
        state.room[row] -= gone
        for j in range(len(LAG_MINUTES)):
            state.cursor[row, j] = max(0, state.cursor[row, j] - gone)
        _rebuild_row(state.start, state.length, state.base, state.pool_minute, state.pool_cum, state.decayed, row)


@kernel_part
def _count_minute(start: Any, length: Any, base: Any, pool_minute: Any, pool_cum: Any, decayed: Any, row: int, minute: int) -> None:
    """One row more in `minute` (or in the list's last minute, if that is later)."""
    s, n = start[row], length[row]
    if n == 0:
        pool_minute[s] = minute
        pool_cum[s] = base[row] + 1
        length[row] = 1
        return
    end = s + n - 1
    step = minute - pool_minute[end]
    if step <= 0:
        pool_cum[end] += 1
        return
    rows = float(pool_cum[end] - (pool_cum[end - 1] if n > 1 else base[row]))
    for k in range(_N_TAUS):
        fade = _DECAYS[step, k] if step < 512 else math.exp(-60.0 * step / _TAUS[k])
        decayed[row, k] = (decayed[row, k] + rows) * fade
    pool_minute[end + 1] = minute
    pool_cum[end + 1] = pool_cum[end] + 1
    length[row] = n + 1


@kernel_part
def _take_user(state: State, user: int, m: int, t: float) -> None:
    buckets, ways = state.user_id.shape
    # Fibonacci hashing (Knuth): numbers in a row, and numbers that differ only in their high bits, spread evenly
    b = int((((user ^ (user >> 29)) * 2654435761) >> 22) & (buckets - 1))
    w = _oldest_or_same(state.user_id[b], state.user_s[b], user)
    if state.user_id[b, w] != user:
        state.user_id[b, w] = user
        state.user_rows[b, w] = 0.0
        state.user_now[b, w] = -1
        for j in range(state.user_model.shape[2]):
            state.user_model[b, w, j] = -1
            state.user_w[b, w, j] = 0.0
            state.user_at[b, w, j] = -math.inf
    before = state.user_now[b, w]
    if before >= 0 and t - state.user_s[b, w] < ACTIVE_S:
        _push(state.switch[before], state.switch_w[before], m)
        state.switches[before] += 1.0
        if state.switches[before] > HALVE_AT:
            state.switches[before] *= 0.5
            _scale(state.switch_w[before], 0.5)
    _push(state.user_model[b, w], state.user_w[b, w], m)
    for j in range(state.user_model.shape[2]):
        if state.user_model[b, w, j] == m:
            state.user_at[b, w, j] = t
    state.user_rows[b, w] += 1.0
    if state.user_rows[b, w] > HALVE_AT:
        state.user_rows[b, w] *= 0.5
        _scale(state.user_w[b, w], 0.5)
    state.user_now[b, w] = m
    state.user_s[b, w] = t
    p = _oldest_or_same(state.active, state.active_s, user)
    state.active[p] = user
    state.active_at[p] = b * ways + w
    state.active_s[p] = t


@kernel_part
def _take_row(state: State, ts: float, m: int, user: int, count: int) -> float:
    """One row into the state; the time that it counts at (see `LATE_S`), or NaN if it came too late."""
    if ts < state.times[1] - LATE_S:
        state.counters[2] += 1
        return math.nan
    if math.isinf(state.times[0]):
        state.times[0] = ts
    if ts < state.times[1]:
        state.counters[1] += 1
    state.times[1] = max(state.times[1], ts)
    roll_slots(state, ts)
    state.counters[3] += 1
    _roll_day(state, ts)
    old = state.total[m]
    t = max(ts, state.last_s[m]) if old > 0 else ts
    gap = t - state.last_s[m] if old > 0 else math.inf
    take_start(state, m, t, gap)
    log_count = math.log(max(count, 1))
    if old > 0:
        h = state.histogram[m]
        h[_gap_bin(gap)] += 1.0
        gaps = 0.0
        for j in range(GAP_BINS):
            gaps += h[j]
        if gaps > HISTOGRAM_GAPS:
            _scale(h, 0.7)
        state.gaps_s[m, 2] = state.gaps_s[m, 1]
        state.gaps_s[m, 1] = state.gaps_s[m, 0]
        state.gaps_s[m, 0] = gap
        off = math.log(gap + 1.0) - state.log_gap_mean[m]
        state.log_gap_mean[m] += GAP_WEIGHT * off
        state.log_gap_var[m] += GAP_WEIGHT * (off * off - state.log_gap_var[m])
        state.log_count[m] += GAP_WEIGHT * (log_count - state.log_count[m])
    else:
        state.first_s[m] = t
        state.log_count[m] = log_count
    if gap > TOGETHER_S:
        for j in range(len(state.recent)):
            k = state.recent[j]
            if k >= 0 and k != m and t - state.recent_s[j] < TOGETHER_S:
                _push(state.follower[k], state.follower_w[k], m)
    slot = int(t // TOGETHER_S)
    if slot != state.last_slot[m]:
        state.last_slot[m] = slot
        state.slots[m] += 1.0
        if state.slots[m] > HALVE_AT:
            state.slots[m] *= 0.5
            _scale(state.follower_w[m], 0.5)
    minute = int(t // 60.0)
    for row in (0, m + 1):
        _count_minute(state.start, state.length, state.base, state.pool_minute, state.pool_cum, state.decayed, row, minute)
    p = _oldest_or_same(state.recent, state.recent_s, m)
    state.recent[p] = m
    state.recent_s[p] = t
    state.last_s[m] = t
    state.total[m] = old + 1
    if user >= 0:
        _take_user(state, user, m, t)
    return t


@kernel_part
def _rate(state: State, row: int, k: int, t: float) -> float:
    """Rows a second, decayed over `TAUS_S[k]`; a minute's rows count as if they came at its end."""
    n = state.length[row]
    if n == 0:
        return 0.0
    end = state.start[row] + n - 1
    rows = float(state.pool_cum[end] - (state.pool_cum[end - 1] if n > 1 else state.base[row]))
    age = max(0.0, t - 60.0 * (state.pool_minute[end] + 1.0))
    return float((state.decayed[row, k] + rows) * math.exp(-age / _TAUS[k]) / _TAUS[k])


@kernel_part
def _feature_row(state: State, out: Any, m: int, t: float, is_row: float, before: Any) -> None:
    """Model m's features at t into `out`; `before` is scratch for the counts before each lag. m has been used."""
    i = 0
    age = max(0.0, t - state.last_s[m])
    log_age = math.log(age + 1.0)
    out[i] = log_age
    i += 1
    for k in range(_N_TAUS):
        out[i] = math.log(_rate(state, m + 1, k, t) + 1e-8)
        i += 1
    for k in range(3):
        out[i] = math.log(state.gaps_s[m, k] + 1.0)
        i += 1
    total = float(state.total[m])
    out[i] = math.log(total / (max(0.0, t - state.first_s[m]) + 60.0))
    out[i + 1] = math.log(total)
    i += 2
    h = state.histogram[m]
    own = _gap_bin(age)
    tail = 0.0
    for j in range(own, GAP_BINS):
        tail += h[j]
    out[i] = math.log(tail + 0.3)
    i += 1
    for ahead in (120.0, 600.0, 3600.0, 21600.0):
        mass = 0.0
        for j in range(own, _gap_bin(age + ahead) + 1):
            mass += h[j]
        out[i] = mass / (tail + 0.5)
        i += 1
    # rows before each lag, by cursors that move with time: as cheap as a dense table, at the size of the rows
    minute = int(t // 60.0)
    past = minute - int(state.times[0] // 60.0)
    s, n, base = state.start[m + 1], state.length[m + 1], state.base[m + 1]
    for j in range(len(LAG_MINUTES)):
        at = minute - LAG_MINUTES[j]
        c = state.cursor[m + 1, j]
        while c < n and state.pool_minute[s + c] < at:
            c += 1
        while c > 0 and state.pool_minute[s + c - 1] >= at:
            c -= 1
        state.cursor[m + 1, j] = c
        before[j] = (state.pool_cum[s + c - 1] if c > 0 else base) - base
    day, week = past >= _DAY, past >= 7 * _DAY
    d1, d7 = _L_DAYS, _L_DAYS + 24
    out[i] = before[_L_DAY_10] - before[d1] if day else -1.0
    out[i + 1] = before[d1 + 2] - before[d1] if day else -1.0
    out[i + 2] = before[d1] - before[_L_EVE] if past >= _DAY + 60 else -1.0
    out[i + 3] = before[_L_WEEK_10] - before[d7] if week else -1.0
    out[i + 4] = before[d7 + 2] - before[d7] if week else -1.0
    out[i + 5] = before[_L_HOUR_5] - before[_L_HOUR] if past >= 60 else -1.0
    out[i + 6] = t % 3600.0
    out[i + 7] = (t % 86400.0) / 3600.0
    out[i + 8] = (t // 86400.0) % 7.0
    all_10min, all_1h, all_1d = _rate(state, 0, 1, t), _rate(state, 0, 3, t), _rate(state, 0, 6, t)
    out[i + 9] = math.log((all_10min + 1e-6) / (all_1h + 1e-6))
    out[i + 10] = math.log((all_1h + 1e-6) / (all_1d + 1e-6))
    i += 11
    best, mass = 0.0, 0.0
    for j in range(len(state.recent)):
        k = state.recent[j]
        if k >= 0 and k != m and t - state.recent_s[j] < TOGETHER_S:
            v = _weight(state.follower[k], state.follower_w[k], m) / (state.slots[k] + 5.0)
            mass += v
            best = max(best, v)
    out[i] = best
    out[i + 1] = mass
    log_1h = math.log(_rate(state, m + 1, 3, t) + 1e-8)
    out[i + 2] = log_1h - math.log(all_1h + 1e-6)
    out[i + 3] = state.log_gap_mean[m]
    out[i + 4] = state.log_gap_var[m]
    out[i + 5] = log_age - state.log_gap_mean[m]
    out[i + 6] = log_age - math.log(state.gaps_s[m, 0] + 1.0)
    i += 7
    n15, n60, n240, used15, used60, days = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(7):
        if past >= (k + 1) * _DAY:
            d = _L_DAYS + 4 * k
            a, b = before[d + 1] - before[d], before[d + 2] - before[d]
            n15 += a
            n60 += b
            n240 += before[d + 3] - before[d]
            used15 += 1.0 if a > 0 else 0.0
            used60 += 1.0 if b > 0 else 0.0
            days += 1.0
    out[i] = n15 / days if days > 0 else -1.0
    out[i + 1] = n60 / days if days > 0 else -1.0
    out[i + 2] = n240 / days if days > 0 else -1.0
    out[i + 3] = used15 / days if days > 0 else -1.0
    out[i + 4] = used60 / days if days > 0 else -1.0
    i += 5
    c = state.cursor[m + 1, d1]
    wait = float(state.pool_minute[s + c] - (minute - _DAY)) if c < n else 1440.0
    out[i] = min(wait, 1440.0) if day else -1.0
    c = state.cursor[m + 1, _L_HOUR]
    wait = float(state.pool_minute[s + c] - (minute - 60)) if c < n else 60.0
    out[i + 1] = min(wait, 60.0) if past >= 60 else -1.0
    i += 2
    n60, n360 = before[d7 + 2] - before[d7], before[_L_WEEK_360] - before[d7]
    weeks = 1.0
    if past >= 14 * _DAY:
        n60 += before[_L_FORTNIGHT + 1] - before[_L_FORTNIGHT]
        n360 += before[_L_FORTNIGHT + 2] - before[_L_FORTNIGHT]
        weeks = 2.0
    out[i] = n60 / weeks if week else -1.0
    out[i + 1] = n360 / weeks if week else -1.0
    out[i + 2] = is_row
    out[i + 3] = math.log(_rate(state, m + 1, 1, t) + 1e-8) - math.log(_rate(state, m + 1, 6, t) + 1e-8)
    i += 4
    share, most, now, recent, switch, active = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    ways = state.user_id.shape[1]
    for j in range(len(state.active)):
        since = max(0.0, t - state.active_s[j])
        if state.active[j] < 0 or since >= ACTIVE_S:
            continue
        b, w = state.active_at[j] // ways, state.active_at[j] % ways
        if state.user_id[b, w] != state.active[j]:
            continue
        slow, fast = math.exp(-since / 900.0), math.exp(-since / 300.0)
        active += fast
        for x in range(state.user_model.shape[2]):
            if state.user_model[b, w, x] == m:
                v = state.user_w[b, w, x] / (state.user_rows[b, w] + 1.0)
                share += v * slow
                most = max(most, v * slow)
                now += v * fast
                recent += fast * math.exp(-max(0.0, t - state.user_at[b, w, x]) / 3600.0)
        k = state.user_now[b, w]
        switch += fast * _weight(state.switch[k], state.switch_w[k], m) / (state.switches[k] + 2.0)
    out[i] = share
    out[i + 1] = most
    out[i + 2] = now
    out[i + 3] = recent
    out[i + 4] = switch
    out[i + 5] = active
    out[i + 6] = state.log_count[m]
    i += 7
    i += start_features(state, out, i, m, t, age)
    profile_features(state, out, i, m, t)


@kernel
def take_features(state: State, models: Any, now_s: float, out: Any) -> None:
    """Feature rows of `models` at `now_s` into out[len(models), F]; a model that was never used gets NaN."""
    state = by_reference(state)
    _roll_day(state, now_s)
    before = np.zeros(len(LAG_MINUTES))
    for r in range(len(models)):
        if state.total[models[r]] > 0:
            _feature_row(state, out[r], models[r], now_s, 0.0, before)
        else:
            _fill_nan(out[r])


@kernel
def take_block(
    state: State,
    ts: Any,
    model: Any,
    user: Any,
    count: Any,
    ticks: Any,
    row_features: Any,
    tick_of: Any,
    tick_model: Any,
    tick_features: Any,
) -> int:
    """Rows and ticks in time order into the state, each with its features; how many tick rows were written.

    A row at a tick's very time comes after it. Without room in `row_features` (length 0) no features are computed at
    all; the features of a row that was dropped are NaN.
    """
    state = by_reference(state)
    before = np.zeros(len(LAG_MINUTES))
    want = len(row_features) > 0 or len(tick_features) > 0
    want_rows = len(row_features) > 0
    n, written, i = len(state.last_s), 0, 0
    for k in range(len(ticks) + 1):
        until = ticks[k] if k < len(ticks) else math.inf
        while i < len(ts) and ts[i] < until:
            t = _take_row(state, ts[i], model[i], user[i], count[i])
            if want_rows:
                if math.isnan(t):
                    _fill_nan(row_features[i])
                else:
                    _feature_row(state, row_features[i], model[i], t, 1.0, before)
            i += 1
        if want and k < len(ticks):
            _roll_day(state, until)
            for m in range(n):
                if state.total[m] > 0:
                    tick_of[written] = k
                    tick_model[written] = m
                    _feature_row(state, tick_features[written], m, until, 0.0, before)
                    written += 1
    return written


@kernel
def take_rates(state: State, models: Any, now_s: float, out: Any) -> None:
    """Decayed row rates of `models` at `now_s` into out[len(models), len(TAUS_S)]."""
    state = by_reference(state)
    _roll_day(state, now_s)
    for r in range(len(models)):
        for k in range(_N_TAUS):
            out[r, k] = _rate(state, models[r] + 1, k, now_s)

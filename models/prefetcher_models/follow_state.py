"""What follows what, as arrays: kernels that take rows into decayed transition tables and say who will need which model soon.

Two tables. Of **arrivals**: when a model starts (first row, or idle for `IDLE_S`), which models started in the seconds before, by delay.
Of **users**: which model a user turns to after which, how long he waits, what he used before; each user's last visits are kept, and those
who were active lately are looked at one by one. Both are bounded, whatever the log holds. Covers counting and looking up; what is learned
by gradient is evaluated in `follow_scorer`. Everything is a function of past rows.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel, kernel_part
from prefetcher.core.references import by_reference
from prefetcher.core.traffic_state import LATE_S
from prefetcher_models.follow_scorer import N_LOOKS, VISITS, Scorer, chances, remember

__all__ = ["COLUMNS", "MODEL_FIELDS", "OWN", "TICK_SAMPLES", "TURNS", "Follow", "follow_block", "new_follow"]

#: A model starts with its first row, or with one after this long without any.
IDLE_S = 300.0
#: Bounds of the delays between two models' starts that are told apart, in seconds; later ones don't count.
DELAYS_S = np.array([0.0, 2.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0])
#: Bounds of the time from one row of a user to his next one that are told apart, in seconds.
SPELLS_S = np.array([0.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 3600.0])
#: A user counts as active this long after his last row.
ACTIVE_S = 1800.0
#: Models that start after a model, models that users turn to after a model, starts that count as recent.
AFTER, TURNS, STARTS = 32, 24, 128
#: Users kept (buckets × ways), models kept of each, users that count as active.
BUCKETS, WAYS, OWN, ACTIVE = 1024, 8, 16, 32
#: Decayed counts are halved here, so that habits that changed are forgotten; spells of all users, later.
HALVE_AT, SPELLS_HALVE_AT = 300.0, 20_000.0
#: Time scale of a model's popularity among users.
POPULAR_S = 86400.0
#: Of the users at a tick, how many at most become samples.
TICK_SAMPLES = 4

#: The columns that a block is given, in order.
COLUMNS: tuple[str, ...] = (
    "next_users_120s",
    "next_users_600s",
    "next_users_likely",
    "next_arrivals_120s",
    "next_arrivals_600s",
    "next_arrivals_most",
)
class Follow(NamedTuple):
    """All that is counted. n models; user tables are [BUCKETS, WAYS, …]; weights are decayed counts."""

    # recent starts, newest at counters[0] − 1
    start_model: npt.NDArray[np.int32]
    start_s: npt.NDArray[np.float64]
    # one row a model
    last_s: npt.NDArray[np.float64]
    starts: npt.NDArray[np.float64]
    first_s: npt.NDArray[np.float64]
    begun: npt.NDArray[np.float64]
    after: npt.NDArray[np.int32]
    after_w: npt.NDArray[np.float32]
    after_s: npt.NDArray[np.float64]
    turn: npt.NDArray[np.int32]
    turn_w: npt.NDArray[np.float64]
    turn_s: npt.NDArray[np.float64]
    turns: npt.NDArray[np.float64]
    popular: npt.NDArray[np.float64]
    popular_s: npt.NDArray[np.float64]
    # users
    user_id: npt.NDArray[np.int64]
    user_s: npt.NDArray[np.float64]
    user_rows: npt.NDArray[np.float64]
    user_gap: npt.NDArray[np.float64]
    own: npt.NDArray[np.int32]
    own_w: npt.NDArray[np.float64]
    own_s: npt.NDArray[np.float64]
    visit: npt.NDArray[np.int32]
    visit_s: npt.NDArray[np.float64]
    # active users: place in the tables, last row
    active: npt.NDArray[np.int64]
    active_s: npt.NDArray[np.float64]
    # spells of users: [0, 0] how many began; [1] ended by the same model, [2] by another one, by length
    spells: npt.NDArray[np.float64]
    # [newest_s, popularity of all, when]
    times: npt.NDArray[np.float64]
    # [starts seen, users' rows, rows dropped, rows]
    counters: npt.NDArray[np.int64]


#: Per-model fields: dtype, shape, value of a model that was never used.
MODEL_FIELDS: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "last_s": (np.float64, (), -np.inf),
    "starts": (np.float64, (), 0.0),
    "first_s": (np.float64, (), np.inf),
    "begun": (np.float64, (), 0.0),
    "after": (np.int32, (AFTER,), -1),
    "after_w": (np.float32, (AFTER, len(DELAYS_S) - 1), 0.0),
    "after_s": (np.float64, (AFTER,), -np.inf),
    "turn": (np.int32, (TURNS,), -1),
    "turn_w": (np.float64, (TURNS,), 0.0),
    "turn_s": (np.float64, (TURNS,), -np.inf),
    "turns": (np.float64, (), 0.0),
    "popular": (np.float64, (), 0.0),
    "popular_s": (np.float64, (), 0.0),
}


def new_follow(n_models: int = 0) -> Follow:
    """Nothing counted yet."""
    users = (BUCKETS, WAYS)
    fields: dict[str, Any] = {
        "start_model": np.full(STARTS, -1, np.int32),
        "start_s": np.full(STARTS, -np.inf),
        **{name: np.full((n_models, *shape), fill, dtype) for name, (dtype, shape, fill) in MODEL_FIELDS.items()},
        "user_id": np.full(users, -1, np.int64),
        "user_s": np.full(users, -np.inf),
        "user_rows": np.zeros(users),
        "user_gap": np.zeros(users),
        "own": np.full((*users, OWN), -1, np.int32),
        "own_w": np.zeros((*users, OWN)),
        "own_s": np.full((*users, OWN), -np.inf),
        "visit": np.full((*users, VISITS), -1, np.int32),
        "visit_s": np.full((*users, VISITS), -np.inf),
        "active": np.full(ACTIVE, -1, np.int64),
        "active_s": np.full(ACTIVE, -np.inf),
        "spells": np.zeros((3, len(SPELLS_S) - 1)),
        "times": np.array([-np.inf, 0.0, 0.0]),
        "counters": np.zeros(4, np.int64),
    }
    return Follow(**fields)


@kernel_part
def _bin(bounds: Any, x: float) -> int:
    """The bin of `bounds` that x ≥ bounds[0] lies in; the last one's end is open."""
    b = len(bounds) - 2
    while b > 0 and x < bounds[b]:
        b -= 1
    return b


@kernel_part
def _mass(bounds: Any, weights: Any, low: float, high: float) -> float:
    """The weight between low and high of a histogram, spread evenly in each bin."""
    total = 0.0
    for b in range(len(weights)):
        left, right = max(low, bounds[b]), min(high, bounds[b + 1])
        if right > left:
            total += weights[b] * (right - left) / (bounds[b + 1] - bounds[b])
    return total


@kernel_part
def _find(ids: Any, item: int) -> int:
    for j in range(len(ids)):
        if ids[j] == item:
            return j
    return -1


@kernel_part
def _lightest(ids: Any, weights: Any, times: Any) -> int:
    """An empty place, else the one of least weight; among equals, the one that was seen longest ago."""
    best = 0
    for j in range(len(ids)):
        if ids[j] < 0:
            return j
        if weights[j] < weights[best] or (weights[j] == weights[best] and times[j] < times[best]):
            best = j
    return best


@kernel_part
def _add(ids: Any, weights: Any, times: Any, item: int, t: float) -> None:
    """One more of `item` in a bounded table."""
    j = _find(ids, item)
    if j < 0:
        j = _lightest(ids, weights, times)
        ids[j] = item
        weights[j] = 0.0
    weights[j] += 1.0
    times[j] = t


@kernel_part
def _begin(state: Follow, m: int, t: float) -> None:
    """Model m starts: it follows the models that started before it, and others may follow it."""
    n = len(state.start_model)
    for i in range(min(n, state.counters[0])):
        at = (state.counters[0] - 1 - i) % n
        k, delay = state.start_model[at], t - state.start_s[at]
        if delay >= DELAYS_S[-1]:
            break
        # the model's own earlier start, and what it was already counted for, end the search
        if k == m:
            break
        sums = np.zeros(AFTER)
        j = _find(state.after[k], m)
        if j < 0:
            for x in range(AFTER):
                sums[x] = state.after_w[k, x].sum()
            j = _lightest(state.after[k], sums, state.after_s[k])
            state.after[k, j] = m
            state.after_w[k, j, :] = 0.0
        state.after_w[k, j, _bin(DELAYS_S, delay)] += 1.0
        state.after_s[k, j] = t
    state.first_s[m] = min(state.first_s[m], t)
    state.begun[m] += 1.0
    state.starts[m] += 1.0
    if state.starts[m] > HALVE_AT:
        state.starts[m] *= 0.5
        state.after_w[m] *= np.float32(0.5)
    at = state.counters[0] % n
    state.start_model[at] = m
    state.start_s[at] = t
    state.counters[0] += 1


@kernel_part
def _take_user(state: Follow, user: int, m: int, t: float) -> None:
    b = int((((user ^ (user >> 29)) * 2654435761) >> 22) & (BUCKETS - 1))
    w, oldest = 0, math.inf
    for j in range(WAYS):
        if state.user_id[b, j] == user:
            w = j
            break
        if state.user_s[b, j] < oldest:
            w, oldest = j, state.user_s[b, j]
    if state.user_id[b, w] != user:
        state.user_id[b, w] = user
        state.user_rows[b, w] = 0.0
        state.user_gap[b, w] = math.log(300.0)
        state.own[b, w, :] = -1
        state.visit[b, w, :] = -1
        state.visit_s[b, w, :] = -math.inf
    now = state.visit[b, w, 0]
    if now >= 0:
        gap = t - state.user_s[b, w]
        state.user_gap[b, w] += 0.2 * (math.log(gap + 1.0) - state.user_gap[b, w])
        if gap < SPELLS_S[-1]:
            state.spells[1 if now == m else 2, _bin(SPELLS_S, gap)] += 1.0
            if now != m:
                _add(state.turn[now], state.turn_w[now], state.turn_s[now], m, t)
                state.turns[now] += 1.0
                if state.turns[now] > HALVE_AT:
                    state.turns[now] *= 0.5
                    state.turn_w[now] *= 0.5
    state.spells[0, 0] += 1.0
    if state.spells[0, 0] > SPELLS_HALVE_AT:
        state.spells[:, :] *= 0.5
    if now != m:
        for j in range(VISITS - 1, 0, -1):
            state.visit[b, w, j] = state.visit[b, w, j - 1]
            state.visit_s[b, w, j] = state.visit_s[b, w, j - 1]
        state.visit[b, w, 0] = m
    state.visit_s[b, w, 0] = t
    _add(state.own[b, w], state.own_w[b, w], state.own_s[b, w], m, t)
    state.user_rows[b, w] += 1.0
    if state.user_rows[b, w] > HALVE_AT:
        state.user_rows[b, w] *= 0.5
        state.own_w[b, w] *= 0.5
    state.user_s[b, w] = t
    place, slot = 0, b * WAYS + w
    for j in range(ACTIVE):
        if state.active[j] == slot:
            place = j
            break
        if state.active_s[j] < state.active_s[place]:
            place = j
    state.active[place] = slot
    state.active_s[place] = t
    state.popular[m] = state.popular[m] * math.exp(-(t - state.popular_s[m]) / POPULAR_S) + 1.0
    state.popular_s[m] = t
    state.times[1] = state.times[1] * math.exp(-(t - state.times[2]) / POPULAR_S) + 1.0
    state.times[2] = t
    state.counters[1] += 1


@kernel_part
def _take_row(state: Follow, ts: float, m: int, user: int) -> float:
    """One row into the tables; the time that it counts at, or NaN if it came too late."""
    if ts < state.times[0] - LATE_S:
        state.counters[2] += 1
        return math.nan
    t = max(ts, state.times[0])
    state.times[0] = t
    state.counters[3] += 1
    if t - state.last_s[m] > IDLE_S:
        _begin(state, m, t)
    state.last_s[m] = t
    if user >= 0:
        _take_user(state, user, m, t)
    return float(t)


@kernel_part
def _moves(state: Follow, age: float, moves: Any) -> None:
    """P(an active user's next row is of another model within 120 s, within 600 s; of the same one likewise), into moves[4]."""
    ended = _mass(SPELLS_S, state.spells[1], 0.0, age) + _mass(SPELLS_S, state.spells[2], 0.0, age)
    alive = max(0.0, state.spells[0, 0] - ended) + 2.0
    moves[0] = (_mass(SPELLS_S, state.spells[2], age, age + 120.0) + 0.01) / alive
    moves[1] = (_mass(SPELLS_S, state.spells[2], age, age + 600.0) + 0.02) / alive
    moves[2] = (_mass(SPELLS_S, state.spells[1], age, age + 120.0) + 0.01) / alive
    moves[3] = (_mass(SPELLS_S, state.spells[1], age, age + 600.0) + 0.02) / alive


@kernel_part
def _turn_share(state: Follow, k: int, m: int) -> float:
    if k < 0:
        return 0.0
    j = _find(state.turn[k], m)
    return state.turn_w[k, j] / (state.turns[k] + 4.0) if j >= 0 else 0.0


@kernel_part
def _look(state: Follow, b: int, w: int, m: int, t: float, moves: Any, x: Any) -> None:
    """What is known of a user and model m at t, into x[LOOKS]."""
    own = _find(state.own[b, w], m)
    own_w = state.own_w[b, w, own] if own >= 0 else 0.0
    rows = state.user_rows[b, w]
    now, before = state.visit[b, w, 0], state.visit[b, w, 1]
    share = _turn_share(state, now, m)
    everyone = state.times[1] * math.exp(-(t - state.times[2]) / POPULAR_S)
    popular = (state.popular[m] * math.exp(-(t - state.popular_s[m]) / POPULAR_S) + 0.1) / (everyone + 10.0)
    now_own = _find(state.own[b, w], now)
    others = rows - (state.own_w[b, w, now_own] if now_own >= 0 else 0.0)
    turned = share + popular * 4.0 / (state.turns[now] + 4.0)
    choice = (own_w + 2.0 * turned) / (others + 2.0)
    current = now == m
    x[0] = math.log(t - state.user_s[b, w] + 1.0)
    x[1] = 1.0 if current else 0.0
    x[2] = own_w / (rows + 1.0)
    x[3] = math.log(own_w + 1.0)
    x[4] = math.log(min(t - state.own_s[b, w, own], 1e6) + 1.0) if own >= 0 else math.log(1e6)
    x[5] = math.log(rows + 1.0)
    x[6] = share
    x[7] = _turn_share(state, before, m)
    x[8] = math.log(popular)
    x[9] = 0.0 if current else math.log(min(choice, 1.0))
    x[10] = math.log(moves[2] if current else moves[0])
    x[11] = math.log(moves[3] if current else moves[1])
    visits, place, turns = 0.0, 0.0, 0.0
    for j in range(VISITS):
        if state.visit[b, w, j] < 0:
            break
        if t - state.visit_s[b, w, j] < 3600.0:
            visits += 1.0
        if state.visit[b, w, j] == m:
            if place == 0.0:
                place = 1.0 / (1.0 + j)
            if j + 1 < VISITS and state.visit[b, w, j + 1] == now:
                turns += 1.0
    x[12] = visits
    x[13] = place
    x[14] = state.user_gap[b, w]
    near = 0.0
    for j in range(ACTIVE):
        slot = state.active[j]
        if slot >= 0 and slot != b * WAYS + w and t - state.active_s[j] < ACTIVE_S and state.visit[slot // WAYS, slot % WAYS, 0] == m:
            near += 1.0
    x[15] = math.log(near + 1.0)
    x[16] = math.log(min(t - state.last_s[m], 1e6) + 1.0)
    x[17] = turns


@kernel_part
def _candidates(state: Follow, b: int, w: int, ids: Any) -> int:
    """The models that the user may turn to, into ids; how many: his own, then those that follow his current one."""
    n = 0
    for j in range(OWN):
        if state.own[b, w, j] >= 0:
            ids[n] = state.own[b, w, j]
            n += 1
    now = state.visit[b, w, 0]
    for j in range(TURNS):
        m = state.turn[now, j]
        if m >= 0 and _find(ids[:n], m) < 0:
            ids[n] = m
            n += 1
    return n


@kernel_part
def _add_chances(p: Any, out: Any) -> None:
    """One user's chances to those of all, kept as log(1 − P)."""
    out[0] += math.log1p(-min(p[0], 0.999))
    out[1] += math.log1p(-min(p[1], 0.999))
    out[2] += 1.0 if p[1] >= 0.02 else 0.0


@kernel_part
def _beyond(p: float, base: float) -> float:
    """What a chance says beyond one that is there anyway: 0 where it is no larger."""
    return float(min(0.98, max(0.0, (p - base) / (1.0 - base))))


@kernel_part
def _add_arrivals(state: Follow, t: float, sums: Any) -> None:
    """What recent starts say of the models that follow them, beyond what the model's own rate of starts would: added to sums[n, 6]
    from column 3 on, log(1 − P) twice and the largest P.
    """
    n = len(state.start_model)
    for i in range(min(n, state.counters[0])):
        at = (state.counters[0] - 1 - i) % n
        k, since = state.start_model[at], state.start_s[at]
        age = t - since
        if age >= DELAYS_S[-1]:
            break
        for j in range(AFTER):
            m = state.after[k, j]
            if m < 0:
                break
            # used since: it has followed already; used shortly before: it is not idle
            if state.last_s[m] >= since or t - state.last_s[m] <= IDLE_S:
                continue
            weights = state.after_w[k, j]
            left = max(1.0, state.starts[k] + 2.0 - _mass(DELAYS_S, weights, 0.0, age))
            rate = state.begun[m] / (t - state.first_s[m] + 600.0)
            near = _beyond(_mass(DELAYS_S, weights, age, age + 120.0) / left, -math.expm1(-120.0 * rate))
            sums[m, 3] += math.log1p(-near)
            sums[m, 4] += math.log1p(-_beyond(_mass(DELAYS_S, weights, age, age + 600.0) / left, -math.expm1(-rate * (600.0 - age))))
            sums[m, 5] = max(sums[m, 5], near)


@kernel_part
def _finish(sums: Any, out: Any) -> None:
    for j in (0, 1, 3, 4):
        out[j] = -math.expm1(sums[j])
    out[2] = sums[2]
    out[5] = sums[5]


@kernel
def follow_block(
    state: Follow,
    scorer: Scorer,
    ts: Any,
    model: Any,
    user: Any,
    ticks: Any,
    tick_of: Any,
    tick_model: Any,
    rows_out: Any,
    ticks_out: Any,
    instant_s: Any,
    instant_user: Any,
    instant_visits: Any,
    instant_ages: Any,
    samples: Any,
    looks: Any,
) -> tuple[int, int]:
    """Rows and ticks in time order into the tables, with columns rows_out[N, 6] and ticks_out[M, 6]; a row at a tick's time comes after it.

    Samples of users at ticks: instant_s[i], instant_user[i], instant_visits and instant_ages [i, VISITS], samples[s] = (instant, model) and
    looks[s, LOOKS]; none where there is no room. How many instants and samples were written.
    """
    state, scorer = by_reference(state), by_reference(scorer)
    n = len(state.last_s)
    sums = np.zeros((n, 6))
    ids = np.empty(OWN + TURNS, np.int64)
    moves, x, p, query, row = np.zeros(4), np.zeros(N_LOOKS), np.zeros(2), np.zeros(scorer.place.shape[1]), np.zeros(6)
    i, r, n_instants, n_samples = 0, 0, 0, 0
    for k in range(len(ticks) + 1):
        until = ticks[k] if k < len(ticks) else math.inf
        while i < len(ts) and ts[i] < until:
            m = model[i]
            t = _take_row(state, ts[i], m, user[i])
            if len(rows_out) > 0:
                if math.isnan(t):
                    rows_out[i, :] = math.nan
                else:
                    row[:] = 0.0
                    for a in range(ACTIVE):
                        slot = state.active[a]
                        if slot < 0 or t - state.active_s[a] >= ACTIVE_S:
                            continue
                        b, w = slot // WAYS, slot % WAYS
                        if _find(state.own[b, w], m) < 0 and _find(state.turn[state.visit[b, w, 0]], m) < 0:
                            continue
                        _moves(state, t - state.user_s[b, w], moves)
                        _look(state, b, w, m, t, moves, x)
                        remember(scorer, state.visit[b, w], state.visit_s[b, w], t, query)
                        chances(scorer, query, m, x, p)
                        _add_chances(p, row)
                    _finish(row, rows_out[i])
            i += 1
        if k == len(ticks):
            break
        t = max(until, state.times[0])
        sums[:] = 0.0
        _add_arrivals(state, t, sums)
        taken, offset = 0, int(t / 60.0) % ACTIVE
        for step in range(ACTIVE):
            a = (step + offset) % ACTIVE
            slot = state.active[a]
            if slot < 0 or t - state.active_s[a] >= ACTIVE_S:
                continue
            b, w = slot // WAYS, slot % WAYS
            sampled = taken < TICK_SAMPLES and n_instants < len(instant_s)
            if sampled:
                taken += 1
                instant_s[n_instants] = t
                instant_user[n_instants] = state.user_id[b, w]
                for j in range(VISITS):
                    instant_visits[n_instants, j] = state.visit[b, w, j]
                    instant_ages[n_instants, j] = min(t - state.visit_s[b, w, j], 1e6)
            _moves(state, t - state.user_s[b, w], moves)
            remember(scorer, state.visit[b, w], state.visit_s[b, w], t, query)
            for c in range(_candidates(state, b, w, ids)):
                m = ids[c]
                _look(state, b, w, m, t, moves, x)
                chances(scorer, query, m, x, p)
                _add_chances(p, sums[m])
                if sampled and n_samples < len(looks):
                    samples[n_samples, 0] = n_instants
                    samples[n_samples, 1] = m
                    for j in range(N_LOOKS):
                        looks[n_samples, j] = x[j]
                    n_samples += 1
            if sampled:
                n_instants += 1
        while r < len(tick_of) and tick_of[r] == k:
            _finish(sums[tick_model[r]], ticks_out[r])
            r += 1
    return n_instants, n_samples

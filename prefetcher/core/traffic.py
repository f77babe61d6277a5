"""Online traffic features: what the log so far says about every model, as arrays, one row a model.

Stored, and enough to rebuild every row bit for bit (`Traffic.snapshot`): the minute counts of two weeks, first and
last use, the last gaps, mean and variance of log gaps, a half-octave gap histogram, the last starts, a decayed profile of
the day, and bounded tables of followers, of users, and of what a user turns to next. Derived from these: decayed rates at
several time scales and the places of past windows. The feature function itself is `prefetcher.core.features`. Everything here
is a function of past rows only; decisions never enter it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core import features as _f
from prefetcher.core import minute_lists as _lists
from prefetcher.core.traffic_state import FEATURE_NAMES, GAP_BINS, KEPT_STARTS, LAG_MINUTES, SLOTS, TAUS_S, State

__all__ = ["FEATURE_NAMES", "TAUS_S", "Block", "Traffic"]

#: Successors kept per model, models kept per user, users kept (buckets × ways), models and users that count as recent.
FOLLOWERS = 16
MODELS_PER_USER = 16
USER_BUCKETS = 1024
USER_WAYS = 8
RECENT_MODELS = 8
ACTIVE_USERS = 16

_POOL = ("pool_minute", "pool_cum", "start", "length", "room", "base", "decayed", "cursor")
#: Per-model fields, with the value of a model that was never used.
_FILL: dict[str, tuple[Any, tuple[int, ...], Any]] = {
    "last_s": (np.float64, (), -np.inf),
    "first_s": (np.float64, (), np.inf),
    "total": (np.int64, (), 0),
    "gaps_s": (np.float64, (3,), 1e6),
    "log_gap_mean": (np.float64, (), 8.0),
    "log_gap_var": (np.float64, (), 1.0),
    "log_count": (np.float64, (), 0.0),
    "starts": (np.int64, (), 0),
    "start_s": (np.float64, (KEPT_STARTS,), -np.inf),
    "idle_gap_s": (np.float64, (KEPT_STARTS,), 0.0),
    "start_gap_s": (np.float64, (KEPT_STARTS,), 0.0),
    "session_rows": (np.float64, (), 0.0),
    "profile": (np.float32, (2, SLOTS), 0.0),
    "histogram": (np.float64, (GAP_BINS,), 0.0),
    "slots": (np.float64, (), 0.0),
    "last_slot": (np.int64, (), -1),
    "follower": (np.int32, (FOLLOWERS,), -1),
    "follower_w": (np.float64, (FOLLOWERS,), 0.0),
    "switch": (np.int32, (FOLLOWERS,), -1),
    "switch_w": (np.float64, (FOLLOWERS,), 0.0),
    "switches": (np.float64, (), 0.0),
}


@dataclass(frozen=True, slots=True)
class Block:
    """What happened in [from_s, until_s), with features: the unit that predictors learn from.

    Rows in time order: `ts` float64[N], `model` int64[N], `user` int64[N] (−1 unknown), `count` int64[N], and
    `row_features` float32[N, F], each right after its row (NaN for a row that came too late). Ticks: `ticks`
    float64[T], and for every model seen by then one entry in `tick_of` int32[R] (which tick), `tick_model` int32[R]
    and `tick_features` float32[R, F]. Features may be absent (length 0).
    """

    from_s: float
    until_s: float
    ts: npt.NDArray[np.float64]
    model: npt.NDArray[np.int64]
    user: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    row_features: npt.NDArray[np.float32]
    ticks: npt.NDArray[np.float64]
    tick_of: npt.NDArray[np.int32]
    tick_model: npt.NDArray[np.int32]
    tick_features: npt.NDArray[np.float32]


class Traffic:
    """The traffic state of `n_models` models, which are numbered from 0; it grows when a higher number appears.

    Not for two threads at once: even reading features moves cursors.
    """

    def __init__(self, n_models: int = 0) -> None:
        rows = n_models + 1
        self._used = 0
        fields: dict[str, Any] = {
            "pool_minute": np.zeros(0, np.int32),
            "pool_cum": np.zeros(0, np.int64),
            "decayed": np.zeros((rows, len(TAUS_S))),
            "cursor": np.zeros((rows, len(LAG_MINUTES)), np.int32),
            **{name: np.zeros(rows, np.int64) for name in ("start", "length", "room", "base")},
            **{name: np.full((n_models, *shape), fill, dtype) for name, (dtype, shape, fill) in _FILL.items()},
            "recent": np.full(RECENT_MODELS, -1, np.int32),
            "recent_s": np.full(RECENT_MODELS, -np.inf),
            "active": np.full(ACTIVE_USERS, -1, np.int64),
            "active_at": np.zeros(ACTIVE_USERS, np.int64),
            "active_s": np.full(ACTIVE_USERS, -np.inf),
            "user_id": np.full((USER_BUCKETS, USER_WAYS), -1, np.int64),
            "user_s": np.full((USER_BUCKETS, USER_WAYS), -np.inf),
            "user_rows": np.zeros((USER_BUCKETS, USER_WAYS)),
            "user_now": np.full((USER_BUCKETS, USER_WAYS), -1, np.int32),
            "user_model": np.full((USER_BUCKETS, USER_WAYS, MODELS_PER_USER), -1, np.int32),
            "user_w": np.zeros((USER_BUCKETS, USER_WAYS, MODELS_PER_USER)),
            "user_at": np.full((USER_BUCKETS, USER_WAYS, MODELS_PER_USER), -np.inf),
            "profile_days": np.zeros((2, SLOTS)),
            "all_starts": np.array([0.0, -np.inf]),
            "times": np.array([np.inf, -np.inf]),
            "counters": np.zeros(5, np.int64),
        }
        self._state = State(**fields)

    @property
    def n_models(self) -> int:
        return len(self._state.last_s)

    @property
    def origin_s(self) -> float:
        """Time of the first row; inf before it."""
        return float(self._state.times[0])

    @property
    def newest_s(self) -> float:
        """Time of the newest row; −inf before the first."""
        return float(self._state.times[1])

    @property
    def rows(self) -> int:
        """Rows taken in."""
        return int(self._state.counters[3])

    @property
    def late_rows(self) -> int:
        """Rows that came after a newer one and were counted with their model's last row."""
        return int(self._state.counters[1])

    @property
    def dropped_rows(self) -> int:
        """Rows that came more than `traffic_state.LATE_S` late and were not counted."""
        return int(self._state.counters[2])

    @property
    def last_s(self) -> npt.NDArray[np.float64]:
        """float64[n]: time of each model's last row, −inf if none. A view; do not write."""
        return self._state.last_s

    @property
    def first_s(self) -> npt.NDArray[np.float64]:
        """float64[n]: time of each model's first row, inf if none. A view; do not write."""
        return self._state.first_s

    @property
    def total(self) -> npt.NDArray[np.int64]:
        """int64[n]: rows of each model. A view; do not write."""
        return self._state.total

    @property
    def gap_histogram(self) -> npt.NDArray[np.float64]:
        """float64[n, GAP_BINS]: decayed counts of gaps between rows, bin b from 2^(b/2) to 2^((b+1)/2) s. A view; do
        not write.
        """
        return self._state.histogram

    def add(
        self,
        ts: npt.ArrayLike,
        model: npt.ArrayLike,
        user: npt.ArrayLike | None = None,
        count: npt.ArrayLike | None = None,
    ) -> None:
        """Take in rows in time order: `ts` seconds, `model` numbers, `user` numbers below 2^63 (−1 unknown), `count`
        arrivals a row.

        A row up to `traffic_state.LATE_S` older than the newest one counts as if it came with its model's last row; an
        older one is dropped and counted.
        """
        times = np.asarray(ts, dtype=np.float64).reshape(-1)
        if len(times):
            self.advance(times, model, user, count, features=False)

    def advance(
        self,
        ts: npt.ArrayLike,
        model: npt.ArrayLike,
        user: npt.ArrayLike | None = None,
        count: npt.ArrayLike | None = None,
        *,
        ticks: npt.ArrayLike = (),
        from_s: float | None = None,
        until_s: float | None = None,
        features: bool = True,
    ) -> Block:
        """`add`, with the feature row right after each row and those of all seen models at each of `ticks`.

        `ticks` rise; a row at a tick's very time comes after it. `from_s`, `until_s` are the block's bounds (by
        default those of its rows and ticks). The result equals adding row by row and asking `features` each time, bit
        for bit.
        """
        times = np.ascontiguousarray(np.asarray(ts, dtype=np.float64).reshape(-1))
        models = np.ascontiguousarray(np.asarray(model, dtype=np.int64).reshape(-1))
        n = len(times)
        users = np.full(n, -1, np.int64) if user is None else np.ascontiguousarray(user, dtype=np.int64).reshape(-1)
        counts = np.ones(n, np.int64) if count is None else np.ascontiguousarray(count, dtype=np.int64).reshape(-1)
        at = np.ascontiguousarray(np.asarray(ticks, dtype=np.float64).reshape(-1))
        if not len(models) == len(users) == len(counts) == n:
            raise ValueError(f"rows of different lengths: {n}, {len(models)}, {len(users)}, {len(counts)}")
        if n and models.min() < 0:
            raise ValueError(f"model numbers start at 0, got {models.min()}")
        if not np.isfinite(times).all():
            raise ValueError("times must be finite")
        if n:
            self._grow(int(models.max()) + 1)
            self._make_room(times, models)
        width = len(FEATURE_NAMES)
        seen = np.count_nonzero(self._state.total) + (len(np.unique(models)) if features and len(at) else 0)
        most = len(at) * seen if features else 0
        row_features = np.empty((n if features else 0, width), np.float32)
        tick_of, tick_model = np.empty(most, np.int32), np.empty(most, np.int32)
        tick_features = np.empty((most, width), np.float32)
        written = _f.take_block(self._state, times, models, users, counts, at, row_features, tick_of, tick_model, tick_features)
        bounds = [x for edge in (times, at) if len(edge) for x in (float(edge[0]), float(edge[-1]))]
        return Block(
            from_s=from_s if from_s is not None else min(bounds, default=self.newest_s),
            until_s=until_s if until_s is not None else max(bounds, default=self.newest_s),
            ts=times,
            model=models,
            user=users,
            count=counts,
            row_features=row_features,
            ticks=at,
            tick_of=tick_of[:written],
            tick_model=tick_model[:written],
            tick_features=tick_features[:written],
        )

    def features(self, now_s: float, models: npt.ArrayLike | None = None) -> npt.NDArray[np.float32]:
        """float32[len(models), F], columns `FEATURE_NAMES`, at `now_s` (not before the newest row); NaN for a model
        never used.
        """
        which = self._which(models)
        out = np.empty((len(which), len(FEATURE_NAMES)), np.float32)
        _f.take_features(self._state, which, float(now_s), out)
        return out

    def rates(self, now_s: float, models: npt.ArrayLike | None = None) -> npt.NDArray[np.float64]:
        """float64[len(models), len(TAUS_S)]: rows a second, decayed over each of `TAUS_S`; 0 for a model never used."""
        which = self._which(models)
        out = np.empty((len(which), len(TAUS_S)))
        _f.take_rates(self._state, which, float(now_s), out)
        return out

    def counts(self, from_s: float, until_s: float, models: npt.ArrayLike | None = None) -> npt.NDArray[np.int64]:
        """int64[len(models)]: rows in the minutes from that of `from_s` up to, and without, that of `until_s`;
        bounded history.
        """
        which = self._which(models)
        out = np.empty(len(which), np.int64)
        s = self._state
        minutes = int(from_s // 60.0), int(until_s // 60.0)
        _lists.take_counts(s.start, s.length, s.base, s.pool_minute, s.pool_cum, which, *minutes, out)
        return out

    def snapshot(self) -> dict[str, np.ndarray]:
        """All that is stored, as new arrays; what is derived is left out and rebuilt by `restore`."""
        s = self._state
        taken = {name: np.array(getattr(s, name)) for name in State._fields if name not in _POOL}
        entry = np.concatenate([np.arange(a, a + k) for a, k in zip(s.start, s.length, strict=True)]).astype(np.int64)
        cum = s.pool_cum[entry]
        first = np.cumsum(s.length) - s.length
        before = np.concatenate([[0], cum[:-1]]) if len(cum) else cum
        full = s.length > 0
        before[first[full]] = s.base[full]
        return {**taken, "minutes": s.pool_minute[entry], "minute_rows": cum - before, "minute_length": s.length.copy()}

    @classmethod
    def restore(cls, snapshot: Mapping[str, np.ndarray]) -> Traffic:
        """The traffic that `snapshot` was taken of: the same features, bit for bit, now and after the same rows.

        Raises `ValueError` for a snapshot of another shape.
        """
        expected = {name for name in State._fields if name not in _POOL} | {"minutes", "minute_rows", "minute_length"}
        if set(snapshot) != expected:
            raise ValueError(f"a snapshot of traffic lacks or has too many of {sorted(set(snapshot) ^ expected)}")
        traffic = cls(len(snapshot["last_s"]))
        own: dict[str, Any] = {}
        for name in State._fields:
            have = getattr(traffic._state, name)
            if name in _POOL:
                own[name] = have
                continue
            given = np.array(snapshot[name], dtype=have.dtype)
            if given.shape != have.shape:
                raise ValueError(f"a snapshot of traffic with {name} of shape {given.shape}, expected {have.shape}")
            own[name] = given
        length = np.array(snapshot["minute_length"], dtype=np.int64)
        rows = np.array(snapshot["minute_rows"], dtype=np.int64)
        minutes = np.array(snapshot["minutes"], dtype=np.int32)
        if len(length) != traffic.n_models + 1 or length.sum() != len(rows) or len(rows) != len(minutes):
            raise ValueError("a snapshot of traffic whose minute counts do not fit its models")
        start = np.cumsum(length) - length
        total = np.cumsum(rows)
        before = np.concatenate([[0], total])[start]
        own.update(start=start, length=length, room=length.copy(), base=np.zeros_like(length), pool_minute=minutes)
        own["pool_cum"] = total - np.repeat(before, length)
        traffic._state = State(**own)
        traffic._used = len(minutes)
        s = traffic._state
        _f.rebuild_rates(s.start, s.length, s.base, s.pool_minute, s.pool_cum, s.decayed)
        return traffic

    def _which(self, models: npt.ArrayLike | None) -> npt.NDArray[np.int64]:
        if models is None:
            return np.arange(self.n_models)
        which = np.ascontiguousarray(np.asarray(models, dtype=np.int64).reshape(-1))
        if len(which) and (which.min() < 0 or which.max() >= self.n_models):
            raise ValueError(f"models are numbered from 0 to {self.n_models - 1}, got {which.min()} to {which.max()}")
        return which

    def _grow(self, n: int) -> None:
        """Room for model numbers below n."""
        have = self.n_models
        if n <= have:
            return
        s = self._state
        more: dict[str, Any] = {}
        for name, (dtype, shape, fill) in _FILL.items():
            more[name] = np.concatenate([getattr(s, name), np.full((n - have, *shape), fill, dtype)])
        for name in ("start", "length", "room", "base", "decayed", "cursor"):
            old = getattr(s, name)
            more[name] = np.concatenate([old, np.zeros((n - have, *old.shape[1:]), old.dtype)])
        self._state = s._replace(**more)

    def _make_room(self, times: npt.NDArray[np.float64], models: npt.NDArray[np.int64]) -> None:
        """Room in the pool for every minute that these rows can open."""
        s = self._state
        span = int(times.max() // 60.0) - int(times.min() // 60.0) + 1
        need = np.zeros(len(s.start), np.int64)
        need[1:] = np.minimum(np.bincount(models, minlength=self.n_models), span)
        need[0] = min(len(times), span)
        moved = np.flatnonzero(s.length + need > s.room)
        if not len(moved):
            return
        room = np.maximum(2 * s.length[moved], s.length[moved] + need[moved]) + 4
        if self._used + room.sum() > len(s.pool_minute):
            self._compact(need)
            return
        to = self._used + np.cumsum(room) - room
        _lists.copy_lists(moved, s.start, s.length, s.pool_minute, s.pool_cum, to, s.pool_minute, s.pool_cum)
        s.start[moved], s.room[moved] = to, room
        self._used += int(room.sum())

    def _compact(self, need: npt.NDArray[np.int64]) -> None:
        """A new pool, without the holes that moved lists left, with room for every list to grow by half and for later
        moves.
        """
        s = self._state
        room = s.length + np.maximum(s.length // 2, need) + 4
        total = int(room.sum())
        size = total + total // 2
        to = np.cumsum(room) - room
        fresh = s._replace(pool_minute=np.zeros(size, np.int32), pool_cum=np.zeros(size, np.int64), start=to, room=room)
        _lists.copy_lists(np.arange(len(room)), s.start, s.length, s.pool_minute, s.pool_cum, to, fresh.pool_minute, fresh.pool_cum)
        self._state = fresh
        self._used = total

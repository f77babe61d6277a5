"""The tables of one partition in memory, and what a batch changes in them.

Every rule goes row by row in offset order, so that it makes no difference how rows are cut into batches: a row is late when it is more than
the bound older than the newest row before it; a gap is a row's time after its model's newest row so far, 0 for one that is younger than the
bound but out of order. Late rows are counted and change nothing else. Covers no storage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic_state import GAP_BINS
from prefetcher.ingest.decoding import Decoded
from prefetcher.ingest.users import UserHasher

__all__ = ["MINUTE_S", "RECENT_MODELS", "Changes", "PartitionCounts"]

MINUTE_S = 60
#: Models of a user that are kept, the last ones; what is used in a row is one.
RECENT_MODELS = 8
#: Upper ends of the gap bins, but for the last, which is open.
_GAP_ENDS_S = 2.0 ** (np.arange(1, GAP_BINS) / 2.0)
#: A user's entry is [offset of the last row, model, second, model, second, …].
_USER_LENGTH = 1 + 2 * RECENT_MODELS

_encode, _encode_lines = msgspec.json.Encoder().encode, msgspec.json.Encoder().encode_lines
_decode = msgspec.json.Decoder().decode


@dataclass(slots=True)
class Changes:
    """What one batch changed: values to store by field, users to remove, and rows to add by minute and model."""

    models: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    gone_users: list[str] = field(default_factory=list)
    minutes: list[tuple[int, list[str | int]]] = field(default_factory=list)


class PartitionCounts:
    """Everything counted up to `offset`, which is None before the first record.

    `generation` tells states apart that stand at the same offset. At most `most_models` models and `most_users` users are known: rows of
    further models are counted in `unlisted` alone, and the user whose last row is oldest makes room.
    """

    def __init__(self, hasher: UserHasher, late_s: float, most_models: int, most_users: int) -> None:
        self._hash = hasher
        self._late_s = late_s
        self._most_models = most_models
        self._most_users = most_users
        self.offset: int | None = None
        self.generation = 0
        self.newest_s = -np.inf
        #: What `newest_s` was when it was stored last: which hours are closed is told by this, since rows in hand may lie in others.
        self.stored_s = -np.inf
        self.rows = self.late = self.unlisted = self.bad = 0
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._rows = np.zeros(0, np.int64)
        self._late = np.zeros(0, np.int64)
        self._first_s = np.zeros(0)
        self._last_s = np.zeros(0)
        self._bins = np.zeros((0, GAP_BINS), np.int64)
        self._users: OrderedDict[str, list[Any]] = OrderedDict()
        #: Hours since 1970 of which minutes are stored and not yet in the history.
        self.hours: set[int] = set()

    def restore(self, position: Mapping[bytes, bytes], models: Mapping[bytes, bytes], users: Mapping[bytes, bytes]) -> bool:
        """Takes stored tables over; whether they are whole: False when models are missing."""
        self.offset, self.generation = int(position[b"offset"]), int(position[b"generation"])
        self.newest_s = self.stored_s = float(position[b"newest_s"])
        self.rows, self.late, self.unlisted, self.bad = (int(position[name]) for name in (b"rows", b"late", b"unlisted", b"bad"))
        self._grow(len(models))
        for i, (name, value) in enumerate(models.items()):
            rows, late, first_s, last_s, bins = _decode(value)
            self._names.append(name.decode())
            self._index[self._names[-1]] = i
            self._rows[i], self._late[i] = rows, late
            if rows:
                self._first_s[i], self._last_s[i] = first_s, last_s
            self._bins[i, : len(bins)] = bins
        entries = sorted(((_decode(value), name) for name, value in users.items()), key=lambda item: int(item[0][0]))
        self._users = OrderedDict((name.decode(), entry) for entry, name in entries)
        return int(self._rows.sum()) == self.rows

    def position(self) -> dict[str, str]:
        """The fields of the stored position."""
        return {
            "offset": str(self.offset),
            "generation": str(self.generation),
            "newest_s": repr(float(self.newest_s)),
            "rows": str(self.rows),
            "late": str(self.late),
            "unlisted": str(self.unlisted),
            "bad": str(self.bad),
        }

    def take(self, batch: Decoded, next_offset: int) -> Changes:
        """Counts a batch that begins at `offset`, and stands at `next_offset` then."""
        self.offset = next_offset
        self.bad += len(batch.bad)
        if not len(batch.ts):
            return Changes()
        newest = np.maximum.accumulate(np.concatenate(([self.newest_s], batch.ts)))
        late = batch.ts < newest[:-1] - self._late_s
        self.newest_s = float(newest[-1])
        ids = self._ids(batch.models)
        listed = ids >= 0
        self.unlisted += len(ids) - int(np.count_nonzero(listed))
        changes = Changes()
        late_ids = ids[late & listed]
        if len(late_ids):
            np.add.at(self._late, late_ids, 1)
            self.late += len(late_ids)
        on_time = listed & ~late
        changed = self._count(ids[on_time], batch.ts[on_time], changes)
        if len(late_ids):
            changed = np.union1d(changed, late_ids)
        self._list_models(changed, changes)
        self._take_users(batch, on_time, changes)
        return changes

    def _ids(self, models: list[str]) -> npt.NDArray[np.int64]:
        index = self._index
        ids = np.array([index.get(model, -1) for model in models], np.int64)
        for i in np.flatnonzero(ids < 0).tolist():
            model = models[i]
            found = index.get(model)
            if found is None and len(index) < self._most_models:
                found = index[model] = len(self._names)
                self._names.append(model)
            if found is not None:
                ids[i] = found
        if len(self._names) > len(self._rows):
            self._grow(max(len(self._names), 2 * len(self._rows)))
        return ids

    def _grow(self, size: int) -> None:
        more = size - len(self._rows)
        self._rows = np.concatenate((self._rows, np.zeros(more, np.int64)))
        self._late = np.concatenate((self._late, np.zeros(more, np.int64)))
        self._first_s = np.concatenate((self._first_s, np.full(more, np.inf)))
        self._last_s = np.concatenate((self._last_s, np.full(more, -np.inf)))
        self._bins = np.concatenate((self._bins, np.zeros((more, GAP_BINS), np.int64)))

    def _count(self, ids: npt.NDArray[np.int64], ts: npt.NDArray[np.float64], changes: Changes) -> npt.NDArray[np.int64]:
        """Counts rows that are on time; returns the models that they changed."""
        if not len(ids):
            return ids
        order = np.argsort(ids, kind="stable")
        ids, ts = ids[order], ts[order]
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        changed = ids[starts]
        sizes = np.diff(np.append(starts, len(ids)))
        before = _running_max(ts, starts, sizes, self._last_s[changed])
        known = before > -np.inf
        gaps_s = np.maximum(ts[known] - before[known], 0.0)
        np.add.at(self._bins, (ids[known], np.searchsorted(_GAP_ENDS_S, gaps_s, side="right")), 1)
        self._rows[changed] += sizes
        self.rows += len(ids)
        self._first_s[changed] = np.minimum(self._first_s[changed], np.minimum.reduceat(ts, starts))
        self._last_s[changed] = np.maximum(self._last_s[changed], np.maximum.reduceat(ts, starts))
        self._count_minutes(ids, ts, changes)
        return changed

    def _count_minutes(self, ids: npt.NDArray[np.int64], ts: npt.NDArray[np.float64], changes: Changes) -> None:
        minutes = np.floor(ts / MINUTE_S).astype(np.int64)
        cells, rows = np.unique(minutes * len(self._names) + ids, return_counts=True)
        minute, model = np.divmod(cells, len(self._names))
        starts = np.flatnonzero(np.concatenate(([True], minute[1:] != minute[:-1])))
        models, counts = model.tolist(), rows.tolist()
        names = self._names
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(models)], strict=True):
            pairs: list[str | int] = []
            for i in range(start, end):
                pairs += (names[models[i]], counts[i])
            changes.minutes.append((int(minute[start]), pairs))
            self.hours.add(int(minute[start]) // 60)

    def _list_models(self, changed: npt.NDArray[np.int64], changes: Changes) -> None:
        bins = self._bins[changed]
        lengths = GAP_BINS - np.argmax(bins[:, ::-1] != 0, axis=1)
        lengths[~bins.any(axis=1)] = 0
        columns = (self._rows[changed], self._late[changed], self._first_s[changed], self._last_s[changed], bins, lengths)
        for i, rows, late, first_s, last_s, row_bins, length in zip(changed.tolist(), *(c.tolist() for c in columns), strict=True):
            # Without a row on time, first and last are infinite: null.
            changes.models += (self._names[i], _encode((rows, late, first_s, last_s, row_bins[:length])).decode())

    def _take_users(self, batch: Decoded, on_time: npt.NDArray[np.bool_], changes: Changes) -> None:
        if self._most_users == 0:
            return
        if not any(batch.users):
            return
        users, hasher = self._users, self._hash
        hashes = [None if user is None else hasher(user) for user in batch.users]
        if not on_time.all():
            hashes = [hashed if counts else None for hashed, counts in zip(hashes, on_time.tolist(), strict=True)]
        #: What was changed, as it is in the end; None for those who made room.
        changed: dict[str, list[Any] | None] = {}
        seconds = np.floor(batch.ts).astype(np.int64).tolist()
        for hashed, model, ts, offset in zip(hashes, batch.models, seconds, batch.offsets.tolist(), strict=True):
            if hashed is None:
                continue
            entry = users.get(hashed)
            if entry is None:
                if len(users) >= self._most_users:
                    changed[users.popitem(last=False)[0]] = None
                users[hashed] = changed[hashed] = [offset, model, ts]
                continue
            entry[0] = offset
            if entry[-2] != model:
                entry += (model, ts)
                if len(entry) > _USER_LENGTH:
                    del entry[1:3]
            elif ts > entry[-1]:
                entry[-1] = ts
            users.move_to_end(hashed)
            changed[hashed] = entry
        kept = [(hashed, entry) for hashed, entry in changed.items() if entry is not None]
        # One call for all: no JSON of an entry has a line end in it.
        lines = _encode_lines([entry for _, entry in kept]).decode().split("\n")
        for (hashed, _), line in zip(kept, lines, strict=False):
            changes.users += (hashed, line)
        changes.gone_users = [hashed for hashed, entry in changed.items() if entry is None]


def _running_max(
    ts: npt.NDArray[np.float64], starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], last_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """For every row, the newest time before it in its group, `last_s` of the group included; groups lie one after another."""
    before = np.concatenate(([0.0], ts[:-1]))
    before[starts] = last_s
    if (ts >= before).all():
        return before
    # Out of order: with `last_s` put before its group, a running maximum of ranks, which unlike times can be set apart by group exactly.
    every = np.insert(ts, starts, last_s)
    group = np.repeat(np.arange(len(starts)), sizes + 1)
    by_time = np.argsort(every, kind="stable")
    rank = np.empty(len(every), np.int64)
    rank[by_time] = np.arange(len(every))
    highest = np.maximum.accumulate(group * len(every) + rank) - group * len(every)
    running = every[by_time[highest]]
    return np.asarray(np.delete(running, np.cumsum(sizes + 1) - 1))

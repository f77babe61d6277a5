"""The tables in Redis: one atomic step stores what a batch changed and the offset that it leads to, or neither (`docs/tables.md`: keys).

All tables of a partition share a hash tag, so that one script can compare the stored offset with the one that a batch began at. Readers add
partitions up. Uses nothing newer than Redis 7.0. Every method raises `redis.RedisError`; `why` puts a word to it. Covers no counting
(`counting`) and no waiting (`ingest`).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from prefetcher.core.traffic_state import GAP_BINS
from prefetcher.ingest.counting import Changes, PartitionCounts
from prefetcher.ingest.users import UserHasher

__all__ = ["PARTITIONS", "USER_KEY", "Commit", "ModelTable", "Tables", "TablesReader", "connect", "key", "why"]

#: The key that users are hashed with, and the partitions that were ever counted.
USER_KEY = "prefetcher:{installation}:user-key"
PARTITIONS = "prefetcher:{installation}:partitions"
#: A script of one batch takes tens of milliseconds; a server that takes its append-only file may keep everybody for a second or two.
_TIMEOUT_S = 5.0
#: Lua takes no more than some thousands of arguments at once.
_FORGOTTEN_AT_ONCE = 1000

_HELD = """
local held = redis.call('HMGET', KEYS[1], 'offset', 'generation', 'rows')
local now = (held[1] or '') .. '/' .. (held[2] or '')
"""
#: KEYS: position, models, users, minutes, one for each changed minute. ARGV: what must be stored (`offset/generation`), and the changes as
#: MessagePack: [position, models, users, users gone, [minute, [model, rows, …]] …].
#: Answers 'ok', or what is stored; 'damaged' when models were lost without the position.
_COMMIT = (
    _HELD
    + """
if now ~= ARGV[1] then return now end
if held[3] and held[3] ~= '0' and redis.call('EXISTS', KEYS[2]) == 0 then return 'damaged' end
local function hset(key, flat)
  for i = 1, #flat, 2000 do redis.call('HSET', key, unpack(flat, i, math.min(i + 1999, #flat))) end
end
local changes = cmsgpack.unpack(ARGV[2])
hset(KEYS[1], changes[1])
hset(KEYS[2], changes[2])
for i = 1, #changes[4], 2000 do redis.call('HDEL', KEYS[3], unpack(changes[4], i, math.min(i + 1999, #changes[4]))) end
hset(KEYS[3], changes[3])
for m, minute in ipairs(changes[5]) do
  redis.call('ZADD', KEYS[4], minute[1], minute[1])
  local key, rows = KEYS[4 + m], minute[2]
  for i = 1, #rows, 2 do redis.call('HINCRBY', key, rows[i], rows[i + 1]) end
end
return 'ok'
"""
)
#: Deletes all tables of a partition if ARGV[1] is still stored. KEYS: position, models, users, minutes; ARGV[2] begins a minute's key.
#: The minutes' keys are not named: they share the tag, and only the index knows them.
_WIPE = (
    _HELD
    + """
if now ~= ARGV[1] then return now end
for _, minute in ipairs(redis.call('ZRANGE', KEYS[4], 0, -1)) do redis.call('DEL', ARGV[2] .. minute) end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
return 'ok'
"""
)
#: Removes a user, and makes whoever counts the partition load it again, which would else write the user back.
_FORGET = """
local gone = redis.call('HDEL', KEYS[2], unpack(ARGV))
if gone > 0 and redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HINCRBY', KEYS[1], 'generation', 1) end
return gone
"""

_decode = msgspec.json.Decoder().decode
_pack = msgspec.msgpack.Encoder().encode


def connect(url: str, timeout_s: float = _TIMEOUT_S) -> redis.Redis:
    """A client that asks once: whoever waits decides whether to ask again."""
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0))


def why(error: redis.RedisError) -> str:
    """A word for what is wrong with the server: `state_full`, `state_away` or `state_refuses`."""
    if isinstance(error, redis.OutOfMemoryError):
        return "state_full"
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "state_away"
    return "state_refuses"


def key(partition: int, what: str) -> str:
    """The key of `what` (position, models, users, minutes, minute/M) of a partition."""
    return f"prefetcher:{{requests/{partition}}}:{what}"


@dataclass(frozen=True, slots=True)
class Commit:
    """One batch of one partition, ready to be stored any number of times: only the first does anything."""

    partition: int
    expected: str
    changes: bytes
    minutes: tuple[int, ...]


def user_key(client: redis.Redis, known: bytes | None = None) -> bytes:
    """The installation's key, which is made once: the `known` one, else a new one, where there is none."""
    pipe = client.pipeline(transaction=True)
    pipe.set(USER_KEY, known or secrets.token_bytes(32), nx=True)
    pipe.get(USER_KEY)
    return cast("bytes", pipe.execute()[1])


class Tables:
    """Loads and stores the tables of partitions, for whoever counts them."""

    def __init__(self, client: redis.Redis, late_s: float, most_models: int, most_users: int) -> None:
        self._redis = client
        self._limits = (late_s, most_models, most_users)
        self._commit = client.register_script(_COMMIT)
        self._wipe = client.register_script(_WIPE)
        self._hasher: UserHasher | None = None

    def hasher(self) -> UserHasher:
        """With the installation's key; when the server lost it, it gets the one that was known before."""
        held = user_key(self._redis, None if self._hasher is None else self._hasher.key)
        if self._hasher is None or held != self._hasher.key:
            self._hasher = UserHasher(held)
        return self._hasher

    def new_counts(self) -> PartitionCounts:
        """Counts of nothing."""
        counts = PartitionCounts(self.hasher(), *self._limits)
        counts.generation = secrets.randbits(32)
        return counts

    def load(self, partition: int) -> tuple[PartitionCounts, str]:
        """What is stored of a partition, and '' or what is wrong with it (`lost`, `damaged`): then it must be wiped and counted anew."""
        counts = PartitionCounts(self.hasher(), *self._limits)
        pipe = self._redis.pipeline(transaction=True)
        for what in ("position", "models", "users"):
            pipe.hgetall(key(partition, what))
        pipe.zrange(key(partition, "minutes"), 0, -1)
        position, models, users, minutes = pipe.execute()
        self._redis.sadd(PARTITIONS, partition)
        if not position:
            counts.generation = secrets.randbits(32)
            return counts, "lost" if models or users or minutes else ""
        whole = counts.restore(position, models, users)
        counts.hours = {int(minute) // 60 for minute in minutes}
        return counts, "" if whole else "damaged"

    def stored(self, partitions: Sequence[int]) -> dict[int, str]:
        """What is stored of each of `partitions`, as `held` says it. That they are counted, and the users' key, is written again where it
        went missing."""
        pipe = self._redis.pipeline(transaction=False)
        for partition in partitions:
            pipe.hmget(key(partition, "position"), "offset", "generation")
        if partitions:
            pipe.sadd(PARTITIONS, *partitions)
        found = pipe.execute()
        self.hasher()
        words = [[(part or b"").decode() for part in parts] for parts in found[: len(partitions)]]
        return {partition: "/".join(parts) for partition, parts in zip(partitions, words, strict=True)}

    def counted(self) -> set[int]:
        """The partitions that were ever counted."""
        return {int(member) for member in cast("Iterable[bytes]", self._redis.smembers(PARTITIONS))}

    def remove(self, partition: int) -> bool:
        """Deletes everything of a partition that nobody counts; whether there was anything, and nobody stored more meanwhile."""
        held = self.stored([partition])[partition]
        done = self.wipe(partition, held) == "ok"
        if done:
            self._redis.srem(PARTITIONS, partition)
        return done and held != "/"

    def held(self, counts: PartitionCounts) -> str:
        """What is stored while nobody else changes it."""
        return "/" if counts.offset is None else f"{counts.offset}/{counts.generation}"

    def prepare(self, partition: int, expected: str, counts: PartitionCounts, changes: Changes) -> Commit:
        """The commit of `changes`, which led from `expected` to where `counts` stand now."""
        position = [part for item in counts.position().items() for part in item]
        packed = _pack((position, changes.models, changes.users, changes.gone_users, changes.minutes))
        return Commit(partition, expected, packed, tuple(minute for minute, _ in changes.minutes))

    def store(self, commit: Commit) -> str:
        """'ok', or what is stored instead of what the commit expects (`offset/generation`, '/' when nothing is), or 'damaged'."""
        keys = [key(commit.partition, what) for what in ("position", "models", "users", "minutes")]
        keys += [key(commit.partition, f"minute/{minute}") for minute in commit.minutes]
        answer = bytes(self._commit(keys=keys, args=[commit.expected, commit.changes])).decode()
        if commit.expected == "/":
            # What is counted for the first time may be so because a server lost its memory since the partition was loaded.
            self.stored([commit.partition])
        return answer

    def wipe(self, partition: int, expected: str) -> str:
        """Deletes everything of a partition if `expected` is stored; answers as `store`."""
        keys = [key(partition, what) for what in ("position", "models", "users", "minutes")]
        return bytes(self._wipe(keys=keys, args=[expected, key(partition, "minute/")])).decode()

    def read_minutes(self, partition: int, first: int, last: int) -> dict[int, dict[str, int]]:
        """Rows by minute and model, of the minutes `first` to `last` that are stored."""
        return _read_minutes(self._redis, partition, first, last)

    def delete_minutes(self, partition: int, minutes: Sequence[int]) -> None:
        """Removes minutes that are kept elsewhere, all at once."""
        if minutes:
            pipe = self._redis.pipeline(transaction=True)
            pipe.delete(*(key(partition, f"minute/{minute}") for minute in minutes))
            pipe.zrem(key(partition, "minutes"), *minutes)
            pipe.execute()

    def evicts(self) -> str:
        """The server's policy of eviction if it may throw tables away, else ''."""
        policy = str(self._redis.info("memory").get("maxmemory_policy", ""))
        return policy if policy.startswith("allkeys-") else ""


@dataclass(slots=True)
class ModelTable:
    """One model over all partitions. `gaps` int64[GAP_BINS]: gaps between its rows, by half octaves of seconds."""

    rows: int = 0
    late: int = 0
    first_s: float | None = None
    last_s: float | None = None
    gaps: list[int] = field(default_factory=lambda: [0] * GAP_BINS)

    def mean_gap_s(self) -> float | None:
        """The mean time between rows; None before there are two."""
        if self.rows < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.last_s - self.first_s) / (self.rows - 1)


class TablesReader:
    """Reads the tables of all partitions, and forgets users. Partitions are read one after another, each at one instant."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._forget = client.register_script(_FORGET)

    def partitions(self) -> list[int]:
        """The partitions that were ever counted."""
        return sorted(int(member) for member in cast("Iterable[bytes]", self._redis.smembers(PARTITIONS)))

    def positions(self) -> dict[int, dict[str, float]]:
        """By partition: offset, rows, late, unlisted, bad, newest_s; a partition of which nothing was counted is absent."""
        pipe = self._redis.pipeline(transaction=False)
        partitions = self.partitions()
        for partition in partitions:
            pipe.hgetall(key(partition, "position"))
        found = zip(partitions, pipe.execute(), strict=True)
        whole = ("offset", "rows", "late", "unlisted", "bad")
        return {p: {n: int(d[n.encode()]) for n in whole} | {"newest_s": float(d[b"newest_s"])} for p, d in found if d}

    def models(self) -> dict[str, ModelTable]:
        """Every model."""
        tables: dict[str, ModelTable] = {}
        for partition in self.partitions():
            for name, value in cast("dict[bytes, bytes]", self._redis.hgetall(key(partition, "models"))).items():
                rows, late, first_s, last_s, bins = _decode(value)
                table = tables.setdefault(name.decode(), ModelTable())
                table.rows += rows
                table.late += late
                if rows:
                    table.first_s = first_s if table.first_s is None else min(table.first_s, first_s)
                    table.last_s = last_s if table.last_s is None else max(table.last_s, last_s)
                for i, count in enumerate(bins):
                    table.gaps[i] += count
        return tables

    def minutes(self, first: int, last: int) -> dict[int, Counter[str]]:
        """Rows by minute since 1970 and model, of what is not in the history yet."""
        sums: dict[int, Counter[str]] = {}
        for partition in self.partitions():
            for minute, models in _read_minutes(self._redis, partition, first, last).items():
                sums.setdefault(minute, Counter()).update(models)
        return sums

    def minutes_of(self, model: str, first: int, last: int) -> tuple[Counter[int], int | None]:
        """Rows of one model by minute since 1970, of what is not in the history yet; and the oldest minute that is kept of any model."""
        found: Counter[int] = Counter()
        oldest: int | None = None
        for partition in self.partitions():
            begin = cast("list[bytes]", self._redis.zrange(key(partition, "minutes"), 0, 0))
            if begin:
                oldest = int(begin[0]) if oldest is None else min(oldest, int(begin[0]))
            stored = [int(m) for m in cast("list[bytes]", self._redis.zrangebyscore(key(partition, "minutes"), first, last))]
            pipe = self._redis.pipeline(transaction=False)
            for minute in stored:
                pipe.hget(key(partition, f"minute/{minute}"), model)
            for minute, rows in zip(stored, pipe.execute() if stored else [], strict=True):
                if rows is not None:
                    found[minute] += int(rows)
        return found, oldest

    def recent(self, user: str) -> list[tuple[float, str]]:
        """(time, model) of what a user used last, oldest first; nothing when the user is not known (any more)."""
        hashed = self._hash(user)
        entries = [self._redis.hget(key(partition, "users"), hashed) for partition in self.partitions()] if hashed else []
        return _merged([cast("bytes", entry) for entry in entries if entry])

    def followers(self, most: int = 8) -> dict[str, list[tuple[str, int]]]:
        """By model, which models its users turned to next and how often, most often first; from what is known of recent users.

        A user's models may lie in any partitions, so this is told by merging them, and not kept by any.
        """
        entries: dict[bytes, list[bytes]] = {}
        for partition in self.partitions():
            for hashed, value in cast("dict[bytes, bytes]", self._redis.hgetall(key(partition, "users"))).items():
                entries.setdefault(hashed, []).append(value)
        pairs: dict[str, Counter[str]] = {}
        for values in entries.values():
            for (_, before), (_, after) in pairwise(_merged(values)):
                if before != after:
                    pairs.setdefault(before, Counter())[after] += 1
        return {model: sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most] for model, counts in pairs.items()}

    def forget(self, user: str) -> bool:
        """Deletes what is left of a user; whether there was anything. Records in the topic are not touched."""
        hashed = self._hash(user)
        if not hashed:
            return False
        removed = [
            int(self._forget(keys=[key(partition, "position"), key(partition, "users")], args=[hashed])) for partition in self.partitions()
        ]
        return any(removed)

    def forget_idle(self, before_s: float) -> int:
        """Deletes what is left of users whose last row is older than `before_s`; how many there were."""
        gone = 0
        for partition in self.partitions():
            rows = cast("Iterable[tuple[bytes, bytes]]", self._redis.hscan_iter(key(partition, "users"), count=1000))
            idle = [name for name, line in rows if _decode(line)[-1] < before_s]
            for first in range(0, len(idle), _FORGOTTEN_AT_ONCE):
                keys = [key(partition, "position"), key(partition, "users")]
                gone += int(self._forget(keys=keys, args=idle[first : first + _FORGOTTEN_AT_ONCE]))
        return gone

    def _hash(self, user: str) -> str:
        held = cast("bytes | None", self._redis.get(USER_KEY))
        return "" if held is None else UserHasher(held)(user)


def _read_minutes(client: redis.Redis, partition: int, first: int, last: int) -> dict[int, dict[str, int]]:
    stored = [int(m) for m in cast("list[bytes]", client.zrangebyscore(key(partition, "minutes"), first, last))]
    pipe = client.pipeline(transaction=True)
    for minute in stored:
        pipe.hgetall(key(partition, f"minute/{minute}"))
    found = zip(stored, pipe.execute() if stored else [], strict=True)
    return {minute: {name.decode(): int(rows) for name, rows in models.items()} for minute, models in found}


def _merged(values: Iterable[bytes]) -> list[tuple[float, str]]:
    """Entries of one user from several partitions -> (time, model) in order."""
    return sorted((entry[i + 1], entry[i]) for entry in map(_decode, values) for i in range(1, len(entry), 2))

"""What the ingest's tests share: streams whose partitions a test gives, takes and delivers again, and a recount of a topic row by row."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from prefetcher.core.traffic_state import GAP_BINS
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader
from prefetcher.ports import Chunk, Partition, Positions, StreamReader, Topic
from prefetcher.wire import DeadLetter, RequestMessage, decode_request, encode

START_S = 1_700_000_000.0


class Broker:
    """Streams in memory. `records` by partition; what is `lost` of one was dropped from its front; `away` nobody answers."""

    def __init__(self, partitions: int = 1) -> None:
        self.records: dict[int, list[bytes]] = {number: [] for number in range(partitions)}
        self.first: dict[int, int] = dict.fromkeys(self.records, 0)
        self.letters: list[DeadLetter] = []
        self.away = self.letters_away = False
        self.readers: list[Reader] = []
        self.chunk = 10_000

    def add(self, *rows: RequestMessage | bytes, to: int = 0) -> None:
        self.records[to] += [row if isinstance(row, bytes) else encode(row) for row in rows]

    def prepare(self) -> None:
        pass

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        assert topic is Topic.DEAD_LETTER
        if self.letters_away:
            raise UnavailableError("the dead letters are away")
        self.letters += [msgspec.json.decode(value, type=DeadLetter) for _, value in records]

    def writer(self) -> Broker:
        return self

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None] = lambda partitions: None,
        *,
        shared: bool = False,
    ) -> StreamReader:
        assert (list(topics), shared) == ([Topic.REQUESTS], True)
        self.readers.append(Reader(self, start, revoked))
        return self.readers[-1]

    def last_mark(self, topic: Topic) -> str | None:
        return None

    def close(self) -> None:
        pass


class Reader:
    """Has all partitions but those in `others`, which a test changes."""

    def __init__(
        self, broker: Broker, start: Callable[[Sequence[Partition]], Positions], revoked: Callable[[Sequence[Partition]], None]
    ) -> None:
        self._broker, self._start, self._revoked = broker, start, revoked
        self.others: set[int] = set()
        self.at: dict[int, int] = {}
        self.paused = self.closed = False
        self.done_at: dict[Partition, int] = {}

    def poll(self, limit: int, timeout_s: float) -> Sequence[Chunk]:
        if self._broker.away:
            raise UnavailableError("the broker is away")
        taken = [n for n in self.at if n in self.others]
        for number in taken:
            del self.at[number]
        if taken:
            self._revoked([Partition(Topic.REQUESTS, n) for n in taken])
        new = [Partition(Topic.REQUESTS, n) for n in self._broker.records if n not in self.at and n not in self.others]
        if new:
            positions = self._start(new)
            self.at |= {p.number: positions.get(p, self._broker.first[p.number]) for p in new}
        return () if self.paused else [chunk for number in sorted(self.at) if (chunk := self._chunk(number, limit)) is not None]

    def _chunk(self, number: int, limit: int) -> Chunk | None:
        at, records, first = self.at[number], self._broker.records[number], self._broker.first[number]
        lost = max(0, first - at)
        if at > first + len(records):
            self.at[number] = first
            return Chunk(Partition(Topic.REQUESTS, number), (), (), first)
        at += lost
        values = records[at - first :][: min(limit, self._broker.chunk)]
        self.at[number] = at + len(values)
        if not values and not lost:
            return None
        return Chunk(Partition(Topic.REQUESTS, number), range(at, at + len(values)), values, at + len(values), lost)

    def pause(self, topics: Sequence[Topic]) -> None:
        self.paused = True

    def resume(self, topics: Sequence[Topic]) -> None:
        self.paused = False

    def done(self, positions: Positions) -> None:
        self.done_at |= positions

    def lag(self) -> Mapping[Partition, int]:
        broker = self._broker
        return {Partition(Topic.REQUESTS, n): broker.first[n] + len(broker.records[n]) - at for n, at in self.at.items()}

    def close(self) -> None:
        self.closed = True


class Recount:
    """The tables that a partition's records lead to, counted one row after another in the plainest way."""

    def __init__(self, late_s: float = 600.0) -> None:
        self._late_s = late_s
        self._newest_s = -math.inf
        self.rows: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.first_s: dict[str, float] = {}
        self.last_s: dict[str, float] = {}
        self.gaps: dict[str, list[int]] = {}
        self.minutes: dict[int, Counter[str]] = {}
        self._ends_s = [2.0 ** (b / 2.0) for b in range(1, GAP_BINS)]

    def take(self, values: Sequence[bytes]) -> None:
        for value in values:
            try:
                row = decode_request(value)
            except ValueError:
                continue
            model, ts = row.model, row.ts
            if ts < self._newest_s - self._late_s:
                self.late[model] += 1
                continue
            self._newest_s = max(ts, self._newest_s)
            gaps = self.gaps.setdefault(model, [0] * GAP_BINS)
            if model in self.last_s:
                gaps[bisect.bisect_right(self._ends_s, max(0.0, ts - self.last_s[model]))] += 1
            self.rows[model] += 1
            self.first_s[model] = min(ts, self.first_s.get(model, ts))
            self.last_s[model] = max(ts, self.last_s.get(model, ts))
            self.minutes.setdefault(int(ts // 60), Counter())[model] += 1


def recount(broker: Broker) -> list[Recount]:
    found = []
    for records in broker.records.values():
        found.append(Recount())
        found[-1].take(records)
    return found


def assert_exact(reader: TablesReader, broker: Broker, history: Mapping[int, Mapping[str, int]] | None = None) -> None:
    """The tables in Redis, and the history for closed minutes, are those of the topic."""
    counts = recount(broker)
    tables = reader.models()
    assert {m: t.rows for m, t in tables.items() if t.rows} == sum((c.rows for c in counts), Counter())
    assert {m: t.late for m, t in tables.items() if t.late} == sum((c.late for c in counts), Counter())
    for model, table in tables.items():
        having = [c for c in counts if c.rows[model]]
        if having:
            assert table.first_s == min(c.first_s[model] for c in having)
            assert table.last_s == max(c.last_s[model] for c in having)
            assert table.gaps == [sum(column) for column in zip(*(c.gaps[model] for c in having), strict=True)]
    minutes: dict[int, Counter[str]] = {}
    for count in counts:
        for minute, models in count.minutes.items():
            minutes.setdefault(minute, Counter()).update(models)
    stored = reader.minutes(0, 1 << 40)
    for minute, models in (history or {}).items():
        stored.setdefault(minute, Counter()).update(models)
    assert stored == minutes

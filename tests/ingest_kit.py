"""What the ingest's tests share: streams whose partitions a test gives, takes and delivers again, and a recount of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from prefetcher.bench.recount import Recount, differences
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader
from prefetcher.ports import Chunk, Partition, Positions, StreamReader, Topic
from prefetcher.wire import DeadLetter, RequestMessage, encode

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
        taken = [n for n in self.at if n in self.others or n not in self._broker.records]
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

    def partitions(self) -> frozenset[Partition]:
        return frozenset(Partition(Topic.REQUESTS, number) for number in self._broker.records)

    def close(self) -> None:
        self.closed = True


def recount(broker: Broker) -> list[Recount]:
    found = []
    for records in broker.records.values():
        found.append(Recount())
        found[-1].take(records)
    return found


def assert_exact(reader: TablesReader, broker: Broker, history: Mapping[int, Mapping[str, int]] | None = None) -> None:
    """The tables in Redis, and the history for closed minutes, are those of the topic."""
    assert differences(reader, recount(broker), (history or {}).items()) == []

"""Readers of streams within one process, of whatever keeps the records: who has the one partition, who waits, what may be dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError
from prefetcher.ports import Chunk, Partition, Positions, StreamReader, Topic

__all__ = ["Kept", "KeptLog", "LocalReaders"]

_clock = SystemClock()


class Kept(Protocol):
    """What a log gives for a position; `lost` is at least 1 where something is not kept any more."""

    @property
    def positions(self) -> Sequence[int]: ...
    @property
    def values(self) -> Sequence[bytes]: ...
    @property
    def next_position(self) -> int: ...
    @property
    def lost(self) -> int: ...


class KeptLog(Protocol):
    """One topic's records."""

    def read(self, position: int, limit: int) -> Kept: ...

    def start(self) -> int: ...

    def end(self) -> int: ...

    def drop_before(self, position: int) -> None: ...


class _Had(NamedTuple):
    """A reader that has the partitions of its name, or waits for them."""

    name: str
    reader: StreamReader


class LocalReaders:
    """The readers of `logs`, which have one partition each, 0."""

    def __init__(self, logs: Mapping[Topic, KeptLog]) -> None:
        self._logs = logs
        self._appended = threading.Condition()
        self._closed = False
        #: By topic and name: up to where a reader needs nothing any more. Stays when the reader closes: it may come back.
        self._done: dict[Topic, dict[str, int]] = {topic: {} for topic in logs}
        #: Shared readers in the order in which they came; the first one of a name has the partitions.
        self._members: list[_Had] = []

    def appended(self) -> None:
        """Wakes readers that wait."""
        with self._appended:
            self._appended.notify_all()

    def rolled(self, topic: Topic) -> None:
        """Drops what nobody needs; of a topic that nobody has read yet, what is beyond the segments to keep."""
        needed = self._done[topic].values()
        self._logs[topic].drop_before(min(needed, default=self._logs[topic].end()))

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        *,
        shared: bool,
    ) -> StreamReader:
        made = _LocalReader(self, topics, name, start, shared=shared)
        with self._appended:
            for topic in topics:
                self._done[topic].setdefault(name, 0)
            if shared:
                self._members.append(_Had(name, made))
        return made

    def close(self) -> None:
        with self._appended:
            self._closed = True
            self._appended.notify_all()


class _LocalReader:
    def __init__(
        self,
        readers: LocalReaders,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        *,
        shared: bool,
    ) -> None:
        self._readers = readers
        self._topics = tuple(topics)
        self._name = name
        self._start = start
        self._shared = shared
        self._paused: set[Topic] = set()
        self._next: dict[Topic, int] = {}
        self._first = 0

    def _has(self) -> bool:
        """Whether the partitions are this reader's."""
        if not self._shared:
            return True
        first = next((had.reader for had in self._readers._members if had.name == self._name), None)
        return first is self

    def poll(self, limit: int, timeout_s: float) -> Sequence[Chunk]:
        until_s = _clock.steady_s() + timeout_s
        while True:
            with self._readers._appended:
                if self._readers._closed:
                    raise UnavailableError(f"the streams that {self._name} reads are closed")
                has = self._has()
            if has and len(self._next) < len(self._topics):
                self._begin()
            # Ends are noted before reading: what is appended from here on is seen by the wait.
            ends = self._ends() if has else {}
            chunks = self._read(limit) if has else []
            left_s = until_s - _clock.steady_s()
            if chunks or left_s <= 0:
                return chunks
            with self._readers._appended:
                if not self._readers._closed and self._has() == has and (not has or self._ends() == ends):
                    self._readers._appended.wait(left_s)

    def _begin(self) -> None:
        new = [Partition(topic, 0) for topic in self._topics]
        positions = self._start(new)
        self._next = {at.topic: max(0, positions.get(at, self._readers._logs[at.topic].start())) for at in new}

    def _ends(self) -> dict[Topic, int]:
        return {topic: self._readers._logs[topic].end() for topic in self._topics if topic not in self._paused}

    def _read(self, limit: int) -> list[Chunk]:
        """Topics take turns in coming first, so that a busy one does not keep the others from being read."""
        self._first = (self._first + 1) % len(self._topics)
        chunks: list[Chunk] = []
        left = limit
        for topic in self._topics[self._first :] + self._topics[: self._first]:
            if topic in self._paused or left <= 0:
                continue
            at = self._next[topic]
            kept = self._readers._logs[topic].read(at, left)
            if kept.next_position != at:
                chunks.append(Chunk(Partition(topic, 0), kept.positions, kept.values, kept.next_position, kept.lost))
                self._next[topic] = kept.next_position
                left -= len(kept.values)
        return chunks

    def pause(self, topics: Sequence[Topic]) -> None:
        self._paused.update(topics)

    def resume(self, topics: Sequence[Topic]) -> None:
        self._paused.difference_update(topics)

    def done(self, positions: Positions) -> None:
        with self._readers._appended:
            for partition, position in positions.items():
                done = self._readers._done[partition.topic]
                done[self._name] = max(done.get(self._name, 0), position)
        for partition in positions:
            self._readers.rolled(partition.topic)

    def lag(self) -> Mapping[Partition, int]:
        return {Partition(topic, 0): max(0, self._readers._logs[topic].end() - at) for topic, at in self._next.items()}

    def partitions(self) -> frozenset[Partition]:
        return frozenset(Partition(topic, 0) for topic in self._topics)

    def close(self) -> None:
        self._next = {}
        with self._readers._appended:
            self._readers._members = [had for had in self._readers._members if had.reader is not self]
            self._readers._appended.notify_all()

"""Twins in memory of the streams and the state store: tests and demonstrations without a disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from prefetcher.clock import Clock, SystemClock
from prefetcher.ports import Partition, Positions, StreamReader, StreamWriter, Topic
from prefetcher_connectors.local_readers import LocalReaders
from prefetcher_connectors.segments import Lines

__all__ = ["MemoryState", "MemoryStreams"]


class MemoryState:
    """A state store in memory."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._values: dict[str, tuple[bytes, float]] = {}
        self._lists: dict[str, list[bytes]] = {}
        self._seen: dict[str, dict[str, float]] = {}
        self._hearing: list[tuple[frozenset[str], Callable[[str, bytes], None]]] = []

    def _get(self, key: str) -> bytes | None:
        found = self._values.get(key)
        if found is None or found[1] <= self._clock.steady_s():
            return None
        return found[0]

    def read(self, key: str) -> bytes | None:
        with self._lock:
            return self._get(key)

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            return [self._get(key) for key in keys]

    def write(self, items: Mapping[str, bytes], expire_s: float | None = None) -> None:
        with self._lock:
            until = float("inf") if expire_s is None else self._clock.steady_s() + expire_s
            self._values.update({key: (value, until) for key, value in items.items()})

    def claim(self, items: Mapping[str, bytes], expire_s: float) -> list[bytes | None]:
        with self._lock:
            found = [self._get(key) for key in items]
            until = self._clock.steady_s() + expire_s
            free = [item for item, held in zip(items.items(), found, strict=True) if held is None]
            self._values.update({key: (value, until) for key, value in free})
            return found

    def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
        with self._lock:
            if self._get(key) != before:
                return False
            self._values[key] = (after, float("inf"))
            return True

    def write_fenced(self, fence_key: str, fence: int, items: Mapping[str, bytes]) -> bool:
        with self._lock:
            if int(self._get(fence_key) or b"0") > fence:
                return False
            new = dict(items) | {fence_key: str(fence).encode()}
            self._values.update({key: (value, float("inf")) for key, value in new.items()})
            return True

    def next_number(self, key: str) -> int:
        with self._lock:
            number = int(self._get(key) or b"0") + 1
            self._values[key] = (str(number).encode(), float("inf"))
            return number

    def append(self, key: str, items: Sequence[bytes], keep: int) -> None:
        with self._lock:
            self._lists[key] = (self._lists.get(key, []) + list(items))[-keep:]

    def tail(self, key: str, count: int) -> list[bytes]:
        with self._lock:
            return self._lists.get(key, [])[-count:]

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._values.pop(key, None)
                self._lists.pop(key, None)

    def take_lease(self, key: str, holder: str, ttl_s: float) -> bool:
        with self._lock:
            if self._get(key) not in (None, holder.encode()):
                return False
            self._values[key] = (holder.encode(), self._clock.steady_s() + ttl_s)
            return True

    def drop_lease(self, key: str, holder: str) -> None:
        with self._lock:
            if self._get(key) == holder.encode():
                del self._values[key]

    def see(self, key: str, member: str, at_s: float) -> None:
        with self._lock:
            self._seen.setdefault(key, {})[member] = at_s

    def members(self, key: str, since_s: float) -> list[str]:
        with self._lock:
            return sorted(member for member, at_s in self._seen.get(key, {}).items() if at_s >= since_s)

    def last_seen(self, key: str) -> dict[str, float]:
        with self._lock:
            return dict(self._seen.get(key, {}))

    def unsee(self, key: str, members: Sequence[str]) -> None:
        with self._lock:
            for member in members:
                self._seen.get(key, {}).pop(member, None)

    def publish(self, channel: str, message: bytes) -> int:
        with self._lock:
            hearing = list(self._hearing)
        listening = [hear for channels, hear in hearing if channel in channels]
        for hear in listening:
            hear(channel, message)
        return len(listening)

    def listen(self, channels: Sequence[str], hear: Callable[[str, bytes], None], stop: threading.Event) -> None:
        entry = (frozenset(channels), hear)
        with self._lock:
            self._hearing.append(entry)
        stop.wait()
        with self._lock:
            self._hearing.remove(entry)

    def close(self) -> None:
        pass


class _MemoryLog:
    """One topic's records; a position is the number of records before it."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.mark: str | None = None

    def read(self, position: int, limit: int) -> Lines:
        if position > len(self.values):  # a position of another stream
            return Lines((), (), 0)
        values = self.values[position : position + max(0, limit)]
        after = position + len(values)
        return Lines(range(position, after), values, after)

    def start(self) -> int:
        return 0

    def end(self) -> int:
        return len(self.values)

    def drop_before(self, position: int) -> None:
        pass


class MemoryStreams:
    """Streams in memory, one partition each; they stay when they are closed, for who opens them again."""

    def __init__(self) -> None:
        self._logs = {topic: _MemoryLog() for topic in Topic}
        self._lock = threading.Lock()
        self._readers = LocalReaders(self._logs)

    def prepare(self) -> None:
        pass

    def writer(self) -> StreamWriter:
        return _MemoryWriter(self._logs, self._lock, self._readers)

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None] = lambda partitions: None,
        *,
        shared: bool = False,
    ) -> StreamReader:
        return self._readers.reader(topics, name, start, shared=shared)

    def last_mark(self, topic: Topic) -> str | None:
        return self._logs[topic].mark

    def close(self) -> None:
        pass


class _MemoryWriter:
    def __init__(self, logs: Mapping[Topic, _MemoryLog], lock: threading.Lock, readers: LocalReaders) -> None:
        self._logs = logs
        self._lock = lock
        self._readers = readers

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        log = self._logs[topic]
        with self._lock:
            log.values.extend(value for _, value in records)
            if records and mark is not None:
                log.mark = mark
        self._readers.appended()

    def check(self) -> str:
        return ""

    def close(self) -> None:
        pass

"""The seams: what the application needs from the outside world, as protocols.

A real implementation and its twin in memory pass the same contract tests. The clock's protocol is `prefetcher.clock.Clock`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from prefetcher.clock import Clock
from prefetcher.core.types import WeightsKey

__all__ = [
    "Acted",
    "Chunk",
    "Clock",
    "Engine",
    "Partition",
    "Positions",
    "StateStore",
    "StoredObject",
    "StreamReader",
    "StreamWriter",
    "Streams",
    "Topic",
    "WeightsCatalog",
    "WeightsEntry",
    "WeightsStore",
]


@dataclass(frozen=True, slots=True)
class Acted:
    """The answer to an act: done or begun, or refused, and why."""

    ok: bool
    reason: str


class Topic(StrEnum):
    """The streams of the system, by what they carry (`prefetcher.wire`)."""

    REQUESTS = "requests"
    HINTS = "hints"
    OUTCOMES = "outcomes"
    DEAD_LETTER = "dead-letter"


class Partition(NamedTuple):
    """One ordered part of a topic: records of one key are always in the same one, until partitions are added."""

    topic: Topic
    number: int


#: Where to read on, by partition: the offset of the next record. A partition that is not named is read from the oldest record kept.
Positions = Mapping[Partition, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one partition in order. `offsets` rise and may have holes; `next_offset` is where to read on.

    `lost` counts records that were asked for and are no longer kept: the stream went on from the oldest one.
    """

    partition: Partition
    offsets: Sequence[int]
    values: Sequence[bytes]
    next_offset: int
    lost: int = 0


class StreamWriter(Protocol):
    """Appends records, durably. Safe for threads; appends of many threads share a trip to the broker or the disk."""

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        """Appends (key, value) pairs and returns once all of them are acknowledged by every replica in sync, or synced to the disk.

        Records of one key keep their order. `mark`, if given, is kept with the last record, in the same write (`Streams.last_mark`).

        Raises:
            UnavailableError: no acknowledgement within `timeout_s`; the records may still arrive later, so whoever sends again must
                tell them by an id.
            NoRoomError: the disk is full, or too much is waiting to be sent; nothing was appended.
        """
        ...

    def check(self) -> str:
        """'' while records can be appended, else why not: from the first append that failed on, until there is room again."""
        ...

    def close(self) -> None: ...


class StreamReader(Protocol):
    """Reads topics from where its owner says. For one thread."""

    def poll(self, limit: int, timeout_s: float) -> Sequence[Chunk]:
        """Up to `limit` records of any partitions, waiting up to `timeout_s` for the first; empty when there are none.

        What is there is returned at once. Partitions may be taken and given meanwhile: `revoked` and `start` are called in here. A chunk
        without records says where the reader goes on when it had to leave its place.

        Raises:
            UnavailableError: the stream is away; poll again later, nothing is skipped.
        """
        ...

    def pause(self, topics: Sequence[Topic]) -> None:
        """Back-pressure: `poll` gives nothing of these topics, and keeps the membership alive, until `resume`."""
        ...

    def resume(self, topics: Sequence[Topic]) -> None: ...

    def done(self, positions: Positions) -> None:
        """Everything before these positions is dealt with and need not be kept for this reader. For lag monitors and for dropping old
        records; the truth about positions is with the owner."""
        ...

    def lag(self) -> Mapping[Partition, int]:
        """Records (embedded: bytes) after what was polled last, by partition that this reader has and knows the end of. Cheap: the last
        answer of the broker counts."""
        ...

    def partitions(self) -> frozenset[Partition]:
        """All partitions that the topics have, of this reader or not; of a topic that is gone, none.

        Raises:
            UnavailableError: the stream is away.
        """
        ...

    def close(self) -> None: ...


class Streams(Protocol):
    """One connection to the streams: a folder of segmented logs, or a broker."""

    def prepare(self) -> None:
        """Sees that every topic is there, and makes those that are not.

        Raises:
            UnavailableError: nobody answers.
            SettingsError: credentials were refused, or a topic is missing and may not be made; says which and how.
        """
        ...

    def writer(self) -> StreamWriter: ...

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None] = lambda partitions: None,
        *,
        shared: bool = False,
    ) -> StreamReader:
        """A reader of `topics` that is called `name` (the consumer group, with the installation's prefix).

        `shared`: the partitions are split among all readers of that name, and may come and go. Otherwise it reads all of them, also those
        that are added later. `start` is called in `poll` with partitions that are new to this reader and says where to begin, by the thread
        that polls; what it raises, `poll` raises, and it is asked again. `revoked` is called with those that another member takes over,
        before it does, or after the broker has given this member up; by another thread while `poll` waits, so it must not use the reader.
        `close` calls neither.
        """
        ...

    def last_mark(self, topic: Topic) -> str | None:
        """The mark that was appended last, if any."""
        ...

    def close(self) -> None: ...


class StateStore(Protocol):
    """A small shared store of bytes by key: what controllers, agents and endpoints know of each other. Keys: `controller.records`.

    Every method raises UnavailableError when the store does not answer.
    """

    def read(self, key: str) -> bytes | None: ...

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]: ...

    def write(self, items: Mapping[str, bytes], expire_s: float | None = None) -> None:
        """Writes all items at once, or none. `expire_s` counts in the store's own time."""
        ...

    def claim(self, items: Mapping[str, bytes], expire_s: float) -> list[bytes | None]:
        """Writes each item whose key is free, for `expire_s` of the store's own time, and says for each what is there instead; None: it was
        free. Of several who claim a key at once, one finds it free."""
        ...

    def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
        """Writes `after` where `before` is still there (None: nothing is); else nothing, and False."""
        ...

    def write_fenced(self, fence_key: str, fence: int, items: Mapping[str, bytes]) -> bool:
        """Writes all items and the fence at once, unless `fence_key` already holds a higher fence; then nothing, and False."""
        ...

    def next_number(self, key: str) -> int:
        """1, 2, 3 …: each number is given once."""
        ...

    def append(self, key: str, items: Sequence[bytes], keep: int) -> None:
        """Appends to a list of which the last `keep` items stay."""
        ...

    def tail(self, key: str, count: int) -> list[bytes]:
        """The last `count` items of a list, oldest first."""
        ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def take_lease(self, key: str, holder: str, ttl_s: float) -> bool:
        """Whether `holder` has the lease from now on for `ttl_s` seconds: it was free, or its own already."""
        ...

    def drop_lease(self, key: str, holder: str) -> None:
        """Gives the lease back if it is `holder`'s."""
        ...

    def see(self, key: str, member: str, at_s: float) -> None:
        """Notes that `member` was there at `at_s`."""
        ...

    def members(self, key: str, since_s: float) -> list[str]:
        """Members that were there at `since_s` or later, sorted."""
        ...

    def last_seen(self, key: str) -> dict[str, float]:
        """Every member, and when it was there last."""
        ...

    def unsee(self, key: str, members: Sequence[str]) -> None:
        """Forgets that these members were there."""
        ...

    def publish(self, channel: str, message: bytes) -> int:
        """Tells whoever listens at this moment, and how many there are."""
        ...

    def listen(self, channels: Sequence[str], hear: Callable[[str, bytes], None], stop: threading.Event) -> None:
        """Calls `hear(channel, message)` for every message until `stop`; returns at once where the store does not answer or goes away,
        after which whoever listens looks for himself what he missed, and listens again.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightsEntry:
    """One model's weights on this node's disk: its files in load order and their bytes."""

    key: WeightsKey
    size_bytes: int
    files: tuple[Path, ...] = field(default=())


class StoredObject(NamedTuple):
    """A file of a store: its path below the store's place, and a tag that differs once it was replaced ('' where the store has none)."""

    path: str
    bytes: int
    tag: str
    modified_s: float


class WeightsStore(Protocol):
    """A place that many nodes fetch models from. Safe for threads.

    Every method raises `UnavailableError` or `RateLimitedError` (with the seconds that the store asked for, 0 where it said nothing) where
    the store does not answer now, and `UsageError` where it refuses this program.
    """

    @property
    def place(self) -> str:
        """Where it is, as it may be shown."""
        ...

    def objects(self) -> Sequence[StoredObject]:
        """All files."""
        ...

    def read(self, path: str, most_bytes: int) -> bytes:
        """A small file. Raises `IntegrityError` where it is not there, `ArtifactError` where it has more bytes."""
        ...

    def read_range(self, found: StoredObject, start: int, into: memoryview, go_on: Callable[[], bool]) -> int:
        """Fills `into` from the file's bytes at `start`; how many came: fewer at its end, and where `go_on` says no.

        Raises:
            ChangedError: the file is no longer what `found` says.
        """
        ...

    def write(self, path: str, parts: Iterator[bytes]) -> None:
        """Writes a file whole, or not at all."""
        ...

    def close(self) -> None: ...


class WeightsCatalog(Protocol):
    """Which weights exist below the host tier."""

    def entries(self) -> Mapping[str, WeightsEntry]:
        """By model name."""
        ...


class Engine(Protocol):
    """A serving engine that can be told to take weights to the device or give the memory back."""

    def wake(self, key: WeightsKey) -> None: ...

    def sleep(self, key: WeightsKey) -> None: ...

    def is_ready(self, key: WeightsKey) -> bool: ...

"""The seams: what the application needs from the outside world, as protocols.

A real implementation and its twin in memory pass the same contract tests. The clock's protocol is `prefetcher.clock.Clock`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from prefetcher.clock import Clock
from prefetcher.core.types import RequestSeen, WeightsKey

__all__ = [
    "Acted",
    "BadRecord",
    "Clock",
    "Engine",
    "RequestBatch",
    "RequestStream",
    "StateStore",
    "WeightsCatalog",
    "WeightsEntry",
]


@dataclass(frozen=True, slots=True)
class Acted:
    """The answer to an act: done or begun, or refused, and why."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read: where (`position`) and why. It was skipped."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Records in stream order, and the position to read on from; equal to the position that was read from when there is nothing new."""

    requests: tuple[RequestSeen, ...]
    next_position: int
    bad: tuple[BadRecord, ...] = ()


class RequestStream(Protocol):
    """An ordered, durable log of requests. Positions are integers that grow; 0 is before the first record ever."""

    def append(self, requests: Sequence[RequestSeen], mark: str | None = None) -> int:
        """Appends in order and returns the position after them, once they are durable. `mark` is kept with the last of them.

        Raises:
            NoRoomError: the disk is full; nothing was appended.
        """
        ...

    def read(self, position: int, limit: int) -> RequestBatch:
        """Up to `limit` records from `position` on. A position that was already dropped reads on from the oldest record kept."""
        ...

    def end(self) -> int:
        """The position after the last durable record."""
        ...

    def last_mark(self) -> str | None:
        """The mark that was appended last, if any."""
        ...

    def drop_before(self, position: int) -> None:
        """Allows records before `position` to be removed; how many are kept is the stream's own affair."""
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

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightsEntry:
    """One model's weights on this node's disk: its files in load order and their bytes."""

    key: WeightsKey
    size_bytes: int
    files: tuple[Path, ...] = field(default=())


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

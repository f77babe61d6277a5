"""Streams in memory whose rows a test can look at, and that can be full."""

from __future__ import annotations

from collections.abc import Sequence

from prefetcher.core.types import RequestSeen
from prefetcher.errors import NoRoomError
from prefetcher.ports import Streams, StreamWriter, Topic
from prefetcher.wire import read_request
from prefetcher_connectors.memory import MemoryStreams

__all__ = ["FullStreams", "rows_of"]


def rows_of(streams: Streams) -> list[RequestSeen]:
    """Every request row that was appended."""
    reader = streams.reader([Topic.REQUESTS], "test", lambda partitions: {})
    rows: list[RequestSeen] = []
    while chunks := reader.poll(1000, 0.0):
        rows += [read_request(value) for chunk in chunks for value in chunk.values]
    reader.close()
    return rows


class FullStreams(MemoryStreams):
    """Streams on a disk that is full until `full` is set to False."""

    full = True

    def writer(self) -> StreamWriter:
        return _Writer(self, super().writer())


class _Writer:
    def __init__(self, streams: FullStreams, writer: StreamWriter) -> None:
        self._streams = streams
        self._writer = writer

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        if self._streams.full:
            raise NoRoomError("the disk is full", retry_after_s=5.0)
        self._writer.append(topic, records, mark, timeout_s)

    def check(self) -> str:
        return "the disk is full" if self._streams.full else ""

    def close(self) -> None:
        self._writer.close()

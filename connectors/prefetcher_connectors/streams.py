"""Streams without a broker: a folder with one segmented log for each topic, each with one partition, for the readers of one process.

An append is durable when it returns (`segments`). Covers no retention by time: segments go when every reader of the topic is done with
them, but the last few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from prefetcher.errors import UnavailableError
from prefetcher.ports import Partition, Positions, StreamReader, StreamWriter, Topic
from prefetcher_connectors.local_readers import LocalReaders
from prefetcher_connectors.segments import SegmentLog

__all__ = ["FileStreams"]


class FileStreams:
    """The streams in `folder`. One process has them at a time; nothing is opened before `prepare`, a writer or a reader."""

    def __init__(self, folder: Path, segment_bytes: int = 64_000_000, keep_segments: int = 16) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._keep = keep_segments
        self._logs: dict[Topic, SegmentLog] = {}
        self._readers = LocalReaders(self._logs)
        self._closed = False

    def prepare(self) -> None:
        """Opens the logs.

        Raises:
            UnavailableError: another process has them.
            UsageError: the folder can't be made or written to.
        """
        if self._closed:
            raise UnavailableError(f"the streams in {self._folder} are closed")
        if self._logs:
            return
        logs: dict[Topic, SegmentLog] = {}
        try:
            for topic in Topic:
                # Only requests were ever kept with marks in their JSON.
                logs[topic] = SegmentLog(self._folder / topic.value, self._segment_bytes, self._keep, old_marks=topic is Topic.REQUESTS)
        except BaseException:
            for log in logs.values():
                log.close()
            raise
        self._logs.update(logs)
        self._readers = LocalReaders(self._logs)

    def writer(self) -> StreamWriter:
        self.prepare()
        return _FileWriter(self._logs, self._readers)

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None] = lambda partitions: None,
        *,
        shared: bool = False,
    ) -> StreamReader:
        """A reader; `revoked` is never called: what a shared reader has, it has until it closes."""
        self.prepare()
        return self._readers.reader(topics, name, start, shared=shared)

    def last_mark(self, topic: Topic) -> str | None:
        self.prepare()
        return self._logs[topic].last_mark()

    def close(self) -> None:
        self._closed = True
        self._readers.close()
        for log in self._logs.values():
            log.close()


class _FileWriter:
    def __init__(self, logs: dict[Topic, SegmentLog], readers: LocalReaders) -> None:
        self._logs = logs
        self._readers = readers

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        """Keys are not kept: all records of a topic are in order. A disk can't be given up on: `timeout_s` is not used."""
        if not records:
            return
        log = self._logs[topic]
        before = log.segment()
        log.append([value for _, value in records], mark)
        self._readers.appended()
        if log.segment() != before:
            self._readers.rolled(topic)

    def check(self) -> str:
        return next((problem for log in self._logs.values() if (problem := log.check())), "")

    def close(self) -> None:
        """The logs stay open for readers and other writers."""

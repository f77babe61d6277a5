"""Processes that benchmarks of the ingest start, stop and kill: a member of the ingest group, and a loop that only polls and decodes.

Each takes its options as JSON, says in a line of JSON how many partitions it has whenever that changes, begins to read at the line `go`,
and ends with its figures at the end of its input. The clock is the machine's: this measures the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.ingest import Ingest, IngestOptions
from prefetcher.ingest.tables import connect
from prefetcher.ports import Chunk, Partition, Positions, StreamReader, Streams, StreamWriter, Topic
from prefetcher.process import settle_memory
from prefetcher.telemetry.logs import configure
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import RequestMessage
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams

__all__ = ["Member"]

#: Between figures of a member that goes on.
_TELL_S = 0.5


class Member:
    """A started process: `kind` is `ingest` or `bare`."""

    def __init__(self, kind: str, log: Path, **options: object) -> None:
        command = [sys.executable, "-m", "prefetcher.bench.ingest_member", kind, json.dumps(options)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.pid = self._process.pid
        self.partitions = 0
        self.figures: dict[str, float] = {}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            self.partitions = int(said.get("partitions", self.partitions))
            self.figures = said.get("figures", self.figures)

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def rss_bytes(self) -> int:
        """Resident memory now; 0 once it has ended."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """As a power cut of the process: nothing is closed."""
        self._process.kill()
        self._close()

    def end(self) -> dict[str, float]:
        """Ends it in order and returns its figures."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._close()
        return self.figures

    def _close(self) -> None:
        with self._process:
            self._process.wait()
        self._reading.join()


def _tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


class _HeldStreams:
    """The streams of a member that has its partitions and reads nothing before `go`. `again`: it begins at the oldest records always."""

    def __init__(self, streams: KafkaStreams, go: threading.Event, *, again: bool) -> None:
        self._streams = streams
        self._go = go
        self._again = again
        self._had: set[Partition] = set()

    def prepare(self) -> None:
        self._streams.prepare()

    def writer(self) -> StreamWriter:
        return self._streams.writer()

    def reader(
        self,
        topics: Sequence[Topic],
        name: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None] = lambda partitions: None,
        *,
        shared: bool = False,
    ) -> StreamReader:
        def begin(partitions: Sequence[Partition]) -> Positions:
            positions = start(partitions)
            self._had.update(partitions)
            _tell(partitions=len(self._had))
            return {} if self._again else positions

        def give_up(partitions: Sequence[Partition]) -> None:
            revoked(partitions)
            self._had.difference_update(partitions)
            _tell(partitions=len(self._had))

        return _HeldReader(self._streams.reader(topics, name, begin, give_up, shared=shared), topics, self._go)

    def last_mark(self, topic: Topic) -> str | None:
        return self._streams.last_mark(topic)

    def close(self) -> None:
        self._streams.close()


class _HeldReader:
    def __init__(self, reader: StreamReader, topics: Sequence[Topic], go: threading.Event) -> None:
        self._reader, self._topics, self._go = reader, topics, go
        self._held = not go.is_set()
        if self._held:
            reader.pause(topics)

    def poll(self, limit: int, timeout_s: float) -> Sequence[Chunk]:
        if self._held and self._go.is_set():
            self._held = False
            self._reader.resume(self._topics)
        return self._reader.poll(limit, min(timeout_s, 0.05) if self._held else timeout_s)

    def pause(self, topics: Sequence[Topic]) -> None:
        self._reader.pause(topics)

    def resume(self, topics: Sequence[Topic]) -> None:
        if not self._held:
            self._reader.resume(topics)

    def done(self, positions: Positions) -> None:
        self._reader.done(positions)

    def partitions(self) -> frozenset[Partition]:
        return self._reader.partitions()

    def lag(self) -> Mapping[Partition, int]:
        return self._reader.lag()

    def close(self) -> None:
        self._reader.close()


def _listen() -> tuple[threading.Event, threading.Event]:
    """Events that are set by the line `go` and by the end of the input."""
    go, stop = threading.Event(), threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            go.set()
        stop.set()

    threading.Thread(target=read, daemon=True).start()
    return go, stop


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def _ingest(options: dict[str, Any]) -> None:
    configure("info", "json")
    go, stop = _listen()
    if not options.pop("hold", False):
        go.set()
    kafka = KafkaOptions(options.pop("brokers"), options.pop("prefix"), session_s=options.pop("session_s", 10.0))
    streams: Streams = _HeldStreams(KafkaStreams(kafka), go, again=options.pop("again", False))
    client = connect(options.pop("redis"))
    history = options.pop("history", None)
    metrics = Metrics()
    ingest = Ingest(streams, client, SystemClock(), metrics, IngestOptions(history=None if history is None else Path(history), **options))
    settle_memory()
    clock, told_s, before_s = SystemClock(), 0.0, _cpu_s()
    while not stop.is_set():
        ingest.step()
        if clock.steady_s() >= told_s + _TELL_S:
            told_s = clock.steady_s()
            _tell(figures=_figures(metrics) | {"cpu_s": _cpu_s() - before_s})
    ingest.close()
    _tell(figures=_figures(metrics) | {"cpu_s": _cpu_s() - before_s})


def _figures(metrics: Metrics) -> dict[str, float]:
    """Records by what became of them, and reloads."""
    totals = [s for m in metrics.ingest_records.collect() for s in m.samples if s.name.endswith("_total")]
    reloads = [s.value for m in metrics.ingest_reloads.collect() for s in m.samples if s.name.endswith("_total")]
    return {s.labels["result"]: s.value for s in totals} | {"reloads": sum(reloads)}


def _bare(options: dict[str, Any]) -> None:
    """What any reader of the topic does at the least: kafka-python's poll, and one decoder call a record."""
    from kafka import KafkaConsumer, TopicPartition

    go, stop = _listen()
    consumer = KafkaConsumer(bootstrap_servers=options["brokers"].split(","), enable_auto_commit=False, metrics_enabled=False)
    topic = f"{options['prefix']}.{Topic.REQUESTS}"
    numbers = sorted(consumer.partitions_for_topic(topic) or ())
    if not numbers:
        raise UnavailableError(f"no topic {topic}")
    consumer.assign([TopicPartition(topic, number) for number in numbers])
    consumer.seek_to_beginning()
    _tell(partitions=len(numbers))
    decode = msgspec.json.Decoder(RequestMessage).decode
    clock = SystemClock()
    go.wait()
    before_s, start_s, left, rows = _cpu_s(), clock.steady_s(), int(options["records"]), 0
    while left > 0 and not stop.is_set():
        for records in consumer.poll(timeout_ms=500, max_records=int(options["batch"])).values():
            for record in records:
                rows += decode(record.value).count
            left -= len(records)
    _tell(figures={"cpu_s": _cpu_s() - before_s, "seconds": clock.steady_s() - start_s, "rows": rows})
    stop.wait()
    consumer.close(autocommit=False)


if __name__ == "__main__":
    {"ingest": _ingest, "bare": _bare}[sys.argv[1]](json.loads(sys.argv[2]))

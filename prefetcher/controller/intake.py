"""What came from the streams: request rows in event time, hints, and what became of orders, each with the positions that they lead to.

What can't be decoded is passed over and counted here; keeping it for people is the ingest role's. Covers no learning: positions go into the
same snapshot as what was learned from the records before them, and come back from there at a start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prefetcher.clock import Clock
from prefetcher.controller.merge import RowMerge
from prefetcher.core.types import RequestSeen
from prefetcher.ports import Chunk, Partition, Positions, Streams, Topic
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import AHEAD_S, HintMessage, OutcomeMessage, RequestMapping, decode_hint, decode_outcome

__all__ = ["Came", "Intake"]

_TOPICS = (Topic.REQUESTS, Topic.HINTS, Topic.OUTCOMES)
#: Unreadable records that are named each minute of reading; the others are counted.
_NAMED = 20


@dataclass(slots=True)
class Came:
    """What one look at the streams brought. Once all of it is taken in, `positions` are where to read on; `more` waits already."""

    rows: list[RequestSeen] = field(default_factory=list)
    hints: list[HintMessage] = field(default_factory=list)
    outcomes: list[OutcomeMessage] = field(default_factory=list)
    positions: dict[Partition, int] = field(default_factory=dict)
    more: bool = False


class Intake:
    """Reads all partitions from `positions` on. For one thread, but for `lag`."""

    def __init__(self, streams: Streams, positions: Positions, clock: Clock, metrics: Metrics, read_request: RequestMapping) -> None:
        self._from = dict(positions)
        self._clock = clock
        self._metrics = metrics
        self._read_request = read_request
        self._merge = RowMerge()
        self._named = 0
        #: What is not learned yet: records, or bytes where streams count in bytes.
        self.lag = 0
        self._reader = streams.reader(_TOPICS, "controller", self._start)

    def _start(self, partitions: Sequence[Partition]) -> Positions:
        for partition in partitions:
            self._merge.drop(partition)
        return {p: self._from[p] for p in partitions if p in self._from}

    def poll(self, limit: int, timeout_s: float) -> Came:
        """Up to about `limit` rows, and all hints and outcomes that came with them; waits up to `timeout_s` real seconds for the first.

        Raises:
            UnavailableError: the streams are away; nothing is skipped.
        """
        came = Came()
        chunks = self._reader.poll(limit, 0.0 if self._merge.rows >= limit else timeout_s)
        polled = 0
        for chunk in chunks:
            polled += len(chunk.values)
            if chunk.lost:
                log().error("records_lost", topic=chunk.partition.topic.value, partition=chunk.partition.number, count=chunk.lost)
            if chunk.partition.topic is Topic.REQUESTS:
                self._take_rows(chunk)
            else:
                self._take_others(chunk, came)
        came.more = polled >= limit
        if self._merge.rows or not came.hints:
            # Hints alone are handed on at once: asking every partition for its end costs more than reading them.
            self._take_out(came, limit)
        self._from |= came.positions
        return came

    def _take_out(self, came: Came, limit: int) -> None:
        """Rows that no partition that is behind can still come before."""
        lag = self._reader.lag()
        waiting = sum(n for partition, n in lag.items() if partition.topic is Topic.REQUESTS)
        behind = {partition for partition, n in lag.items() if n > 0 and partition.topic is Topic.REQUESTS}
        came.rows, positions = self._merge.take(limit, behind)
        came.positions |= positions
        # What this look brought is not learned before the next one.
        self.lag = waiting + self._merge.rows + len(came.rows)
        came.more = came.more or len(came.rows) >= limit

    def _take_rows(self, chunk: Chunk) -> None:
        rows: list[tuple[int, RequestSeen]] = []
        # A chunk without records says that the reader had to move.
        after = [*chunk.offsets[1:], chunk.next_offset][: len(chunk.values)]
        latest_s = self._clock.now_s() + AHEAD_S * self._clock.speed
        for offset, value in zip(after, chunk.values, strict=True):
            try:
                row = self._read_request(value)
                if row.ts > latest_s:
                    raise ValueError(f"future: ts is {row.ts}, which is to come")
                rows.append((offset, row))
            except ValueError as exc:
                self._skipped(chunk, offset, str(exc))
        self._merge.add(chunk.partition, rows, chunk.next_offset)

    def _take_others(self, chunk: Chunk, came: Came) -> None:
        latest_s = self._clock.now_s() + AHEAD_S * self._clock.speed
        for offset, value in zip(chunk.offsets, chunk.values, strict=True):
            try:
                if chunk.partition.topic is Topic.HINTS:
                    hint = decode_hint(value)
                    if hint.ts > latest_s:
                        raise ValueError(f"future: ts is {hint.ts}, which is to come")
                    came.hints.append(hint)
                else:
                    came.outcomes.append(decode_outcome(value))
            except ValueError as exc:
                self._skipped(chunk, offset, str(exc))
        came.positions[chunk.partition] = chunk.next_offset

    def _skipped(self, chunk: Chunk, offset: int, reason: str) -> None:
        topic, number = chunk.partition
        self._metrics.skipped.labels(what=f"record of {topic.value}", reason=reason.split(":")[0]).inc()
        self._named += 1
        if self._named <= _NAMED:
            log().warning("record_skipped", topic=topic.value, partition=number, before=offset, reason=reason)

    def done(self, positions: Positions) -> None:
        """What lies before these positions is in a snapshot."""
        self._reader.done(positions)

    def close(self) -> None:
        self._reader.close()

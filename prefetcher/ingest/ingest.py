"""The ingest loop: requests topic -> tables and dead letters, one batch at a time, each counted once whatever dies in between.

The order in a batch: bad records are acknowledged in the dead-letter topic; then the tables and the offset change in one atomic step; then
the broker is told. A kill before the second repeats dead letters, which are told apart by topic, partition and offset; a kill after it
repeats nothing, since where to read on is taken from the tables. A step that finds another offset stored than its batch began at changes
nothing: the partition is loaded again. Covers no rules of counting (`counting`), no keys (`tables`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import redis

from prefetcher.clock import Clock
from prefetcher.core.traffic_state import LATE_S
from prefetcher.core.types import RequestSeen
from prefetcher.errors import NoRoomError, UnavailableError
from prefetcher.ingest.counting import PartitionCounts
from prefetcher.ingest.decoding import BadRow, Decoded, RowDecoder
from prefetcher.ingest.history import write_hour
from prefetcher.ingest.tables import Commit, Tables, why
from prefetcher.ports import Chunk, Partition, Positions, StreamReader, Streams, StreamWriter, Topic
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import AHEAD_S, encode

__all__ = ["Ingest", "IngestOptions"]

_HOUR_S = 3600
#: Between tries, doubled each time: a server that was started again answers within a second, and one that is back is noticed within 5 s.
_BACK_OFF_S = 0.1
_MOST_BACK_OFF_S = 5.0
#: One append of dead letters: 5.5 kB each at most, so 1.4 MB.
_LETTERS_AT_ONCE = 256
_LETTER_TIMEOUT_S = 10.0
#: Between tries to write the history, and between lines about bad records of one reason.
_HISTORY_RETRY_S = 60.0
_SAY_AGAIN_S = 60.0
_LAG_S = 5.0
#: Between looks whether the tables are still there: what a server forgot is counted again by itself.
_LOOK_S = 2.0
#: A partition that the topic has not had for so long is gone: other members hear of one that was added within a few seconds.
_GONE_S = 20.0
#: Between times that freed memory is given back, a millisecond each.
_TRIM_S = 5.0
#: None with another C library than glibc.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """`late_s`: how much older than the newest row of its partition a row may be. `keep_s`: minutes stay in Redis so long, and up to an
    hour more; then they go to the parquet folder `history`, or are deleted without one. `topic` names the requests topic in dead letters.
    """

    late_s: float = LATE_S
    ahead_s: float = AHEAD_S
    most_bytes: int = 1_000_000
    batch: int = 10_000
    keep_s: float = 3.0 * _HOUR_S
    most_models: int = 100_000
    most_users: int = 10_000
    history: Path | None = None
    topic: str = Topic.REQUESTS.value
    #: How long one look waits for records.
    idle_s: float = 0.5


class _DroppedError(Exception):
    """The batch in hand is nobody's any more: the partition was taken away, or the process stops."""


@dataclass(frozen=True, slots=True)
class _InHand:
    """Records of one partition from offset `begin` on, counted and being stored."""

    chunk: Chunk
    decoded: Decoded
    begin: int
    newest_s: float
    results: dict[str, int]
    commit: Commit
    storing: list[Future[str]]


class Ingest:
    """One member of the ingest group; `mapping` reads a foreign topic's records (`decoding.RowDecoder`). `run` is for one thread."""

    def __init__(
        self,
        streams: Streams,
        client: redis.Redis,
        clock: Clock,
        metrics: Metrics,
        options: IngestOptions | None = None,
        mapping: Callable[[bytes], RequestSeen] | None = None,
    ) -> None:
        self._streams = streams
        self._clock = clock
        self._metrics = metrics
        self._options = options = options or IngestOptions()
        self._decode = RowDecoder(options.most_bytes, options.ahead_s, mapping)
        self._tables = Tables(client, options.late_s, options.most_models, options.most_users)
        self._counts: dict[Partition, PartitionCounts] = {}
        #: Up to where each partition was polled since it was taken.
        self._polled: dict[Partition, int] = {}
        self._reader: StreamReader | None = None
        self._writer: StreamWriter | None = None
        self._storing = ThreadPoolExecutor(1, "ingest-store")
        self._in_hand: _InHand | None = None
        self._polling = False
        #: Give all partitions up after this batch, and take them again at the offsets that are stored.
        self._again = False
        self._stop = threading.Event()
        self._trouble = ""
        self._history_again_s = self._lag_again_s = self._trim_again_s = self._look_again_s = 0.0
        #: Since when tables are there of a partition that the topic does not have.
        self._gone_since: dict[int, float] = {}
        self._said: dict[str, float] = {}

    def run(self, stop: threading.Event) -> None:
        """Counts what comes, until `stop`."""
        self._stop = stop
        try:
            while not stop.is_set():
                self.step()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves the group, for good. What was polled and not stored is read again by whoever comes next."""
        self._leave()
        self._storing.shutdown()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def step(self) -> bool:
        """Takes in one batch; whether there may be more. Waits while streams or Redis are away, or full."""
        try:
            if self._reader is None:
                self._warn_of_eviction()
                self._reader = self._streams.reader([Topic.REQUESTS], "ingest", self._start, self._revoked, shared=True)
            chunks = self._poll(self._options.batch, self._options.idle_s)
        except UnavailableError as exc:
            self._tell_trouble("streams_away", str(exc))
            self._clock.wait(self._stop, _BACK_OFF_S * 10)
            return False
        if self._trouble == "streams_away":
            self._tell_well()
        began_s = self._clock.steady_s()
        self._take_all(chunks)
        if chunks:
            self._metrics.ingest_batch_time.observe(self._clock.steady_s() - began_s)
        self._give_memory_back()
        self._tell_lag()
        self._compact()
        self._look_after_tables()
        again = self._again
        if again:
            self._leave()
        return bool(chunks) or again

    def _give_memory_back(self) -> None:
        """Batches of records of all sizes leave holes in the heaps of all threads, which the allocator keeps by itself."""
        if _malloc_trim is not None and self._clock.steady_s() >= self._trim_again_s:
            self._trim_again_s = self._clock.steady_s() + _TRIM_S
            _malloc_trim(0)

    def _tell_lag(self) -> None:
        """The broker is asked, so not each time."""
        assert self._reader is not None
        if self._clock.steady_s() >= self._lag_again_s:
            self._lag_again_s = self._clock.steady_s() + _LAG_S
            with contextlib.suppress(UnavailableError):  # the next poll says so
                self._metrics.ingest_lag.set(sum(self._reader.lag().values()))

    def _look_after_tables(self) -> None:
        """What the server forgot is counted again though no record comes, and tables of partitions that the topic has no more go."""
        now_s = self._clock.steady_s()
        if now_s < self._look_again_s:
            return
        self._look_again_s = now_s + _LOOK_S
        try:
            self._look_for_lost()
            self._remove_gone(now_s)
        except redis.RedisError as exc:
            log().debug("tables_not_looked_at", reason=why(exc))  # the next question waits for it
        except UnavailableError as exc:
            log().debug("partitions_not_known", reason=str(exc))  # the next poll says so

    def _look_for_lost(self) -> None:
        # What is being stored finds out by itself.
        storing = None if self._in_hand is None else self._in_hand.chunk.partition
        counted = {p.number: counts for p, counts in self._counts.items() if p != storing and counts.offset is not None}
        stored = self._tables.stored(list(counted))
        lost = sorted(number for number, held in stored.items() if held == "/")
        if lost:
            log().warning("tables_lost", partitions=lost, then="counting the topic again from its oldest record")
            self._metrics.ingest_reloads.labels(reason="state_lost").inc(len(lost))
            self._read_again()

    def _remove_gone(self, now_s: float) -> None:
        assert self._reader is not None
        there = {partition.number for partition in self._reader.partitions()}
        if not there:  # the whole topic is gone, and may come back as it was
            return
        gone = self._tables.counted() - there
        self._gone_since = {number: self._gone_since.get(number, now_s) for number in gone}
        for number, since_s in sorted(self._gone_since.items()):
            if now_s - since_s >= _GONE_S and self._tables.remove(number):
                log().warning("partition_gone", partition=number, then="its tables are deleted: the topic has fewer partitions now")
                self._metrics.ingest_reloads.labels(reason="partition_gone").inc()

    def _poll(self, limit: int, timeout_s: float) -> Sequence[Chunk]:
        assert self._reader is not None
        self._polling = True
        try:
            return self._reader.poll(limit, timeout_s)
        finally:
            self._polling = False

    # Partitions that come and go

    def _start(self, partitions: Sequence[Partition]) -> Positions:
        positions: dict[Partition, int] = {}
        for partition in partitions:
            try:
                counts = self._load(partition)
            except _DroppedError:
                return {}
            self._counts[partition] = counts
            self._polled.pop(partition, None)
            if counts.offset is not None:
                positions[partition] = counts.offset
            log().info("partition_taken", partition=partition.number, offset=counts.offset, rows=counts.rows)
        return positions

    def _revoked(self, partitions: Sequence[Partition]) -> None:
        self._await_stores()
        for partition in partitions:
            if self._counts.pop(partition, None) is not None:
                log().info("partition_given_up", partition=partition.number)

    def _load(self, partition: Partition) -> PartitionCounts:
        """What is stored; what is stored no longer whole is deleted, to be counted anew from the oldest record that is kept."""
        counts, wrong = self._ask(lambda: self._tables.load(partition.number))
        if not wrong:
            return counts
        return self._wipe(partition, counts, f"state_{wrong}")

    def _wipe(self, partition: Partition, counts: PartitionCounts, reason: str) -> PartitionCounts:
        held = self._tables.held(counts)
        log().warning("tables_rebuilt", partition=partition.number, reason=reason, then="counting the topic again from its oldest record")
        self._metrics.ingest_reloads.labels(reason=reason).inc()
        if self._ask(lambda: self._tables.wipe(partition.number, held)) != "ok":
            return self._load(partition)
        return self._ask(self._tables.new_counts)

    def _read_again(self) -> None:
        """Drops what else was polled: the next step reads from the offsets that are stored."""
        self._again = True
        self._counts.clear()

    def _await_stores(self) -> None:
        """Whoever loads a partition next finds what is on its way, or it never comes."""
        self._storing.submit(bool).result()

    def _leave(self) -> None:
        self._await_stores()
        self._in_hand = None
        reader, self._reader, self._again = self._reader, None, False
        self._counts.clear()
        if reader is not None:
            reader.close()

    # One batch: records of some partitions

    def _take_all(self, chunks: Sequence[Chunk]) -> None:
        """One chunk is judged and counted, and the next one polled, while the one before is stored: Redis and this process work at once."""
        for chunk in chunks:
            following: _InHand | None = None
            with contextlib.suppress(_DroppedError):
                following = self._take(chunk)
            loaded_again = self._finish_last()
            self._in_hand = following
            if loaded_again:  # and so without what follows
                self._finish_last()
        if not chunks:
            self._finish_last()

    def _finish_last(self) -> bool:
        """Whether the partition had to be loaded again."""
        in_hand, self._in_hand = self._in_hand, None
        with contextlib.suppress(_DroppedError):
            return self._finish(in_hand)
        return True

    def _take(self, chunk: Chunk) -> _InHand | None:
        """Judges and counts a chunk; the storing has begun when this returns."""
        counts = self._counts.get(chunk.partition)
        if counts is None:
            return None
        if chunk.lost:
            self._metrics.ingest_records.labels(result="lost").inc(chunk.lost)
            log().warning("records_lost", partition=chunk.partition.number, lost=chunk.lost, then="reading on from the oldest one kept")
        begin = counts.offset or 0
        before, self._polled[chunk.partition] = self._polled.get(chunk.partition, 0), chunk.next_offset
        if begin < before and chunk.next_offset > before:
            # What was polled before this is not in these counts: taking this in would pass it over.
            self._read_again()
            return None
        if chunk.next_offset <= begin:
            if self._began_anew(chunk, begin):
                self._await_stores()
                self._wipe(chunk.partition, counts, "stream_anew")
                self._read_again()
            else:
                self._metrics.ingest_records.labels(result="again").inc(len(chunk.offsets))
            return None
        decoded = self._decode(chunk.offsets, chunk.values, self._clock.now_s()).since(begin)
        if decoded.bad:
            self._bury(chunk.partition, decoded.bad)
        return self._begin(chunk, decoded)

    def _began_anew(self, chunk: Chunk, begin: int) -> bool:
        """Whether the stream was deleted and made again, or cut: it goes on before `begin` without a record, or ends before it."""
        assert self._reader is not None
        if not chunk.offsets:
            return chunk.next_offset < begin
        try:
            lag = self._reader.lag().get(chunk.partition)
        except UnavailableError:
            return False
        return lag is not None and chunk.next_offset + lag < begin

    def _bury(self, partition: Partition, rows: list[BadRow]) -> None:
        """Appends dead letters, and returns once they are acknowledged."""
        now_s = self._clock.now_s()
        for reason, count in Counter(row.reason for row in rows).items():
            self._metrics.bad_requests.labels(source="topic", reason=reason).inc(count)
            if now_s >= self._said.get(reason, 0.0):
                self._said[reason] = now_s + _SAY_AGAIN_S
                first = next(row for row in rows if row.reason == reason)
                log().warning("record_refused", reason=reason, partition=partition.number, offset=first.offset, detail=first.detail[:200])
        if self._writer is None:
            self._writer = self._ask(self._streams.writer, partition)
        writer, whose = self._writer, f"{self._options.topic}/{partition.number}"
        for start in range(0, len(rows), _LETTERS_AT_ONCE):
            letters = [(whose, encode(r.letter(partition, self._options.topic, now_s))) for r in rows[start : start + _LETTERS_AT_ONCE]]
            self._ask(partial(writer.append, Topic.DEAD_LETTER, letters, timeout_s=_LETTER_TIMEOUT_S), partition)

    def _begin(self, chunk: Chunk, decoded: Decoded) -> _InHand | None:
        """Counts what was not counted yet and begins to store it; None when the partition was taken away, or all of it was counted."""
        counts = self._counts.get(chunk.partition)
        begin = 0 if counts is None else counts.offset or 0
        if counts is None or chunk.next_offset <= begin:
            return None
        rows = decoded.since(begin)
        before = (counts.rows, counts.late, counts.unlisted)
        expected = self._tables.held(counts)
        changes = counts.take(rows, chunk.next_offset)
        results = {
            name: new - old
            for name, new, old in zip(("counted", "late", "unlisted"), (counts.rows, counts.late, counts.unlisted), before, strict=True)
        }
        commit = self._tables.prepare(chunk.partition.number, expected, counts, changes)
        storing = self._storing.submit(self._tables.store, commit)
        return _InHand(chunk, decoded, begin, counts.newest_s, results | {"bad": len(rows.bad)}, commit, [storing])

    def _finish(self, in_hand: _InHand | None) -> bool:
        """Returns when it is stored, by us or by others, or must be read again; whether the partition had to be loaded again."""
        loaded_again = False
        while in_hand is not None:
            answer = self._ask(partial(self._stored, in_hand), in_hand.chunk.partition)
            if answer == "ok":
                for result, count in in_hand.results.items():
                    self._metrics.ingest_records.labels(result=result).inc(count)
                counts = self._counts.get(in_hand.chunk.partition)
                if self._reader is not None and counts is not None:
                    counts.stored_s = max(counts.stored_s, in_hand.newest_s)
                    self._reader.done({in_hand.chunk.partition: in_hand.chunk.next_offset})
                break
            loaded_again = True
            partition = in_hand.chunk.partition
            found = self._load_after(answer, partition)
            if (found.offset or 0) < in_hand.begin:
                self._read_again()
                break
            self._counts[partition] = found
            in_hand = self._begin(in_hand.chunk, in_hand.decoded)
        return loaded_again

    def _stored(self, in_hand: _InHand) -> str:
        """The answer to the first try, which has begun, or to a further one."""
        return in_hand.storing.pop().result() if in_hand.storing else self._tables.store(in_hand.commit)

    def _load_after(self, answer: str, partition: Partition) -> PartitionCounts:
        """What is stored instead of what a commit expected."""
        if answer == "damaged":
            return self._wipe(partition, self._ask(lambda: self._tables.load(partition.number))[0], "state_damaged")
        reason = "state_lost" if answer == "/" else "changed_by_others"
        log().warning("tables_loaded_again", partition=partition.number, reason=reason, stored=answer)
        self._metrics.ingest_reloads.labels(reason=reason).inc()
        return self._load(partition)

    # Waiting

    def _ask(self, ask: Callable[[], _T], partition: Partition | None = None) -> _T:
        """The answer of Redis or of the dead-letter topic, however long it takes; nothing else is read meanwhile.

        Raises:
            _DroppedError: `stop`, or `partition` was taken away.
        """
        back_off_s = _BACK_OFF_S
        while True:
            try:
                answer = ask()
            except redis.RedisError as exc:
                self._tell_trouble(why(exc), str(exc))
                if self._trouble == "state_full":
                    self._compact(0.0)
            except UnavailableError as exc:
                self._tell_trouble("dead_letters_away", str(exc))
            except NoRoomError as exc:
                self._tell_trouble("dead_letters_full", str(exc))
            else:
                self._tell_well()
                return answer
            self._keep_waiting(back_off_s)
            back_off_s = min(2.0 * back_off_s, _MOST_BACK_OFF_S)
            if self._stop.is_set() or (partition is not None and partition not in self._counts):
                raise _DroppedError

    def _keep_waiting(self, wait_s: float) -> None:
        if self._reader is not None and not self._polling:
            # Whoever does not poll is taken for dead by the group.
            self._reader.pause([Topic.REQUESTS])
            try:
                self._poll(1, 0.0)
            except UnavailableError:
                log().debug("streams_away_too")
            self._reader.resume([Topic.REQUESTS])
        self._clock.wait(self._stop, wait_s)

    def _tell_trouble(self, reason: str, detail: str) -> None:
        self._metrics.ingest_waits.labels(reason=reason).inc()
        if reason != self._trouble:
            self._trouble = reason
            log().warning("ingest_waits", reason=reason, detail=detail, then="trying again; nothing is skipped")

    def _tell_well(self) -> None:
        if self._trouble:
            log().info("ingest_goes_on", after=self._trouble)
            self._trouble = ""

    def _warn_of_eviction(self) -> None:
        try:
            policy = self._tables.evicts()
        except redis.RedisError:
            return  # the next question waits for it
        if policy:
            log().warning(
                "state_may_be_evicted", policy=policy, then="set maxmemory-policy noeviction: what is thrown away is counted again"
            )

    # Closed hours

    def _compact(self, keep_s: float | None = None) -> None:
        """Moves hours that can't change any more, and are older than `keep_s`, from Redis to the history."""
        keep_s = max(self._options.keep_s if keep_s is None else keep_s, self._options.late_s)
        for partition, counts in self._counts.items():
            closed = sorted(hour for hour in counts.hours if (hour + 1) * _HOUR_S <= counts.stored_s - keep_s)
            if not closed or self._clock.steady_s() < self._history_again_s:
                continue
            try:
                for hour in closed:
                    self._compact_hour(partition.number, hour)
                    counts.hours.discard(hour)
            except OSError as exc:
                self._history_again_s = self._clock.steady_s() + _HISTORY_RETRY_S
                log().warning("history_not_written", reason=str(exc), then="minutes stay in Redis; free some room or fix the folder")
            except redis.RedisError as exc:
                self._history_again_s = self._clock.steady_s() + _MOST_BACK_OFF_S
                log().warning("history_delayed", reason=why(exc), detail=str(exc))
                return

    def _compact_hour(self, partition: int, hour: int) -> None:
        first = hour * 60
        counts = self._tables.read_minutes(partition, first, first + 59)
        if self._options.history is not None and counts:
            write_hour(self._options.history, partition, hour, counts)
            self._metrics.history_hours.inc()
        self._tables.delete_minutes(partition, list(counts))

"""The reader of `kafka`: one consumer that reads from where its owner says, alone or as a member of a group.

Positions that the broker keeps for the group are for lag monitors only: the owner's count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

import kafka.errors as errors
import structlog
from kafka import ConsumerRebalanceListener, KafkaConsumer, OffsetAndMetadata, TopicPartition
from kafka.structs import MemberState

from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, UnavailableError
from prefetcher.ports import Chunk, Partition, Positions, Topic

__all__ = ["KafkaReader"]

#: The longest that the consumer waits in one go: partitions that were given to this member meanwhile are begun after it.
_SLICE_S = 0.1
#: How much longer a poll may take while the group hands partitions over: the client forgets an assignment that comes while nobody polls,
#: and all begin again. Others hear of it by their next heartbeat, within a second.
_JOIN_S = 2.0
#: After so long without a record the broker is asked whether it is there, and given the other time to answer.
_SILENCE_S = 2.0
_ANSWER_S = 1.0
#: How often the list of partitions, which the client keeps fresh, is compared with those that are read.
_LOOK_S = 0.5
#: Closing: for leaving the group.
_CLOSE_S = 2.0

_clock = SystemClock()


class KafkaReader:
    """A `StreamReader` on `consumer`, which it closes. `names`: topics by their names at the broker."""

    def __init__(
        self,
        consumer: KafkaConsumer,
        names: Mapping[str, Topic],
        error: Callable[[errors.KafkaError, str], PrefetcherError],
        brokers: str,
        start: Callable[[Sequence[Partition]], Positions],
        revoked: Callable[[Sequence[Partition]], None],
        *,
        shared: bool,
    ) -> None:
        self._consumer = consumer
        self._names = dict(names)
        self._topics = {topic: name for name, topic in names.items()}
        self._error = error
        self._brokers = brokers
        self._start = start
        self._revoked = revoked
        self._shared = shared
        self._log = structlog.get_logger()
        #: Partitions that are assigned and still have no position: paused, at offset 0.
        self._new: set[TopicPartition] = set()
        self._paused: set[Topic] = set()
        #: After what was polled last; a partition that is read from its oldest record is not in it before its first one.
        self._next: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        #: Of which topic the records are that were read last: one that is deleted and made again keeps its name, and has another id.
        self._read_of: dict[TopicPartition, UUID] = {}
        self._missing: list[str] = []
        self._heard_s = self._looked_s = _clock.steady_s() - _SILENCE_S
        self._closed = False
        if shared:
            consumer.subscribe(list(self._names), listener=_Listener(self))

    def _partition(self, at: TopicPartition) -> Partition:
        return Partition(self._names[at.topic], at.partition)

    def _at(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self._topics[partition.topic], partition.number)

    def poll(self, limit: int, timeout_s: float) -> Sequence[Chunk]:
        until_s = _clock.steady_s() + timeout_s
        wait_s = timeout_s
        while True:
            try:
                self._look()
                if self._new:
                    self._begin()
                anew = self._made_anew()
                if anew:
                    return anew
                found = self._consumer.poll(timeout_ms=min(wait_s, _SLICE_S) * 1000, max_records=limit)
            except errors.OffsetOutOfRangeError as exc:
                return [self._out_of_range(at, asked) for at, asked in exc.args[0].items()]
            except errors.LogTruncationError as exc:
                return [self._truncated(at, kept) for at, kept in exc.divergent_offsets.items()]
            except errors.KafkaError as exc:
                if isinstance(exc.__cause__, PrefetcherError):
                    raise exc.__cause__ from None  # what `revoked` raised
                raise self._error(exc, f"reading {', '.join(self._names)}") from exc
            if found:
                self._heard_s = _clock.steady_s()
                return [self._chunk(at, records) for at, records in found.items()]
            wait_s = until_s - _clock.steady_s()
            if wait_s <= 0.0 and wait_s > -_JOIN_S and self._joins():
                wait_s = _SLICE_S
            elif wait_s <= 0.0 and not self._new:
                if self._missing:
                    raise UnavailableError(
                        f"{self._brokers} has no topic {', '.join(self._missing)} any more: start any role again, which makes it, "
                        "or make it by hand; it is read from its beginning then"
                    )
                if _clock.steady_s() - self._heard_s > _SILENCE_S:
                    self._ask()
                return ()
            wait_s = max(0.0, wait_s)

    def _joins(self) -> bool:
        """Whether the group is handing partitions over just now."""
        return self._shared and self._consumer.group_metadata().state == MemberState.REBALANCING

    def _chunk(self, at: TopicPartition, records: Sequence[Any]) -> Chunk:
        self._next[at] = after = records[-1].offset + 1
        # A record without a value is a tombstone of a compacted topic.
        return Chunk(self._partition(at), [record.offset for record in records], [record.value or b"" for record in records], after)

    def _look(self) -> None:
        """Takes up partitions that were added and lets go of those that are gone; in a group, the group does."""
        now_s = _clock.steady_s()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        there = {TopicPartition(name, number) for name in self._names for number in self._consumer.partitions_for_topic(name)}
        missing = sorted(self._names.keys() - {at.topic for at in there})
        if missing and missing != self._missing:
            self._log.warning("topic_gone", topics=missing, brokers=self._brokers, then="it is read again once it is there")
        self._missing = missing
        if self._shared:
            return
        had = self._consumer.assignment()
        if there != had:
            gone = had - there
            self._consumer.assign(sorted(there))
            self._new -= gone
            for at in gone:
                self._next.pop(at, None)
                self._ends.pop(at, None)
            if gone and not missing:
                named = [f"{at.topic}/{at.partition}" for at in sorted(gone)]
                self._log.warning("partitions_gone", partitions=named, brokers=self._brokers)
            self._given(there - had)

    def _made_anew(self) -> list[Chunk]:
        """Partitions of a topic that was deleted and made again: read from their beginning, to which a chunk without records leads."""
        found = []
        for at in sorted(self._consumer.assignment() - self._new):
            if self._names[at.topic] in self._paused:
                continue
            made = self._consumer._cluster.topic_id(at.topic)
            if made is None or not made.int:  # of an older broker, or of a topic that is not there just now
                continue
            before = self._read_of.setdefault(at, made)
            if made == before:
                continue
            self._read_of[at] = made
            self._log.warning("stream_made_anew", topic=at.topic, partition=at.partition, asked=self._next.get(at), brokers=self._brokers)
            self._consumer.seek(at, 0)
            self._next[at] = 0
            self._ends.pop(at, None)
            found.append(Chunk(self._partition(at), (), (), 0))
        return found

    def partitions(self) -> frozenset[Partition]:
        with self._asking("partitions"):
            return frozenset(Partition(topic, n) for name, topic in self._names.items() for n in self._consumer.partitions_for_topic(name))

    def _given(self, partitions: Iterable[TopicPartition]) -> None:
        """Holds new partitions until the owner has said where to begin. In a group, the client's own thread is here."""
        for at in partitions:
            self._consumer.pause(at)
            self._consumer.seek(at, 0)
            self._new.add(at)

    def _begin(self) -> None:
        new = sorted(self._new)
        positions = self._start([self._partition(at) for at in new])
        for at in new:
            if at not in self._consumer.assignment():
                continue
            position = positions.get(self._partition(at))
            if position is None:
                self._next.pop(at, None)
                self._read_of.pop(at, None)
                self._consumer.seek_to_beginning(at)
            else:
                self._next[at] = max(0, position)
                self._consumer.seek(at, max(0, position))
            if self._names[at.topic] not in self._paused:
                self._consumer.resume(at)
        self._new.difference_update(new)

    def _taken(self, partitions: Iterable[TopicPartition]) -> None:
        """In a group: the client's own thread, while the owner's waits in `poll`."""
        begun = [at for at in sorted(partitions) if at not in self._new]
        self._new.difference_update(partitions)
        for at in partitions:
            self._next.pop(at, None)
        if begun and not self._closed:
            self._revoked([self._partition(at) for at in begun])

    def _out_of_range(self, at: TopicPartition, asked: int) -> Chunk:
        """Goes on with the oldest record kept."""
        oldest, end = self._oldest(at), self._asked_ends([at])[at]
        facts = {"topic": at.topic, "partition": at.partition, "asked": asked, "oldest": oldest, "end": end, "brokers": self._brokers}
        if asked > end:
            self._log.warning("stream_made_anew", **facts)
        else:
            self._log.warning("records_lost", lost=max(0, oldest - asked), **facts)
        self._ends[at] = end
        go_on = asked if oldest <= asked <= end else oldest
        self._consumer.seek(at, go_on)
        self._next[at] = go_on
        return Chunk(self._partition(at), (), (), go_on, lost=max(0, oldest - asked))

    def _truncated(self, at: TopicPartition, kept: OffsetAndMetadata | None) -> Chunk:
        """A new leader has fewer records than were read: goes on where both agree."""
        go_on = kept.offset if kept is not None else self._oldest(at)
        self._log.warning("stream_cut", topic=at.topic, partition=at.partition, read=self._next.get(at), kept=go_on, brokers=self._brokers)
        self._consumer.seek(at, go_on)
        self._next[at] = go_on
        return Chunk(self._partition(at), (), (), go_on)

    def _ask(self) -> None:
        """Where the partitions end, and with that, whether anybody answers."""
        asked = sorted(self._consumer.assignment()) or [TopicPartition(next(iter(self._names)), 0)]
        self._ends.update(self._asked_ends(asked))
        self._heard_s = _clock.steady_s()

    def _oldest(self, at: TopicPartition) -> int:
        with self._asking(f"the oldest record of {at.topic}/{at.partition}"):
            return int(self._consumer.beginning_offsets([at], timeout_ms=_ANSWER_S * 1000)[at])

    def _asked_ends(self, asked: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with self._asking(f"the ends of {', '.join(self._names)}"):
            return dict(self._consumer.end_offsets(asked, timeout_ms=_ANSWER_S * 1000))

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except KeyError as exc:  # the client's answer lacks partitions that are not there
            raise UnavailableError(f"{self._brokers} has no {exc.args[0]} any more; asked for {what}") from exc
        except errors.KafkaTimeoutError as exc:
            raise UnavailableError(f"{self._brokers} does not answer; asked for {what}") from exc
        except errors.KafkaError as exc:
            raise self._error(exc, f"asking for {what}") from exc

    def pause(self, topics: Sequence[Topic]) -> None:
        self._paused.update(topics)
        self._consumer.pause(*[at for at in self._consumer.assignment() if self._names[at.topic] in self._paused])

    def resume(self, topics: Sequence[Topic]) -> None:
        self._paused.difference_update(topics)
        self._consumer.resume(
            *[at for at in self._consumer.assignment() if self._names[at.topic] not in self._paused and at not in self._new]
        )

    def done(self, positions: Positions) -> None:
        offsets = {self._at(partition): OffsetAndMetadata(offset, "", -1) for partition, offset in positions.items()}
        with contextlib.suppress(errors.KafkaError):  # best effort: what fails now is done with the next one
            self._consumer.commit_async(offsets)

    def lag(self) -> Mapping[Partition, int]:
        """Mostly from what came with the last records; a partition of which nobody has said where it ends is not in it."""
        had = self._consumer.assignment() - self._new
        if any(self._end(at) is None for at in had):
            with contextlib.suppress(UnavailableError):
                self._ask()
        behind: dict[Partition, int] = {}
        for at in had:
            end, position = self._end(at), self._next.get(at)
            if position is None:
                with contextlib.suppress(errors.KafkaError):  # the next poll says what is wrong
                    position = self._consumer.position(at, timeout_ms=_ANSWER_S * 1000)
            if end is not None and position is not None:
                self._next[at] = position
                behind[self._partition(at)] = max(0, end - position)
        return behind

    def _end(self, at: TopicPartition) -> int | None:
        """What came with the last records; while a topic is paused none come, and only `_ask` tells."""
        asked, came = self._ends.get(at), self._consumer.highwater(at)
        if came is None or (asked is not None and self._names[at.topic] in self._paused):
            return asked
        return int(came)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(errors.KafkaError):
            self._consumer.close(autocommit=False, timeout_ms=_CLOSE_S * 1000)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    """What the client says of partitions, in its own thread, while `poll` waits."""

    def __init__(self, reader: KafkaReader) -> None:
        self._reader = reader

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._reader._given(assigned)

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        self._reader._taken(revoked)

    def on_partitions_lost(self, lost: Iterable[TopicPartition]) -> None:
        self._reader._taken(lost)

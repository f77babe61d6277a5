"""The writer of `kafka`: one idempotent producer for all threads, with a bound on what waits and on how long anybody waits for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import kafka.errors as errors
from kafka import KafkaProducer
from kafka.partitioner.default import murmur2

from prefetcher.clock import SystemClock
from prefetcher.errors import NoRoomError, PrefetcherError, TemporaryError, UnavailableError, UsageError
from prefetcher.ports import Topic

__all__ = ["MARK_HEADER", "KafkaWriter"]

#: The header of a record that carries a mark.
MARK_HEADER = "mark"
#: What a record takes in the producer's memory beside its key and value: its future, its place in the batch.
_RECORD_BYTES = 1_000
#: What a record takes in a batch beside key, value and mark, at most: lengths, times, a header's name.
_ENVELOPE_BYTES = 100
#: How often `check` asks a broker that did not answer whether it does, and how long it waits for that.
_ASK_AGAIN_S = 2.0
_ASK_S = 0.3
#: Closing: for a last batch that is on its way.
_CLOSE_S = 2.0

_clock = SystemClock()


@lru_cache(maxsize=100_000)
def _key_hash(key: bytes) -> int:
    """Kafka's default: other producers put the same key into the same partition."""
    return int(murmur2(key)) & 0x7FFFFFFF


class KafkaWriter:
    """A `StreamWriter` on `producer`, which it closes."""

    def __init__(
        self,
        producer: KafkaProducer,
        topic_name: Callable[[Topic], str],
        error: Callable[[errors.KafkaError, str], PrefetcherError],
        is_there: Callable[[float], bool],
        brokers: str,
        pending_bytes: int,
        record_bytes: int,
    ) -> None:
        self._producer = producer
        self._is_there = is_there
        self._brokers = brokers
        self._topic_name = topic_name
        self._error = error
        self._most_pending = pending_bytes
        self._most_record = record_bytes
        self._lock = threading.Lock()
        self._pending = 0
        self._mark_ms = 0
        #: Why the last append failed, '' when it did not.
        self._problem = ""
        self._ask_again_s = 0.0

    def append(self, topic: Topic, records: Sequence[tuple[str, bytes]], mark: str | None = None, timeout_s: float = 1.0) -> None:
        if not records:
            return
        until_s = _clock.steady_s() + timeout_s
        name = self._topic_name(topic)
        keyed = [(key.encode("utf-8", "surrogatepass"), value) for key, value in records]
        largest = max(len(key) + len(value) for key, value in keyed) + len(mark or "") * 4 + _ENVELOPE_BYTES
        if largest > self._most_record:
            raise UsageError(f"a record of {largest:,} bytes for {name}: at most {self._most_record:,} are taken")
        try:
            if mark is None or len(keyed) == 1:
                self._deliver(name, keyed, mark, until_s)
            else:
                # The last record says that all others are there, wherever they went; so it is sent after they are.
                self._deliver(name, keyed[:-1], None, until_s)
                self._deliver(name, keyed[-1:], mark, until_s)
        except TemporaryError as exc:
            self._problem = str(exc)
            raise
        self._problem = ""

    def check(self) -> str:
        """As the port says. Records that still wait tell it when they arrive; without any, the broker is asked, now and then."""
        with self._lock:
            now_s = _clock.steady_s()
            if not self._problem or self._pending or now_s < self._ask_again_s:
                return self._problem
            self._ask_again_s = now_s + _ASK_AGAIN_S
        if self._is_there(_ASK_S):
            self._problem = ""
        return self._problem

    def _deliver(self, name: str, keyed: Sequence[tuple[bytes, bytes]], mark: str | None, until_s: float) -> None:
        """Sends and waits for all acknowledgements."""
        sizes = [len(key) + len(value) + _RECORD_BYTES for key, value in keyed]
        self._reserve(name, sum(sizes))
        sent = 0
        futures: list[Any] = []
        places: list[int] = []
        try:
            numbers = sorted(self._producer.partitions_for(name))
            headers = None if mark is None else [(MARK_HEADER, mark.encode())]
            time_ms = None if mark is None else self._next_mark_ms()
            for key, value in keyed:
                number = numbers[_key_hash(key) % len(numbers)]
                places.append(number)
                futures.append(self._producer.send(name, value, key, headers, partition=number, timestamp_ms=time_ms))
            for future in futures:
                if not future.succeeded():  # most came with the ones before: asking is much cheaper than waiting
                    future.get(max(0.0, until_s - _clock.steady_s()))
                sent += 1
        except errors.KafkaTimeoutError as exc:
            where = f"{name}/{places[sent]}" if futures else name
            raise UnavailableError(
                f"{self._brokers} {where}: {len(keyed) - sent} of {len(keyed)} records are not acknowledged in time; "
                f"they may still arrive: {exc}"
            ) from exc
        except (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError) as exc:
            raise UsageError(f"{self._brokers} {name}: the broker refuses a record as too large (its message.max.bytes): {exc}") from exc
        except errors.KafkaError as exc:
            raise self._error(exc, f"writing to {name}") from exc
        finally:
            self._release(futures, sizes)

    def _next_mark_ms(self) -> int:
        """Times of marked records rise, so that the last mark can be told among partitions."""
        with self._lock:
            self._mark_ms = max(self._mark_ms + 1, int(_clock.now_s() * 1000))
            return self._mark_ms

    def _reserve(self, name: str, size: int) -> None:
        with self._lock:
            # An empty buffer takes anything: an append that is larger than the bound alone is the caller's choice.
            if self._pending and self._pending + size > self._most_pending:
                raise NoRoomError(
                    f"{name}: {self._pending:,} bytes already wait for the broker at {self._brokers}, at most {self._most_pending:,} may"
                )
            self._pending += size

    def _release(self, futures: Sequence[Any], sizes: Sequence[int]) -> None:
        """Gives back what is settled now, and the rest when it is."""
        settled = sum(sizes[len(futures) :])
        for future, size in zip(futures, sizes, strict=False):
            if future.is_done:
                settled += size
            else:
                future.add_both(lambda result, size=size: self._settled(result, size))
        self._give_back(settled)

    def _settled(self, result: object, size: int) -> None:
        """In the client's own thread: a record that nobody waits for any more has arrived, or never will."""
        self._give_back(size)
        if not isinstance(result, BaseException):
            self._problem = ""

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._pending -= size

    def close(self) -> None:
        try:
            self._producer.close(timeout=_CLOSE_S)
        except errors.KafkaTimeoutError:
            # `close` waits for what is on its way before it stops anything: given up, it stops when nothing waits any more.
            self._producer._sender.force_close()
            with contextlib.suppress(errors.KafkaTimeoutError):
                self._producer.close(timeout=_CLOSE_S)

"""Bad records: every kind has its reason and its dead letter, good ones beside it are counted, and nothing passes unacknowledged."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from ingest_kit import START_S, Broker
from structlog.testing import capture_logs

from prefetcher.clock import VirtualClock
from prefetcher.core.types import ModelName, RequestSeen
from prefetcher.ingest.decoding import RowDecoder
from prefetcher.ingest.ingest import Ingest, IngestOptions
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Partition, Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import RequestMessage, encode
from prefetcher_connectors.redis import EmbeddedServer

NOW_S = START_S + 3600.0
GOOD = encode(RequestMessage(START_S, "a", user="ann"))
BAD = {
    b"": "not_json",
    b"GET / HTTP/1.1": "not_json",
    b"\xff\xfe\x00": "not_json",
    b'{"ts":1700000000,"model":"a","user":"half \xc3"}': "not_json",
    b'{"ts":1700000000,"model":"a"': "not_json",
    b'{"x":' + b"[" * 100_000: "not_json",
    b"[" * 100_000: "bad_field",
    b"null": "bad_field",
    b'{"model":"a"}': "bad_field",
    b'{"ts":"now","model":"a"}': "bad_field",
    b'{"ts":1700000000,"model":["a"]}': "bad_field",
    b'{"ts":1700000000,"model":""}': "empty_name",
    b'{"ts":1700000000,"model":"a","count":0}': "bad_count",
    b'{"ts":1700000000,"model":"a","v":9}': "too_new",
    b'{"ts":12,"model":"a"}': "bad_time",
    b'{"ts":1700000000000,"model":"a"}': "future",
    encode(RequestMessage(NOW_S + 61.0, "a")): "future",
    encode(RequestMessage(START_S, "x" * 600)): "long_name",
    encode(RequestMessage(START_S, "a", user="\u20ac" * 200)): "long_name",
    b'{"ts":1700000000,"model":"a","x":"' + b"x" * 1_000_000 + b'"}': "oversized",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("state"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        client.flushall()
        yield client


def make(broker: Broker, client: redis.Redis, **options: object) -> tuple[Ingest, Metrics]:
    metrics = Metrics()
    return Ingest(broker, client, VirtualClock(NOW_S), metrics, IngestOptions(**options)), metrics  # type: ignore[arg-type]


def test_every_kind_has_its_reason_and_a_dead_letter(client: redis.Redis) -> None:
    broker = Broker()
    for value in BAD:
        broker.add(GOOD, value)
    ingest, metrics = make(broker, client, topic="gateway")
    while ingest.step():
        pass
    assert {(x.topic, x.partition, x.offset): x.reason for x in broker.letters} == {
        ("gateway", 0, 2 * i + 1): reason for i, reason in enumerate(BAD.values())
    }
    for letter, value in zip(broker.letters, BAD, strict=True):
        assert (letter.raw(), letter.size_bytes, letter.ts) == (value[:4096], len(value), NOW_S)
        assert letter.detail
    position = TablesReader(client).positions()[0]
    assert (position["rows"], position["bad"], position["offset"]) == (len(BAD), len(BAD), 2 * len(BAD))
    for reason, count in Counter(BAD.values()).items():
        assert metrics.registry.get_sample_value("prefetcher_bad_requests_total", {"source": "topic", "reason": reason}) == count


@given(st.lists(st.one_of(st.sampled_from([GOOD, *BAD]), st.binary(max_size=40)), max_size=30))
def test_whole_chunks_and_single_records_are_judged_alike(values: list[bytes]) -> None:
    decoder = RowDecoder(1_000_000, 60.0)
    together = decoder(range(len(values)), values, NOW_S)
    apart = [decoder([i], [value], NOW_S) for i, value in enumerate(values)]
    assert together.offsets.tolist() == [o for one in apart for o in one.offsets.tolist()]
    assert together.models == [m for one in apart for m in one.models]
    assert together.users == [u for one in apart for u in one.users]
    assert together.bad == [b for one in apart for b in one.bad]


def test_a_position_waits_for_its_dead_letters(client: redis.Redis) -> None:
    broker = Broker()
    broker.add(GOOD, b"bad", GOOD)
    broker.letters_away = True
    ingest, metrics = make(broker, client)
    stop = threading.Event()
    thread = threading.Thread(target=ingest.run, args=(stop,))
    thread.start()
    waits = ("prefetcher_ingest_waits_total", {"reason": "dead_letters_away"})
    while (metrics.registry.get_sample_value(*waits) or 0) < 3:
        threading.Event().wait(0.005)
    assert TablesReader(client).positions() == {}
    assert broker.readers[0].at == {0: 3}  # nothing more was polled
    broker.letters_away = False
    while not TablesReader(client).positions():
        threading.Event().wait(0.005)
    stop.set()
    thread.join()
    assert [letter.offset for letter in broker.letters] == [1]
    assert TablesReader(client).positions()[0]["rows"] == 2


def test_a_crash_after_the_dead_letters_repeats_them_and_counts_once(client: redis.Redis) -> None:
    broker = Broker()
    broker.add(GOOD, b"bad", GOOD)
    ingest, _ = make(broker, client)
    chunk = broker.reader([Topic.REQUESTS], "probe", lambda partitions: {}, shared=True).poll(10, 0.0)[0]
    decoded = RowDecoder(1_000_000, 60.0)(chunk.offsets, chunk.values, NOW_S)
    ingest._bury(Partition(Topic.REQUESTS, 0), decoded.bad)  # and then the power goes
    survivor, _ = make(broker, client)
    while survivor.step():
        pass
    assert [(x.partition, x.offset) for x in broker.letters] == [(0, 1), (0, 1)]
    position = TablesReader(client).positions()[0]
    assert (position["rows"], position["bad"]) == (2, 1)


def test_bad_records_are_named_once_a_minute(client: redis.Redis) -> None:
    broker = Broker()
    broker.chunk = 10
    broker.add(*[b"bad"] * 100)
    ingest, _ = make(broker, client)
    with capture_logs() as logs:
        while ingest.step():
            pass
    assert [entry["offset"] for entry in logs if entry["event"] == "record_refused"] == [0]


def test_a_foreign_topic_is_read_through_its_mapping(client: redis.Redis) -> None:
    def read(value: bytes) -> RequestSeen:
        if not value.startswith(b"ok "):
            raise ValueError(f"no model in it: {value[:10]!r}")
        return RequestSeen(START_S, ModelName(value[3:].decode()))

    broker = Broker()
    broker.add(b"ok a", b"nonsense", b"ok ", b"ok b")
    ingest = Ingest(broker, client, VirtualClock(NOW_S), Metrics(), mapping=read)
    while ingest.step():
        pass
    assert {model: table.rows for model, table in TablesReader(client).models().items()} == {"a": 1, "b": 1}
    assert [(x.offset, x.reason) for x in broker.letters] == [(1, "bad_field"), (2, "empty_name")]


def test_a_broker_that_is_away_is_waited_for(client: redis.Redis) -> None:
    broker = Broker()
    broker.add(GOOD)
    broker.away = True
    ingest, metrics = make(broker, client)
    assert not ingest.step()
    assert metrics.registry.get_sample_value("prefetcher_ingest_waits_total", {"reason": "streams_away"}) == 1
    broker.away = False
    assert ingest.step()


def test_a_partition_taken_away_while_waiting_is_dropped(client: redis.Redis, tmp_path: Path) -> None:
    broker = Broker(2)
    broker.add(GOOD, b"bad")
    broker.add(GOOD, to=1)
    ingest, _ = make(broker, client)
    ingest.step()  # takes both
    broker.add(b"bad too")
    broker.add(GOOD, to=1)
    broker.letters_away = True
    reader = broker.readers[0]
    polled = reader.poll

    def taken_while_waiting(limit: int, timeout_s: float) -> object:
        if reader.paused:
            reader.others = {0}
        return polled(limit, timeout_s)

    reader.poll = taken_while_waiting  # type: ignore[method-assign, assignment]
    ingest.step()
    ingest.close()
    positions = TablesReader(client).positions()
    assert (positions[0]["offset"], positions[1]["offset"]) == (2, 2)
    assert len(broker.letters) == 1

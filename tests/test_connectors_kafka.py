"""Streams on a broker when something goes wrong: members and brokers that vanish, hang and come back, wrong addresses and passwords."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from broker_kit import ApacheKafka, free_port
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from waiting import eventually

from prefetcher.errors import NoRoomError, SettingsError, UnavailableError, UsageError
from prefetcher.ports import Partition, Topic
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams

#: More than anything here takes: a wait that ends by it has failed.
PATIENCE_S = 40.0

# Sockets that were refused are left to the collector by the client; it should not find them in other tests.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def options(own_kafka: ApacheKafka) -> KafkaOptions:
    return KafkaOptions(own_kafka.address, prefix=f"t{uuid.uuid4().hex[:12]}", partitions=3, session_s=6.0)


@pytest.fixture
def streams(options: KafkaOptions) -> KafkaStreams:
    made = KafkaStreams(options)
    made.prepare()
    return made


@pytest.fixture
def admin(own_kafka: ApacheKafka) -> Iterator[KafkaAdminClient]:
    client = KafkaAdminClient(bootstrap_servers=own_kafka.address)
    yield client
    client.close()


def deadline(seconds: float = PATIENCE_S) -> Callable[[], bool]:
    over = threading.Event()
    timer = threading.Timer(seconds, over.set)
    timer.daemon = True
    timer.start()
    return over.is_set


class Taken:
    """What a reader gave, and where it stands."""

    def __init__(self, streams: KafkaStreams, *, shared: bool = False) -> None:
        self.values: list[bytes] = []
        self.positions: dict[Partition, int] = {}
        self.begun: list[Partition] = []
        self.lost = 0
        self.away = 0
        self.why_away = ""
        self.reader = streams.reader([Topic.REQUESTS], "r", self._start, shared=shared)

    def _start(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        self.begun.extend(partitions)
        return self.positions

    def poll(self, timeout_s: float = 0.2) -> None:
        try:
            chunks = self.reader.poll(1000, timeout_s)
        except UnavailableError as exc:
            self.away += 1
            self.why_away = str(exc)
            return
        for chunk in chunks:
            self.values.extend(chunk.values)
            self.positions[chunk.partition] = chunk.next_offset
            self.lost += chunk.lost

    def until(self, true: Callable[[], bool]) -> None:
        give_up = deadline()
        while not true():
            assert not give_up(), f"{len(self.values)} values, {self.begun}, {self.positions}"
            self.poll()

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()


_MEMBER = """
import sys
from prefetcher.ports import Topic
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams

streams = KafkaStreams(KafkaOptions(sys.argv[1], prefix=sys.argv[2], partitions=3, session_s=6.0))
reader = streams.reader([Topic.REQUESTS], "r", lambda partitions: {}, shared=True)
while True:
    for chunk in reader.poll(10, 1.0):
        print(chunk.next_offset, flush=True)
"""


def test_a_member_that_is_killed_is_taken_over(streams: KafkaStreams, options: KafkaOptions) -> None:
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [(f"k{i}", b"%d" % i) for i in range(50)], timeout_s=PATIENCE_S)
    member = subprocess.Popen([sys.executable, "-c", _MEMBER, options.brokers, options.prefix], stdout=subprocess.PIPE)
    assert member.stdout is not None
    member.stdout.readline()  # it has them
    os.kill(member.pid, signal.SIGKILL)
    member.wait()
    member.stdout.close()
    with Taken(streams, shared=True) as other:
        other.until(lambda: len(other.values) == 50)
        assert len(other.begun) == 3
    writer.close()


def test_a_broker_that_hangs_costs_who_appends_its_timeout_and_nothing_is_lost(
    streams: KafkaStreams, options: KafkaOptions, own_kafka: ApacheKafka
) -> None:
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [("a", b"before")], timeout_s=PATIENCE_S)
    with Taken(streams) as taken:
        taken.until(lambda: len(taken.values) == 1)
        own_kafka.freeze()
        try:
            for number in range(3):
                with pytest.raises(UnavailableError, match=r"127.0.0.1:\d+ t\w+\.requests/\d: 1 of 1 records are not acknowledged in time"):
                    writer.append(Topic.REQUESTS, [("a", b"meanwhile %d" % number)], timeout_s=0.3)
            taken.until(lambda: taken.away > 0)
            assert "not acknowledged" in writer.check()
        finally:
            own_kafka.go_on()
        taken.until(lambda: not writer.check())
        writer.append(Topic.REQUESTS, [("a", b"after")], timeout_s=PATIENCE_S)
        taken.until(lambda: b"after" in taken.values)
        # What was not acknowledged may be there; here it is, once and in order.
        assert taken.values == [b"before", b"meanwhile 0", b"meanwhile 1", b"meanwhile 2", b"after"]
    writer.close()


def test_a_writer_goes_on_after_an_outage_that_outlasted_what_it_had_sent(
    options: KafkaOptions, own_kafka: ApacheKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half a minute, made short: what was sent by then is given up, and with it the idempotent producer's id.
    monkeypatch.setattr("prefetcher_connectors.kafka._REQUEST_S", 2.0)
    monkeypatch.setattr("prefetcher_connectors.kafka._DELIVERY_S", 2.1)
    streams = KafkaStreams(options)
    streams.prepare()
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [("a", b"before")], timeout_s=PATIENCE_S)
    own_kafka.freeze()
    try:
        with pytest.raises(UnavailableError):
            writer.append(Topic.REQUESTS, [("a", b"meanwhile")], timeout_s=5.0)
    finally:
        own_kafka.go_on()
    give_up = deadline()
    while not give_up():
        with contextlib.suppress(UnavailableError):
            writer.append(Topic.REQUESTS, [("a", b"after")], timeout_s=1.0)
            break
    assert not give_up()
    with Taken(streams) as taken:
        taken.until(lambda: b"after" in taken.values)
        assert taken.values[0] == b"before"
    writer.close()


def test_what_waits_for_a_broker_is_bounded(own_kafka: ApacheKafka, options: KafkaOptions) -> None:
    streams = KafkaStreams(KafkaOptions(options.brokers, prefix=options.prefix, pending_bytes=100_000))
    streams.prepare()
    writer = streams.writer()
    own_kafka.freeze()
    try:
        for _ in range(9):
            with pytest.raises(UnavailableError):
                writer.append(Topic.REQUESTS, [("a", b"x" * 10_000)], timeout_s=0.01)
        with pytest.raises(NoRoomError, match="already wait for the broker"):
            writer.append(Topic.REQUESTS, [("a", b"x" * 10_000)], timeout_s=0.01)
    finally:
        own_kafka.go_on()
    give_up = deadline()
    while not give_up():
        with contextlib.suppress(NoRoomError):
            writer.append(Topic.REQUESTS, [("a", b"last")], timeout_s=PATIENCE_S)
            break
    assert not give_up()
    writer.close()


def test_a_broker_that_is_killed_and_comes_back_has_every_acknowledged_record_once(streams: KafkaStreams, own_kafka: ApacheKafka) -> None:
    writer = streams.writer()
    acknowledged: list[bytes] = []
    stop = threading.Event()

    def append(thread: int) -> None:
        number = 0
        while not stop.is_set():
            batch = [(f"k{i}", b"%d:%d:%d" % (thread, number, i)) for i in range(5)]
            number += 1
            try:
                writer.append(Topic.REQUESTS, batch, timeout_s=1.0)
            except (UnavailableError, NoRoomError):
                continue
            acknowledged.extend(value for _, value in batch)

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(3)]
    with Taken(streams) as taken:
        for thread in threads:
            thread.start()
        taken.until(lambda: len(acknowledged) > 200)
        own_kafka.kill()
        taken.until(lambda: taken.away > 0)
        before = len(acknowledged)
        own_kafka.start()
        taken.until(lambda: len(acknowledged) > before + 200)
        stop.set()
        for thread in threads:
            thread.join()
        taken.until(lambda: set(acknowledged) <= set(taken.values))
        assert len(taken.values) == len(set(taken.values))
        assert taken.lost == 0
    writer.close()


def test_partitions_that_are_added_are_read_from_their_beginning(
    streams: KafkaStreams, admin: KafkaAdminClient, options: KafkaOptions
) -> None:
    with Taken(streams) as alone, Taken(streams, shared=True) as member:
        alone.until(lambda: len(alone.begun) == 3)
        member.until(lambda: len(member.begun) == 3)
        admin.create_partitions({f"{options.prefix}.requests": 6})
        writer = KafkaProducer(bootstrap_servers=options.brokers)
        for number in range(6):
            writer.send(f"{options.prefix}.requests", b"%d" % number, partition=number).get(PATIENCE_S)
        writer.close()
        for taken in (alone, member):
            taken.until(lambda taken=taken: len(taken.values) == 6)  # type: ignore[misc]
            assert sorted(taken.begun) == [Partition(Topic.REQUESTS, number) for number in range(6)]


def test_records_that_are_no_longer_kept_are_counted(streams: KafkaStreams, admin: KafkaAdminClient, options: KafkaOptions) -> None:
    writer = streams.writer()
    for number in range(10):
        writer.append(Topic.REQUESTS, [("a", b"%d" % number)], timeout_s=PATIENCE_S)
    with Taken(streams) as first:
        first.until(lambda: len(first.values) == 10)
        partition = next(iter(first.positions))
    admin.delete_records({TopicPartition(f"{options.prefix}.requests", partition.number): 7})
    with Taken(streams) as taken:
        taken.positions[partition] = 2
        taken.until(lambda: len(taken.values) == 3)
        assert taken.values == [b"7", b"8", b"9"]
        assert taken.lost == 5
    writer.close()


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(streams: KafkaStreams, options: KafkaOptions) -> None:
    writer = streams.writer()
    writer.append(Topic.REQUESTS, [("a", b"1")], timeout_s=PATIENCE_S)
    with Taken(streams) as taken:
        taken.positions.update({Partition(Topic.REQUESTS, number): 1000 for number in range(3)})
        taken.until(lambda: len(taken.values) == 1)
        assert taken.lost == 0
        assert max(taken.positions.values()) == 1
    writer.close()


@pytest.mark.parametrize("shared", [False, True])
def test_a_topic_that_is_deleted_is_away_until_it_is_made_again_and_is_read_from_its_beginning(
    streams: KafkaStreams, admin: KafkaAdminClient, options: KafkaOptions, *, shared: bool
) -> None:
    topic = f"{options.prefix}.requests"
    writer = KafkaProducer(bootstrap_servers=options.brokers)
    for number in range(9):
        writer.send(topic, b"old", partition=number % 3).get(PATIENCE_S)
    with Taken(streams, shared=shared) as taken:
        taken.until(lambda: len(taken.values) == 9)
        assert taken.reader.partitions() == {Partition(Topic.REQUESTS, number) for number in range(3)}
        admin.delete_topics([topic])
        taken.until(lambda: "has no topic" in taken.why_away)
        taken.reader.lag()
        assert not taken.reader.partitions()
        writer.close()
        # More records than before: where was read up to is in range again, and stands for others.
        admin.create_topics({topic: {"num_partitions": 1, "replication_factor": 1}})
        writer = KafkaProducer(bootstrap_servers=options.brokers)
        for number in range(12):
            writer.send(topic, b"%d" % number, partition=0).get(PATIENCE_S)
        taken.until(lambda: len(taken.values) == 21)
        assert taken.values[9:] == [b"%d" % number for number in range(12)]
        assert taken.positions[Partition(Topic.REQUESTS, 0)] == 12
        assert taken.reader.partitions() == {Partition(Topic.REQUESTS, 0)}
        taken.poll(3.0)
        assert taken.reader.lag() == {Partition(Topic.REQUESTS, 0): 0}
        writer.close()


def test_a_key_goes_where_other_producers_put_it(streams: KafkaStreams, options: KafkaOptions) -> None:
    writer = streams.writer()
    other = KafkaProducer(bootstrap_servers=options.brokers)
    for key in ("llama-8b", "é中", "", "m/2"):
        place = other.send(f"{options.prefix}.requests", key=key.encode(), value=b"theirs").get(PATIENCE_S).partition
        writer.append(Topic.REQUESTS, [(key, b"ours")], timeout_s=PATIENCE_S)
        with Taken(streams) as taken:
            taken.until(lambda taken=taken: taken.values.count(b"ours") == taken.values.count(b"theirs"))  # type: ignore[misc]
            assert taken.positions.get(Partition(Topic.REQUESTS, place), 0) % 2 == 0
    other.close()
    writer.close()


def test_a_record_that_is_too_large_says_so(streams: KafkaStreams) -> None:
    writer = streams.writer()
    with pytest.raises(UsageError, match=r"a record of 2,000,\d+ bytes for t\w+\.requests: at most 1,048,576"):
        writer.append(Topic.REQUESTS, [("a", b"x" * 2_000_000)])
    writer.close()


def test_nobody_is_at_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnavailableError, match=f"no Kafka broker answers at {address} as PLAINTEXT"):
        KafkaStreams(KafkaOptions(address)).prepare()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kafka-")]
    named = KafkaOptions(address, security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username="fetch", password="x")
    with pytest.raises(UnavailableError, match=r"is the password of user 'fetch' right\?"):
        KafkaStreams(named).prepare()


def sasl_options(kafka: ApacheKafka, username: str, password: str) -> KafkaOptions:
    return KafkaOptions(
        kafka.address, prefix="s", security_protocol="SASL_PLAINTEXT", sasl_mechanism="PLAIN", username=username, password=password
    )


def refusal(options: KafkaOptions) -> SettingsError | None:
    """Why the broker lets nobody in. One that is busy may hang up before it says so, which is no refusal yet."""
    try:
        KafkaStreams(options).prepare()
    except SettingsError as exc:
        return exc
    return None


def test_passwords_and_rights(sasl_kafka: ApacheKafka, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    wrong = sasl_options(sasl_kafka, "fetch", "s3cret-wrong")
    refused = eventually(lambda: refusal(wrong))
    assert "refuses user 'fetch' (PLAIN): check the password" in str(refused)
    guest = sasl_options(sasl_kafka, "guest", "guest")
    with pytest.raises(SettingsError, match=r"kafka-topics.sh --bootstrap-server \S+ --create --topic s\.requests --partitions 6"):
        KafkaStreams(guest).prepare()
    right = KafkaStreams(sasl_options(sasl_kafka, "fetch", "right"))
    right.prepare()
    writer = right.writer()
    writer.append(Topic.REQUESTS, [("a", b"1")], timeout_s=PATIENCE_S)
    writer.close()
    assert "s3cret" not in str(refused) + repr(wrong) + caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (KafkaOptions(" , "), "no address of a broker"),
        (KafkaOptions("a:1", security_protocol="SASL_SSL"), "SASL_SSL needs a mechanism, a username and a password"),
        (KafkaOptions("a:1", password="x"), "PLAINTEXT uses none"),
    ],
)
def test_options_that_contradict_each_other(options: KafkaOptions, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        KafkaStreams(options)


def test_a_certificate_that_is_not_there() -> None:
    with pytest.raises(SettingsError, match=r"certificates of the broker can't be used \(No such file.*nowhere/ca\.pem"):
        KafkaStreams(KafkaOptions("a:1", security_protocol="SSL", ca_file=Path("nowhere/ca.pem")))

"""The ingest's tables on a real server: exact whatever the batches, the order, the deliveries and what became of the server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_kit import START_S, Broker, assert_exact

import prefetcher
from prefetcher.clock import VirtualClock
from prefetcher.ingest.history import read_hours
from prefetcher.ingest.ingest import Ingest, IngestOptions
from prefetcher.ingest.tables import TablesReader, connect, key
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import RequestMessage
from prefetcher_connectors.redis import EmbeddedServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("state"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with connect(server.url) as client:
        client.config_set("maxmemory", 0)
        client.flushall()
        yield client


class Node:
    """One member, and what it tells."""

    def __init__(self, broker: Broker, client: redis.Redis, clock: VirtualClock | None = None, **options: object) -> None:
        self.metrics = Metrics()
        self.clock = clock or VirtualClock(START_S + 86_400.0)
        self.ingest = Ingest(broker, client, self.clock, self.metrics, IngestOptions(**options))  # type: ignore[arg-type]

    def run(self, steps: int = 50) -> None:
        """Until nothing new comes."""
        for _ in range(steps):
            if not self.ingest.step():
                return

    def close(self) -> None:
        self.ingest.close()

    def told(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"prefetcher_{name}", labels) or 0.0


def random_rows(seed: int, count: int, models: int = 12, span_s: float = 7200.0) -> list[RequestMessage]:
    """Mostly in order, some out of it, some too late."""
    rng = np.random.default_rng(seed)
    ts = START_S + np.sort(rng.uniform(0.0, span_s, count)) - rng.choice([0.0, 0.0, 30.0, 500.0, 2000.0], count) * rng.uniform(0, 1, count)
    names = rng.zipf(1.4, count) % models
    users = rng.integers(0, 20, count)
    return [RequestMessage(float(t), f"m{n}", user=f"u{u}" if u else None) for t, n, u in zip(ts, names, users, strict=True)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), chunk=st.integers(1, 60))
def test_tables_are_exact_whatever_the_batches(client: redis.Redis, seed: int, chunk: int) -> None:
    client.flushall()
    broker = Broker(3)
    broker.chunk = chunk
    for i, row in enumerate(random_rows(seed, 200)):
        broker.add(row, to=i % 3)
    Node(broker, client, keep_s=1e9).run(300)
    reader = TablesReader(client)
    assert_exact(reader, broker)
    users = {u: reader.recent(f"u{u}") for u in range(1, 20)}
    followers = reader.followers()

    client.flushall()
    broker.chunk = 10_000
    Node(broker, client, keep_s=1e9).run()
    assert_exact(reader, broker)
    assert {u: reader.recent(f"u{u}") for u in range(1, 20)} == users
    assert reader.followers() == followers


def test_delivered_again_changes_nothing(client: redis.Redis) -> None:
    broker = Broker()
    broker.add(*random_rows(1, 500))
    node = Node(broker, client)
    node.run()
    before = client.hgetall(key(0, "position"))
    broker.readers[0].at[0] = 100
    node.run()
    assert node.told("ingest_records_total", result="again") == 400
    assert client.hgetall(key(0, "position")) == before
    broker.readers[0].at[0] = 480
    broker.add(*random_rows(2, 50))
    node.run()
    assert_exact(TablesReader(client), broker)


def test_two_who_both_count_a_partition_count_it_once(client: redis.Redis) -> None:
    broker = Broker(2)
    broker.chunk = 7
    for i, row in enumerate(random_rows(3, 400)):
        broker.add(row, to=i % 2)
    first, second = Node(broker, client), Node(broker, client)
    for second_is_next in np.random.default_rng(0).integers(0, 2, 400).tolist():
        (second if second_is_next else first).ingest.step()
    first.close()
    second.close()
    assert_exact(TablesReader(client), broker)
    assert first.told("ingest_reloads_total", reason="changed_by_others") > 0
    assert second.told("ingest_reloads_total", reason="changed_by_others") > 0


def test_a_partition_that_moves_is_counted_on(client: redis.Redis) -> None:
    broker = Broker(2)
    broker.chunk = 10
    for i, row in enumerate(random_rows(4, 400)):
        broker.add(row, to=i % 2)
    first, second = Node(broker, client), Node(broker, client)
    first.ingest.step()
    second.ingest.step()
    for step in range(60):
        broker.readers[0].others, broker.readers[1].others = ({0}, {1}) if step // 10 % 2 else ({1}, {0})
        first.ingest.step()
        second.ingest.step()
    first.close()
    second.close()
    assert_exact(TablesReader(client), broker)
    assert first.told("ingest_records_total", result="counted") > 0
    assert second.told("ingest_records_total", result="counted") > 0


def test_partitions_that_are_added_are_summed(client: redis.Redis) -> None:
    broker = Broker(1)
    broker.add(RequestMessage(START_S, "a"), RequestMessage(START_S + 10.0, "a"))
    node = Node(broker, client)
    node.run()
    broker.records[1], broker.first[1] = [], 0
    broker.add(RequestMessage(START_S + 40.0, "a"), to=1)
    node.run()
    table = TablesReader(client).models()["a"]
    assert (table.rows, table.first_s, table.last_s, table.mean_gap_s()) == (3, START_S, START_S + 40.0, 20.0)


def test_late_rows_are_counted_apart(client: redis.Redis) -> None:
    broker = Broker()
    broker.add(*(RequestMessage(START_S + t, "a") for t in (0.0, 1000.0, 401.0, 399.0, 1001.0)))
    Node(broker, client).run()
    table = TablesReader(client).models()["a"]
    assert (table.rows, table.late, table.first_s, table.last_s) == (4, 1, START_S, START_S + 1001.0)
    assert sum(table.gaps) == 3
    assert_exact(TablesReader(client), broker)
    assert broker.letters == []


def test_a_server_that_lost_everything_is_counted_anew(client: redis.Redis) -> None:
    broker = Broker(2)
    for i, row in enumerate(random_rows(5, 300)):
        broker.add(row, to=i % 2)
    node = Node(broker, client)
    node.run()
    recent = TablesReader(client).recent("u3")
    client.flushall()
    broker.add(RequestMessage(START_S + 7300.0, "late-comer"))
    node.run()
    assert node.told("ingest_reloads_total", reason="state_lost") == 1
    assert_exact(TablesReader(client), broker)
    assert TablesReader(client).recent("u3") == recent


def test_what_a_server_forgot_is_counted_again_though_no_record_comes(client: redis.Redis) -> None:
    broker = Broker(3)
    for i, row in enumerate(random_rows(5, 300)):
        broker.add(row, to=i % 2)
    node = Node(broker, client)
    node.run()
    before = {name for name in client.scan_iter() if b"/2}" not in name}
    recent = TablesReader(client).recent("u3")
    client.flushall()
    node.clock.advance(3.0)
    node.run()
    assert node.told("ingest_reloads_total", reason="state_lost") == 2
    assert_exact(TablesReader(client), broker)
    assert {name for name in client.scan_iter() if b"/2}" not in name} == before
    assert TablesReader(client).recent("u3") == recent
    assert TablesReader(client).partitions() == [0, 1, 2]
    # Also where the first commit is what finds it out.
    client.flushall()
    broker.add(RequestMessage(START_S + 7300.0, "late-comer"), to=2)
    node.ingest.step()
    node.ingest.step()
    assert TablesReader(client).partitions()
    node.clock.advance(3.0)
    node.run()
    assert_exact(TablesReader(client), broker)
    assert TablesReader(client).recent("u3") == recent


def test_tables_of_partitions_that_the_topic_has_no_more_go(client: redis.Redis) -> None:
    broker = Broker(3)
    for i, row in enumerate(random_rows(5, 300)):
        broker.add(row, to=i % 3)
    node = Node(broker, client)
    node.run()
    broker.records = {0: []}
    broker.add(*random_rows(6, 20))
    node.run()
    for _ in range(15):
        assert TablesReader(client).partitions() == [0, 1, 2], "other members may know of partitions that this one has not heard of"
        node.clock.advance(1.0)
        node.run()
    with structlog.testing.capture_logs() as logged:
        node.clock.advance(10.0)
        node.run()
    assert [entry["partition"] for entry in logged if entry["event"] == "partition_gone"] == [1, 2]
    assert TablesReader(client).partitions() == [0]
    assert not [name for name in client.scan_iter() if b"requests/0}" not in name and b"installation" not in name]
    assert_exact(TablesReader(client), broker)


@pytest.mark.parametrize("what", ["position", "models"])
def test_a_server_that_lost_a_part_is_counted_anew(client: redis.Redis, what: str) -> None:
    broker = Broker()
    broker.add(*random_rows(6, 300))
    node = Node(broker, client)
    node.run()
    client.delete(key(0, what))
    broker.add(RequestMessage(START_S + 7300.0, "late-comer"))
    node.run()
    assert_exact(TablesReader(client), broker)
    # And one that finds it so at its start.
    client.delete(key(0, what))
    Node(broker, client).run()
    assert_exact(TablesReader(client), broker)


def test_a_server_that_went_back_is_counted_on_from_there(client: redis.Redis) -> None:
    broker = Broker()
    rows = random_rows(7, 300)
    broker.add(*rows[:200])
    node = Node(broker, client)
    node.run()
    saved = {name: client.dump(name) for name in client.scan_iter()}
    broker.add(*rows[200:250])
    node.run()
    client.flushall()
    for name, value in saved.items():
        client.restore(name, 0, value)
    broker.add(*rows[250:])
    node.run()
    assert_exact(TablesReader(client), broker)


def test_a_topic_that_was_made_again_is_counted_from_its_start(client: redis.Redis) -> None:
    broker = Broker()
    broker.add(*random_rows(8, 300))
    node = Node(broker, client)
    node.run()
    broker.records[0] = []
    broker.add(*random_rows(9, 100))
    node.run()
    assert node.told("ingest_reloads_total", reason="stream_anew") == 1
    assert_exact(TablesReader(client), broker)


def test_records_that_were_dropped_before_their_turn_are_told(client: redis.Redis) -> None:
    broker = Broker()
    rows = random_rows(10, 300)
    broker.add(*rows[:100])
    node = Node(broker, client)
    node.run()
    broker.add(*rows[100:])
    broker.records[0] = broker.records[0][150:]
    broker.first[0] = 150
    node.run()
    assert node.told("ingest_records_total", result="lost") == 50
    assert TablesReader(client).positions()[0]["offset"] == 300
    assert sum(t.rows + t.late for t in TablesReader(client).models().values()) == 250


def test_a_server_that_ends_is_waited_for(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    server.start()
    broker = Broker()
    broker.chunk = 5
    broker.add(*random_rows(11, 300))
    with connect(server.url) as client:
        node = Node(broker, client)
        for _ in range(20):
            node.ingest.step()
        node.ingest.step()
        server.stop()
        stop = threading.Event()
        thread = threading.Thread(target=node.ingest.run, args=(stop,))
        thread.start()
        while not node.told("ingest_waits_total", reason="state_away"):
            threading.Event().wait(0.01)
        server.start()
        while TablesReader(client).positions()[0]["offset"] < 300:
            threading.Event().wait(0.01)
        stop.set()
        thread.join()
        assert_exact(TablesReader(client), broker)
    server.stop()


def test_a_full_server_makes_room_by_closing_hours_and_is_waited_for(client: redis.Redis, tmp_path: Path) -> None:
    broker = Broker()
    broker.chunk = 500
    broker.add(*random_rows(12, 3000, models=400, span_s=6 * 3600.0))
    node = Node(broker, client, keep_s=1e9, history=tmp_path)
    node.ingest.step()
    used = int(client.info("memory")["used_memory"])
    client.config_set("maxmemory", used)
    stop = threading.Event()
    thread = threading.Thread(target=node.ingest.run, args=(stop,))
    thread.start()
    while node.told("ingest_waits_total", reason="state_full") < 3:
        threading.Event().wait(0.01)
    client.config_set("maxmemory", 0)
    while TablesReader(client).positions()[0]["offset"] < 3000:
        threading.Event().wait(0.01)
    stop.set()
    thread.join()
    assert_exact(TablesReader(client), broker, {minute: models for _, minute, models in read_hours(tmp_path)})


def test_closed_hours_move_to_the_history(client: redis.Redis, tmp_path: Path) -> None:
    broker = Broker(2)
    broker.chunk = 50
    for i, row in enumerate(random_rows(13, 2000, span_s=12 * 3600.0)):
        broker.add(row, to=i % 2)
    node = Node(broker, client, keep_s=2 * 3600.0, history=tmp_path)
    node.run()
    reader = TablesReader(client)
    last = max(reader.minutes(0, 1 << 40))
    assert min(reader.minutes(0, 1 << 40)) >= last - 3 * 60 - 1
    kept: dict[int, Counter[str]] = {}
    for _, minute, models in read_hours(tmp_path):
        kept.setdefault(minute, Counter()).update(models)
    assert_exact(reader, broker, kept)
    # Lost and counted anew, with a topic that keeps less: what the files hold stays.
    client.flushall()
    for number in (0, 1):
        broker.first[number], broker.records[number] = 500, broker.records[number][500:]
    node.run()
    again: dict[int, Counter[str]] = {}
    for _, minute, models in read_hours(tmp_path):
        again.setdefault(minute, Counter()).update(models)
    assert again == kept


def test_a_crash_between_file_and_deletion_changes_nothing(client: redis.Redis, tmp_path: Path) -> None:
    broker = Broker()
    broker.add(*random_rows(14, 1000, span_s=6 * 3600.0))
    node = Node(broker, client, keep_s=1e9, history=tmp_path)
    node.run()
    saved = {name: client.dump(name) for name in client.scan_iter()}
    Node(broker, client, keep_s=3600.0, history=tmp_path).run()
    first = list(read_hours(tmp_path))
    assert first
    client.flushall()
    for name, value in saved.items():
        client.restore(name, 0, value)
    Node(broker, client, keep_s=3600.0, history=tmp_path).run()
    assert list(read_hours(tmp_path)) == first
    kept: dict[int, Counter[str]] = {}
    for _, minute, models in first:
        kept.setdefault(minute, Counter()).update(models)
    assert_exact(TablesReader(client), broker, kept)


def test_a_history_that_cannot_be_written_leaves_minutes_where_they_are(client: redis.Redis, tmp_path: Path) -> None:
    (tmp_path / "history").write_text("a file where the folder should be")
    broker = Broker()
    broker.add(*random_rows(15, 500, span_s=6 * 3600.0))
    Node(broker, client, keep_s=3600.0, history=tmp_path / "history").run()
    assert_exact(TablesReader(client), broker)


def test_a_user_is_forgotten_also_by_who_counts(client: redis.Redis) -> None:
    broker = Broker(2)
    broker.add(RequestMessage(START_S, "a", user="ann"), RequestMessage(START_S + 1.0, "b", user="bob"))
    broker.add(RequestMessage(START_S + 2.0, "c", user="ann"), to=1)
    node = Node(broker, client)
    node.run()
    reader = TablesReader(client)
    assert reader.recent("ann") == [(START_S, "a"), (START_S + 2.0, "c")]
    assert reader.followers() == {"a": [("c", 1)]}
    assert all(b"ann" not in field for p in (0, 1) for field in client.hgetall(key(p, "users")))
    assert reader.forget("ann")
    assert not reader.forget("ann")
    broker.add(RequestMessage(START_S + 3.0, "d", user="ann"), RequestMessage(START_S + 3.0, "d", user="bob"))
    node.run()
    assert reader.recent("ann") == [(START_S + 3.0, "d")]
    assert reader.recent("bob") == [(START_S + 1.0, "b"), (START_S + 3.0, "d")]
    assert_exact(reader, broker)


def test_users_and_models_are_bounded(client: redis.Redis) -> None:
    broker = Broker()
    broker.chunk = 9
    broker.add(*(RequestMessage(START_S + i, f"m{i % 30}", user=f"u{i % 50}") for i in range(500)))
    node = Node(broker, client, most_users=10, most_models=20)
    node.run(100)
    assert client.hlen(key(0, "users")) == 10
    assert client.hlen(key(0, "models")) == 20
    reader = TablesReader(client)
    assert [bool(reader.recent(f"u{u}")) for u in range(50)] == [False] * 40 + [True] * 10
    assert max(len(reader.recent(f"u{u}")) for u in range(50)) <= 8
    assert node.told("ingest_records_total", result="unlisted") == TablesReader(client).positions()[0]["unlisted"] > 0


def test_every_key_is_in_the_reference(client: redis.Redis) -> None:
    page = (Path(prefetcher.__file__).parent / "docs" / "tables.md").read_text()
    broker = Broker()
    broker.add(RequestMessage(START_S, "a", user="ann"))
    Node(broker, client).run()
    minute = int(START_S // 60)
    shown = {name.decode().replace("requests/0", "requests/P").replace(f"minute/{minute}", "minute/M") for name in client.scan_iter()}
    assert len(shown) == 7
    assert sorted(name for name in shown if f"`{name}`" not in page) == []
    assert sorted(name.decode() for name in client.hgetall(key(0, "position")) if f"`{name.decode()}`" not in page) == []

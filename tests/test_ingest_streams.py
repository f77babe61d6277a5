"""The ingest on the streams of one machine, a folder: counted on after a restart, dead letters in their own log."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from broker_kit import ApacheKafka
from ingest_kit import START_S
from kafka import KafkaAdminClient

from prefetcher.clock import SystemClock, VirtualClock
from prefetcher.ingest.ingest import Ingest, IngestOptions
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import DeadLetter, RequestMessage, encode
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer
from prefetcher_connectors.streams import FileStreams


def test_a_folder_of_streams_is_counted_on_after_a_restart(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    with connect(server.url) as client:
        for start in (0, 50):
            streams = FileStreams(tmp_path / "streams")
            streams.prepare()
            writer = streams.writer()
            rows = [("m", encode(RequestMessage(START_S + i, f"m{i % 3}"))) for i in range(start, start + 50)]
            writer.append(Topic.REQUESTS, [*rows, ("m", b'{"ts":1,"model":"m"}')])
            ingest = Ingest(streams, client, VirtualClock(START_S + 100.0), Metrics(), IngestOptions(idle_s=0.0))
            while ingest.step():
                pass
            ingest.close()
            reader = streams.reader([Topic.DEAD_LETTER], "probe", lambda partitions: {})
            letters = [msgspec.json.decode(value, type=DeadLetter) for chunk in reader.poll(10, 0.0) for value in chunk.values]
            reader.close()
            streams.close()
        position = TablesReader(client).positions()[0]
        assert (position["rows"], position["bad"]) == (100, 2)
        assert [letter.reason for letter in letters] == ["bad_time", "bad_time"]
        assert len({letter.offset for letter in letters}) == 2
    server.stop()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_topic_that_is_made_anew_with_fewer_partitions_is_all_that_counts(
    own_kafka: ApacheKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefetcher.ingest.ingest._GONE_S", 6.0)
    streams = KafkaStreams(KafkaOptions(own_kafka.address, prefix="anew", partitions=3, session_s=6.0))
    streams.prepare()
    rows = [(f"k{i}", encode(RequestMessage(START_S + i, f"m{i % 3}"))) for i in range(300)]
    writer = streams.writer()
    writer.append(Topic.REQUESTS, rows[:30], timeout_s=20.0)
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    admin = KafkaAdminClient(bootstrap_servers=own_kafka.address)
    with connect(server.url) as client:
        tables = TablesReader(client)
        metrics = Metrics()
        ingest = Ingest(streams, client, SystemClock(), metrics, IngestOptions(idle_s=0.1))

        def until_counted(rows: int, partitions: int) -> None:
            for _ in range(600):
                ingest.step()
                found = tables.positions()
                if (sum(int(p["rows"]) for p in found.values()), len(found)) == (rows, partitions):
                    return
            pytest.fail(f"{tables.positions()}")

        until_counted(30, 3)
        admin.delete_topics(["anew.requests"])
        for _ in range(600):
            ingest.step()
            if metrics.registry.get_sample_value("prefetcher_ingest_waits_total", {"reason": "streams_away"}):
                break
        admin.create_topics({"anew.requests": {"num_partitions": 1, "replication_factor": 1}})
        writer.close()
        writer = streams.writer()
        # Past every position of before.
        writer.append(Topic.REQUESTS, rows, timeout_s=20.0)
        until_counted(300, 1)
        assert tables.partitions() == [0]
        ingest.close()
    writer.close()
    admin.close()
    server.stop()

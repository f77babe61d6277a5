"""The ingest on the streams of one machine, a folder: counted on after a restart, dead letters in their own log."""

from __future__ import annotations

from pathlib import Path

import msgspec
from ingest_kit import START_S

from prefetcher.clock import VirtualClock
from prefetcher.ingest.ingest import Ingest, IngestOptions
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import DeadLetter, RequestMessage, encode
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

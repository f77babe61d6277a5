"""`prefetcher bench ingest-crash`: members of the ingest group are killed again and again while records come; then every cell is recounted.

Two members share six partitions on a real broker. Records (a few out of order, late, malformed or without meaning) are appended slice by
slice; somewhere in each slice one member, drawn by lot, gets SIGKILL and another is started. In the end all records are delivered once more
to one that begins at the oldest. Counted: cells of the tables and the history that differ from a recount of the topic, and dead letters
that are missing or stand for no bad record. The clock is the machine's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefetcher.bench.broker import bench_broker
from prefetcher.bench.ingest import PARTITIONS, say, topics, wait_until
from prefetcher.bench.ingest_member import Member
from prefetcher.bench.machine import describe_machine
from prefetcher.bench.recount import Recount, differences
from prefetcher.clock import SystemClock
from prefetcher.ingest.history import read_hours
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Streams, Topic
from prefetcher.wire import DeadLetter, RequestMessage, decode_request, encode
from prefetcher_connectors.redis import EmbeddedServer

__all__ = ["read_topic", "run"]

_MODELS = 200
_USERS = 500
_SPAN_S = 12 * 3600.0
#: Small batches: a kill falls into many different steps.
_BATCH = 250
_KEEP_S = 3600.0
#: The longest that a kill waits for its point in the records; partitions of the last one killed may be nobody's meanwhile.
_POINT_S = 20.0
_BAD_RATIO = 0.01
_BAD = (
    b"not json",
    b'{"ts":1700000000.5,"model":""}',
    b'{"model":"m"}',
    b"\xff\xfe",
    b'{"ts":1,"model":"m"}',
    b'{"ts":1e9,"model":"m","v":99}',
)
_clock = SystemClock()


def _slices(records: int, count: int, rng: np.random.Generator) -> Iterator[list[tuple[str, bytes]]]:
    base_s = _clock.now_s() - _SPAN_S
    ts = base_s + np.sort(rng.uniform(0.0, _SPAN_S, records))
    # Of ten rows one is up to nine minutes out of order; of a hundred, one up to two hours late.
    kind = rng.random(records)
    ts -= np.where(kind < 0.01, rng.uniform(700.0, 7200.0, records), np.where(kind < 0.11, rng.uniform(0.0, 540.0, records), 0.0))
    models = np.minimum(rng.zipf(1.3, records), _MODELS)
    users = rng.integers(0, _USERS, records)
    bad = rng.random(records) < _BAD_RATIO
    for part in np.array_split(np.arange(records), count):
        rows: list[tuple[str, bytes]] = []
        for i in part.tolist():
            model = f"model-{models[i]}"
            row = RequestMessage(float(ts[i]), model, user=f"user-{users[i]}")
            rows.append((model, _BAD[i % len(_BAD)] if bad[i] else encode(row)))
        yield rows


def read_topic(streams: Streams, topic: Topic, records: int, take: Callable[[int, int, bytes], None]) -> None:
    """Calls `take(partition, offset, value)` for the `records` records of a topic, from the oldest on."""
    reader = streams.reader([topic], "recount", lambda partitions: {})
    left, silent = records, 0
    while left > 0 and silent < 40:
        chunks = reader.poll(10_000, 0.5)
        silent = 0 if chunks else silent + 1
        for chunk in chunks:
            left -= len(chunk.offsets)
            for offset, value in zip(chunk.offsets, chunk.values, strict=True):
                take(chunk.partition.number, offset, value)
    reader.close()


def run(
    json_out: Path | None = None,
    progress: Callable[[str], None] | None = say,
    *,
    records: int = 200_000,
    kills: int = 30,
    seed: int = 0,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures and returns {"figures", "peers", "differences", "machine"}; `miscounted` is 0 when nothing was lost or counted twice.

    `json_out` gets the same as JSON. `quick`: small, for tests.

    Raises:
        UnavailableError: there is no broker that notices members that vanish, or the members do not get through.
    """
    if quick:
        records, kills = 10_000, 3
    tell = progress or (lambda _: None)
    rng = np.random.default_rng(seed)
    folder = Path(tempfile.mkdtemp(prefix="prefetcher-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        broker = stack.enter_context(bench_broker(folder, members=True))
        prefix, streams = stack.enter_context(topics(broker.address, broker.kind))
        server = EmbeddedServer(folder / "state")
        server.start()
        stack.callback(server.stop)
        reader = TablesReader(stack.enter_context(connect(server.url)))
        log, history = folder / "members.log", folder / "history"

        def member(**options: object) -> Member:
            common = {"brokers": broker.address, "prefix": prefix, "redis": server.url, "session_s": broker.session_s}
            return Member("ingest", log, **common, batch=_BATCH, keep_s=_KEEP_S, history=str(history), **options)

        def counted() -> float:
            return sum(p["rows"] + p["late"] + p["bad"] for p in reader.positions().values())

        members = [member(), member()]
        writer = streams.writer()
        slices = _slices(records, kills + 1, rng)
        written, at_points = 0, 0
        for number in range(kills):
            rows = next(slices)
            before = counted()
            wait_until(lambda: all(m.partitions for m in members), "both members have partitions")
            appending = threading.Thread(target=writer.append, args=(Topic.REQUESTS, rows), kwargs={"timeout_s": 60.0})
            appending.start()
            written += len(rows)
            point, until_s = before + rng.uniform(0.05, 0.9) * (written - before), _clock.steady_s() + _POINT_S
            while counted() < point and _clock.steady_s() < until_s:
                _clock.wait(threading.Event(), 0.002)
            _clock.wait(threading.Event(), float(rng.uniform(0.0, 0.02)))
            at_points += counted() < written
            which = int(rng.integers(2))
            members[which].kill()
            members[which] = member()
            appending.join()
            tell(f"kill {number + 1} of {kills}: {counted():,.0f} of {written:,} records were counted")
        rows = next(slices)
        writer.append(Topic.REQUESTS, rows, timeout_s=60.0)
        writer.close()
        written += len(rows)
        wait_until(lambda: counted() >= written, "all records are counted")
        survived = [m.end() for m in members]
        tell("delivering everything again")
        again = member(again=True)
        wait_until(lambda: again.figures.get("again", 0) >= written or not again.alive(), "everything was delivered again")
        once_more = again.end()
        return _judge(streams, reader, history, written, kills, at_points, survived, once_more, json_out)


def _judge(
    streams: Streams,
    reader: TablesReader,
    history: Path,
    written: int,
    kills: int,
    at_points: int,
    survived: list[dict[str, float]],
    once_more: dict[str, float],
    json_out: Path | None,
) -> dict[str, Any]:
    values: list[list[tuple[int, bytes]]] = [[] for _ in range(PARTITIONS)]
    read_topic(streams, Topic.REQUESTS, written, lambda partition, offset, value: values[partition].append((offset, value)))
    counts, bad = [Recount() for _ in values], set()
    for number, (count, found) in enumerate(zip(counts, values, strict=True)):
        count.take(value for _, value in found)
        bad |= {(number, offset) for offset, value in found if not _good(value)}
    wrong = differences(reader, counts, ((minute, rows) for _, minute, rows in read_hours(history)))
    for number, position in reader.positions().items():
        expected = sum(partition == number for partition, _ in bad)
        if position["bad"] != expected:
            wrong.append(f"partition {number}: {position['bad']} bad, expected {expected}")
    letters: list[tuple[int, int]] = []

    def take(_partition: int, _offset: int, value: bytes) -> None:
        letter = msgspec.json.decode(value, type=DeadLetter)
        letters.append((letter.partition, letter.offset))

    read_topic(streams, Topic.DEAD_LETTER, 1 << 40, take)
    report = {
        "figures": {
            "miscounted": len(wrong) + len(bad ^ set(letters)),
            "kills": kills,
            "kills_with_records_waiting": at_points,
            "records": written,
            "read_back": sum(map(len, values)),
            "bad_records": len(bad),
            "dead_letters": len(letters),
            "repeated_dead_letters": len(letters) - len(set(letters)),
            "delivered_again": int(once_more.get("again", 0)),
            "reloads_of_survivors": int(sum(f.get("reloads", 0) for f in survived)),
        },
        "peers": {},
        "differences": wrong[:20],
        "machine": describe_machine(),
    }
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _good(value: bytes) -> bool:
    try:
        decode_request(value)
    except ValueError:
        return False
    return True

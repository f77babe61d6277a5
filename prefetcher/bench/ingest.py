"""`prefetcher bench ingest`: requests a second into exact tables, over a loop that only polls and decodes the same records.

One topic on a real broker on this machine, six partitions, written before. Every measured process has its partitions before the clock
starts, and all run alone, in turn. Ratios are of runs of one round. The clock is the machine's: this measures the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from prefetcher.bench.broker import bench_broker
from prefetcher.bench.ingest_member import Member
from prefetcher.bench.machine import describe_machine
from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Topic
from prefetcher.wire import RequestMessage, encode
from prefetcher_connectors.kafka import KafkaOptions, KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer

__all__ = ["PARTITIONS", "run", "say", "synthetic_rows", "topics", "wait_until"]

PARTITIONS = 6
_RECORD_BYTES = 300
_MODELS = 500
_USERS = 5_000
_SPAN_S = 7_200.0
_BATCH = 10_000
_PATIENCE_S = 240.0
_clock = SystemClock()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wait_until(true: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S, look_s: float = 0.02) -> None:
    """Raises UnavailableError when it does not become so in time."""
    end_s = _clock.steady_s() + timeout_s
    while not true():
        if _clock.steady_s() > end_s:
            raise UnavailableError(f"after {timeout_s:.0f} s, still not: {what}; the logs of the members say more")
        _clock.wait(threading.Event(), look_s)


@contextlib.contextmanager
def topics(brokers: str, kind: str) -> Iterator[tuple[str, KafkaStreams]]:
    """Topics of a run's own: their prefix, and the streams; removed again at a broker that somebody named."""
    from kafka import KafkaAdminClient

    prefix = f"bench-{os.getpid()}-{os.urandom(3).hex()}"
    streams = KafkaStreams(KafkaOptions(brokers, prefix, partitions=PARTITIONS))
    streams.prepare()
    try:
        yield prefix, streams
    finally:
        if kind == "named":
            admin = KafkaAdminClient(bootstrap_servers=brokers.split(","))
            admin.delete_topics([f"{prefix}.{topic}" for topic in Topic])
            admin.close()


def synthetic_rows(
    count: int, seed: int = 0, size: int = _RECORD_BYTES, span_s: float = _SPAN_S
) -> Iterator[tuple[str, bytes]]:
    """(model, record of `size` bytes): Zipf's law over models, in the last `span_s` seconds."""
    rng = np.random.default_rng(seed)
    ts = _clock.now_s() - span_s + np.sort(rng.uniform(0.0, span_s, count))
    models = np.minimum(rng.zipf(1.3, count), _MODELS)
    users = rng.integers(0, _USERS, count)
    for t, m, u in zip(ts.tolist(), models.tolist(), users.tolist(), strict=True):
        row = RequestMessage(
            round(t, 3), f"model-{m:04d}", user=f"user-{u:06d}", node=f"node-{m % 8}", request_id=f"{u:012x}{m:012x}{t:.3f}"
        )
        value = encode(row)[:-1] + b',"path":"'
        yield row.model, value + b"x" * (size - len(value) - 2) + b'"}'


def run(
    json_out: Path | None = None,
    progress: Callable[[str], None] | None = say,
    *,
    records: int = 400_000,
    rounds: int = 3,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures and returns {"figures", "peers", "method", "machine"}; `ratio_over_bare` and `scale_3` are medians of paired runs.

    `json_out` gets the same as JSON. `quick`: small, for tests.

    Raises:
        UnavailableError: there is no broker, or a process does not do its work in time.
    """
    if quick:
        records, rounds = 20_000, 1
    tell = progress or (lambda _: None)
    folder = Path(tempfile.mkdtemp(prefix="prefetcher-bench-"))
    took: dict[str, list[float]] = {"bare": [], "ours": [], "ours_3": []}
    cpu: dict[str, list[float]] = {name: [] for name in took}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        broker = stack.enter_context(bench_broker(folder))
        prefix, streams = stack.enter_context(topics(broker.address, broker.kind))
        tell(f"writing {records:,} records of {_RECORD_BYTES} bytes to {broker.address} ({broker.kind})")
        _write(streams, records)
        server = EmbeddedServer(folder / "state")
        server.start()
        stack.callback(server.stop)
        log = folder / "members.log"
        common = {"brokers": broker.address, "prefix": prefix, "batch": _BATCH}
        for number in range(rounds):
            order = [("bare", 0), ("ours", 1), ("ours_3", 3)]
            for name, members in order if number % 2 == 0 else reversed(order):
                if members:
                    seconds, cpu_s = _run_ours(log, server.url, records, members, common)
                else:
                    seconds, cpu_s = _run_bare(log, records, common)
                took[name].append(seconds)
                cpu[name].append(cpu_s)
            tell(f"round {number + 1}: " + ", ".join(f"{name} {records / seconds[-1]:,.0f}/s" for name, seconds in took.items()))
    report = _report(took, cpu, records, rounds, broker.kind)
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _write(streams: KafkaStreams, records: int) -> None:
    writer = streams.writer()
    rows: list[tuple[str, bytes]] = []
    for row in synthetic_rows(records):
        rows.append(row)
        if len(rows) == 10_000:
            writer.append(Topic.REQUESTS, rows, timeout_s=60.0)
            rows.clear()
    writer.append(Topic.REQUESTS, rows, timeout_s=60.0)
    writer.close()


def _run_bare(log: Path, records: int, common: dict[str, Any]) -> tuple[float, float]:
    member = Member("bare", log, records=records, **common)
    wait_until(lambda: member.partitions == PARTITIONS or not member.alive(), "the bare loop has its partitions")
    member.go()
    wait_until(lambda: bool(member.figures) or not member.alive(), "the bare loop is through")
    figures = member.end()
    if "seconds" not in figures:
        raise UnavailableError(f"the bare loop died: {log.read_text()[-300:]}")
    return figures["seconds"], figures["cpu_s"]


def _run_ours(log: Path, redis_url: str, records: int, count: int, common: dict[str, Any]) -> tuple[float, float]:
    with connect(redis_url) as client:
        client.flushall()
        reader = TablesReader(client)
        members = [Member("ingest", log, hold=True, redis=redis_url, **common) for _ in range(count)]
        try:
            wait_until(
                lambda: sorted(m.partitions for m in members) == [PARTITIONS // count] * count or not all(m.alive() for m in members),
                "all members have their partitions",
            )
            start_s = _clock.steady_s()
            for member in members:
                member.go()
            wait_until(lambda: sum(p["rows"] for p in reader.positions().values()) >= records, "all records are counted")
            seconds = _clock.steady_s() - start_s
        finally:
            figures = [member.end() for member in members]
        return seconds, sum(f["cpu_s"] for f in figures)


def _report(took: dict[str, list[float]], cpu: dict[str, list[float]], records: int, rounds: int, kind: str) -> dict[str, Any]:
    rates = {name: [records / seconds for seconds in all_s] for name, all_s in took.items()}
    ratios = [ours / bare for ours, bare in zip(rates["ours"], rates["bare"], strict=True)]
    scales = [three / one for three, one in zip(rates["ours_3"], rates["ours"], strict=True)]
    per_record_us = {name: round(statistics.median(seconds) / records * 1e6, 2) for name, seconds in cpu.items()}
    return {
        "figures": {
            "ratio_over_bare": round(statistics.median(ratios), 3),
            "worst_ratio_over_bare": round(min(ratios), 3),
            "scale_3": round(statistics.median(scales), 3),
            "records_per_s": round(statistics.median(rates["ours"])),
            "records_per_s_3": round(statistics.median(rates["ours_3"])),
            "cpu_us_per_record": per_record_us["ours"],
            "records": records,
            "rounds": rounds,
        },
        "peers": {"bare": {"records_per_s": round(statistics.median(rates["bare"])), "cpu_us_per_record": per_record_us["bare"]}},
        "method": {
            "bare": "kafka-python poll and one msgspec decoder call a record, all six partitions, nothing kept",
            "records": f"{_RECORD_BYTES} bytes, {_MODELS} models by Zipf's law, {_USERS} users, two hours",
            "clock": "from the word to read, with all partitions assigned, until everything is counted in Redis",
            "broker": kind,
        },
        "machine": describe_machine(),
    }

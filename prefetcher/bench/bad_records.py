"""`prefetcher bench bad-records`: malformed, oversized, future and half-encoded records among good ones, on a real broker.

Counted: good records that were counted, over all good ones; bad records with a dead letter of their own, over all bad ones; and how much
the ingest's memory grows, the peak of the last half of the records over the peak of the first tenth. The clock is the machine's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prefetcher.bench.broker import bench_broker
from prefetcher.bench.ingest import PARTITIONS, say, synthetic_rows, topics, wait_until
from prefetcher.bench.ingest_crash import read_topic
from prefetcher.bench.ingest_member import Member
from prefetcher.bench.machine import describe_machine
from prefetcher.clock import SystemClock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader, connect
from prefetcher.ports import Topic
from prefetcher.wire import DeadLetter
from prefetcher_connectors.kafka import KafkaStreams
from prefetcher_connectors.redis import EmbeddedServer

__all__ = ["run"]

#: One good record for this many bad ones; one of these many bad ones is oversized, which are a megabyte each.
_BAD_PER_GOOD = 9
_OVERSIZED_EVERY = 10_000
_OVERSIZED_BYTES = 1_010_000
#: A day of good records: minutes of an hour that is not over are in memory, and every tenth of the records is to end some hours.
_SPAN_S = 72_000.0
_SLICE = 5_000
_clock = SystemClock()


def _bad_values(now_s: float) -> list[bytes]:
    """One of each kind that is small."""
    good = b'{"ts":%.1f,"model":"m"' % (now_s - 60.0)
    return [
        b"",
        b"GET / HTTP/1.1",
        good,
        good + b',"user":"half \xc3"}',
        b"[" * 2_000,
        b'{"ts":"yesterday","model":"m"}',
        b'{"ts":%.1f,"model":7}' % now_s,
        b'{"ts":%.1f,"model":""}' % now_s,
        b'{"ts":%.1f,"model":"m","count":-1}' % now_s,
        b'{"ts":%.1f,"model":"m","v":99}' % now_s,
        b'{"ts":%.1f,"model":"m"}' % (now_s * 1000.0),
        b'{"ts":%.1f,"model":"m"}' % (now_s + 86_400.0),
        b'{"ts":12.5,"model":"m"}',
        b'{"ts":%.1f,"model":"%s"}' % (now_s, b"x" * 600),
        good + b"}" + b"\x00" * 50,
        "\ufeff".encode() + good + b"}",
    ]


def _records(bad: int, oversized_every: int, seed: int) -> Iterator[tuple[str, bytes, bool]]:
    """(key, value, whether it is good), in an order drawn by lot."""
    rng = np.random.default_rng(seed)
    values = _bad_values(_clock.now_s())
    good = synthetic_rows(bad // _BAD_PER_GOOD, seed, span_s=_SPAN_S)
    kinds = rng.integers(0, len(values), bad)
    for i, kind in enumerate(kinds.tolist()):
        oversized = i % oversized_every == oversized_every // 20
        yield f"bad-{i % 64}", b'{"ts":1,"model":"' + b"x" * _OVERSIZED_BYTES + b'"}' if oversized else values[kind], False
        if i % _BAD_PER_GOOD == 0:
            row = next(good, None)
            if row is not None:
                yield row[0], row[1], True


def run(
    json_out: Path | None = None,
    progress: Callable[[str], None] | None = say,
    *,
    bad: int = 1_000_000,
    seed: int = 0,
    quick: bool = False,
) -> dict[str, Any]:
    """Measures and returns {"figures", "reasons", "peers", "machine"}: `good_ratio` and `dead_letter_ratio` are 1 when nothing was lost.

    `json_out` gets the same as JSON. `quick`: small, for tests.

    Raises:
        UnavailableError: there is no broker, or the ingest does not get through.
    """
    oversized_every = _OVERSIZED_EVERY
    if quick:
        bad, oversized_every = 5_000, 1_000
    tell = progress or (lambda _: None)
    folder = Path(tempfile.mkdtemp(prefix="prefetcher-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        broker = stack.enter_context(bench_broker(folder))
        prefix, streams = stack.enter_context(topics(broker.address, broker.kind))
        server = EmbeddedServer(folder / "state")
        server.start()
        stack.callback(server.stop)
        reader = TablesReader(stack.enter_context(connect(server.url)))
        tell(f"writing {bad:,} bad records among {bad // _BAD_PER_GOOD:,} good ones to {broker.address} ({broker.kind})")
        good = _write(streams, bad, oversized_every, seed)
        member = Member("ingest", folder / "members.log", hold=True, brokers=broker.address, prefix=prefix, redis=server.url)
        wait_until(lambda: member.partitions == PARTITIONS or not member.alive(), "the member has all partitions")
        start_s = _clock.steady_s()
        member.go()
        looks: list[tuple[float, int]] = []

        def through() -> bool:
            done = sum(p["rows"] + p["late"] + p["bad"] for p in reader.positions().values()) / (good + bad)
            looks.append((done, member.rss_bytes()))
            if len(looks) % 100 == 0:
                tell(f"{done:.0%} taken in, {looks[-1][1] / 1e6:.0f} MB")
            return done >= 1.0 or not member.alive()

        wait_until(through, "all records are taken in", timeout_s=60.0 + bad / 2_000.0, look_s=0.05)
        seconds = _clock.steady_s() - start_s
        if not member.alive():
            raise UnavailableError(f"the ingest died: {(folder / 'members.log').read_text()[-300:]}")
        member.end()
        rows = sum(p["rows"] for p in reader.positions().values())
        letters, reasons, told = set(), Counter[str](), 0

        def take(_partition: int, _offset: int, value: bytes) -> None:
            nonlocal told
            letter = msgspec.json.decode(value, type=DeadLetter)
            told += 1
            if (letter.topic, letter.partition, letter.offset) not in letters:
                letters.add((letter.topic, letter.partition, letter.offset))
                reasons[letter.reason] += 1

        tell("reading the dead letters")
        read_topic(streams, Topic.DEAD_LETTER, bad, take)
    first = max((rss for done, rss in looks if done <= 0.1), default=looks[0][1])
    last = max(rss for done, rss in looks if done >= 0.5)
    report = {
        "figures": {
            "good_ratio": rows / good,
            "dead_letter_ratio": len(letters) / bad,
            "rss_growth_ratio": round(last / first, 3),
            "rss_first_tenth_bytes": first,
            "rss_last_half_bytes": last,
            "bad_records": bad,
            "good_records": good,
            "dead_letters": told,
            "records_per_s": round((good + bad) / seconds),
        },
        "reasons": dict(sorted(reasons.items())),
        "peers": {},
        "machine": describe_machine(),
    }
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _write(streams: KafkaStreams, bad: int, oversized_every: int, seed: int) -> int:
    """Appends all records; returns how many of them are good."""
    writer = streams.writer()
    rows: list[tuple[str, bytes]] = []
    good = size = 0
    for key, value, is_good in _records(bad, oversized_every, seed):
        rows.append((key, value))
        good += is_good
        size += len(value)
        if len(rows) == _SLICE or size > 8_000_000:
            writer.append(Topic.REQUESTS, rows, timeout_s=60.0)
            rows.clear()
            size = 0
    writer.append(Topic.REQUESTS, rows, timeout_s=60.0)
    writer.close()
    return good

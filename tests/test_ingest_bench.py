"""The ingest's benchmarks, small, on a real broker: what they count must come out even."""

from __future__ import annotations

import os
import shutil

import pytest

from prefetcher.bench import bad_records, ingest, ingest_crash

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (os.environ.get("PREFETCHER_BENCH_KAFKA") or (os.environ.get("KAFKA_HOME") and shutil.which("java"))),
        reason="needs a broker: PREFETCHER_BENCH_KAFKA=host:9092, or KAFKA_HOME and java",
    ),
]


def test_ingest_counts_everything() -> None:
    figures = ingest.run(progress=None, quick=True)["figures"]
    assert figures["records"] == 20_000
    assert figures["ratio_over_bare"] > 0
    assert figures["scale_3"] > 0


def test_kills_change_nothing() -> None:
    report = ingest_crash.run(progress=None, quick=True)
    assert report["differences"] == []
    assert report["figures"]["miscounted"] == 0
    assert report["figures"]["read_back"] == report["figures"]["records"] == report["figures"]["delivered_again"]


def test_every_bad_record_has_a_dead_letter() -> None:
    figures = bad_records.run(progress=None, quick=True)["figures"]
    assert (figures["good_ratio"], figures["dead_letter_ratio"]) == (1.0, 1.0)

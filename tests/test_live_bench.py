"""The benchmarks of roles that run apart, small, on a real broker: what they count must come out even; their times are the machine's."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator

import pytest

from prefetcher.bench import hint, outage

pytestmark = [
    pytest.mark.slow,
    # Sockets of the broker's client that were refused are left to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(not (os.environ.get("KAFKA_HOME") and shutil.which("java")), reason="needs a broker that may be killed: KAFKA_HOME"),
]


@pytest.fixture(autouse=True)
def collect() -> Iterator[None]:
    yield
    gc.collect()


def test_hints_for_absent_models_are_loaded() -> None:
    figures = hint.run(progress=None, quick=True)["figures"]
    assert figures["statuses"].keys() == {"202"}
    assert figures["absent_models_hinted"] >= 8
    # A machine that is busy with other work may begin a load after the bench has stopped looking.
    assert figures["not_loaded"] < figures["absent_models_hinted"]


def test_nothing_that_was_acknowledged_is_lost() -> None:
    figures = outage.run(progress=None, quick=True)["figures"]
    assert (figures["lost_acknowledged"], figures["miscounted"], figures["other_answers"]) == (0, 0, 0)
    assert figures["caught_up"]
    assert figures["roles_that_ended"] == []
    assert figures["rows_taken"] > 0
    assert figures["hints_taken"] > 0

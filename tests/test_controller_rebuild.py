"""Ledgers from the outcomes topic: the highest number counts, and what is no order or no totals is counted as unread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefetcher.app import open_streams
from prefetcher.config import Settings, StateSettings
from prefetcher.controller.rebuild import rebuild_ledgers
from prefetcher.controller.records import OrderRecord
from prefetcher.errors import UsageError
from prefetcher.ledger_view import rebuilt
from prefetcher.ports import Topic
from prefetcher.wire import MOST_VERSION, OutcomeMessage, decode_outcome, encode
from prefetcher_connectors.memory import MemoryStreams

TOTALS = {"rows": 12, "cold_starts": 2, "cold_seconds": 3.5, "outcomes": {"timely": 1}, "accuracy": None, "idle_byte_seconds": 1.2e12}


def order(decision_id: str = "d", outcome: str = "timely", **more: Any) -> dict[str, Any]:
    made = OrderRecord(decision_id, "n", "m", "v", "host", "forecast", "treated", 1e9, outcome=outcome, **more)
    built: dict[str, Any] = msgspec.to_builtins(made)
    return built


def message(kind: str, seq: int, **more: Any) -> bytes:
    return encode(OutcomeMessage(kind, "n", 1e9 + seq, seq, **more))


def topic_of(*values: bytes) -> MemoryStreams:
    streams = MemoryStreams()
    streams.writer().append(Topic.OUTCOMES, [("n", value) for value in values], timeout_s=1.0)
    return streams


def test_the_highest_number_counts_also_twice_and_out_of_order() -> None:
    values = [
        message("order", 1, order=order(outcome="open")),
        message("order", 3, order=order(outcome="late")),
        message("order", 2, order=order(outcome="timely")),
        message("order", 4, order=order("e")),
        message("order", 4, order=order("f") | {"cause": "manual"}),
        message("totals", 6, totals=TOTALS | {"rows": 20}),
        message("totals", 5, totals=TOTALS),
    ]
    ledgers, unread = rebuild_ledgers(topic_of(*values, *values))
    assert unread == 0
    assert ledgers["n"].outcomes() == {"late": 1, "timely": 1}
    assert (ledgers["n"].totals["rows"], ledgers["n"].told_at_s) == (20, 1e9 + 6)


BAD = [
    message("totals", 9, totals={"rows": "many"}),
    message("totals", 9, totals={"rows": None}),
    message("totals", 9, totals={"rows": 10**400}),
    message("totals", 9, totals={"rows": True}),
    message("totals", 9, totals={"rows": 1, "outcomes": {"timely": "x"}}),
    message("totals", 9, totals={"rows": 1, "more": [1]}),
    message("totals", 9),
    message("order", 9),
    message("order", 9, order={"decision_id": "x"}),
    message("order", 9, order=order("")),
    message("order", 9, order=order("x") | {"outcome": 5}),
    message("order", 9, totals=TOTALS),
    message("surprise", 9, order=order("x"), totals=TOTALS),
    message("totals", 9, totals={"rows": 99}, v=MOST_VERSION + 1),
    message("order", 9, order=order("x"), v=MOST_VERSION + 1),
    b'{"kind":"totals","node":"n","ts":1e9,"seq":9,"totals":{"a":' + b'{"a":' * 990 + b"[]" + b"}" * 992,
    b"{",
    b"\xff",
]


def test_what_is_no_order_and_no_totals_is_counted_as_unread() -> None:
    good = [message("order", 1, order=order()), message("totals", 2, totals=TOTALS)]
    expected, unread = rebuild_ledgers(topic_of(*good))
    assert unread == 0
    found, unread = rebuild_ledgers(topic_of(*BAD[:8], *good, *BAD[8:]))
    assert unread == len(BAD)
    assert found == expected
    assert rebuild_ledgers(topic_of(*BAD)) == ({}, len(BAD))


def test_a_newer_outcome_is_refused_and_an_older_one_with_more_fields_is_read() -> None:
    with pytest.raises(ValueError, match=r"^too_new"):
        decode_outcome(message("totals", 1, totals={}, v=MOST_VERSION + 1))
    assert decode_outcome(message("totals", 1, totals={})[:-1] + b',"more":1}').seq == 1


def test_what_the_command_prints(tmp_path: Path) -> None:
    settings = Settings(state=StateSettings(dir=tmp_path))
    with pytest.raises(UsageError, match="has no outcomes"):
        rebuilt(settings, as_json=False)
    assert not list(tmp_path.iterdir())

    def append(*values: bytes) -> None:
        streams = open_streams(settings)
        streams.prepare()
        writer = streams.writer()
        writer.append(Topic.OUTCOMES, [("n", value) for value in values], timeout_s=10.0)
        writer.close()
        streams.close()

    append()
    assert "empty" in rebuilt(settings, as_json=False)
    append(BAD[0])
    assert rebuilt(settings, as_json=False) == "none of 1 records could be read"
    append(*BAD, message("totals", 2, totals=TOTALS), message("order", 1, order=order()))
    text = rebuilt(settings, as_json=False)
    assert "1 timely" in text
    assert f"{len(BAD) + 1} records could not be read" in text
    shown = msgspec.json.decode(rebuilt(settings, as_json=True))
    assert shown["unread"] == len(BAD) + 1
    assert shown["nodes"]["n"] == {"told_at_s": 1e9 + 2, "totals": TOTALS, "orders": 1, "outcomes": {"timely": 1}}

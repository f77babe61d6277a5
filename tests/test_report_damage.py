"""Reports over what somebody else wrote: a record that is none costs its node's figures and nobody else's; times are bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefetcher.clock import SystemClock
from prefetcher.config import ReportSettings, Settings, StateSettings
from prefetcher.controller import records
from prefetcher.core.held import HeldEntry, by_hour, provisional
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey
from prefetcher.core.types import Arm, Cause, ModelName, ModelVersion, NodeName
from prefetcher.errors import UsageError
from prefetcher.report.command import Asked, rebuilt
from prefetcher.report.desk import ReportDesk, time_of
from prefetcher.report.history import copy_hours
from prefetcher.report.reading import read_nodes
from prefetcher.report.sums import LedgerPart, NodeSums, StoredLedger, decode_ledger, encode_hour
from prefetcher_connectors.memory import MemoryState

HOUR = 490_000
NOW_S = HOUR * HOUR_S + 1800.0
KEY = TotalsKey(ModelName("a"), Cause.DEMAND, Arm.TREATED, HOUR)
ENTRY = HeldEntry(ModelName("a"), ModelVersion("1"), "host", Cause.DEMAND, Arm.TREATED, 1000, NOW_S - 60.0)
GOOD = StoredLedger(NOW_S, NOW_S - 100.0, 5, [ENTRY], {}, [(HOUR, 0, HOUR)])


def _with(**changes: Any) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(GOOD, **changes))


def _held(**changes: Any) -> bytes:
    return _with(held=[msgspec.structs.replace(ENTRY, **changes)])


DAMAGED = {
    "text": b"junk",
    "no parts": _with(seq=-1, hours=[], held=[]),
    "late": _with(at_s=1e300),
    "early": _with(at_s=-1e300, since_s=-1e300),
    "since": _with(since_s=1e300),
    "an hour far ahead": _with(hours=[(10**15, 0, 0)]),
    "an hour far back": _with(hours=[(-(10**15), 0, 0)]),
    "held for ever": _held(start_s=-1e12),
    "held since a float has no hours": _with(at_s=1e18, held=[msgspec.structs.replace(ENTRY, start_s=1e17)]),
    "held for decades": _held(start_s=5.0),
    "less than nothing": _held(bytes=-1),
    "a newer format": _with(format=99),
    "nested": b"[" * 200_000,
}


def _state(raw: bytes) -> MemoryState:
    state = MemoryState()
    good, other = NodeName("good"), NodeName("other")
    for node in (good, other):
        state.see(records.NODES, node, NOW_S)
        state.write({records.hour_key(node, HOUR, 0): encode_hour([(KEY, Totals(rows=3, wait_s=1.5))])})
    state.write({records.node_key(good, "sums"): _with(), records.node_key(other, "sums"): raw})
    return state


@pytest.mark.parametrize("name", DAMAGED)
def test_a_node_whose_record_is_none_is_missing_and_the_others_are_told(name: str) -> None:
    found = read_nodes(_state(DAMAGED[name]), None, None, NOW_S)
    assert [each.node for each in found.nodes] == ["good"]
    assert [m.node for m in found.missing if "can't be read" in m.reason] == ["other"]
    report = ReportDesk(_state(DAMAGED[name]), SystemClock(), ReportSettings()).report("0")
    assert report.total.requests == 3


@pytest.mark.parametrize("name", DAMAGED)
def test_a_node_whose_record_is_none_keeps_no_other_from_the_history(name: str, tmp_path: Path) -> None:
    assert copy_hours(_state(DAMAGED[name]), tmp_path, NOW_S + 24 * HOUR_S) == 1


def test_hours_that_are_listed_twice_count_once_and_sums_of_another_hour_not() -> None:
    state = _state(_with(hours=[(HOUR, 0, HOUR)] * 3))
    other = NodeName("other")
    assert [sum(t.rows for t in each.by_key().values()) for each in read_nodes(state, None, None, NOW_S).nodes] == [3, 3]
    state.write({records.hour_key(other, HOUR, 0): encode_hour([(KEY._replace(hour=10**15), Totals(rows=9))])})
    found = read_nodes(state, None, None, NOW_S)
    assert [sum(t.rows for t in each.by_key().values()) for each in found.nodes] == [3, 0]
    assert [m.node for m in found.missing if "neither in the store" in m.reason] == ["other"]


def test_a_part_of_times_that_cannot_be_is_refused_and_changes_nothing() -> None:
    sums = NodeSums("n")
    for part in (LedgerPart(1e300, 0.0), LedgerPart(NOW_S, 0.0, held=[msgspec.structs.replace(ENTRY, start_s=-1e15)])):
        with pytest.raises(ValueError, match=r"1970|held since"):
            sums.take(1, part)
    assert sums == NodeSums("n")
    assert decode_ledger(_with()) == GOOD


def test_memory_of_some_hours_is_the_same_as_of_all() -> None:
    entry = msgspec.structs.replace(ENTRY, start_s=NOW_S - 5 * HOUR_S, last_use_s=NOW_S - 3 * HOUR_S)
    everything = provisional([entry], NOW_S)
    some = range(HOUR - 3, HOUR)
    assert provisional([entry], NOW_S, some) == {key: totals for key, totals in everything.items() if key.hour in some}
    assert list(by_hour(0.0, 1e11, range(5, 7))) == [(5, 3600.0), (6, 3600.0)]


@pytest.mark.parametrize("span", ["9" * 400 + "w", "9" * 30 + "w", "9999999h"])
def test_a_span_from_before_1970_is_from_the_beginning(span: str) -> None:
    assert time_of(span, NOW_S, "since") == 0.0
    desk = ReportDesk(_state(_with()), SystemClock(), ReportSettings())
    assert desk.report(span).total.requests == 6
    with pytest.raises(UsageError, match="must lie before until"):
        desk.report("1h", span)


def test_a_folder_without_streams_is_said_and_left_alone(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    with pytest.raises(UsageError, match="holds no outcomes"):
        rebuilt(Settings(state=StateSettings(dir=missing)), Asked("24h", None, None, 10))
    assert not missing.exists()

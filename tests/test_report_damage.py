"""Reports over what somebody else wrote: a record that is none costs its node's figures and nobody else's; times are bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefetcher import ledger_view
from prefetcher.clock import SystemClock
from prefetcher.config import ReportSettings, Settings, StateSettings
from prefetcher.controller import records
from prefetcher.core.facts import Found
from prefetcher.core.held import HeldEntry, by_hour, provisional
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey
from prefetcher.core.types import Arm, Cause, ModelName, ModelVersion, NodeName
from prefetcher.errors import UsageError
from prefetcher.report.build import Besides, Question, build_report
from prefetcher.report.command import Asked, rebuilt
from prefetcher.report.desk import ReportDesk, time_of
from prefetcher.report.history import copy_hours
from prefetcher.report.messages import IdlePin, MissingNode
from prefetcher.report.reading import read_nodes
from prefetcher.report.sums import LedgerPart, NodeSums, StoredLedger, decode_ledger, encode_hour
from prefetcher.report.terminal import idle_line, shown
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
    given = Settings(state=StateSettings(dir=missing))
    with pytest.raises(UsageError, match="has no outcomes"):
        rebuilt(given, Asked("24h", None, None, 10))
    with pytest.raises(UsageError, match="has no outcomes"):
        ledger_view.rebuilt(given, as_json=False)
    assert not missing.exists()


def test_names_are_no_markup_and_no_codes_for_a_terminal() -> None:
    sums = NodeSums("[/n]", NOW_S, NOW_S, 1)
    names = ("[/x]", "[red]t\x1b[2J", ":smile:", "a\nb")
    for tenant in names:
        sums.sums[0, KEY._replace(tenant=tenant, model=ModelName(tenant))] = Totals(rows=1, stage_s={"read": 1.0}, stage_bins={"read:3": 1})
    missing = Besides(missing=[MissingNode("[/gone]\x1b[2J", "it is away")])
    for by in ("tenant", "node", "stage"):
        said = shown(build_report([sums], Question(NOW_S, by=by), missing))
        assert "[/gone]\\x1b[2J" in said
        assert "\x1b" not in said
    for name in ("[/x]", "[red]t", ":smile:", "a\\nb"):
        assert name in shown(build_report([sums], Question(NOW_S, by="tenant")))
    pin = IdlePin("a b", "n", "pin", 10**9, 0.0, 0.1, 1.0, 1.0, 0.0)
    assert "unpin 'a b'`" in idle_line(pin, 9.0)


def test_stages_are_told_of_so_many_models_on_nodes_those_that_loaded_longest_first() -> None:
    nodes = []
    for node in range(3):
        sums = NodeSums(f"n{node}", NOW_S, NOW_S, 1)
        for model in range(4):
            took = Totals(stage_s={"read": float(10 * node + model)}, stage_bins={"read:3": 1})
            sums.sums[0, KEY._replace(model=ModelName(f"m{model}"))] = took
        nodes.append(sums)
    report = build_report(nodes, Question(NOW_S, by="stage", most=3))
    assert {(s.node, s.model) for s in report.stages} == {("n2", "m3"), ("n2", "m2"), ("n2", "m1")}
    assert report.groups_in_all == 12
    assert "and 9 more" in shown(report)
    everything = build_report(nodes, Question(NOW_S, by="stage"))
    assert len(everything.stages) == 12 * 5
    assert [s for s in everything.stages if s in report.stages] == list(report.stages)


def test_coverage_of_nodes_and_hours_is_that_of_their_own_shadows() -> None:
    nodes, shadow_s = [], {}
    for number in range(2):
        sums = NodeSums(f"n{number}", NOW_S, NOW_S, 1)
        for hour in (HOUR - 1, HOUR):
            sums.sums[0, KEY._replace(hour=hour)] = Totals(rows=2, wait_s=1.0 + number)
        nodes.append(sums)
        shadow_s[f"n{number}"] = {HOUR: 4.0}
    besides = Besides(shadow_s=shadow_s)
    by_node = build_report(nodes, Question(NOW_S, by="node"), besides).groups
    assert {g.name: (g.figures.shadow_requests, g.figures.coverage) for g in by_node} == {"n0": (2, 0.75), "n1": (2, 0.5)}
    by_hour_ = build_report(nodes, Question(NOW_S, by="hour"), besides).groups
    assert [(g.figures.shadow_requests, g.figures.coverage) for g in by_hour_] == [(0, None), (4, 1.0 - 3.0 / 8.0)]
    assert {g.figures.coverage for g in build_report(nodes, Question(NOW_S, by="model"), besides).groups} == {None}


def test_of_many_nodes_that_are_missing_the_first_are_named() -> None:
    gone = Besides(missing=[MissingNode(f"pod-{k}", "it is away") for k in range(25)])
    lines = [line for line in shown(build_report([], Question(NOW_S), gone)).splitlines() if line.startswith("missing")]
    assert (len(lines), lines[-1]) == (21, "missing: and of 5 more: --json names them")


def test_what_requests_found_is_no_number_by_tier() -> None:
    sums = NodeSums("n", NOW_S, NOW_S, 1)
    sums.sums[0, KEY] = Totals(rows=2, found={Found.ABSENT: 2}, served={"disk": 2}, served_wait_s={"disk": 1.0})
    (row,) = [line for line in shown(build_report([sums], Question(NOW_S, by="tier"))).splitlines() if line.startswith("│ disk")]
    assert [cell.strip() for cell in row.split("│")[1:5]] == ["disk", "2", "-", "1.0"]

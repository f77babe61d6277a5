"""The report of a running process, whose agent is killed: the topic alone gives what the store shows, to the last digit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from up_kit import Up
from waiting import eventually

from prefetcher.api.client import get, post
from prefetcher.app import open_streams
from prefetcher.cli import app
from prefetcher.config import Settings, StateSettings
from prefetcher.controller.rebuild import rebuild_ledgers
from prefetcher.core.types import NodeName
from prefetcher.report.build import Question, build_report
from prefetcher.report.reading import read_nodes
from prefetcher_connectors.redis import EmbeddedServer, RedisState


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "server")
    made.start()
    yield made
    made.stop()


def ask(up: Up, model: str, tenant: str) -> None:
    post(up.url, "/v1/requests", {"model": model, "tenant": tenant})


def total(up: Up) -> dict[str, Any]:
    found: dict[str, Any] = get(up.url, "/v1/report?since=0")["total"]
    return found


def test_a_killed_agents_ledger_is_the_same_from_the_topic_alone(
    tmp_path: Path, server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    up = Up(tmp_path, PREFETCHER_STATE__URL=server.url)
    try:
        for number in range(6):
            ask(up, f"m{number % 3}", "chat")
        post(up.url, "/v1/models/m3:pin", {"allow_release": True})
        eventually(lambda: total(up)["waits"]["count"] == 6)
        by_tenant = get(up.url, "/v1/report?since=0&by=tenant")["groups"]
        assert {group["name"]: group["figures"]["requests"] for group in by_tenant} == {"chat": 6, "none": 0}
        stages = get(up.url, "/v1/models/m0/cold-start")["stages"]
        assert [(each["stage"], each["count"]) for each in stages if each["count"]] == [("read", 1)]
        assert all(each["note"] for each in stages if not each["count"])
        app(["report", "--url", up.url, "--by", "model", "--parquet", str(tmp_path / "out")], standalone_mode=False)
        assert "6 requests" in capsys.readouterr().out
        table = pq.read_table(tmp_path / "out" / "totals.parquet")
        assert sum(table["rows"].to_pylist()) == 6
        listed = pq.read_table(tmp_path / "out" / "orders.parquet").to_pylist()
        assert {row["decision_id"] for row in listed} <= {order["decision_id"] for order in get(up.url, "/v1/orders?count=1000&node=*")}
    finally:
        up.process.send_signal(signal.SIGKILL)
        up.close()

    state = RedisState(server.url)
    streams = open_streams(Settings(state=StateSettings(dir=tmp_path / "state")))
    try:
        streams.prepare()
        ledgers, unread = rebuild_ledgers(streams)
        found = read_nodes(state, None, None, 2e9)
    finally:
        streams.close()
        state.close()
    assert unread == 0
    (live,) = found.nodes
    for by in ("model", "cause", "tenant", "hour", "tier", "stage"):
        question = Question(until_s=live.at_s + 1.0, by=by)
        rebuilt = build_report([ledger.sums for ledger in ledgers.values()], question)
        assert msgspec.json.encode(rebuilt) == msgspec.json.encode(build_report(found.nodes, question))
    assert (rebuilt.total.requests, rebuilt.total.waits.count) == (6, 6)
    assert rebuilt.total.held_gb_h > 0.0
    eventually(lambda: [each.reason for each in _missing(server) if "does not report now" in each.reason])


def _missing(server: EmbeddedServer) -> Any:
    state = RedisState(server.url)
    try:
        return read_nodes(state, None, None, 2e9).missing
    finally:
        state.close()


def test_nodes_that_told_nothing_and_hours_that_are_gone_are_named(tmp_path: Path, server: EmbeddedServer) -> None:
    from prefetcher.controller import records
    from prefetcher.core.totals import Totals, TotalsKey
    from prefetcher.core.types import Arm, Cause, ModelName
    from prefetcher.report.history import copy_hours
    from prefetcher.report.sums import StoredLedger, encode_hour

    state = RedisState(server.url)
    try:
        now_s = 490_100 * 3600.0
        name = NodeName("n")
        for node in ("n", "old"):
            state.see(records.NODES, node, now_s)
        key = TotalsKey(ModelName("a"), Cause.DEMAND, Arm.TREATED, 490_000)
        stored = StoredLedger(now_s, 490_000 * 3600.0, 4, hours=[(490_000, 0, 490_000), (490_001, 0, 490_001)])
        hour = {records.hour_key(name, 490_000, 0): encode_hour([(key, Totals(rows=5))])}
        state.write({records.node_key(name, "sums"): records.encode(stored), **hour})
        reasons = {(each.node, each.reason.split(";")[0]) for each in read_nodes(state, None, None, now_s).missing}
        assert {node for node, _ in reasons} == {"n", "old"}
        assert any("1 of its hours" in reason for _, reason in reasons)

        folder = tmp_path / "ledger"
        assert copy_hours(state, folder, now_s) == 1
        assert copy_hours(state, folder, now_s) == 0, "copied once"
        state.delete(list(hour))
        found = read_nodes(state, folder, None, now_s)
        assert [sum(totals.rows for totals in each.by_key().values()) for each in found.nodes] == [5]
        # A part that its node wrote again is copied again, in the place of the first.
        again = msgspec.structs.replace(stored, hours=[(490_000, 0, 490_002)])
        state.write({records.node_key(name, "sums"): records.encode(again), next(iter(hour)): encode_hour([(key, Totals(rows=6))])})
        assert copy_hours(state, folder, now_s) == 1
        state.delete(list(hour))
        assert [sum(t.rows for t in each.by_key().values()) for each in read_nodes(state, folder, None, now_s).nodes] == [6]
    finally:
        state.close()

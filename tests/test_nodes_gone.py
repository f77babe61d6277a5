"""Nodes that are gone: all that the store has of one goes and nothing of what it told, and its name begins anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
from api_kit import T0, Setup, report_of
from safetensors.numpy import save_file
from typer.testing import CliRunner
from waiting import eventually

from prefetcher import cli
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.manifest import write_manifests
from prefetcher.batch.gone_nodes import forget_nodes
from prefetcher.batch.runs import JobAbout
from prefetcher.batch.scheduler import Run, RunEnded
from prefetcher.clock import Clock, ScaledClock, VirtualClock
from prefetcher.config import ReportSettings
from prefetcher.controller import records
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.effects import EffectReader
from prefetcher.controller.experiment import ExperimentKeeper, ExperimentView
from prefetcher.controller.learner import Learner
from prefetcher.core.block_sums import BLOCKS_KEPT, BlockSum
from prefetcher.core.held import HeldEntry
from prefetcher.core.shadow_caches import ShadowCaches
from prefetcher.core.totals import HOUR_S, Totals, TotalsKey
from prefetcher.core.types import Arm, Cause, ModelName, ModelVersion, NodeName, Plan, RequestSeen
from prefetcher.ports import StateStore, Topic
from prefetcher.report.desk import ReportDesk
from prefetcher.report.gone import JOB, GoneNode, read_gone, with_gone
from prefetcher.report.messages import Report
from prefetcher.report.sums import StoredLedger, encode_hour
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import RequestMessage, encode
from prefetcher_connectors.memory import MemoryState, MemoryStreams
from prefetcher_connectors.redis import EmbeddedServer, RedisState

NODE, OTHER = NodeName("pod-7f9c"), NodeName("pod-2b1d")
SPEED = 100.0
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S


def a_run() -> Run:
    return Run(1, 0.0, lambda items: True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path_factory.mktemp("state"))
    made.start()
    yield made
    made.stop()


def an_agent(folder: Path, state: StateStore, clock: Clock) -> Agent:
    options = AgentOptions(NODE, folder / "models", 5_000_000, folder, socket=folder / "agent.sock", lock="off", hold_s=1e6)
    agent = Agent(options, state, clock, Metrics())
    agent.start()
    return agent


def a_controller(state: StateStore, streams: MemoryStreams, clock: Clock) -> Controller:
    controller = Controller(
        streams, state, Learner(lambda: None), clock, Metrics(), ControllerOptions((), 0.002, 60.0, 600.0, 1e9),
        arm_of=lambda node, now_s: Arm.TREATED,
    )  # fmt: skip
    controller.start()
    return controller


def lived(folder: Path, state: RedisState, streams: MemoryStreams, clock: Clock) -> int:
    """A node lives, with a controller, people and an experiment; the number of its last message."""
    (folder / "models" / "m0").mkdir(parents=True)
    save_file({"w": np.full(250_000, 7, np.float32)}, folder / "models" / "m0" / "model.safetensors")
    write_manifests(folder / "models")
    agent = an_agent(folder, state, clock)
    try:
        controller = a_controller(state, streams, clock)
        eventually(lambda: controller.step() or NODE in controller._nodes.reports)
        rows = [RequestSeen(clock.now_s(), ModelName("m0"), node=NODE) for _ in range(3)]
        streams.writer().append(Topic.REQUESTS, [(row.model, encode(RequestMessage.of(row))) for row in rows])
        agent.requested(rows)

        def all_written() -> bool:
            controller.step()
            wanted = records.NODE_KEYS - {"shadow", "switch"}
            keys = [records.node_key(NODE, what) for what in wanted if what != "orders"]
            told = NODE in controller._shadows and all(state.read_many(keys))
            return told and bool(state.tail(records.node_key(NODE, "orders"), 1))

        assert agent.act("load", "m0").ok or agent.act("evict", "m0").ok
        eventually(all_written)
        controller.save()
        shadow = ShadowCaches(price_s_per_gb_h=0.002, hold_s=600.0, tick_s=60.0, start_s=T0)
        shadow.shadow_measured = {int(T0 // HOUR_S): 5.0}
        ExperimentKeeper(state, ExperimentView(state), Metrics(), 0.0, 0).tick(clock.now_s(), controller.fence, [NODE], {NODE: shadow})
        state.write({records.node_key(NODE, "switch"): records.encode(records.Switch(False, by="ops"))})
        controller.close()
    finally:
        agent.close()
    raw = state.read(records.node_key(NODE, "sums"))
    assert raw is not None
    return int(msgspec.json.decode(raw)["seq"])


def everything(server: EmbeddedServer) -> dict[str, bytes]:
    """Every key of the store, and what is there."""
    client = redis.Redis.from_url(server.url)
    found: dict[str, bytes] = {}
    for key in client.scan_iter("*"):
        kind = client.type(key)
        if kind == b"string":
            found[key.decode()] = client.get(key)  # type: ignore[assignment]
        elif kind == b"list":
            found[key.decode()] = b"\n".join(client.lrange(key, 0, -1))  # type: ignore[arg-type]
        else:
            found[key.decode()] = b"\n".join(client.zrange(key, 0, -1))  # type: ignore[arg-type]
    client.close()
    return found


def of_report(report: Report) -> Any:
    """What people read of a report: without what changes with the time of asking."""
    return msgspec.to_builtins(report.total), msgspec.to_builtins(report.groups)


def test_of_a_node_that_was_forgotten_no_key_stays_and_its_figures_do(tmp_path: Path, server: EmbeddedServer) -> None:
    clock, streams = ScaledClock(SPEED, T0), MemoryStreams()
    state = RedisState(server.url)
    seq = lived(tmp_path, state, streams, clock)
    mark = f"{{node/{NODE}}}:"
    before = everything(server)
    there = {key.split(mark)[1] for key in before if mark in key}
    assert records.NODE_KEYS - {"report", "lease"} <= there, "the test would not see what it does not make"
    assert any(what.startswith("hour/") for what in there)
    later = VirtualClock(clock.now_s() + WEEK_S + HOUR_S)
    ledger = tmp_path / "ledger"

    def report() -> Any:
        return of_report(ReportDesk(state, later, ReportSettings(), ledger).report("0", by="node"))

    told = report()
    assert told[0]["requests"] == 3
    did = forget_nodes(a_run(), state, ledger, WEEK_S, later.now_s())
    assert did.said == f"1 node forgotten: {NODE}"
    after = everything(server)
    assert [key for key in after if NODE in key] == []
    assert report() == told
    # A leader that comes now knows it only from the snapshot, and saves one without it.
    controller = a_controller(state, streams, later)
    assert list(controller._shadows) == [NODE]
    controller.step()
    controller.save()
    controller.close()
    kept = {key for key, value in everything(server).items() if NODE.encode() in value}
    assert kept == {records.GONE}
    assert NODE not in controller._nodes.names
    assert forget_nodes(a_run(), state, ledger, WEEK_S, later.now_s()).said == ""

    # Its name comes back.
    fence = int(state.read(records.FENCE) or b"0")
    again = an_agent(tmp_path, state, later)
    try:
        raw = eventually(lambda: state.read(records.node_key(NODE, "report")))
        assert records.decode_report(raw, NODE).fence == fence
        assert records.decode_report(raw, NODE).prefetching, "the switch went with the node"
        stale = Plan(NODE, 1_000_000, fence - 1, later.now_s(), 1e-16, ())
        again._take_plan(stale)
        assert again._machine.plans.fence == fence
        eventually(lambda: state.read(records.node_key(NODE, "sums")))
    finally:
        again.close()
    raw = state.read(records.node_key(NODE, "sums"))
    assert raw is not None
    assert msgspec.json.decode(raw)["seq"] > seq
    assert ReportDesk(state, later, ReportSettings(), ledger).report("0", by="node").total.requests == 3
    forget_nodes(a_run(), state, ledger, WEEK_S, later.now_s() + 2 * WEEK_S)
    state.close()


def test_a_key_that_is_not_listed_is_none_of_a_node() -> None:
    with pytest.raises(ValueError, match="NODE_KEYS"):
        records.node_key(NODE, "favourites")


# --- what stays, and why ---


def told(state: StateStore, node: NodeName, at_s: float, rows: int = 3, since_s: float = T0 - 100.0) -> None:
    """`node` told of the hour of `at_s`, held a model, and was heard last then."""
    hour = int(at_s // HOUR_S)
    key = TotalsKey(ModelName("a"), Cause.DEMAND, Arm.TREATED, hour)
    held = HeldEntry(ModelName("a"), ModelVersion("1"), "host", Cause.DEMAND, Arm.TREATED, 1000, at_s - 60.0)
    ledger = StoredLedger(at_s, since_s, 5, [held], {}, [(hour, 0, hour)])
    state.write({records.hour_key(node, hour, 0): encode_hour([(key, Totals(rows=rows, wait_s=1.5))])})
    state.write({records.node_key(node, "sums"): records.encode(ledger)})
    state.see(records.NODES, node, at_s)


def test_only_what_is_silent_for_long_enough_is_forgotten(tmp_path: Path) -> None:
    state, now_s = MemoryState(), T0 + 30 * DAY_S
    told(state, NODE, now_s - WEEK_S - 1)
    told(state, OTHER, now_s - WEEK_S + 1)
    assert forget_nodes(a_run(), state, tmp_path, WEEK_S, now_s).rows == 1
    assert state.members(records.NODES, 0.0) == [OTHER]
    assert state.read(records.node_key(OTHER, "sums")) is not None


@pytest.mark.parametrize(
    ("what", "why"),
    [("report", "it is alive"), ("lease", "it is alive"), ("the hour", "it told of the hour that runs, which is whole at 13:00 UTC")],
)
def test_what_is_alive_or_may_come_back_within_its_hour_is_not_forgotten(tmp_path: Path, what: str, why: str) -> None:
    state, now_s = MemoryState(), T0 + 12.5 * HOUR_S
    told(state, NODE, now_s if what == "the hour" else now_s - 2 * HOUR_S)
    if what != "the hour":
        state.write({records.node_key(NODE, what): b"x"}, expire_s=1e6)
    state.see(records.TO_FORGET, NODE, now_s)
    did = forget_nodes(a_run(), state, tmp_path, WEEK_S, now_s)
    assert (did.rows, did.said.startswith(f"{NODE} stays: {why}")) == (0, True)
    assert state.last_seen(records.TO_FORGET) == {}
    assert state.read(records.node_key(NODE, "sums")) is not None


def test_a_run_that_is_stopped_halfway_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    state, now_s = MemoryState(), T0 + 30 * DAY_S
    told(state, NODE, T0)
    desk = lambda: of_report(ReportDesk(state, VirtualClock(now_s), ReportSettings(), tmp_path).report("0"))  # noqa: E731
    before = desk()
    run = a_run()
    unsee = state.unsee

    def stopped(key: str, members: Any) -> None:
        raise RunEnded("killed")

    state.unsee = stopped  # type: ignore[method-assign]
    with pytest.raises(RunEnded):
        forget_nodes(run, state, tmp_path, WEEK_S, now_s)
    state.unsee = unsee  # type: ignore[method-assign]
    assert forget_nodes(a_run(), state, tmp_path, WEEK_S, now_s).rows == 1
    assert state.last_seen(records.NODES) == {}
    assert desk() == before


def test_a_node_that_speaks_while_it_is_looked_at_stays(tmp_path: Path) -> None:
    state, now_s = MemoryState(), T0 + 30 * DAY_S
    told(state, NODE, T0)
    take = state.take_lease

    def speaks(key: str, holder: str, ttl_s: float) -> bool:
        told(state, NODE, now_s, rows=8)
        return take(key, holder, ttl_s)

    state.take_lease = speaks  # type: ignore[method-assign]
    assert forget_nodes(a_run(), state, tmp_path, WEEK_S, now_s).rows == 0
    assert state.read(records.node_key(NODE, "sums")) is not None
    assert state.read(records.node_key(NODE, "lease")) is None
    # What it goes on telling stands in the place of what was copied, and what it held is not counted twice.
    again = ReportDesk(state, VirtualClock(now_s + 1.0), ReportSettings(), tmp_path).report("0").total
    assert again.requests == 3 + 8
    assert again.held_gb_h == pytest.approx(1e-6 * 60.0 / HOUR_S)


def test_hours_of_the_experiment_outlive_their_node(tmp_path: Path) -> None:
    state, now_s = MemoryState(), T0 + 10 * DAY_S
    first = int(T0 // HOUR_S)
    blocks = [BlockSum(first + n, False, 5, 10.0, 1, 3000.0) for n in range(5)]
    state.write({records.node_key(NODE, "blocks"): records.encode(blocks)})
    state.append(records.node_key(NODE, "shadow"), [records.encode((first + n, 20.0)) for n in range(3)], 100)
    state.write({records.node_key(NODE, "shadow-hours"): records.encode({"hours": {first: 30.0}})})
    told(state, NODE, T0)
    before = EffectReader(state).read(now_s)
    assert before["blocks"] == 3, "the last two may still change"
    forget_nodes(a_run(), state, tmp_path, WEEK_S, now_s)
    (gone,) = read_gone(state)
    assert (len(gone.blocks), gone.shadow[first + 2], gone.shadow_hours) == (5, 20.0, {first: 30.0})
    after = EffectReader(state).read(now_s)
    assert (after["basis"], after["blocks"]) == (before["basis"], 5)
    # The name comes back, and is forgotten once more: both lives count.
    more = [BlockSum(first + 300 + n, False, 5, 10.0, 1, 3000.0) for n in range(4)]
    state.write({records.node_key(NODE, "blocks"): records.encode(more)})
    told(state, NODE, T0 + 300 * HOUR_S)
    assert EffectReader(state).read(now_s)["blocks"] == 5 + 2
    forget_nodes(a_run(), state, tmp_path, WEEK_S, now_s + 20 * DAY_S)
    assert EffectReader(state).read(now_s)["blocks"] == 9
    assert forget_nodes(a_run(), state, tmp_path, WEEK_S, T0 + (301 + BLOCKS_KEPT) * HOUR_S).rows == 0
    assert read_gone(state) == []


def test_of_two_lives_of_a_name_both_are_kept() -> None:
    one = GoneNode("n", T0, (BlockSum(1, False),), {1: 1.0})
    two = GoneNode("n", T0 + 9, (BlockSum(2, True),), {2: 2.0})
    (both,) = with_gone([one], [two], T0)
    assert ([b.block for b in both.blocks], both.shadow, both.last_s) == ([1, 2], {1: 1.0, 2: 2.0}, T0 + 9)


def test_a_switch_that_was_forgotten_is_not_written_back_by_an_endpoint() -> None:
    with Setup() as setup:
        key = records.node_key(OTHER, "switch")
        setup.report(report_of(), report_of(OTHER))
        setup.state.write({key: records.encode(records.Switch(False))})
        setup.service.by_hand.look_after()
        setup.state.delete([key, records.node_key(OTHER, "report")])
        setup.state.unsee(records.NODES, [OTHER])
        setup.virtual.advance(10.0)
        setup.report(report_of())
        setup.service.by_hand.look_after()
        setup.report(report_of(), report_of(OTHER))
        setup.virtual.advance(2.0)
        setup.service.by_hand.look_after()
        assert setup.state.read(key) is None


# --- people ---


def test_nodes_are_listed_and_forgotten_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Setup() as setup:

        def ask(url: str, path: str, method: str, body: Any = None) -> Any:
            answer = setup.http.request(method, path, json=body)
            return answer.json()

        http, now_s = setup.http, setup.clock.now_s()
        setup.report(report_of())
        told(setup.state, OTHER, now_s - 3 * HOUR_S)
        listed = http.get("/v1/nodes/heard").json()
        assert [(line["node"], line["reports"], line["last_heard_s"]) for line in listed] == [
            ("node-0", True, T0),
            (OTHER, False, now_s - 3 * HOUR_S),
        ]
        (away,) = http.get("/v1/nodes").json()["away"]
        assert (away["node"], away["last_heard_s"], away["at_most_s"]) == (OTHER, now_s - 3 * HOUR_S, 3 * HOUR_S)
        alive = http.post("/v1/nodes/node-0:forget")
        assert (alive.status_code, "it is alive" in alive.json()["detail"]) == (409, True)
        assert http.post("/v1/nodes/nobody:forget").status_code == 404
        assert http.post(f"/v1/nodes/{OTHER}:forget").status_code == 503, "no scheduler runs"
        assert setup.state.last_seen(records.TO_FORGET) == {}
        setup.state.write({records.JOBS: records.encode([JobAbout(JOB, "forgets", 3600.0)])})
        setup.state.see(records.SCHEDULERS, "s", now_s + 1e9)
        answer = http.post(f"/v1/nodes/{OTHER}:forget")
        assert (answer.status_code, answer.headers["location"]) == (202, answer.json()["follow"])
        assert [line["to_forget"] for line in http.get("/v1/nodes/heard").json()] == [False, True]
        assert setup.service.by_hand.done(1)[0].act == "forget"
        monkeypatch.setattr("prefetcher.api.client._ask", ask)
        shown = CliRunner().invoke(cli.app, ["nodes", "list"]).stdout
        assert "to be forgotten" in shown
        assert "reports" in shown
        refused = CliRunner().invoke(cli.app, ["nodes", "forget", "node-0"])
        assert refused.exit_code != 0
        forget_nodes(a_run(), setup.state, tmp_path, WEEK_S, now_s)
        assert [line["node"] for line in http.get("/v1/nodes/heard").json()] == ["node-0"]
        setup.virtual.advance(10.0)
        setup.report(report_of())
        assert http.get("/v1/nodes").json()["away"] == []

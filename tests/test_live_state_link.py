"""The agent, in this process, while its state store hangs, dies and comes back: a real server, stopped and killed by signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import structlog
from safetensors.numpy import save_file
from waiting import eventually

import prefetcher
from prefetcher.agent import state_link
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.manifest import write_manifests
from prefetcher.agent.name_lease import NameLease
from prefetcher.clock import ScaledClock
from prefetcher.controller import records
from prefetcher.controller.remembered import Remembered
from prefetcher.core.types import (
    Arm,
    Cause,
    DecisionId,
    DesiredWeights,
    ModelName,
    ModelVersion,
    NodeName,
    Order,
    Plan,
    RequestSeen,
    Tier,
    WeightsKey,
)
from prefetcher.errors import UnavailableError, UsageError
from prefetcher.ports import StateStore
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState

NODE = NodeName("node-0")
SPEED = 100.0



class Node:
    """An agent on a clock that runs a hundred times as fast, and the store that it uses. What a test reads of the store it reads here."""

    def __init__(self, folder: Path, state: StateStore, clock: ScaledClock | None = None, hold_s: float = 1e6) -> None:
        self.folder, self.state, self.clock = folder, state, clock or ScaledClock(SPEED, 1_767_225_600.0)
        self.socket = folder / "run" / "agent.sock"
        options = AgentOptions(NODE, folder / "models", 5_000_000, folder, socket=self.socket, lock="off", hold_s=hold_s)
        self.metrics = Metrics()
        self.agent = Agent(options, state, self.clock, self.metrics)
        self.agent.start()

    def again(self, state: StateStore) -> Node:
        """The next agent of this node."""
        return Node(self.folder, state, self.clock)

    def open(self, model: str) -> None:
        with prefetcher.open(model, socket_path=self.socket, timeout_s=20.0) as opened:
            assert opened["w"][7] == int(model[1:])

    def resident(self) -> set[str]:
        """Asked of the agent's own figures: the store knows nothing of it while it hangs."""
        return {key.model for key in list(self.agent._machine.holdings.in_tier[Tier.HOST])}

    def is_away(self) -> bool:
        return self.agent._link.away

    def totals(self) -> dict[str, Any]:
        raw = self.state.read(records.node_key(NODE, "totals"))
        return {} if raw is None else msgspec.json.decode(raw)

    def report(self) -> records.NodeReport | None:
        raw = self.state.read(records.node_key(NODE, "report"))
        return None if raw is None else records.decode_report(raw)

    def told(self) -> list[records.OrderRecord]:
        raw = self.state.tail(records.node_key(NODE, "orders"), 1000)
        return [msgspec.json.decode(item, type=records.OrderRecord) for item in raw]

    def orders(self) -> dict[str, str]:
        """Outcomes by model, as they stand."""
        return {order.model: order.outcome for order in self.told()}

    def plan(self, *models: str, revision: int = 1, hold_s: float = 1e6) -> None:
        now_s = self.clock.now_s()
        desired = []
        for known in eventually(self.report).known:
            key = WeightsKey(ModelName(known.model), ModelVersion(known.version))
            order = None
            if known.model in models:
                decision_id = DecisionId(f"{revision}-{known.model}")
                order = Order(decision_id, NODE, key, Tier.HOST, Cause.FORECAST, Arm.TREATED, now_s, now_s + 60, now_s + 6000, hold_s)
            desired.append(DesiredWeights(key, 1e-9, 0.01, order=order))
        self.state.write({records.node_key(NODE, "plan"): records.encode(Plan(NODE, revision, 1, now_s, 1e-16, tuple(desired)))})
        self.agent.plan_written()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(3):
        (tmp_path / "models" / f"m{i}").mkdir(parents=True)
        save_file({"w": np.full(250_000, i, np.float32)}, tmp_path / "models" / f"m{i}" / "model.safetensors")
    write_manifests(tmp_path / "models")
    return tmp_path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "state")
    made.start()
    yield made
    made.stop()


def tell(server: EmbeddedServer, number: int) -> None:
    assert server._process is not None
    os.kill(server._process.pid, number)


def test_while_the_store_hangs_weights_are_handed_out_and_timers_go_on(folder: Path, server: EmbeddedServer) -> None:
    state = RedisState(server.url)
    node = Node(folder, state)
    try:
        node.open("m0")
        node.plan("m1", hold_s=300.0)
        eventually(lambda: node.orders().get("m1") == "open" and "m1" in node.resident())
        tell(server, signal.SIGSTOP)
        try:
            opened = 0
            # The store hangs in a call all the while, and at least one call was given up.
            while not node.is_away() or opened < 3:
                node.open("m0")
                opened += 1
            node.open("m2")
            eventually(lambda: node.resident() == {"m0", "m2"})
            assert node.agent.check() == ""
            assert node.agent.act("evict", "m2").ok
        finally:
            tell(server, signal.SIGCONT)
        eventually(lambda: node.totals().get("opens") == 1 + opened + 1)
        report = eventually(lambda: (found := node.report()) and {h.model for h in found.held} == {"m0"} and found)
        assert report.prefetching
        eventually(lambda: node.orders()["m1"] == "useless")
        assert [order.reason for order in node.told() if order.outcome == "useless"] == ["hold"]
        node.agent.close()
        assert node.report() is None
        node = node.again(state)
        assert eventually(lambda: node.report() and node.totals())["opens"] == 1 + opened + 1
    finally:
        node.agent.close()
        state.close()


def test_no_order_is_lost_with_a_server_that_is_killed(folder: Path, server: EmbeddedServer) -> None:
    state = RedisState(server.url)
    node = Node(folder, state)
    try:
        node.plan("m0", "m1")
        eventually(lambda: node.resident() == {"m0", "m1"} and node.orders() == {"m0": "open", "m1": "open"})
        tell(server, signal.SIGKILL)
        node.open("m0")
        assert node.agent.act("evict", "m1").ok
        eventually(node.is_away)
        node.open("m2")
        server.start()
        eventually(lambda: node.orders() == {"m0": "timely", "m1": "useless"})
        eventually(lambda: node.totals()["outcomes"] == {"timely": 1, "useless": 1})
        eventually(lambda: not node.is_away())
        node.plan("m1", revision=2)
        eventually(lambda: "m1" in node.resident())
        assert [order.decision_id for order in node.told()].count("2-m1") <= 4, "an order is told when it changes, not again and again"
    finally:
        node.agent.close()
        state.close()


class Refusing(MemoryState):
    """A store that refuses the next `refusals` writes of a ledger, or of anything (`full`, and counts down), and says what it took."""

    refusals = 0
    full = False

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[set[str]] = []

    def write(self, items: Mapping[str, bytes], expire_s: float | None = None) -> None:
        names = {key.rsplit(":", 1)[1] for key in items}
        if self.refusals and (self.full or "ledger" in names):
            self.refusals -= 1
            raise UnavailableError("not now")
        super().write(items, expire_s)
        # The experiment's sums are written with the ledger when they changed.
        self.taken.append(names - {"blocks"})


def test_ledger_machine_and_totals_are_written_together_and_shown_no_earlier(folder: Path) -> None:
    state = Refusing()
    node = Node(folder, state)
    try:
        eventually(lambda: {"ledger", "machine", "totals"} in state.taken)
        state.refusals = 3
        state.taken.clear()
        node.open("m0")
        eventually(lambda: node.totals().get("opens") == 1)
        assert {"totals"} not in state.taken[: state.taken.index({"ledger", "machine", "totals"})]
        assert state.refusals == 0
    finally:
        node.agent.close()


def test_the_last_state_is_saved_though_the_store_is_away_at_first(folder: Path) -> None:
    state = Refusing()
    node = Node(folder, state)
    eventually(lambda: node.totals())
    node.agent.requested([RequestSeen(node.clock.now_s(), ModelName("m0"))])
    eventually(lambda: "m0" in node.resident())
    state.refusals = 5
    with structlog.testing.capture_logs() as logged:
        node.agent.close()
    assert state.refusals == 0
    assert not [e for e in logged if e["log_level"] == "error"]
    assert node.totals()["rows"] == 1
    assert node.report() is None


def test_a_store_that_stays_away_does_not_keep_the_agent_from_ending(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_link, "_CLOSE_S", 0.5)
    state = Refusing()
    node = Node(folder, state)
    eventually(lambda: node.report())
    state.refusals = 10_000
    with structlog.testing.capture_logs() as logged:
        node.agent.close()
    assert [e["event"] for e in logged if e["log_level"] == "error"] == ["ledger_not_saved"]
    assert not node.socket.exists()


def test_a_store_that_answers_and_takes_nothing_is_away_once(folder: Path) -> None:
    state = Refusing()
    node = Node(folder, state)
    try:
        eventually(lambda: node.report())
        with structlog.testing.capture_logs() as logged:
            state.refusals, state.full = 4, True
            node.open("m0")
            # Plans are read meanwhile, which does not make it well.
            eventually(lambda: node.agent.plan_written() or (not state.refusals and not node.is_away()))
            eventually(lambda: node.totals().get("opens") == 1)
        assert [e["event"] for e in logged if e["event"].startswith("state_")] == ["state_away", "state_back"]
    finally:
        node.agent.close()


# --- a store that forgot, or holds nonsense ---


def test_what_people_said_is_written_back_to_a_server_that_forgot_it(folder: Path, server: EmbeddedServer) -> None:
    state = RedisState(server.url)
    said = {
        records.SWITCH: records.encode(records.Switch(on=False, by="ops")),
        records.node_key(NODE, "switch"): records.encode(records.Switch(observe=True, by="ops")),
        records.PINS: records.encode({"m0": records.Pin("ops", 1.0, 2e12)}),
    }
    state.write(said)
    node = Node(folder, state)
    client = redis.Redis.from_url(server.url)
    try:
        eventually(lambda: (found := node.report()) and not found.prefetching)
        eventually(lambda: set(said) <= set(node.agent._link._remembered._last))
        node.plan("m0")
        eventually(lambda: node.agent._link._plan is not None)
        with structlog.testing.capture_logs() as logged:
            client.flushall()
            eventually(lambda: state.read_many(list(said)) == list(said.values()))
        assert {entry["key"] for entry in logged if entry["event"] == "state_forgot"} == set(said)
        assert "switched" not in [entry["event"] for entry in logged]
        eventually(lambda: state.members(records.NODES, 0.0) == [NODE])
        eventually(lambda: (found := node.report()) and not found.prefetching)
        state.write({records.SWITCH: records.encode(records.Switch())})
        eventually(lambda: node.agent.plan_written() or ((found := node.report()) and found.prefetching))
    finally:
        client.close()
        node.agent.close()
        state.close()


def test_what_was_written_meanwhile_is_not_undone(server: EmbeddedServer) -> None:
    class Between(RedisState):
        """Somebody writes just before what went missing is written back."""

        def replace(self, key: str, before: bytes | None, after: bytes) -> bool:
            self.write({key: b"new"})
            return super().replace(key, before, after)

    state = Between(server.url)
    remembered = Remembered(state)
    assert remembered.look(["k"], [b"old"]) == [b"old"]
    remembered.look(["k"], [None])
    assert remembered.look(["k"], state.read_many(["k"])) == [b"new"]
    state.close()


@pytest.mark.parametrize("nonsense", [b"", b"5", b'{"on": 3}', b"\xff", b'{"a":' * 50_000])
def test_a_switch_that_is_none_leaves_the_last_one(folder: Path, nonsense: bytes) -> None:
    state = MemoryState()
    state.write({records.SWITCH: records.encode(records.Switch(on=False))})
    node = Node(folder, state)
    died: list[BaseException] = []
    node.agent.on_died = lambda part, error: died.append(error)
    try:
        # A report is written after the switch was taken: nothing else is logged from there on.
        eventually(node.report)
        assert node.agent._link._mode == "off"
        with structlog.testing.capture_logs() as logged:
            state.write({records.SWITCH: nonsense, records.PINS: nonsense, records.node_key(NODE, "plan"): nonsense})
            eventually(lambda: node.agent.plan_written() or [e for e in logged if e["event"] == "plan_unreadable"])
            node.open("m0")
        assert [e["event"] for e in logged].count("switch_unreadable") == 1
        assert not node.agent._machine.plans.allows_prefetch or node.agent._machine.plans.switched_off
        node.agent.close()
        # A process that starts while it is there goes on with what it kept.
        node = node.again(state)
        assert node.agent._machine.plans.switched_off
        assert not died
        state.write({records.SWITCH: records.encode(records.Switch())})
        eventually(lambda: node.agent.plan_written() or not node.agent._machine.plans.switched_off)
    finally:
        node.agent.close()


def test_a_node_that_remembers_nothing_is_off_while_its_switch_is_none(folder: Path) -> None:
    state = MemoryState()
    state.write({records.SWITCH: b"nonsense", records.PINS: b"nonsense"})
    with structlog.testing.capture_logs() as logged:
        node = Node(folder, state)
    assert node.agent._machine.plans.switched_off
    assert {"switch_unreadable", "pins_unreadable"} <= {e["event"] for e in logged}
    node.agent.close()


# --- one agent a name ---


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetcher.agent.name_lease.LEASE_S", 2.5)


def test_a_second_agent_of_a_name_is_refused_and_says_where_the_first_is(folder: Path, tmp_path: Path, short_leases: None) -> None:
    state = MemoryState()
    node = Node(folder, state)
    try:
        eventually(node.report)
        for state_dir in (tmp_path / "elsewhere", folder):
            second = NameLease(state, NODE, state_dir, node.clock)
            with (
                structlog.testing.capture_logs() as logged,
                pytest.raises(UsageError, match=rf"^a node called node-0 runs already on {os.uname().nodename}; give .* another --name$"),
            ):
                second.take()
            assert [entry["event"] for entry in logged].count("name_taken") == 1
            second.drop()
        assert node.report() is not None
    finally:
        node.agent.close()
    second.take()
    second.drop()


def test_a_dead_agents_name_is_waited_for_elsewhere_and_taken_over_at_once_by_itself(tmp_path: Path, server: EmbeddedServer) -> None:
    state, clock = RedisState(server.url), ScaledClock(1.0, 0.0)
    code = f"""
import os
from pathlib import Path
from prefetcher.agent.name_lease import NameLease
from prefetcher.clock import SystemClock
from prefetcher_connectors.redis import RedisState
NameLease(RedisState({server.url!r}), {NODE!r}, Path({str(tmp_path / "here")!r}), SystemClock()).take()
print("has it", flush=True)
os.kill(os.getpid(), 9)
"""
    died = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=False)
    assert died.stdout == b"has it\n"
    with structlog.testing.capture_logs() as logged:
        own = NameLease(state, NODE, tmp_path / "here", clock)
        own.take()
    assert not logged
    # It dies again, without a word; a node of that name elsewhere waits for the lease's end.
    own._unlock()
    with structlog.testing.capture_logs() as logged:
        other = NameLease(state, NODE, tmp_path / "there", clock)
        other.take()
    assert [entry["event"] for entry in logged] == ["name_taken"]
    other.drop()
    state.close()


def test_an_agent_whose_name_was_taken_over_keeps_its_weights_and_writes_nothing(folder: Path) -> None:
    state = Refusing()
    node = Node(folder, state)
    key = records.node_key(NODE, "lease")
    try:
        eventually(node.report)
        node.open("m0")
        with structlog.testing.capture_logs() as logged:
            state.write({key: b"other/1"})
            eventually(lambda: [e for e in logged if e["event"] == "name_lost"])
            state.taken.clear()
            node.open("m1")
            node.agent.plan_written()
            eventually(lambda: len(node.resident()) == 2)
            node.open("m2")
        assert node.resident() == {"m0", "m1", "m2"}
        assert not state.taken
        state.delete([key])
        eventually(lambda: {"report"} in state.taken)
        assert node.agent.check() == ""
    finally:
        node.agent.close()
    assert state.read(key) is None

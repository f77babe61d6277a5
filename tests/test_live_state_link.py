"""The agent, in this process, while its state store hangs, dies and comes back: a real server, stopped and killed by signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from safetensors.numpy import save_file

import prefetcher
from prefetcher.agent import state_link
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.manifest import write_manifests
from prefetcher.clock import ScaledClock
from prefetcher.controller import records
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
from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState

NODE = NodeName("node-0")
SPEED = 100.0


def eventually(what: Callable[[], Any]) -> Any:
    never = threading.Event()
    for _ in range(600):
        found = what()
        if found:
            return found
        never.wait(0.05)
    pytest.fail("it did not happen in time")


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
        self.taken.append(names)


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

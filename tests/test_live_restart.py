"""An agent that is killed and starts again: what was counted stays counted, what ran is lost, and no memory is left behind.

The agent is a process of its own, its state store a real server.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from safetensors.numpy import save_file
from waiting import eventually

import prefetcher
from prefetcher.agent import client
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.manifest import write_manifests
from prefetcher.clock import ScaledClock, SystemClock
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
from prefetcher.ports import StateStore
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState
from prefetcher_connectors.redis import EmbeddedServer, RedisState

NODE = NodeName("node-0")
#: Two blocks that are read at once and one that the cap holds back for hours: a prefetch that is on its way.
SLOW_BYTES = 40_000_000
AGENT = """
import sys
from pathlib import Path
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.clock import SystemClock
from prefetcher.core.types import NodeName
from prefetcher.telemetry.logs import configure
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.redis import RedisState

configure(style="json")
folder, url, host = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
options = AgentOptions(
    NodeName("node-0"), folder / "models", 50_000_000, folder, host_dir=host, socket=folder / "run" / "agent.sock", lock="off",
    prefetch_bytes_per_s=4000.0,
)
agent = Agent(options, RedisState(url), SystemClock(), Metrics())
agent.start()
print("up", flush=True)
sys.stdin.read()
agent.close()
"""



def write_model(folder: Path, model: str, numbers: int) -> None:
    (folder / model).mkdir(parents=True)
    save_file({"w": np.zeros(numbers, np.float32)}, folder / model / "model.safetensors")


def read_orders(state: StateStore) -> dict[str, records.OrderRecord]:
    """As they stand, by decision id."""
    raw = state.tail(records.node_key(NODE, "orders"), 1000)
    return {order.decision_id: order for order in (msgspec.json.decode(item, type=records.OrderRecord) for item in raw)}


def read_totals(state: StateStore) -> dict[str, Any]:
    raw = state.read(records.node_key(NODE, "totals"))
    return {} if raw is None else msgspec.json.decode(raw)


def read_report(state: StateStore) -> records.NodeReport | None:
    raw = state.read(records.node_key(NODE, "report"))
    return None if raw is None else records.decode_report(raw)


def write_plan(state: StateStore, now_s: float, *models: str, fence: int = 1) -> None:
    report = eventually(lambda: read_report(state))
    desired = []
    for known in report.known:
        key = WeightsKey(ModelName(known.model), ModelVersion(known.version))
        order = None
        if known.model in models:
            decision_id = DecisionId(f"{fence}-{known.model}")
            order = Order(decision_id, NODE, key, Tier.HOST, Cause.FORECAST, Arm.TREATED, now_s, now_s + 60, now_s + 6000, 6000.0)
        desired.append(DesiredWeights(key, 1e-9 if known.model == "quick" else 1e-10, 0.01, order=order))
    plan = Plan(NODE, 1, fence, now_s, 1e-16, tuple(desired))
    state.write({records.node_key(NODE, "plan"): records.encode(plan)})


class Killable:
    """An agent's process."""

    def __init__(self, folder: Path, url: str, host_dir: Path) -> None:
        self.arguments = [sys.executable, "-c", AGENT, str(folder), url, str(host_dir)]
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self.arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "up\n"

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> int:
        process, self.process = self.process, None
        assert process is not None
        process.communicate(timeout=30)
        return process.returncode


@pytest.fixture
def host_dir(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"prefetcher-test-{os.getpid()}-{tmp_path.name}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_killed_it_counts_on_exactly_and_what_ran_is_lost(tmp_path: Path, host_dir: Path) -> None:
    for model, numbers in (("small", 250_000), ("quick", 250_000), ("slow", SLOW_BYTES // 4)):
        write_model(tmp_path / "models", model, numbers)
    write_manifests(tmp_path / "models")
    socket, clock = tmp_path / "run" / "agent.sock", SystemClock()
    server = EmbeddedServer(tmp_path / "state")
    server.start()
    state = RedisState(server.url)
    agent = Killable(tmp_path, server.url, host_dir)
    try:
        agent.start()
        for _ in range(3):
            with prefetcher.open("small", socket_path=socket) as opened:
                assert len(opened) == 1
        write_plan(state, clock.now_s(), "quick", "slow")
        eventually(lambda: (o := read_orders(state)) and o.get("1-quick") and o["1-quick"].ready_s and o["1-slow"].begin_s)
        eventually(lambda: read_totals(state)["opens"] == 3)
        before = read_totals(state)
        agent.kill()
        assert before["outcomes"] == {}

        agent.start()
        orders = eventually(lambda: (o := read_orders(state))["1-slow"].outcome == "lost" and o)
        assert (orders["1-slow"].reason, orders["1-slow"].ready_s) == ("restarted", None)
        assert orders["1-slow"].end_s >= orders["1-slow"].begin_s
        assert orders["1-quick"].outcome == "open", "its memory is still there"
        after = read_totals(state)
        for same in ("rows", "opens", "ready", "joined", "cold_starts", "cold_seconds", "dropped", "orders", "saved_seconds"):
            assert after[same] == before[same], same
        assert (after["rows"], after["cold_starts"], after["outcomes"]) == (3, 1, {"lost": 1})
        for grown in ("held_byte_seconds", "idle_byte_seconds", "wasted_byte_seconds"):
            assert after[grown] >= before[grown], grown
        report = eventually(lambda: read_report(state))
        assert {h.model: (h.state, h.decision_id) for h in report.held} == {"small": ("ready", ""), "quick": ("ready", "1-quick")}
        assert report.memory.taken_bytes == sum(h.bytes for h in report.held)
        assert len([entry for entry in host_dir.iterdir() if entry.is_dir()]) == 2, "nothing half-loaded stays"

        client.ask("evict", "quick", socket_path=socket)
        orders = eventually(lambda: (o := read_orders(state))["1-quick"].outcome == "useless" and o)
        assert orders["1-quick"].reason == "asked"
        with prefetcher.open("small", socket_path=socket) as opened:
            assert (opened.source, opened.found) == ("host", "ready")
        eventually(lambda: read_totals(state)["rows"] == 4)
        ended = read_totals(state)
        assert ended["outcomes"] == {"lost": 1, "useless": 1}
        assert ended["wasted_moved_bytes"] >= report.held[0].bytes
        assert agent.close() == 0
        assert not [entry for entry in host_dir.iterdir() if entry.is_dir()]

        agent.start()
        assert eventually(lambda: read_totals(state))["outcomes"] == {"lost": 1, "useless": 1}, "a clean end loses nothing either"
        assert read_totals(state)["rows"] == 4
    finally:
        agent.kill()
        state.close()
        server.stop()


class Node:
    """An agent in this process, on a fast clock that outlives it."""

    def __init__(self, folder: Path, clock: ScaledClock) -> None:
        self.folder, self.clock, self.state = folder, clock, MemoryState()
        for model in ("m0", "m1"):
            write_model(folder / "models", model, 250_000)
        write_manifests(folder / "models")
        self.socket = folder / "run" / "agent.sock"
        self.agent = self.make()

    def make(self) -> Agent:
        options = AgentOptions(NODE, self.folder / "models", 2_500_000, self.folder, socket=self.socket, lock="off")
        return Agent(options, self.state, self.clock, Metrics())

    def row(self, model: str) -> RequestSeen:
        return RequestSeen(self.clock.now_s(), ModelName(model))

    def totals(self) -> dict[str, Any]:
        return read_totals(self.state)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, ScaledClock(100.0, 1_767_225_600.0))
    yield made
    made.agent.close()


def test_rows_that_are_read_again_after_a_restart_count_once(node: Node) -> None:
    rows = [node.row("m0"), node.row("m1"), node.row("m0")]
    node.agent.start()
    node.agent.requested(rows)
    eventually(lambda: node.totals().get("rows") == 3)
    node.agent.close()
    node.agent = node.make()
    node.agent.start()
    node.agent.requested([*rows, node.row("m1")])
    eventually(lambda: node.totals().get("rows") == 4)
    assert node.agent.check() == ""
    assert node.totals()["rows"] == 4


def test_a_state_that_can_not_be_read_is_an_error_in_the_log_and_an_empty_start(node: Node) -> None:
    for raw in (b"nonsense", b"[]", b"{}", b'{"ledger": 3, "machine": null}', b'{"ledger": {"format": 1}, "machine": {"format": 1}}'):
        node.state.write({records.node_key(NODE, what): raw for what in ("ledger", "machine")})
        with structlog.testing.capture_logs() as logged:
            node.agent.start()
        assert {e["event"] for e in logged if e["log_level"] == "error"} == {"ledger_unreadable", "machine_unreadable"}
        node.agent.requested([node.row("m0")])
        eventually(lambda: node.totals().get("rows") == 1)
        node.agent.close()
        node.agent = node.make()


def test_orders_whose_machine_can_not_be_read_are_lost(node: Node) -> None:
    node.agent.start()
    write_plan(node.state, node.clock.now_s(), "m0")
    node.agent.plan_written()
    eventually(lambda: (o := read_orders(node.state)) and o["1-m0"].ready_s)
    node.agent.close()
    node.state.write({records.node_key(NODE, "machine"): b"nonsense"})
    node.agent = node.make()
    node.agent.start()
    eventually(lambda: read_orders(node.state)["1-m0"].outcome == "lost")
    assert node.totals()["outcomes"] == {"lost": 1}


def test_a_state_from_the_future_does_not_stop_the_clock(node: Node) -> None:
    node.agent.start()
    eventually(lambda: read_report(node.state))
    node.agent.close()
    node.clock = ScaledClock(100.0, 1_767_225_600.0 - 1e7)
    node.agent = node.make()
    with structlog.testing.capture_logs() as logged:
        node.agent.start()
    assert [e["event"] for e in logged if e["log_level"] == "error"] == ["machine_unreadable"]
    node.agent.requested([node.row("m0")])
    eventually(lambda: node.totals().get("rows") == 1)


def test_pins_and_the_switch_are_as_the_store_says_at_the_start(node: Node) -> None:
    node.agent.start()
    assert node.agent.act("pin", "m0").ok
    eventually(lambda: (r := read_report(node.state)) and [h.model for h in r.held if h.pinned])
    node.agent.close()
    off = records.Switch(on=False, since_s=0.0, by="test")
    node.state.write({records.PINS: records.encode(["m1"]), records.SWITCH: records.encode(off)})
    node.agent = node.make()
    node.agent.start()
    eventually(lambda: (r := read_report(node.state)) and [h.model for h in r.held if h.pinned] == ["m1"])
    report = read_report(node.state)
    assert report is not None
    assert not report.prefetching

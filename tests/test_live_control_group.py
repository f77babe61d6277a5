"""The control group with agents that run: four nodes over a real state server, one of them a process that is killed, hours of seconds."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from waiting import eventually

from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.hearing import Hearing
from prefetcher.agent.manifest import write_manifests
from prefetcher.clock import ScaledClock
from prefetcher.controller import records
from prefetcher.controller.calling import NodeCalls, RemoteNode
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.effects import EffectReader
from prefetcher.controller.experiment import ExperimentKeeper, ExperimentView, Span, decode_experiment
from prefetcher.controller.learner import Learner
from prefetcher.core.block_sums import BLOCKS_OPEN, BlockSum, is_whole
from prefetcher.core.holdout import HoldoutSettings, arm_of, block_of, is_measured
from prefetcher.core.types import Arm, Cause, ModelName, NodeName, RequestSeen
from prefetcher.errors import PrefetcherError
from prefetcher.ports import Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import HintMessage, RequestMessage, encode
from prefetcher_connectors.memory import MemoryStreams
from prefetcher_connectors.redis import EmbeddedServer, RedisState

#: An hour passes in four seconds.
SPEED = 900.0
HOUR_S = 3600.0
MIDNIGHT_S = 1_767_225_600.0
SHARE = 0.5
#: Every node is control in one hour of each two, drawn: among three hours each has both, and several are control at the same time.
HOURS = 3
NODES = [NodeName(f"n{k}") for k in range(4)]
MODELS = 3
DRAWN = HoldoutSettings(share=SHARE)


def an_agent(node: NodeName, folder: Path, url: str, clock: ScaledClock, stop: threading.Event) -> tuple[Agent, list[threading.Thread]]:
    """The agent of a node as a process has it: what it hears by calls, and the experiment by the record in the store."""
    state = RedisState(url)
    view = ExperimentView(state)
    view.look()
    options = AgentOptions(
        node, folder / node, 3_000_000, folder / f"state-{node}", socket=folder / f"{node}.sock", lock="off", hold_s=600.0
    )
    agent = Agent(options, state, clock, Metrics())
    agent.arm_of = lambda now_s: view.arm(node, now_s)
    agent.start()

    def follow() -> None:
        while not stop.wait(0.2):
            with contextlib.suppress(PrefetcherError):
                view.look()

    threads = [threading.Thread(target=follow), threading.Thread(target=Hearing(state, node, agent).run, args=(stop,))]
    for thread in threads:
        thread.start()
    return agent, threads


def main() -> None:
    """The agent of the node that is killed: node, folder, state server, and when the clock of the others started."""
    node, folder, url, start_s = sys.argv[1:]
    clock = ScaledClock(SPEED, MIDNIGHT_S + (time.monotonic() - float(start_s)) * SPEED)
    an_agent(NodeName(node), Path(folder), url, clock, threading.Event())
    sys.stdout.write("up\n")
    sys.stdout.flush()
    threading.Event().wait()


class Fleet:
    """A controller and three agents in this process, and one more in another."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.state = RedisState(url)
        for node in NODES:
            for j in range(MODELS):
                (folder / node / f"{node}-m{j}").mkdir(parents=True)
                save_file({"w": np.full(50_000, j, np.float32)}, folder / node / f"{node}-m{j}" / "w.safetensors")
            write_manifests(folder / node)
        self.start_s = time.monotonic()
        self.clock = ScaledClock(SPEED, MIDNIGHT_S)
        self.stop = threading.Event()
        self.streams = MemoryStreams()
        self.writer = self.streams.writer()
        self.child = self.begin_child()
        self.threads: list[threading.Thread] = []
        self.agents: dict[NodeName, Agent] = {}
        for node in NODES[1:]:
            self.agents[node], threads = an_agent(node, folder, url, self.clock, self.stop)
            self.threads += threads
        self.metrics = Metrics()
        view, calls = ExperimentView(self.state), NodeCalls(self.state)
        self.controller = Controller(
            self.streams,
            self.state,
            Learner(lambda: None),
            self.clock,
            self.metrics,
            ControllerOptions((), 0.002, 60.0, 600.0, 1e9),
            arm_of=view.arm,
            on_rows=calls.rows,
            on_plan=calls.plan_written,
            # Everybody looks five times a second here, so that a change is heard of within a real second.
            experiment=ExperimentKeeper(self.state, view, self.metrics, SHARE, 0, speed=SPEED / 60.0),
        )
        self.controller.start()
        self.threads.append(threading.Thread(target=self.controller.run, args=(self.stop,)))
        self.threads[-1].start()
        #: By node and hour, rows that were sent in measured minutes.
        self.sent: Counter[tuple[str, int]] = Counter()
        self.round = 0

    def begin_child(self) -> subprocess.Popen[str]:
        given = [NODES[0], str(self.folder), self.url, str(self.start_s)]
        return subprocess.Popen([sys.executable, __file__, *given], stdout=subprocess.PIPE, text=True)

    def wait_for_child(self) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == "up\n"

    def kill_child(self) -> None:
        self.child.send_signal(signal.SIGKILL)
        self.child.wait()
        assert self.child.stdout is not None
        self.child.stdout.close()

    def span(self) -> Span | None:
        spans = decode_experiment(self.state.read("prefetcher:{controller}:experiment")).spans
        return spans[-1] if spans else None

    def use(self) -> None:
        """A hint for a model of each node; a third of a real second later it is asked for, and then given back."""
        j, self.round = self.round % MODELS, self.round + 1
        for node in NODES:
            hint = HintMessage(uuid.uuid4().hex, self.clock.now_s(), f"{node}-m{j}", source="page", in_s=200.0, ttl_s=900.0)
            self.writer.append(Topic.HINTS, [(str(node), encode(hint))])
        self.stop.wait(0.3)
        rows = [RequestSeen(self.clock.now_s(), ModelName(f"{node}-m{j}"), node=node, request_id=uuid.uuid4().hex) for node in NODES]
        for row in rows:
            if is_measured(row.ts, DRAWN):
                self.sent[str(row.node), block_of(row.ts, DRAWN)] += 1
        self.writer.append(Topic.REQUESTS, [(row.model, encode(RequestMessage.of(row))) for row in rows])
        self.stop.wait(0.2)
        for node in NODES:
            with contextlib.suppress(PrefetcherError):
                RemoteNode(node, self.state, self.clock).act("evict", f"{node}-m{j}")

    def use_until(self, done: Callable[[], bool], most: int = 200) -> None:
        for _ in range(most):
            if done():
                return
            self.use()
        pytest.fail("it did not happen")

    def orders(self, node: NodeName) -> list[records.OrderRecord]:
        """Every order of a node, as it stands."""
        found: dict[str, records.OrderRecord] = {}
        for raw in self.state.tail(records.node_key(node, "orders"), 10_000):
            order = msgspec.json.decode(raw, type=records.OrderRecord)
            found[order.decision_id] = order
        return list(found.values())

    def blocks(self, node: NodeName) -> list[BlockSum]:
        """What a node wrote of its hours, but for those that may still change."""
        raw = self.state.read(records.node_key(node, "blocks"))
        return [] if raw is None else msgspec.json.decode(raw, type=list[BlockSum])[:-BLOCKS_OPEN]

    def close(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        for agent in self.agents.values():
            agent.close()
        if self.child.poll() is None:
            self.kill_child()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    server = EmbeddedServer(tmp_path / "store")
    server.start()
    made = Fleet(tmp_path, server.url)
    try:
        yield made
    finally:
        made.close()
        server.stop()


def drawn(node: NodeName, at_s: float) -> Arm:
    return arm_of(node, at_s, DRAWN)[0]


def test_control_nodes_go_without_and_what_is_told_is_what_agents_counted(fleet: Fleet) -> None:
    fleet.wait_for_child()
    eventually(lambda: len(fleet.controller._nodes.reports) == len(NODES))
    span = eventually(fleet.span)
    first = block_of(span.from_s, DRAWN)
    assert span.from_s % HOUR_S == 0.0

    def in_control() -> bool:
        return fleet.clock.now_s() >= span.from_s and drawn(NODES[0], fleet.clock.now_s()) is Arm.CONTROL

    # One process is killed in an hour in which it is control, and started again.
    fleet.use_until(in_control)
    killed_in = block_of(fleet.clock.now_s(), DRAWN)
    fleet.kill_child()
    fleet.child = fleet.begin_child()
    fleet.wait_for_child()
    back_s = fleet.clock.now_s()
    last = max(first, killed_in, block_of(back_s, DRAWN)) + HOURS
    fleet.use_until(lambda: block_of(fleet.clock.now_s(), DRAWN) > last)
    eventually(lambda: all(any(b.block >= last - 1 for b in fleet.blocks(node)) for node in NODES))

    arms, begun_in = Counter[tuple[Arm, bool]](), []
    for node in NODES:
        for order in fleet.orders(node):
            if order.cause == Cause.MANUAL.value or order.issued_s < span.from_s:
                continue
            arm = drawn(node, order.issued_s)
            assert order.arm == arm.value, "every order carries the side that its node was on"
            arms[arm, order.begin_s is not None] += 1
            if arm is Arm.CONTROL:
                assert (order.begin_s, order.reason) == (None, "control_group")
            elif order.begin_s is not None and drawn(node, order.begin_s) is Arm.CONTROL and is_measured(order.begin_s, DRAWN):
                begun_in.append(order)
    assert begun_in == [], "no prefetch begins in a control hour but in its wash-out"
    assert arms[Arm.TREATED, True] > 0
    assert arms[Arm.CONTROL, False] > 0
    after = [order for order in fleet.orders(NODES[0]) if order.issued_s > back_s and drawn(NODES[0], order.issued_s) is Arm.CONTROL]
    assert after, "the one that was killed was control again"
    assert all(order.begin_s is None for order in after)

    # What is told of the experiment is what agents counted.
    told = EffectReader(fleet.state).read(fleet.clock.now_s())
    sums = {node: [b for b in fleet.blocks(node) if b.block >= first] for node in NODES}
    whole = [(node, b) for node, found in sums.items() for b in found if is_whole(b, DRAWN)]
    # Who heard of the experiment only in its first hour was not as drawn in it.
    late = [(node, b) for node, b in whole if b.control != (drawn(node, b.block * HOUR_S) is Arm.CONTROL)]
    assert {b.block for _, b in late} <= {first}
    whole = [each for each in whole if each not in late]
    assert told["running"]
    assert told["control_share"] == SHARE
    assert told["blocks"] == len(whole)
    assert told["control_blocks"] == sum(b.control for _, b in whole)
    assert told["blocks_left_out"] == sum(len(found) for found in sums.values()) - len(whole)
    for node, b in whole:
        if node != NODES[0]:
            assert b.rows == fleet.sent[str(node), b.block]
    at_once = Counter(b.block for _, b in whole if b.control)
    assert max(at_once.values()) >= 2, "several nodes are control at some time"
    assert told["nodes"] == len({node for node, _ in whole})


if __name__ == "__main__":
    main()

"""The agent alone, in this process: its plan comes from the state store, and no controller is there."""

from __future__ import annotations

import os
import threading
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
from prefetcher.agent.agent import Agent, AgentOptions
from prefetcher.agent.hostmem import HostArena, HostCopy
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
from prefetcher.errors import IntegrityError, PrefetcherError, UnavailableError, UsageError
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

T0 = 1_767_225_600.0
NODE = NodeName("node-0")
SPEED = 100.0


class FlakyState(MemoryState):
    away = False

    def read(self, key: str) -> bytes | None:
        if self.away:
            raise UnavailableError("the state store is away")
        return super().read(key)


class Node:
    """An agent on a clock that runs a hundred times as fast."""

    def __init__(self, folder: Path, models: int = 3, state: FlakyState | None = None, *, manifests: bool = True, **more: Any) -> None:
        self.models_dir = folder / "models"
        for i in range(models):
            self.write(f"m{i}", i)
        if manifests:
            write_manifests(self.models_dir)
        self.clock = ScaledClock(SPEED, T0)
        self.state = state or FlakyState()
        self.socket = folder / "run" / "agent.sock"
        given: dict[str, Any] = {"host_bytes": 2_500_000, "state_dir": folder, "socket": self.socket, "lock": "off", "hold_s": 100.0}
        options = AgentOptions(NODE, self.models_dir, **(given | more))
        self.metrics = Metrics()
        self.agent = Agent(options, self.state, self.clock, self.metrics)
        self.agent.start()

    def write(self, model: str, value: int) -> None:
        (self.models_dir / model).mkdir(parents=True, exist_ok=True)
        save_file({"w": np.full(250_000, value, np.float32)}, self.models_dir / model / "model.safetensors")

    def report(self) -> records.NodeReport | None:
        raw = self.state._get(records.node_key(NODE, "report"))
        return None if raw is None else records.decode_report(raw)

    def totals(self) -> dict[str, Any]:
        raw = self.state._get(records.node_key(NODE, "totals"))
        return {} if raw is None else msgspec.json.decode(raw)

    def held(self) -> dict[str, str]:
        report = self.report()
        return {} if report is None else {h.model: h.state for h in report.held}

    def orders(self) -> list[records.OrderRecord]:
        raw = self.state.tail(records.node_key(NODE, "orders"), 100)
        return [msgspec.json.decode(item, type=records.OrderRecord) for item in raw]

    def plan(self, *models: str, revision: int = 1, fence: int = 1, index: float = 1e-9, hold_s: float = 100.0) -> None:
        report = eventually(self.report)
        now_s = self.clock.now_s()
        desired = []
        for known in report.known:
            key = WeightsKey(ModelName(known.model), ModelVersion(known.version))
            order = None
            if known.model in models:
                decision_id = DecisionId(f"{fence}-{revision}-{known.model}")
                order = Order(decision_id, NODE, key, Tier.HOST, Cause.FORECAST, Arm.TREATED, now_s, now_s + 60, now_s + 6000, hold_s)
            desired.append(DesiredWeights(key, index, 0.01, order=order))
        plan = Plan(NODE, revision, fence, now_s, 1e-16, tuple(desired))
        self.state.write({records.node_key(NODE, "plan"): records.encode(plan)})
        self.agent.plan_written()


def opens(node: Node, model: str) -> bool:
    try:
        with prefetcher.open(model, socket_path=node.socket) as opened:
            return len(opened) > 0
    except PrefetcherError:
        return False


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.agent.close()


def test_a_planned_prefetch_arrives_and_goes_unused_without_any_controller(node: Node) -> None:
    node.plan("m1")
    eventually(lambda: node.held() == {"m1": "ready"})
    eventually(lambda: node.held() == {})
    last = node.orders()[-1]
    assert (last.model, last.outcome, last.reason) == ("m1", "useless", "hold")
    assert last.end_s is not None
    assert last.ready_s is not None
    assert 100.0 <= last.end_s - last.ready_s < 100.0 + 20 * SPEED


def test_a_used_prefetch_is_timely_and_stays(node: Node) -> None:
    node.plan("m1")
    eventually(lambda: node.held() == {"m1": "ready"})
    with prefetcher.open("m1", socket_path=node.socket) as opened:
        assert (opened.source, opened.found) == ("host", "ready")
        assert opened["w"][0] == 1.0
    eventually(lambda: [o for o in node.orders() if o.outcome == "timely"])


def test_an_older_plan_is_refused(node: Node) -> None:
    node.plan(fence=2)
    eventually(lambda: (node.report() or pytest.fail("no report")).fence == 2)
    node.plan("m1", fence=1, revision=50)
    node.agent.plan_written()
    eventually(lambda: (node.report() or pytest.fail("no report")).at_s > node.clock.now_s() - 1.5 * SPEED)
    assert node.held() == {}


def test_the_state_store_may_be_away(node: Node) -> None:
    eventually(node.report)
    node.state.away = True
    with prefetcher.open("m2", socket_path=node.socket) as opened:
        assert opened["w"][0] == 2.0
    assert node.agent.check() == ""
    node.state.away = False
    eventually(lambda: "m2" in node.held())


def test_bytes_that_changed_are_never_seen(node: Node) -> None:
    path = node.models_dir / "m1" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-4] ^= 1
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="m1"):
        prefetcher.open("m1", socket_path=node.socket, timeout_s=20.0)
    eventually(lambda: "m1" not in node.held())
    node.write("m1", 1)
    eventually(lambda: opens(node, "m1"))
    with prefetcher.open("m0", socket_path=node.socket) as opened:
        assert opened["w"][0] == 0.0


def test_a_new_version_follows_and_the_old_lease_keeps_its_bytes(node: Node) -> None:
    with prefetcher.open("m1", socket_path=node.socket) as old:
        # A new file, not the old one written over: that is how a download arrives.
        path = node.models_dir / "m1" / "model.safetensors"
        save_file({"w": np.full(250_000, 7, np.float32)}, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        write_manifests(node.models_dir / "m1")

        def version() -> bool:
            with prefetcher.open("m1", socket_path=node.socket) as new:
                return bool(new["w"][0] == 7.0)

        eventually(version)
        assert old["w"][0] == 1.0


def test_a_holder_that_dies_lets_go(node: Node) -> None:
    import subprocess
    import sys

    code = "import sys, prefetcher; m = prefetcher.open('m0', socket_path=sys.argv[1]); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(node.socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        leases = lambda: [h.leases for h in (node.report() or pytest.fail("no report")).held if h.model == "m0"]  # noqa: E731
        eventually(lambda: leases() == [1])
        child.kill()
    eventually(lambda: leases() == [0])
    assert node.agent.act("evict", "m0").ok
    eventually(lambda: "m0" not in node.held())


def test_opens_that_no_row_came_before_are_announced_and_what_comes_back_counts_once(node: Node) -> None:
    announced: list[RequestSeen] = []
    node.agent.on_unannounced = announced.append
    rows = [RequestSeen(node.clock.now_s(), ModelName("m0")), RequestSeen(node.clock.now_s(), ModelName("m1"))]
    node.agent.requested(rows)
    for _ in range(3):
        assert opens(node, "m0")
    assert opens(node, "m2")
    eventually(lambda: len(announced) == 3)
    assert sorted(row.model for row in announced) == ["m0", "m0", "m2"]
    assert all(T0 <= row.ts <= node.clock.now_s() and row.node == NODE for row in announced)
    node.agent.requested(announced)
    for model in ("m0", "m2"):
        assert opens(node, model)
    eventually(lambda: len(announced) == 5)
    eventually(lambda: node.totals().get("opens") == 6)
    assert node.totals()["rows"] == 7, "two rows, five opens of their own"
    assert not opens(node, "nobody")
    assert len({row.request_id for row in announced}) == 5


def test_an_open_that_overtakes_its_row_is_the_same_use(node: Node) -> None:
    announced: list[RequestSeen] = []
    node.agent.on_unannounced = announced.append
    row = RequestSeen(node.clock.now_s(), ModelName("m0"))
    assert opens(node, "m0")
    node.agent.requested([row])
    assert opens(node, "m1")
    eventually(lambda: announced)
    assert [found.model for found in announced] == ["m1"]
    eventually(lambda: node.totals().get("opens") == 2)
    assert node.totals()["rows"] == 2


def test_an_index_that_comes_with_rows_is_taken_before_anything_is_compared(node: Node) -> None:
    """Two of three models fit. By recency m0 would go; by what they save, m1."""
    for model in ("m0", "m1"):
        assert opens(node, model)
    rows = [RequestSeen(node.clock.now_s(), ModelName(f"m{i}")) for i in (1, 0)]
    node.agent.requested(rows, {"m0": 2e-9, "m1": 1e-9})
    node.agent.requested([RequestSeen(node.clock.now_s(), ModelName("m2"))], {"m2": 3e-9})
    eventually(lambda: node.held().get("m2") == "ready")
    assert set(node.held()) == {"m0", "m2"}
    node.agent.requested([RequestSeen(node.clock.now_s(), ModelName("m1"))], {"m1": 1e-12})
    eventually(lambda: node.totals().get("bypassed") == 1)
    node.agent.requested([RequestSeen(node.clock.now_s(), ModelName("m1"))], {"m1": 0.0, "m9": 7.0})
    eventually(lambda: node.totals().get("bypassed") == 2)


def test_the_report_says_who_waited_while_a_model_loaded(node: Node) -> None:
    now_s = node.clock.now_s()
    # The first load takes the link and gives way to none; of those that wait then, that with more rows goes next, and one row waits for it.
    node.agent.requested([RequestSeen(now_s, ModelName(model)) for model in ("m0", "m0", "m1", "m2", "m2")])
    waiting = lambda: {k.model: (k.others, k.loads) for k in eventually(node.report).known}  # noqa: E731
    eventually(lambda: waiting()["m2"] == (1.0, 1.0))
    assert waiting()["m0"] == (0.0, 1.0)
    assert eventually(node.report).waiting_rows > 0.0


def test_totals_count_memory_that_is_still_held(node: Node) -> None:
    assert opens(node, "m0")
    first = eventually(lambda: (totals := node.totals()) and totals["idle_byte_seconds"] > 0 and totals)
    eventually(lambda: node.totals()["idle_byte_seconds"] > first["idle_byte_seconds"])
    with prefetcher.open("m0", socket_path=node.socket):
        eventually(lambda: node.totals()["idle_byte_seconds"] == 0.0)
        assert node.totals()["held_byte_seconds"] > first["held_byte_seconds"]
    node.plan("m1", hold_s=1e6)
    eventually(lambda: node.totals()["wasted_byte_seconds"] > 0.0)
    assert opens(node, "m1")
    eventually(lambda: node.totals()["wasted_byte_seconds"] == 0.0)
    gauge = node.metrics.registry.get_sample_value("prefetcher_idle_byte_seconds")
    assert gauge is not None
    assert gauge > 0.0


def test_many_at_once_stay_within_the_budget(node: Node) -> None:
    errors: list[BaseException] = []

    def use(i: int) -> None:
        try:
            for j in range(6):
                with prefetcher.open(f"m{(i + j) % 3}", socket_path=node.socket) as opened:
                    assert opened["w"][17] == (i + j) % 3
        except BaseException as exc:  # noqa: BLE001 - told by the test
            errors.append(exc)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    report = eventually(node.report)
    assert report.memory.taken_bytes <= report.memory.budget_bytes


def test_an_open_of_a_file_that_was_cut_says_so(node: Node) -> None:
    path = node.models_dir / "m1" / "model.safetensors"
    os.truncate(path, 1000)
    assert not opens(node, "m1")
    eventually(lambda: any(problem.startswith("m1: ") for problem in eventually(node.report).problems))
    with pytest.raises(IntegrityError, match=r"fetch it again.*looked at again within 5 s"):
        prefetcher.open("m1", socket_path=node.socket)
    assert any("looked at again within 5 s" in problem for problem in eventually(node.report).problems)


def test_requests_for_models_that_are_not_there_are_counted_and_named_once_in_the_log(node: Node) -> None:
    now_s = node.clock.now_s()
    with structlog.testing.capture_logs() as said:
        node.agent.requested([RequestSeen(now_s + i, ModelName("nope")) for i in range(3)])
        node.agent.requested([RequestSeen(now_s, ModelName(f"other-{i}")) for i in range(200)])
        node.agent.requested([RequestSeen(now_s, ModelName("m0"))])
        eventually(lambda: eventually(node.report).unknown_rows == 203)
    report = eventually(node.report)
    assert report.unknown[0] == ("nope", 3)
    assert len(report.unknown) == 20
    named = [entry["model"] for entry in said if entry["event"] == "unknown_model"]
    assert len(named) == len(set(named)) == 100
    assert named[0] == "nope"
    node.write("nope", 5)
    write_manifests(node.models_dir / "nope")
    eventually(lambda: eventually(node.report).unknown_rows == 200)


def test_a_model_that_is_not_in_memory_says_why(node: Node) -> None:
    absent = lambda: {k.model: (k.absent, k.last_use_s is not None) for k in eventually(node.report).known}  # noqa: E731
    assert absent() == {"m0": ("", False), "m1": ("", False), "m2": ("", False)}
    assert opens(node, "m0")
    assert node.agent.act("evict", "m0").ok
    eventually(lambda: absent()["m0"] == ("asked", True))


def test_pins_that_stand_and_pins_by_hand_load_nothing_while_a_node_observes(tmp_path: Path) -> None:
    state = FlakyState()
    state.write({records.PINS: records.encode({"m0": records.Pin()}), records.SWITCH: records.encode(records.Switch(observe=True))})
    with structlog.testing.capture_logs() as said:
        node = Node(tmp_path, state=state)
        try:
            acted = node.agent.act("pin", "m1")
            assert (acted.ok, acted.reason) == (True, "observe")
            node.plan()
            known = eventually(lambda: (report := eventually(node.report)).revision == 1 and report.known)
            assert {k.model: k.pinned for k in known} == {"m0": True, "m1": True, "m2": False}
            assert {k.absent for k in known} == {"observe"}
            assert node.held() == {}
            assert [entry for entry in said if entry["event"] == "load_started"] == []
            state.write({records.SWITCH: records.encode(records.Switch())})
            node.agent.switch(on=True)
            eventually(lambda: node.held() == {"m0": "ready", "m1": "ready"})
        finally:
            node.agent.close()


@pytest.mark.parametrize(
    ("models", "host_bytes", "hint"),
    [(0, 2_500_000, "no model in"), (2, 500_000, "every model is larger than --host-bytes"), (2, 1_500_000, "1 of 3 models is larger")],
)
def test_folders_and_budgets_that_can_not_work_are_said_at_the_start(tmp_path: Path, models: int, host_bytes: int, hint: str) -> None:
    (tmp_path / "models").mkdir()
    if "1 of 3" in hint:
        (tmp_path / "models" / "big").mkdir()
        save_file({"w": np.zeros(500_000, np.float32)}, tmp_path / "models" / "big" / "model.safetensors")
    if not models:
        (tmp_path / "models" / "empty").mkdir()
    with structlog.testing.capture_logs() as said:
        node = Node(tmp_path, models=models, host_bytes=host_bytes, manifests=bool(models))
        try:
            (line,) = [entry for entry in said if entry["event"] == "models_folder"]
            assert hint in line["reason"]
            assert line["reason"] in eventually(node.report).problems
            if models:
                assert node.agent.act("pin", "m0" if "every" in hint else "big").reason == "too_large"
        finally:
            node.agent.close()


def test_a_framework_that_is_not_installed_is_refused_at_the_open(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="pip install torch"):
        prefetcher.open("m0", framework="torch", socket_path=node.socket)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_fails_is_told(node: Node) -> None:
    died: list[str] = []
    node.agent.on_died = lambda part, error: died.append(f"{part}: {error}")

    def fail(now_s: float) -> Arm:
        raise RuntimeError("no arms today")

    node.agent.arm_of = fail
    node.agent.requested([RequestSeen(node.clock.now_s(), ModelName("m0"))])
    eventually(lambda: died)
    assert died == ["agent: no arms today"]
    node.agent.arm_of = lambda now_s: Arm.TREATED


def test_a_plan_that_can_not_be_read_is_told_and_the_next_one_is_carried_out(node: Node) -> None:
    with structlog.testing.capture_logs() as logged:
        node.state.write({records.node_key(NODE, "plan"): b"nonsense"})
        node.agent.plan_written()
        eventually(lambda: node.metrics.registry.get_sample_value("prefetcher_skipped_total", {"what": "plan", "reason": "unreadable"}))
    assert [e["event"] for e in logged if e["log_level"] == "error"] == ["plan_unreadable"]
    node.plan("m1")
    eventually(lambda: node.held() == {"m1": "ready"})


def test_a_large_load_gives_way_to_a_small_one_and_nothing_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real files, threads and leases."""
    go_on = held_back(monkeypatch, "large", "small")
    whole = two_models(tmp_path / "models")
    node = Node(tmp_path, models=0, host_bytes=200_000_000)
    served: list[tuple[str, str, bool]] = []

    def opened(model: str) -> None:
        with prefetcher.open(model, socket_path=node.socket, timeout_s=60.0) as tensors:
            served.append((model, tensors.source, bool((tensors["w"] == whole[model]).all())))

    def queued() -> dict[str, records.QueuedWeights]:
        return {q.model: q for q in eventually(node.report).queued}

    programs = [threading.Thread(target=opened, args=(model,)) for model in ("large", "small")]
    try:
        programs[0].start()
        eventually(lambda: node.held() == {"large": "moving"})
        programs[1].start()
        eventually(lambda: node.held() == {"large": "pausing"})
        assert queued()["small"].behind == "large"
        go_on["large"].set()
        eventually(lambda: node.held() == {"large": "paused", "small": "moving"})
        waits = queued()
        assert (waits["large"].paused, waits["large"].behind, waits["large"].rows) == (True, "small", 1)
        assert (waits["small"].moving, waits["small"].behind) == (True, "")
        assert served == []
        go_on["small"].set()
        for program in reversed(programs):
            program.join(60)
        assert served == [("small", "host", True), ("large", "host", True)]
        turns = {known.model: (known.others, known.loads) for known in eventually(node.report).known}
        assert turns == {"large": (0.0, 1.0), "small": (1.0, 1.0)}, "that one waited is learned when a load begins, not when it goes on"
    finally:
        for event in go_on.values():
            event.set()
        node.agent.close()
    value = node.metrics.registry.get_sample_value
    assert value("prefetcher_yields_total") == 1
    files = [path.stat().st_size for path in (tmp_path / "models").glob("*/*.safetensors")]
    assert value("prefetcher_moved_bytes_total", {"cause": "demand"}) == sum(files)
    assert value("prefetcher_loads_total", {"cause": "demand", "result": "ready"}) == 2


def held_back(monkeypatch: pytest.MonkeyPatch, *models: str) -> dict[str, threading.Event]:
    """What is read of these models beyond the first 16 MiB waits until their event is set."""
    go_on = {model: threading.Event() for model in models}
    prefault = HostArena.prefault

    def when_told(arena: HostArena, copy: HostCopy, file: int, start: int, end: int) -> None:
        assert start == 0 or copy.key.model not in go_on or go_on[copy.key.model].wait(60)
        prefault(arena, copy, file, start, end)

    monkeypatch.setattr(HostArena, "prefault", when_told)
    return go_on


def two_models(folder: Path) -> dict[str, np.ndarray]:
    """One of three blocks at whose ends a load may pause, and one of a fraction of one."""
    whole = {"large": np.arange(40_000_000, dtype=np.float32), "small": np.arange(5_000_000, dtype=np.float32)}
    for model, values in whole.items():
        (folder / model).mkdir(parents=True)
        save_file({"w": values}, folder / model / "model.safetensors")
    return whole


def test_what_demand_waits_for_is_not_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a block at whose end a prefetch pauses, nor a paused one that is joined. The cap gives it 16 MiB, and the next in months."""
    go_on = held_back(monkeypatch, "small")
    two_models(tmp_path / "models")
    node = Node(tmp_path, models=0, host_bytes=200_000_000, prefetch_bytes_per_s=1.0)
    found: list[bool] = []
    programs = [threading.Thread(target=lambda model=model: found.append(opens(node, model))) for model in ("small", "large")]
    try:
        node.plan("large", index=1.0)
        eventually(lambda: [h.bytes_done for h in eventually(node.report).held] == [16 << 20])
        programs[0].start()
        eventually(lambda: node.held() == {"large": "paused", "small": "moving"})
        programs[1].start()
        eventually(lambda: [q.model for q in eventually(node.report).queued if q.paused] == ["large"])
        go_on["small"].set()
        for program in programs:
            program.join(60)
        assert found == [True, True]
    finally:
        go_on["small"].set()
        node.agent.close()
    assert node.metrics.registry.get_sample_value("prefetcher_yields_total") == 0, "it was a prefetch that paused"

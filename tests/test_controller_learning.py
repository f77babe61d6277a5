"""The controller without bytes: what it learns survives exactly, what it plans keeps the rules, and who may lead."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from prefetcher.clock import VirtualClock
from prefetcher.controller import records
from prefetcher.controller.controller import Controller, ControllerOptions
from prefetcher.controller.learner import Learner
from prefetcher.controller.records import HeldWeights, KnownWeights, Memory, NodeReport
from prefetcher.core.shadow_caches import ShadowCaches
from prefetcher.core.types import Arm, Cause, ModelName, NodeName, Plan, RequestSeen
from prefetcher.ports import Chunk, Partition, Topic
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import HintMessage, RequestMessage, encode
from prefetcher_connectors.memory import MemoryState, MemoryStreams

T0 = 1_767_225_600.0
AT = Partition(Topic.REQUESTS, 0)
NODE = NodeName("node-0")


def rows(count: int, seed: int = 0, every_s: float = 7.0) -> list[RequestSeen]:
    rng = np.random.default_rng(seed)
    return [
        RequestSeen(T0 + i * every_s, ModelName(f"m{rng.integers(0, 5)}"), user=f"u{rng.integers(0, 9)}", request_id=str(i))
        for i in range(count)
    ]


def hazard() -> Any:
    from prefetcher_models.hazard import Hazard

    return Hazard()


def test_a_silence_of_decades_costs_no_more_than_two_weeks_of_ticks() -> None:
    learner = Learner(lambda: None)
    learner.take(rows(5), {}, T0 + 60.0)
    taken = learner.take([], {}, T0 + 40 * 365 * 86_400.0)
    assert len(taken.ticks) == 20_000
    assert taken.ticks[-1] == (T0 + 40 * 365 * 86_400.0) // 60.0 * 60.0


def test_a_restored_learner_goes_on_as_if_nothing_had_happened() -> None:
    log = rows(400)
    straight, first = Learner(hazard), Learner(hazard)
    for learner in (straight, first):
        learner.take(log[:150], {AT: 150}, log[149].ts + 1)
    second = Learner(hazard)
    second.restore(first.snapshot())
    assert second.positions == {AT: 150}
    for learner in (straight, second):
        learner.take(log[120:300], {}, log[299].ts + 1)
        learner.take(log[300:], {}, log[-1].ts, caught_up=False)
    assert second.snapshot() == straight.snapshot()
    now_s = log[-1].ts + 100
    one, two = (learner.take([], {}, now_s) for learner in (straight, second))
    assert len(one.ticks) == 2
    np.testing.assert_array_equal(one.at_tick, two.at_tick)


def test_repeated_ids_count_once() -> None:
    learner = Learner(lambda: None)
    late_s = T0 + 1000
    assert len(learner.take(rows(50), {}, late_s).rows) == 50
    again = learner.take(rows(60), {}, late_s)
    assert (len(again.rows), again.repeated) == (10, 50)
    assert learner.traffic.rows == 60


def test_a_model_starts_once_and_again_after_a_pause() -> None:
    learner = Learner(lambda: None)
    near = [RequestSeen(T0 + i, ModelName("m")) for i in range(3)]
    assert learner.take(near, {}, T0 + 3).started == ("m",)
    assert learner.take([RequestSeen(T0 + 10, ModelName("m"))], {}, T0 + 10).started == ()
    assert learner.take([RequestSeen(T0 + 1000, ModelName("m"))], {}, T0 + 1000).started == ("m",)


def test_ticks_are_scored_in_event_time_whatever_the_blocks() -> None:
    log = rows(900)
    whole, parts = Learner(hazard), Learner(hazard)
    one = whole.take(log, {}, log[-1].ts + 1, caught_up=False)
    pieces = [parts.take(log[i : i + 70], {}, log[-1].ts + 1, caught_up=False) for i in range(0, 900, 70)]
    np.testing.assert_array_equal(one.ticks, np.concatenate([p.ticks for p in pieces]))
    np.testing.assert_array_equal(one.after_row, np.concatenate([p.after_row for p in pieces], axis=1))
    last = pieces[-1]
    np.testing.assert_array_equal(one.at_tick[:, -len(last.ticks) :], last.at_tick)
    assert (np.diff(one.ticks) == 60.0).all()


def test_a_row_from_the_future_counts_as_now() -> None:
    learner = Learner(lambda: None)
    learner.take([RequestSeen(T0 + 86_400.0, ModelName("m"))], {}, T0)
    assert learner.last_row_s("m") == T0
    assert len(learner.take([], {}, T0 + 180).ticks) == 3


def test_what_is_no_snapshot() -> None:
    for raw in (b"", b"nonsense", records.pack_arrays({}, {})[:-1]):
        with pytest.raises((ValueError, KeyError)):
            Learner(lambda: None).restore(raw)


class World:
    """One controller over twins."""

    def __init__(self, **options: Any) -> None:
        self.clock = VirtualClock(T0)
        self.state = MemoryState(self.clock)
        self.streams = MemoryStreams()
        self.writer = self.streams.writer()
        self.metrics = Metrics()
        self.arm = Arm.TREATED
        self.controller = self.make()
        self.known = tuple(KnownWeights(f"m{i}", "v", 1_000_000, 0.01) for i in range(5))

    def make(self) -> Controller:
        controller = Controller(
            self.streams,
            self.state,
            Learner(lambda: None),
            self.clock,
            self.metrics,
            ControllerOptions((NODE,), 0.002, 60.0, 600.0, 30.0),
            arm_of=lambda node, now_s: self.arm,
        )
        controller.start()
        return controller

    def report(self, held: tuple[HeldWeights, ...] = (), **changes: Any) -> None:
        taken = sum(h.bytes for h in held)
        found = NodeReport(NODE, self.clock.now_s(), Memory(3_000_000, taken), 3.5e9, held=held, known=self.known)
        found = msgspec.structs.replace(found, **changes)
        self.state.write({records.node_key(NodeName(found.node), "report"): records.encode(found)})

    def plan(self) -> Plan:
        raw = self.state.read(records.node_key(NODE, "plan"))
        assert raw is not None
        return records.decode_plan(raw)

    def ask(self, count: int = 60) -> None:
        self.rows([RequestSeen(self.clock.now_s() - 1, ModelName("m1"))] * count)

    def rows(self, rows: Sequence[RequestSeen]) -> None:
        self.writer.append(Topic.REQUESTS, [(row.model, encode(RequestMessage.of(row))) for row in rows])

    def hint(self, model: str, **changes: Any) -> None:
        hint = HintMessage(uuid.uuid4().hex, self.clock.now_s(), model, **changes)
        self.writer.append(Topic.HINTS, [(model, encode(hint))])


def ready(model: str, **changes: Any) -> HeldWeights:
    return msgspec.structs.replace(HeldWeights(model, "v", "host", "ready", 1_000_000, cause="demand"), **changes)


def test_orders_go_on_until_they_are_over_and_budgets_hold() -> None:
    world = World()
    world.report()
    world.rows([RequestSeen(T0 - 1, ModelName(f"m{i}")) for i in range(5) for _ in range(10 * (i + 1))])
    world.controller.step()
    first = [d.order for d in world.plan().desired if d.order is not None]
    assert {o.key.model for o in first} == {"m4", "m3", "m2"}
    assert all(o.contributions and o.arm is Arm.TREATED for o in first)
    indexes = [d.index for d in world.plan().desired]
    assert indexes == sorted(indexes, reverse=True)
    world.clock.advance(60)
    world.controller.step()
    assert {d.order.decision_id for d in world.plan().desired if d.order} == {o.decision_id for o in first}
    world.report(held=tuple(ready(str(o.key.model), decision_id=o.decision_id) for o in first))
    for order in first:
        world.controller.order_ended(NODE, order.decision_id, "useless")
    world.report()
    world.clock.advance(60)
    world.controller.step()
    again = {d.order.key.model for d in world.plan().desired if d.order}
    assert again == {"m0", "m1"}, "what went unused comes back only for a row"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"busy_ratio": 0.7}, "link_busy"),
        ({"memory": Memory(500_000, 0)}, "does_not_fit"),
        (
            {"held": (ready("m0", leases=1), ready("m2", leases=1), ready("m3", leases=1)), "memory": Memory(3_000_000, 3_000_000)},
            "no_room",
        ),
    ],
)
def test_what_is_not_prefetched_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    world = World()
    world.report(**changes)
    world.ask()
    world.controller.step()
    assert [d for d in world.plan().desired if d.order] == []
    text = world.metrics.text().decode()
    assert f'prefetcher_skipped_total{{reason="{reason}",what="prefetch"}} 1.0' in text


def test_the_control_group_gets_one_order_that_the_node_refuses() -> None:
    world = World()
    world.arm = Arm.CONTROL
    world.report()
    world.ask()
    world.controller.step()
    order = next(d.order for d in world.plan().desired if d.order)
    assert order.arm is Arm.CONTROL
    world.controller.order_ended(NODE, order.decision_id, "superseded")
    for _ in range(3):
        world.clock.advance(60)
        world.report()
        world.controller.step()
        assert {d.order.decision_id for d in world.plan().desired if d.order} == {order.decision_id}


def test_an_order_that_has_not_begun_does_not_outlive_its_side_of_the_experiment() -> None:
    world = World()
    world.report()
    world.ask()
    world.controller.step()
    first = next(d.order for d in world.plan().desired if d.order)
    for arm in (Arm.CONTROL, Arm.TREATED):
        world.arm = arm
        world.clock.advance(60)
        world.report()
        world.controller.step()
        order = next(d.order for d in world.plan().desired if d.order)
        assert (order.arm, order.key) == (arm, first.key)
        assert order.decision_id != first.decision_id
    # What has begun goes on, and is held no longer than it was.
    held = ready("m1", decision_id=order.decision_id)
    world.arm = Arm.CONTROL
    world.clock.advance(60)
    world.report(held=(held,))
    world.controller.step()
    (kept,) = [d.order for d in world.plan().desired if d.order]
    assert (kept.decision_id, kept.hold_s) == (order.decision_id, order.hold_s)


def test_switched_off_and_pinned() -> None:
    world = World()
    world.report()
    world.state.write({records.SWITCH: records.encode(records.Switch(on=False)), records.PINS: b'["m3"]'})
    world.ask()
    world.controller.step()
    plan = world.plan()
    assert not plan.prefetch_enabled
    assert [d for d in plan.desired if d.order] == []
    assert [d.key.model for d in plan.desired if d.pinned] == ["m3"]


def test_the_newest_controller_leads_and_the_older_one_writes_nothing() -> None:
    world = World()
    world.report()
    old = world.controller
    old.step()
    new = world.make()
    new.step()
    assert world.plan().fence == new.fence > old.fence
    world.ask()
    world.clock.advance(60)
    old.step()
    assert old.deposed
    assert world.plan().fence == new.fence


def test_state_and_position_are_one(tmp_path: Any) -> None:
    world = World()
    world.report()
    world.ask(10)
    world.controller.step()
    world.controller.save()
    world.ask(5)
    world.controller.step()
    again = world.make()
    again.step()
    assert again._learner.traffic.rows == 15


def test_an_old_first_row_does_not_keep_newer_ones_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    periods: list[None] = []
    end_period = ShadowCaches._end_period

    def counted(caches: ShadowCaches) -> None:
        periods.append(None)
        end_period(caches)

    monkeypatch.setattr(ShadowCaches, "_end_period", counted)
    world = World()
    world.report()
    world.rows([RequestSeen(T0 - 400 * 86_400.0, ModelName("m1"))])
    world.controller.step()
    # The hours of the last day alone; those of four hundred days would hold everything up.
    assert len(periods) <= 26
    world.ask(3)
    world.controller.step()
    assert world.controller._learner.traffic.rows == 4
    assert world.controller._learner.positions[AT] == 4


def test_a_silent_node_is_not_planned_for() -> None:
    world = World()
    assert world.controller.plan(NODE, "tick") is None


def test_a_hint_is_planned_at_once_and_unused_weights_go_with_its_time() -> None:
    world = World()
    world.report()
    world.controller.step()
    world.hint("m3", ttl_s=90.0)
    world.controller.step()
    (order,) = [d.order for d in world.plan().desired if d.order is not None]
    assert (order.key.model, order.cause, order.hold_s) == ("m3", Cause.HINT, 90.0)
    world.hint("m3")
    world.controller.step()
    assert [d.order.decision_id for d in world.plan().desired if d.order] == [order.decision_id], "it joins the order"
    world.clock.advance(200.0)
    world.report()
    world.controller.step()
    assert [d for d in world.plan().desired if d.order] == []
    assert world.controller._hints.book.belief("") < 0.5


def test_a_hint_that_comes_too_late_is_not_planned_and_a_row_keeps_one() -> None:
    world = World()
    world.report()
    world.hint("m2", ttl_s=10.0)
    world.hint("m1")
    world.clock.advance(20.0)
    world.controller.step()
    assert {d.order.key.model for d in world.plan().desired if d.order} == {"m1"}
    world.ask(1)
    world.controller.step()
    assert world.controller._hints.book.kept == 1
    assert 'prefetcher_hints_total{result="past"} 1.0' in world.metrics.text().decode()


def test_hints_survive_a_restart() -> None:
    world = World()
    world.report()
    world.hint("m3")
    world.controller.step()
    world.controller.save()
    again = world.make()
    assert again._hints.book.models() == ["m3"]
    assert len(again._hints.book) == 1
    again.step()
    assert len(again._hints.book) == 1


def test_a_hint_is_for_one_node() -> None:
    world = World()
    for node in ("a", "b", "c"):
        world.report(node=NodeName(node))
        world.state.see(records.NODES, node, world.clock.now_s())
    world.hint("m3")
    world.controller.step()
    plans = [world.state.read(records.node_key(NodeName(node), "plan")) for node in ("a", "b", "c")]
    ordered = [d.order for raw in plans if raw is not None for d in records.decode_plan(raw).desired if d.order]
    assert len(ordered) == 1


def test_a_store_that_lost_its_memory_is_planned_from_again() -> None:
    world = World()
    for _ in range(5):
        world.state.next_number(records.EPOCH)
    old = world.make()
    world.report(fence=old.fence)
    old.step()
    world.state = MemoryState(world.clock)
    world.report(fence=old.fence)
    new = world.make()
    assert new.fence < old.fence
    new.step()
    assert new.fence > old.fence
    assert world.plan().fence == new.fence
    assert not new.deposed


def test_a_leader_that_was_followed_while_it_slept_writes_nothing_more() -> None:
    world = World()
    world.report()
    old = world.controller
    old.step()
    new = world.make()
    new.step()
    world.clock.advance(60)
    world.report(fence=new.fence)
    old.step()
    assert old.deposed
    assert world.plan().fence == new.fence


def test_a_clock_that_is_set_back_does_not_stop_the_planning() -> None:
    world = World()
    world.report()
    world.controller.step()
    first = world.plan().revision
    world.clock.advance(-7200.0)
    world.report()
    world.controller.step()
    assert world.plan().revision > first
    world.clock.advance(60.0)
    world.report()
    world.controller.step()
    assert world.plan().revision > first + 1


def test_a_node_that_joins_while_the_controller_waits_for_records_is_planned_for_at_the_next_tick() -> None:
    clock, state = VirtualClock(T0), MemoryState()
    options = ControllerOptions((), 0.002, 60.0, 600.0, 1e9)
    made = Controller(MemoryStreams(), state, Learner(lambda: None), clock, Metrics(), options, arm_of=lambda node, now_s: Arm.TREATED)
    made.start()

    def joins(node: str) -> None:
        report = NodeReport(node, clock.now_s(), Memory(10_000, 0), 1000.0, known=(KnownWeights("m", "v", 1000, 1.0),))
        state.write({records.node_key(NodeName(node), "report"): records.encode(report)})
        state.see(records.NODES, node, clock.now_s())

    joins("one")
    made.step()
    joins("two")
    intake = made._intake
    assert intake is not None
    poll = intake.poll

    def slow(limit: int, timeout_s: float) -> Any:
        clock.advance(60.0)
        return poll(limit, timeout_s)

    intake.poll = slow  # type: ignore[method-assign]
    made.step()
    intake.poll = poll  # type: ignore[method-assign]
    made.step()
    assert state.read(records.node_key(NodeName("two"), "plan")) is not None


def test_a_hint_for_what_is_there_waits_for_the_next_ones_and_one_for_what_is_not_does_not() -> None:
    world = World()
    world.report(held=(ready("m1"),))
    world.controller.step()

    def plans() -> int:
        return world.plan().revision

    before = plans()
    for n in range(10):
        world.hint("m1")
        world.hint(f"unknown-{n}")
        world.controller.step()
    assert plans() == before
    world.hint("m2")
    world.controller.step()
    assert plans() == before + 1
    world.hint("m1")
    world.controller.step()
    assert plans() == before + 1
    world.clock.advance(1.0)
    world.controller.step()
    assert plans() == before + 2


def test_what_is_dated_in_the_future_is_passed_over() -> None:
    world = World()
    world.report()
    world.rows([RequestSeen((T0 - 5) * 1000.0, ModelName("m1")), RequestSeen(1e300, ModelName("m2")), RequestSeen(T0 - 5, ModelName("m3"))])
    world.writer.append(Topic.HINTS, [("m4", encode(HintMessage("h", T0 * 1000.0, "m4")))])
    world.hint("m0")
    world.controller.step()
    assert world.controller._learner.names == ["m3"]
    assert world.controller._hints.book.models() == ["m0"]
    assert world.controller._learner.positions[AT] == 3
    assert 'reason="future",what="record of requests"} 2.0' in world.metrics.text().decode()


def test_what_was_learned_under_a_backlog_is_saved_and_hints_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetcher.controller.controller._ROWS_A_STEP", 10)
    world = World()
    world.report()
    world.controller.step()
    revision = world.plan().revision
    world.ask(100)
    world.clock.advance(31.0)
    world.hint("m3")
    for _ in range(3):
        # Topics take turns in coming first.
        assert world.controller.step(), "more rows wait"
    assert world.plan().revision > revision
    assert 10 <= world.make()._learner.traffic.rows < 100


class Moved(MemoryStreams):
    """Streams whose reader once had to move: it says so with a chunk without records."""

    def reader(self, *args: Any, **kwargs: Any) -> Any:
        reader = super().reader(*args, **kwargs)
        poll, moves = reader.poll, [Chunk(AT, [], [], 0, lost=7)]
        monkey = lambda limit, timeout_s: [moves.pop()] if moves else poll(limit, timeout_s)  # noqa: E731
        reader.poll = monkey
        return reader


def test_records_that_are_gone_are_passed_over() -> None:
    world = World()
    world.streams = Moved()
    world.writer = world.streams.writer()
    world.report()
    world.controller = world.make()
    world.ask(3)
    world.controller.step()
    world.controller.step()
    assert world.controller._learner.traffic.rows == 3

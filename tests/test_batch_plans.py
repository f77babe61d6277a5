"""Batch schedules in plans: ordered in time with a cause of their own, worth no more than they are, and released whoever plans next."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from test_controller_learning import NODE, T0, World, ready
from test_core_residency import Bench, key

from prefetcher.controller import records
from prefetcher.controller.planning import RELEASED
from prefetcher.controller.records import Memory
from prefetcher.core import events as ev
from prefetcher.core import facts
from prefetcher.core.schedules import Schedule
from prefetcher.core.types import Arm, Cause, DesiredWeights, ModelName, Order, RequestSeen, Tier

#: Seconds after midnight of T0, which is one.
AT_S = 3600


def schedule(*models: str, **more: Any) -> Schedule:
    return Schedule(**{"name": "nightly", "models": models, "at_s": AT_S, "for_s": 1800.0, "lead_s": 45.0, **more})


def set_schedules(world: World, *schedules: Schedule) -> None:
    world.state.write({records.SCHEDULES: records.encode({s.name: s for s in schedules})})
    world.controller.wake("schedule")


def step_at(world: World, at_s: float, **report: Any) -> None:
    world.clock.advance(T0 + at_s - world.clock.now_s())
    world.report(**report)
    world.controller.step()


def orders(world: World) -> dict[str, Order]:
    return {str(d.key.model): d.order for d in world.plan().desired if d.order is not None}


def index_of(world: World, model: str) -> float | None:
    return next((d.index for d in world.plan().desired if d.key.model == model), None)


def skipped(world: World, reason: str) -> float:
    return world.metrics.registry.get_sample_value("prefetcher_skipped_total", {"what": "prefetch", "reason": reason}) or 0.0


def test_t0_is_midnight() -> None:
    assert datetime.fromtimestamp(T0, UTC).hour == 0


@pytest.mark.parametrize("arm", [Arm.TREATED, Arm.CONTROL])
def test_it_is_ordered_between_ticks_when_its_time_has_come(arm: Arm) -> None:
    world = World()
    world.arm = arm
    set_schedules(world, schedule("m2", "m3"))
    roomy = {"memory": Memory(10_000_000, 0)}
    step_at(world, AT_S - 60.0, **roomy)
    assert orders(world) == {}
    step_at(world, AT_S - 46.0, **roomy)
    assert orders(world) == {}
    step_at(world, AT_S - 45.0, **roomy)
    found = orders(world)
    assert set(found) == {"m2", "m3"}
    for order in found.values():
        assert (order.cause, order.arm, order.contributions) == (Cause.BATCH, Arm.TREATED, (("batch", 1.0),))
        assert (order.expected_use_s, order.issued_s + order.hold_s) == (T0 + AT_S, T0 + AT_S + 1800.0)
    ids = {order.decision_id for order in found.values()}
    step_at(world, AT_S, **roomy)
    step_at(world, AT_S + 60.0, **roomy)
    assert {order.decision_id for order in orders(world).values()} == ids


def test_a_busy_link_keeps_forecasts_waiting_and_no_batch() -> None:
    world = World()
    set_schedules(world, schedule("m2"))
    world.ask()
    step_at(world, AT_S, busy_ratio=0.9)
    assert set(orders(world)) == {"m2"}
    assert skipped(world, "link_busy") > 0


def test_nothing_that_is_worth_more_makes_room() -> None:
    world = World()
    set_schedules(world, schedule("m2"))
    held = tuple(ready(f"m{i}") for i in (0, 1, 3))
    world.clock.advance(AT_S - 400.0)
    # Far more often than once a minute.
    world.rows([RequestSeen(world.clock.now_s() + i * 0.5, ModelName(f"m{(0, 1, 3)[i % 3]}")) for i in range(790)])
    for at_s in (AT_S - 300.0, AT_S):
        step_at(world, at_s, held=held)
    assert orders(world) == {}
    assert skipped(world, "victims_worth_more") + skipped(world, "no_room") > 0
    # What is not used any more makes room.
    step_at(world, AT_S + 1500.0, held=held)
    assert set(orders(world)) == {"m2"}


def test_the_quota_of_the_node_bounds_what_is_ordered() -> None:
    world = World()
    set_schedules(world, schedule("m0", "m1", "m2", "m3"))
    step_at(world, AT_S)
    # Half of 3,000,000 bytes: one at a time, each for a quarter of the window.
    assert set(orders(world)) == {"m0"}
    step_at(world, AT_S + 451.0, held=(ready("m0", cause="batch", decision_id=orders(world)["m0"].decision_id),))
    assert set(orders(world)) == {"m1"}
    assert index_of(world, "m0") == RELEASED


@pytest.mark.parametrize("restarted", [False, True])
def test_what_is_held_for_batch_is_released_at_its_end(restarted: bool) -> None:
    world = World()
    set_schedules(world, schedule("m2"))
    held = (ready("m2", cause="batch", decision_id="d", last_use_s=T0 + AT_S), ready("m1"))
    step_at(world, AT_S + 10.0, held=held)
    assert (index_of(world, "m2") or 0.0) > 0.0
    if restarted:
        world.controller = world.make()
    # Used up to the end, so that forecasts would keep it.
    world.rows([RequestSeen(T0 + AT_S + 1700.0 + i, ModelName("m2")) for i in range(90)])
    step_at(world, AT_S + 1800.0, held=held)
    assert index_of(world, "m2") == RELEASED
    assert index_of(world, "m1") != RELEASED
    # It is not fetched on the strength of the job's own requests, but it is for another's.
    step_at(world, AT_S + 1801.0)
    step_at(world, AT_S + 1860.0)
    assert orders(world) == {}
    assert skipped(world, "batch_ended") > 0
    world.rows([RequestSeen(T0 + AT_S + 1870.0 + i, ModelName("m2")) for i in range(40)])
    step_at(world, AT_S + 1920.0)
    assert {model: order.cause for model, order in orders(world).items()} == {"m2": Cause.FORECAST}


def test_one_that_is_removed_is_released_and_its_orders_go() -> None:
    world = World()
    set_schedules(world, schedule("m2", quota_bytes=1_000_000), schedule("m3", name="other"))
    step_at(world, AT_S + 10.0, memory=Memory(10_000_000, 0))
    assert set(orders(world)) == {"m2", "m3"}
    held = (ready("m2", cause="batch", decision_id=orders(world)["m2"].decision_id),)
    set_schedules(world)
    step_at(world, AT_S + 11.0, held=held, memory=Memory(10_000_000, 0))
    assert orders(world) == {}
    assert index_of(world, "m2") == RELEASED


def test_pinned_weights_stay() -> None:
    world = World()
    world.state.write({records.PINS: b'["m2"]'})
    step_at(world, AT_S, held=(ready("m2", cause="batch", pinned=True),))
    assert (index_of(world, "m2") or 0.0) >= 0.0


def test_schedules_outlive_a_store_that_forgets_and_one_that_holds_nonsense() -> None:
    world = World()
    set_schedules(world, schedule("m2"))
    step_at(world, 10.0)
    raw = world.state.read(records.SCHEDULES)
    world.state.delete([records.SCHEDULES])
    step_at(world, 70.0)
    assert world.state.read(records.SCHEDULES) == raw
    world.state.write({records.SCHEDULES: b'{"nightly": 7}'})
    step_at(world, AT_S)
    assert set(orders(world)) == {"m2"}
    world.state.write({records.SCHEDULES: b"{}"})
    step_at(world, AT_S + 60.0)
    assert orders(world) == {}


def test_one_for_another_node_is_none_of_this_one() -> None:
    world = World()
    set_schedules(world, schedule("m2", node="node-7"), schedule("m3", name="own", node=NODE))
    step_at(world, AT_S)
    assert set(orders(world)) == {"m3"}


def batch_copy(used: bool) -> Bench:
    """A machine on which a batch order for 600 s is ready."""
    bench = Bench({"a": 50})
    wanted = bench.wants("a", 1.0, "o1")
    assert wanted.order is not None
    order = replace(wanted.order, cause=Cause.BATCH)
    bench.plan(replace(wanted, order=order)).tell(ev.WeightsLoaded(key("a"), Tier.HOST))
    if used:
        bench.tell(ev.LeaseRequested("h", ModelName("a"), "t"))
        bench.tell(ev.LeaseReleased("h", key("a")))
    return bench


@pytest.mark.parametrize("used", [False, True])
def test_a_node_releases_at_the_end_what_it_loaded_for_batch_without_a_controller(used: bool) -> None:
    bench = batch_copy(used)
    bench.tell(ev.Ticked(), 1000.0 + 599.0 - bench.now_s)
    assert bench.of(ev.EvictWeights) == []
    bench.tell(ev.Ticked(), 4.0)
    assert [(e.key, e.reason) for e in bench.of(ev.EvictWeights)] == [(key("a"), ev.Evicted.WINDOW)]
    assert [e.ending for e in bench.facts(facts.OrderEnded)] == [facts.Ending.GIVEN_UP]
    assert len(bench.facts(facts.OrderUsed)) == 0


def test_what_a_program_has_open_at_the_end_goes_when_it_is_done() -> None:
    bench = batch_copy(used=False)
    bench.tell(ev.LeaseRequested("h", ModelName("a"), "t"))
    bench.tell(ev.Ticked(), 700.0)
    assert bench.of(ev.EvictWeights) == []
    bench.tell(ev.LeaseReleased("h", key("a")))
    bench.tell(ev.Ticked())
    assert [e.reason for e in bench.of(ev.EvictWeights)] == [ev.Evicted.WINDOW]


@pytest.mark.parametrize("price", [0.0, 1e-9])
def test_what_a_plan_releases_goes_whatever_holding_costs(price: float) -> None:
    bench = batch_copy(used=True)
    bench.plan(DesiredWeights(key("a"), RELEASED, 0.01), price=price)
    assert [e.reason for e in bench.of(ev.EvictWeights)] == [ev.Evicted.WINDOW]

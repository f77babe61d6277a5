"""The residency machine, situation by situation."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from prefetcher.core import events as ev
from prefetcher.core import facts
from prefetcher.core.residency import NodeLimits, ResidencyMachine
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
    Tier,
    WeightsKey,
)
from prefetcher.errors import InputError

NODE = NodeName("n")
T = TypeVar("T")


def key(model: str, version: str = "1") -> WeightsKey:
    return WeightsKey(ModelName(model), ModelVersion(version))


class Bench:
    """A machine with models of given sizes on disk; every step's instructions stay in `told`."""

    def __init__(self, sizes: dict[str, int], host: int = 100, **limits: object) -> None:
        budgets = {Tier.HOST: host, Tier.DEVICE: 60}
        reserve = {Tier.DEVICE: 20}
        self.machine = ResidencyMachine(NODE, NodeLimits(budgets, reserve, link_bytes_per_s=10.0, **limits))  # type: ignore[arg-type]
        self.now_s = 1000.0
        self.told: list[ev.Instruction] = []
        self.revision = 0
        for model, size in sizes.items():
            self.see(key(model), size)

    def see(self, which: WeightsKey, size: int, *tiers: Tier) -> None:
        complete = frozenset(tiers or {Tier.DISK})
        self.tell(ev.CatalogSeen(which, size, {Tier.HOST: size / 10, Tier.DEVICE: 0.1}, complete))

    def tell(self, event: ev.Event, after_s: float = 1.0) -> Bench:
        self.now_s += after_s
        self.told = self.machine.handle(event, self.now_s)
        assert self.machine.check() == []
        return self

    def of(self, kind: type[T]) -> list[T]:
        return [i for i in self.told if isinstance(i, kind)]

    def facts(self, kind: type[T]) -> list[T]:
        return [i.fact for i in self.told if isinstance(i, ev.Record) and isinstance(i.fact, kind)]

    def load(self, model: str, holder: str = "") -> Bench:
        """Brings a model in on demand, leased by `holder` if one is named."""
        if holder:
            self.tell(ev.LeaseRequested(holder, ModelName(model), holder))
        else:
            self.tell(ev.Requested(ModelName(model), self.now_s + 1.0))
        return self.tell(ev.WeightsLoaded(key(model), Tier.HOST))

    def plan(self, *desired: DesiredWeights, price: float = 0.0, fence: int = 1, enabled: bool = True) -> Bench:
        self.revision += 1
        return self.tell(ev.PlanReceived(Plan(NODE, self.revision, fence, self.now_s, price, desired, enabled)))

    def wants(
        self, model: str, index: float, order: str = "", tier: Tier = Tier.HOST, pinned: bool = False, arm: Arm = Arm.TREATED
    ) -> DesiredWeights:
        made = None
        if order:
            expected_s = self.now_s + 60.0
            made = Order(DecisionId(order), NODE, key(model), tier, Cause.FORECAST, arm, self.now_s, expected_s, self.now_s + 300.0, 600.0)
        return DesiredWeights(key(model), index, 0.01, pinned, made)

    def tiers(self, model: str) -> set[Tier]:
        return set(self.machine.holdings.weights[key(model)].copies)


def test_a_prefetch_that_nobody_uses_goes_after_its_hold_without_a_controller() -> None:
    bench = Bench({"a": 50}).plan(DesiredWeights(key("a"), 1.0, 0.1))
    bench.plan(bench.wants("a", 1.0, "o1"))
    (load,) = bench.of(ev.LoadWeights)
    assert (load.cause, load.order is not None) == (Cause.FORECAST, True)
    bench.tell(ev.WeightsLoaded(key("a"), Tier.HOST))
    bench.tell(ev.Ticked(), 599.0)
    assert bench.of(ev.EvictWeights) == []
    bench.tell(ev.Ticked(), 1.5)
    assert [(e.key, e.reason) for e in bench.of(ev.EvictWeights)] == [(key("a"), ev.Evicted.HOLD)]
    (ended,) = bench.facts(facts.OrderEnded)
    assert (ended.decision_id, ended.ending) == ("o1", facts.Ending.GIVEN_UP)
    assert Tier.HOST in bench.tiers("a"), "the bytes count until the kernel has them back"
    bench.tell(ev.WeightsEvicted(key("a"), Tier.HOST))
    (residency,) = bench.facts(facts.ResidencyEnded)
    assert residency.last_use_s is None
    assert residency.decision_id == "o1"


def test_a_plan_moves_the_end_of_a_hold_out() -> None:
    bench = Bench({"a": 50})
    wanted = bench.wants("a", 1.0, "o1")
    assert wanted.order is not None
    bench.plan(wanted).tell(ev.WeightsLoaded(key("a"), Tier.HOST))
    bench.tell(ev.Ticked(), 500.0)
    longer = replace(wanted, order=replace(wanted.order, hold_s=900.0))
    bench.plan(longer)
    assert bench.of(ev.RefuseOrder) == []
    bench.plan(wanted)
    bench.tell(ev.Ticked(), wanted.order.issued_s + 899.0 - bench.now_s)
    assert bench.of(ev.EvictWeights) == [], "an earlier end doesn't move it back"
    bench.tell(ev.Ticked(), 2.0)
    assert [(e.key, e.reason) for e in bench.of(ev.EvictWeights)] == [(key("a"), ev.Evicted.HOLD)]


def test_a_used_prefetch_stays() -> None:
    bench = Bench({"a": 50})
    bench.plan(bench.wants("a", 1.0, "o1")).tell(ev.WeightsLoaded(key("a"), Tier.HOST))
    bench.tell(ev.Requested(ModelName("a"), bench.now_s + 1.0))
    assert [u.decision_id for u in bench.facts(facts.OrderUsed)] == ["o1"]
    assert [s.wait_s for s in bench.facts(facts.RowServed)] == [0.0]
    bench.tell(ev.Ticked(), 5000.0)
    assert bench.of(ev.EvictWeights) == []


def test_demand_pauses_a_running_prefetch_and_takes_its_memory_before_any_victim() -> None:
    bench = Bench({"old": 30, "guess": 60, "now": 60})
    bench.load("old")
    bench.plan(bench.wants("guess", 5.0, "o1"), bench.wants("old", 1e-9), bench.wants("now", 9.0))
    bench.tell(ev.LeaseRequested("h", ModelName("now"), "t"))
    assert bench.of(ev.PauseLoad) == [ev.PauseLoad(key("guess"), Tier.HOST)]
    bench.tell(ev.LoadPaused(key("guess"), Tier.HOST, 40))
    assert [c.key for c in bench.of(ev.CancelLoad)] == [key("guess")]
    assert bench.of(ev.EvictWeights) == []
    assert [e.ending for e in bench.facts(facts.OrderEnded)] == [facts.Ending.CANCELLED]
    bench.tell(ev.WeightsEvicted(key("guess"), Tier.HOST))
    assert [i.key for i in bench.of(ev.LoadWeights)] == [key("now")]


def test_requests_do_not_wait_for_memory_that_a_program_keeps_mapped() -> None:
    bench = Bench({"big": 90, "small": 30}).load("big")
    bench.tell(ev.LeaseRequested("h", ModelName("small"), "t"))
    assert [e.key for e in bench.of(ev.EvictWeights)] == [key("big")]
    bench.tell(ev.Ticked(), 2.0)
    assert bench.of(ev.GrantLease) == [], "what leaves is soon gone, as a rule"
    bench.tell(ev.Ticked(), 4.0)
    (small,) = bench.of(ev.GrantLease)
    assert (small.key, small.tier, small.bypass) == (key("small"), Tier.DISK, True)
    bench.tell(ev.LeaseRequested("h", ModelName("big"), "u"))
    (big,) = bench.of(ev.GrantLease)
    assert (big.key, big.tier, big.bypass, big.reason) == (key("big"), Tier.DISK, True, "still_mapped")
    bench.tell(ev.WeightsEvicted(key("big"), Tier.HOST))
    bench.tell(ev.LeaseRequested("h", ModelName("small"), "v"))
    assert [load.key for load in bench.of(ev.LoadWeights)] == [key("small")], "once it is free it is taken again"


def test_a_paused_prefetch_goes_on_where_it_stopped_once_demand_is_served() -> None:
    bench = Bench({"guess": 50, "now": 40})
    bench.plan(bench.wants("guess", 5.0, "o1"), bench.wants("now", 9.0))
    bench.tell(ev.Requested(ModelName("now"), bench.now_s)).tell(ev.LoadPaused(key("guess"), Tier.HOST, 20))
    assert [i.key for i in bench.of(ev.LoadWeights)] == [key("now")]
    bench.tell(ev.WeightsLoaded(key("now"), Tier.HOST))
    (resumed,) = bench.of(ev.LoadWeights)
    assert (resumed.key, resumed.resumed, resumed.resume_from_bytes) == (key("guess"), True, 20)


def test_a_row_joins_a_moving_prefetch_which_is_then_late_and_no_more_paused() -> None:
    bench = Bench({"a": 50, "b": 50})
    bench.plan(bench.wants("a", 1.0, "o1"), bench.wants("b", 1.0))
    bench.tell(ev.Requested(ModelName("a"), bench.now_s + 1.0))
    assert [u.decision_id for u in bench.facts(facts.OrderUsed)] == ["o1"]
    assert [r.found for r in bench.facts(facts.RowSeen)] == [facts.Found.MOVING]
    bench.tell(ev.Requested(ModelName("b"), bench.now_s + 1.0))
    assert bench.of(ev.PauseLoad) == []
    bench.tell(ev.WeightsLoaded(key("a"), Tier.HOST), 5.0)
    assert [(s.found, s.wait_s) for s in bench.facts(facts.RowServed)] == [(facts.Found.MOVING, 6.0)]


def test_demand_is_loaded_by_waiting_rows_per_remaining_byte() -> None:
    bench = Bench({"first": 10, "big": 60, "small": 20, "busy": 60}, host=1000)
    bench.tell(ev.Requested(ModelName("first"), bench.now_s))
    for model in ("big", "small", "busy", "busy", "busy", "busy"):
        bench.tell(ev.Requested(ModelName(model), bench.now_s))
    order = []
    loading = "first"
    for _ in range(3):
        bench.tell(ev.WeightsLoaded(key(loading), Tier.HOST))
        (load,) = bench.of(ev.LoadWeights)
        loading = load.key.model
        order.append(loading)
    assert order == ["busy", "small", "big"]


@pytest.mark.parametrize(("index", "price", "reason"), [(0.1, 0.0, "victims_worth_more"), (0.1, 0.2, "price"), (9.0, 0.0, "")])
def test_weights_that_are_not_worth_it_are_opened_from_disk(index: float, price: float, reason: str) -> None:
    bench = Bench({"small": 40, "big": 90}).load("small")
    bench.plan(bench.wants("small", 1.0), bench.wants("big", index), price=price)
    bench.tell(ev.LeaseRequested("h", ModelName("big"), "t"))
    if reason:
        assert bench.of(ev.GrantLease) == [ev.GrantLease("h", key("big"), Tier.DISK, True, reason, "t")]
        assert [s.wait_s for s in bench.facts(facts.RowServed)] == [9.0], "the time of the link that it must still pass"
    else:
        assert [e.key for e in bench.of(ev.EvictWeights)] == [key("small")]


def test_victims_are_the_lowest_and_no_more_than_needed() -> None:
    bench = Bench({"a": 10, "b": 20, "c": 30, "d": 40, "new": 55})
    for model in ("a", "b", "c", "d"):
        bench.load(model)
    scores = [bench.wants("a", 0.1), bench.wants("b", 0.2), bench.wants("c", 0.3), bench.wants("d", 0.4)]
    bench.plan(*scores, bench.wants("new", 9.0))
    bench.tell(ev.Requested(ModelName("new"), bench.now_s))
    # a, b, c give 60; without a there are still 50 < 55, so all three go and d stays.
    assert {e.key.model for e in bench.of(ev.EvictWeights)} == {"a", "b", "c"}


def test_a_prefetch_never_displaces_a_higher_index() -> None:
    bench = Bench({"low": 50, "high": 10, "entrant": 60})
    bench.load("low").load("high")
    bench.plan(bench.wants("low", 0.1), bench.wants("high", 2.0), bench.wants("entrant", 1.0, "o1"))
    assert {e.key.model for e in bench.of(ev.EvictWeights)} == {"low"}
    bench = Bench({"low": 30, "high": 60, "entrant": 62})
    bench.load("low").load("high")
    # By the sum alone `high` would go (1.005 x 62 > 1.01 x 60).
    bench.plan(bench.wants("low", 0.01), bench.wants("high", 1.01), bench.wants("entrant", 1.005, "o1"))
    assert bench.of(ev.EvictWeights) == []
    assert bench.of(ev.LoadWeights) == []


def test_a_prefetch_never_enters_the_reserve_and_demand_may() -> None:
    bench = Bench({"a": 30, "b": 20}, serving_tier=Tier.DEVICE)
    bench.load("a").tell(ev.WeightsLoaded(key("a"), Tier.DEVICE))
    bench.plan(bench.wants("a", 5.0), bench.wants("b", 1.0, "o1", Tier.DEVICE))
    bench.tell(ev.WeightsLoaded(key("b"), Tier.HOST))
    assert bench.of(ev.LoadWeights) == [], "30 + 20 bytes are more than 60 - 20"
    bench.tell(ev.Requested(ModelName("b"), bench.now_s))
    assert [i.to_tier for i in bench.of(ev.LoadWeights)] == [Tier.DEVICE]


@pytest.mark.parametrize(("size", "tier"), [(101, Tier.HOST), (41, Tier.DEVICE)])
def test_an_order_that_can_never_fit_is_refused_at_once_and_evicts_nothing(size: int, tier: Tier) -> None:
    bench = Bench({"a": 80, "big": size}).load("a")
    bench.plan(bench.wants("a", 0.1), bench.wants("big", 9.0, "o1", tier))
    assert bench.of(ev.RefuseOrder) == [ev.RefuseOrder(DecisionId("o1"), "too_large")]
    assert [e.ending for e in bench.facts(facts.OrderEnded)] == [facts.Ending.REPLACED]
    assert bench.of(ev.EvictWeights) == []


def test_a_head_that_finds_no_room_does_not_hold_up_those_behind_it() -> None:
    bench = Bench({"held": 60, "head": 70, "next": 30}).load("held", "h")
    bench.plan(bench.wants("held", 0.0), bench.wants("head", 9.0, "o1"), bench.wants("next", 1.0, "o2"))
    assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["next"]
    bench.tell(ev.WeightsLoaded(key("next"), Tier.HOST)).tell(ev.Ticked(), 301.0)
    assert [(e.decision_id, e.reason) for e in bench.facts(facts.OrderEnded)] == [("o1", "deadline")]


def test_stale_plans_and_fences_are_refused() -> None:
    bench = Bench({"a": 10})
    bench.plan(fence=3)
    bench.tell(ev.PlanReceived(Plan(NODE, 1, 3, 0.0, 0.0)))
    assert [r.reason for r in bench.of(ev.RefusePlan)] == ["stale_revision"]
    bench.tell(ev.PlanReceived(Plan(NODE, 99, 2, 0.0, 0.0)))
    assert [r.reason for r in bench.of(ev.RefusePlan)] == ["stale_fence"]
    bench.tell(ev.PlanReceived(Plan(NODE, 1, 4, 0.0, 0.0)))
    assert bench.of(ev.RefusePlan) == []


def test_an_order_that_a_newer_plan_drops_is_superseded_and_one_that_ended_is_not_begun_again() -> None:
    bench = Bench({"run": 20, "a": 20})
    orders = (bench.wants("run", 1.0, "o1"), bench.wants("a", 1.0, "o2"))
    bench.plan(*orders)
    bench.plan(orders[0])
    assert [(e.decision_id, e.reason) for e in bench.facts(facts.OrderEnded)] == [("o2", "newer_plan")]
    bench.plan(*orders)
    bench.tell(ev.WeightsLoaded(key("run"), Tier.HOST))
    assert bench.of(ev.LoadWeights) == []


def test_price_takes_back_what_idles_and_leaves_what_is_leased_or_pinned() -> None:
    bench = Bench({"idle": 20, "leased": 20, "pinned": 20}).load("idle").load("leased", "h").load("pinned")
    bench.tell(ev.Pinned(ModelName("pinned")))
    bench.plan(bench.wants("idle", 0.1), bench.wants("leased", 0.1), bench.wants("pinned", 0.1), price=0.2)
    assert [(e.key.model, e.reason) for e in bench.of(ev.EvictWeights)] == [("idle", ev.Evicted.PRICE)]


def test_switched_off_cancels_what_runs_for_a_guess_and_demand_goes_on() -> None:
    bench = Bench({"a": 30, "b": 30, "c": 30})
    bench.plan(bench.wants("a", 1.0, "o1"), bench.wants("b", 1.0, "o2"))
    bench.tell(ev.SwitchedOff())
    assert [c.key.model for c in bench.of(ev.CancelLoad)] == ["a"]
    endings = {e.decision_id: e.ending for e in bench.facts(facts.OrderEnded)}
    assert endings == {"o1": facts.Ending.CANCELLED, "o2": facts.Ending.REPLACED}
    bench.tell(ev.WeightsEvicted(key("a"), Tier.HOST))
    bench.plan(bench.wants("b", 1.0, "o3"))
    assert [r.reason for r in bench.of(ev.RefuseOrder)] == ["switched_off"]
    assert bench.tell(ev.Requested(ModelName("c"), bench.now_s)).of(ev.LoadWeights)


@pytest.mark.parametrize("order", ["o1", ""])
def test_switched_off_cancels_what_runs_for_a_pin_of_the_plan(order: str) -> None:
    bench = Bench({"a": 30})
    bench.plan(bench.wants("a", 1.0, order, pinned=True))
    assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["a"]
    assert [c.key.model for c in bench.tell(ev.SwitchedOff()).of(ev.CancelLoad)] == ["a"]


def test_the_control_arm_loads_nothing_ahead() -> None:
    bench = Bench({"a": 30})
    bench.plan(bench.wants("a", 1.0, "o1", arm=Arm.CONTROL))
    assert [r.reason for r in bench.of(ev.RefuseOrder)] == ["control_group"]


def test_an_old_version_serves_until_the_new_one_is_complete_and_leaves_when_its_leases_end() -> None:
    bench = Bench({"m": 30}).load("m", "h1")
    bench.see(key("m", "2"), 40)
    bench.tell(ev.VersionPublished(key("m"), key("m", "2")))
    assert [i.key.version for i in bench.of(ev.LoadWeights)] == ["2"]
    bench.tell(ev.LeaseRequested("h2", ModelName("m"), "t"))
    assert [g.key.version for g in bench.of(ev.GrantLease)] == ["1"]
    bench.tell(ev.WeightsLoaded(key("m", "2"), Tier.HOST))
    assert bench.of(ev.SwitchVersion) == [ev.SwitchVersion(ModelName("m"), key("m"), key("m", "2"))]
    assert bench.of(ev.EvictWeights) == []
    bench.tell(ev.LeaseRequested("h3", ModelName("m"), "t"))
    assert [g.key.version for g in bench.of(ev.GrantLease)] == ["2"]
    bench.tell(ev.LeaseReleased("h1", key("m")))
    assert bench.of(ev.EvictWeights) == []
    bench.tell(ev.HolderLost("h2"))
    assert [(e.key.version, e.reason) for e in bench.of(ev.EvictWeights)] == [("1", ev.Evicted.VERSION)]


def test_failed_loads_back_off_further_each_time_and_demand_is_served_from_disk_meanwhile() -> None:
    bench = Bench({"a": 30})
    tries_s = []
    bench.tell(ev.Pinned(ModelName("a"), "ask"))
    for _ in range(14):
        bench.tell(ev.LoadFailed(key("a"), Tier.HOST, "disk"))
        failed_s = bench.now_s
        while not bench.of(ev.LoadWeights):
            bench.tell(ev.Ticked(), 0.1)
        tries_s.append(bench.now_s - failed_s)
    assert tries_s[0] < 1.2
    assert 100.0 < tries_s[-1] < 301.0, "capped"
    assert all(0.45 * 2.0**i < gap < 1.15 * 2.0**i for i, gap in enumerate(tries_s[:8]))
    bench.tell(ev.LoadFailed(key("a"), Tier.HOST, "disk"))
    bench.tell(ev.LeaseRequested("h", ModelName("a"), "t"))
    assert [(g.tier, g.reason) for g in bench.of(ev.GrantLease)] == [(Tier.DISK, "load_failed")]


def test_a_bad_source_is_served_to_nobody() -> None:
    bench = Bench({"a": 30})
    bench.tell(ev.LeaseRequested("h", ModelName("a"), "t"))
    bench.tell(ev.LoadFailed(key("a"), Tier.HOST, "digest", source_bad=True))
    assert [(e.tier, e.reason) for e in bench.of(ev.EvictWeights)] == [(Tier.DISK, ev.Evicted.BAD)]
    assert [r.token for r in bench.of(ev.RefuseLease)] == ["t"]
    assert bench.of(ev.GrantLease) == []
    bench.tell(ev.LeaseRequested("h", ModelName("a"), "u"))
    assert [r.reason for r in bench.of(ev.RefuseLease)] == ["no_copy"]


def test_a_load_that_stalls_is_stopped_and_told_again_until_it_answers() -> None:
    bench = Bench({"a": 30})
    bench.tell(ev.LeaseRequested("h", ModelName("a"), "t"))
    bench.tell(ev.BytesVerified(key("a"), Tier.HOST, 5), 100.0)
    bench.tell(ev.Ticked(), 100.0)
    assert bench.of(ev.CancelLoad) == [], "it made progress"
    bench.tell(ev.Ticked(), 21.0)
    assert [c.reason for c in bench.of(ev.CancelLoad)] == ["stalled"]
    assert [(g.tier, g.reason) for g in bench.of(ev.GrantLease)] == [(Tier.DISK, "stalled")]
    bench.tell(ev.Ticked(), 31.0)
    assert [c.reason for c in bench.of(ev.CancelLoad)] == ["overdue"]
    bench.tell(ev.Ticked(), 31.0)
    assert bench.of(ev.CancelLoad) == [], "less often each time"


def test_by_hand_says_why_not() -> None:
    bench = Bench({"a": 30, "big": 200}).load("a", "h")
    answers = {}
    for ask, event in {
        "evict-leased": ev.EvictAsked(ModelName("a"), "evict-leased"),
        "evict-absent": ev.EvictAsked(ModelName("big"), "evict-absent"),
        "load-big": ev.LoadAsked(ModelName("big"), "load-big"),
        "load-there": ev.LoadAsked(ModelName("a"), "load-there"),
        "pin-big": ev.Pinned(ModelName("big"), "pin-big"),
        "pin-nobody": ev.Pinned(ModelName("?"), "pin-nobody"),
        "unpin": ev.Unpinned(ModelName("a"), "unpin"),
    }.items():
        bench.tell(event)
        (answer,) = bench.of(ev.Answer)
        assert answer.ask_id == ask
        answers[ask] = (answer.ok, answer.reason)
    assert answers == {
        "evict-leased": (False, "leased"),
        "evict-absent": (False, "not_resident"),
        "load-big": (False, "too_large"),
        "load-there": (True, "resident"),
        "pin-big": (False, "too_large"),
        "pin-nobody": (False, "unknown_model"),
        "unpin": (False, "not_pinned"),
    }


def test_without_any_plan_the_least_recently_used_makes_room() -> None:
    bench = Bench({"a": 40, "b": 40, "c": 60}).load("a").load("b")
    bench.tell(ev.Requested(ModelName("a"), bench.now_s))
    bench.tell(ev.Requested(ModelName("c"), bench.now_s))
    assert [e.key.model for e in bench.of(ev.EvictWeights)] == ["b"]


def test_observing_loads_nothing_and_says_so() -> None:
    bench = Bench({"a": 30}, observe=True)
    bench.plan(bench.wants("a", 1.0, "o1"))
    assert [r.reason for r in bench.of(ev.RefuseOrder)] == ["observe"]
    bench.tell(ev.LeaseRequested("h", ModelName("a"), "t"))
    assert [(g.tier, g.reason) for g in bench.of(ev.GrantLease)] == [(Tier.DISK, "observe")]


def test_what_is_pinned_while_a_node_observes_is_loaded_once_it_does_not() -> None:
    bench = Bench({"by_hand": 30, "by_plan": 30, "absent": 20}, observe=True)
    pin = bench.tell(ev.Pinned(ModelName("by_hand"), "ask"))
    assert [(a.ok, a.reason) for a in pin.of(ev.Answer)] == [(True, "observe")]
    bench.plan(bench.wants("by_plan", 1.0, pinned=True))
    assert bench.of(ev.LoadWeights) == []
    assert [(a.ok, a.reason) for a in bench.tell(ev.EvictAsked(ModelName("absent"), "ask")).of(ev.Answer)] == [(False, "observe")]
    bench = Bench({"a": 30, "b": 60})
    bench.tell(ev.SwitchedOn(observe=True)).tell(ev.Pinned(ModelName("a")))
    assert bench.of(ev.LoadWeights) == []
    bench.tell(ev.SwitchedOn())
    assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["a"]
    bench.tell(ev.Pinned(ModelName("b"))).tell(ev.WeightsLoaded(key("a"), Tier.HOST))
    assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["b"]
    bench.tell(ev.SwitchedOn(observe=True))
    assert [c.key.model for c in bench.of(ev.CancelLoad)] == ["b"], "a load for a pin stops as well"


def test_after_a_restart_only_what_was_found_is_there_and_begun_prefetches_are_lost() -> None:
    bench = Bench({"kept": 20, "gone": 20, "moving": 20}).load("kept", "h").load("gone")
    bench.plan(bench.wants("moving", 1.0, "o1"))
    bench.tell(ev.AgentRestarted(frozenset({(key("kept"), Tier.HOST)})))
    assert [e.ending for e in bench.facts(facts.OrderEnded)] == [facts.Ending.LOST]
    assert bench.tiers("kept") == {Tier.DISK, Tier.HOST}
    assert bench.tiers("gone") == bench.tiers("moving") == {Tier.DISK}
    assert bench.tell(ev.EvictAsked(ModelName("kept"), "x")).of(ev.Answer)[0].ok, "leases died with the process"


def test_a_restart_ends_what_the_old_process_did_when_it_was_last_heard_of() -> None:
    bench = Bench({"held": 20, "gone": 30, "moving": 10, "wanted": 10}).load("held").load("gone", "h")
    bench.plan(bench.wants("moving", 1.0, "o1"))
    bench.tell(ev.Requested(ModelName("wanted"), bench.now_s)).tell(ev.BytesVerified(key("moving"), Tier.HOST, 7))
    last_s = bench.now_s
    bench.tell(ev.AgentRestarted(frozenset({(key("held"), Tier.HOST)})), after_s=9000.0)
    (ended,) = bench.facts(facts.OrderEnded)
    assert (ended.decision_id, ended.at_s) == ("o1", last_s)
    assert [(t.key.model, t.bytes, t.end_s) for t in bench.facts(facts.TransferEnded)] == [("moving", 7, last_s)]
    assert [(s.model, s.dropped, s.wait_s) for s in bench.facts(facts.RowServed)] == [("wanted", True, 2.0)]
    ends = {r.key.model: (r.last_use_s, r.end_s) for r in bench.facts(facts.ResidencyEnded)}
    assert ends == {"gone": (last_s, last_s), "moving": (None, last_s)}, "leased memory was in use to the end"
    (still,) = bench.machine.held(bench.now_s)
    assert (still.key.model, still.end_s) == ("held", bench.now_s)


def test_after_a_restart_what_is_found_complete_is_adopted_and_what_has_no_files_is_forgotten() -> None:
    bench = Bench({"loading": 20, "old": 30, "away": 10})
    bench.plan(bench.wants("loading", 1.0, "o1"), bench.wants("away", 0.5, "o2"))
    bench.see(key("old", "2"), 40)
    bench.tell(ev.VersionPublished(key("old"), key("old", "2")))
    bench.load("old")
    serving = bench.machine.holdings.serving[ModelName("old")]
    catalog = frozenset({key("loading"), key("old", "2")})
    bench.tell(ev.AgentRestarted(frozenset({(key("loading"), Tier.HOST)}), catalog))
    assert {e.decision_id: (e.ending, e.reason) for e in bench.facts(facts.OrderEnded)} == {
        "o1": (facts.Ending.LOST, "restarted"),
        "o2": (facts.Ending.REPLACED, "no_copy"),
    }
    assert bench.tiers("loading") == {Tier.DISK, Tier.HOST}, "every byte was there: it is not loaded again"
    assert bench.of(ev.LoadWeights) == []
    assert set(bench.machine.holdings.weights) == catalog
    assert serving == key("old", "2")
    bench.plan(bench.wants("loading", 1.0))
    assert [r.reason for r in bench.tell(ev.LeaseRequested("h", ModelName("away"), "t")).of(ev.RefuseLease)] == ["unknown_model"]
    restored = ResidencyMachine(NODE, bench.machine.limits)
    restored.restore(bench.machine.snapshot())
    assert restored.check() == []


def test_a_model_whose_serving_version_has_no_files_any_more_is_served_by_the_one_that_has() -> None:
    bench = Bench({"m": 30, "busy": 20})
    bench.tell(ev.LeaseRequested("h", ModelName("busy"), "t"))
    bench.see(key("m", "2"), 30)
    bench.tell(ev.VersionPublished(key("m"), key("m", "2")))
    bench.see(key("m", "3"), 30)
    catalog = frozenset({key("m", "3"), key("busy")})
    bench.tell(ev.AgentRestarted(frozenset(), catalog))
    assert bench.machine.holdings.serving[ModelName("m")] == key("m", "3")
    bench.tell(ev.LeaseRequested("h2", ModelName("m"), "t2")).tell(ev.WeightsLoaded(key("m", "3"), Tier.HOST))
    assert [g.key.version for g in bench.of(ev.GrantLease)] == ["3"]


@pytest.mark.parametrize("shadow", [True, False, None])
def test_the_first_use_says_whether_the_shadow_had_the_weights_too(shadow: bool | None) -> None:
    for late in (False, True):
        bench = Bench({"a": 50})
        bench.plan(replace(bench.wants("a", 1.0, "o1"), shadow=shadow))
        steps: list[ev.Event] = [ev.WeightsLoaded(key("a"), Tier.HOST), ev.Requested(ModelName("a"), bench.now_s + 2.0)]
        said = []
        for event in [*(reversed(steps) if late else steps), ev.Requested(ModelName("a"), bench.now_s + 3.0)]:
            said += bench.tell(event).facts(facts.OrderRedundant)
        assert [(s.decision_id, s.redundant) for s in said] == ([] if shadow is None else [("o1", shadow)])


def test_memory_that_is_still_held_is_in_use_while_it_is_leased_or_waited_for() -> None:
    bench = Bench({"leased": 20, "idle": 20, "awaited": 20, "guess": 20})
    bench.load("leased", "h").load("idle")
    used_s = bench.now_s
    bench.tell(ev.Requested(ModelName("awaited"), bench.now_s), 100.0)
    held = {f.key.model: f.last_use_s for f in bench.machine.held(bench.now_s + 5.0)}
    assert held == {"leased": bench.now_s + 5.0, "idle": used_s, "awaited": bench.now_s + 5.0}
    bench.tell(ev.WeightsLoaded(key("awaited"), Tier.HOST)).tell(ev.LeaseReleased("h", key("leased")))
    bench.plan(bench.wants("guess", 1.0, "o1"))
    held = {f.key.model: (f.last_use_s, f.decision_id) for f in bench.machine.held(bench.now_s + 5.0)}
    assert held["leased"] == (bench.now_s - 1.0, None)
    assert held["guess"] == (None, "o1")


def test_a_row_that_is_heard_of_late_waited_until_the_weights_were_there_and_no_longer() -> None:
    bench = Bench({"a": 50, "b": 50})
    bench.plan(bench.wants("a", 1.0, "o1")).tell(ev.WeightsLoaded(key("a"), Tier.HOST), 5.0)
    ready_s = bench.now_s
    bench.tell(ev.Requested(ModelName("a"), ready_s - 2.0), 30.0)
    assert [(s.found, s.wait_s) for s in bench.facts(facts.RowServed)] == [(facts.Found.READY, 2.0)]
    assert [u.at_s for u in bench.facts(facts.OrderUsed)] == [ready_s - 2.0], "before it was ready: late"
    bench.tell(ev.Requested(ModelName("a"), bench.now_s - 7.0), 1.0)
    assert [s.wait_s for s in bench.facts(facts.RowServed)] == [0.0]
    bench.plan(bench.wants("a", 1.0), bench.wants("b", 0.1), price=0.2)
    bench.tell(ev.Requested(ModelName("b"), bench.now_s - 7.0), 1.0)
    assert [(s.bypass, s.wait_s) for s in bench.facts(facts.RowServed)] == [(True, 5.0)], "it could have been opened all the time"


def test_an_open_that_no_row_came_before_is_a_row_and_goes_with_its_holder() -> None:
    bench = Bench({"a": 50})
    bench.tell(ev.LeaseRequested("h1", ModelName("a"), "t1", announced=False))
    bench.tell(ev.LeaseRequested("h2", ModelName("a"), "t2"))
    bench.tell(ev.HolderLost("h1"))
    assert [(s.is_row, s.dropped) for s in bench.facts(facts.RowServed)] == [(True, True)]
    bench.tell(ev.WeightsLoaded(key("a"), Tier.HOST))
    assert [s.is_row for s in bench.facts(facts.RowServed)] == [False]


def test_a_row_that_an_open_stood_for_only_brings_its_index() -> None:
    bench = Bench({"a": 50})
    bench.tell(ev.Requested(ModelName("a"), bench.now_s, 3.0, counted=True))
    assert bench.told == []
    assert bench.machine.holdings.weights[key("a")].index == 3.0


def test_a_paused_prefetch_that_demand_joined_is_queued_with_its_memory() -> None:
    bench = Bench({"guess": 50, "now": 40})
    bench.plan(bench.wants("guess", 5.0, "o1"), bench.wants("now", 9.0))
    bench.tell(ev.Requested(ModelName("now"), bench.now_s))
    found = []
    for _ in range(2):
        bench.tell(ev.Requested(ModelName("guess"), bench.now_s))
        found += [r.found for r in bench.facts(facts.RowSeen)]
    assert found == [facts.Found.MOVING, facts.Found.QUEUED]
    bench.tell(ev.LoadPaused(key("guess"), Tier.HOST, 20))
    assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["guess"], "two rows for 30 bytes against one for 40"


def test_the_link_waits_for_memory_that_comes_back_at_once_and_not_for_what_an_engine_still_maps() -> None:
    for late in (False, True):
        bench = Bench({"old": 60, "first": 70, "next": 20, "busy": 5})
        bench.load("old").plan(*(bench.wants(model, i) for model, i in (("old", 0.1), ("first", 9.0), ("next", 1.0), ("busy", 9.0))))
        bench.tell(ev.Requested(ModelName("busy"), bench.now_s))
        for model in ("first", "first", "first", "first", "next"):
            bench.tell(ev.Requested(ModelName(model), bench.now_s))
        bench.tell(ev.WeightsLoaded(key("busy"), Tier.HOST))
        assert [e.key.model for e in bench.of(ev.EvictWeights)] == ["old"]
        assert bench.of(ev.LoadWeights) == [], "20 bytes are free, but it is not their turn"
        bench.tell(ev.Ticked(), 0.5)
        assert bench.of(ev.LoadWeights) == []
        if late:
            bench.tell(ev.Ticked(), 0.6)
            assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["next"]
        else:
            bench.tell(ev.WeightsEvicted(key("old"), Tier.HOST), 0.1)
            assert [i.key.model for i in bench.of(ev.LoadWeights)] == ["first"]


def test_a_snapshot_of_something_else_is_refused() -> None:
    machine = Bench({"a": 10}).machine
    other = ResidencyMachine(NodeName("other"), NodeLimits({Tier.HOST: 100}))
    with pytest.raises(InputError, match="node 'n'"):
        other.restore(machine.snapshot())
    with pytest.raises(InputError, match="not a snapshot"):
        other.restore({"weights": 3})


def test_switched_off_nothing_that_was_said_before_ranks_anything() -> None:
    """What was asked for since the last plan was ranked by its row; off, all are ranked by their last use alone."""
    bench = Bench({"a": 50, "b": 50, "c": 50})
    for model in "ab":
        bench.tell(ev.Requested(ModelName(model), bench.now_s + 1.0, index=1.0))
        bench.tell(ev.WeightsLoaded(key(model), Tier.HOST))
    bench.tell(ev.Requested(ModelName("c"), bench.now_s + 1.0, index=1e-9))
    assert Tier.HOST not in bench.tiers("c"), "switched on, it is not worth its victims"
    bench.tell(ev.SwitchedOff())
    bench.tell(ev.Requested(ModelName("c"), bench.now_s + 1.0, index=1e-9))
    assert [e.key for e in bench.of(ev.EvictWeights)] == [key("a")], "what was used longest ago makes room"

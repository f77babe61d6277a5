"""The ledger: one outcome an order, and totals that follow from the records alone."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefetcher.core import facts
from prefetcher.core.facts import Ending, Found
from prefetcher.core.ledger import Ledger, OrderEntry, Totals, TotalsKey, sum_totals
from prefetcher.core.outcomes import outcome_of, outcomes_of
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, NodeName, Order, Outcome, Tier, WeightsKey
from prefetcher.errors import InputError

NODE = NodeName("n")


def an_order(name: str, model: str = "a", cause: Cause = Cause.FORECAST, arm: Arm = Arm.TREATED, at_s: float = 0.0) -> Order:
    key = WeightsKey(ModelName(model))
    return Order(DecisionId(name), NODE, key, Tier.HOST, cause, arm, at_s, at_s + 60.0, at_s + 300.0, 600.0)


def story(*parts: object, hold_checks_s: float = 1e9) -> OrderEntry:
    """One order of 10 bytes through (what, when) steps to its closed record."""
    ledger = Ledger()
    ledger.record(facts.OrderIssued(an_order("o"), 10))
    for part in parts:
        ledger.record(part)  # type: ignore[arg-type]
    (entry,) = ledger.take_closed(hold_checks_s) or ledger.open_orders()
    counted = sum_totals(ledger.totals().values()).outcomes
    assert counted == ({} if entry.outcome is Outcome.OPEN else {entry.outcome: 1})
    return entry


O = DecisionId("o")  # noqa: E741
BEGAN, READY = facts.OrderBegan(O, 10.0), facts.OrderReady(O, 20.0)


@pytest.mark.parametrize(
    ("parts", "outcome"),
    [
        ((), Outcome.OPEN),
        ((BEGAN, READY), Outcome.OPEN),
        ((BEGAN, facts.OrderUsed(O, 15.0)), Outcome.OPEN),
        ((BEGAN, READY, facts.OrderUsed(O, 20.0)), Outcome.TIMELY),
        ((BEGAN, READY, facts.OrderUsed(O, 30.0), facts.OrderEnded(O, 40.0, Ending.DISPLACED, "room")), Outcome.TIMELY),
        ((BEGAN, facts.OrderUsed(O, 15.0), READY), Outcome.LATE),
        ((BEGAN, READY, facts.OrderUsed(O, 15.0)), Outcome.LATE),
        ((BEGAN, facts.OrderUsed(O, 15.0), facts.OrderEnded(O, 17.0, Ending.FAILED, "disk")), Outcome.FAILED),
        ((BEGAN, READY, facts.OrderEnded(O, 620.0, Ending.GIVEN_UP, "hold")), Outcome.USELESS),
        ((BEGAN, READY, facts.OrderEnded(O, 30.0, Ending.DISPLACED, "room")), Outcome.DISPLACED),
        ((facts.OrderEnded(O, 5.0, Ending.REPLACED, "newer_plan"),), Outcome.SUPERSEDED),
        ((BEGAN, facts.OrderEnded(O, 15.0, Ending.CANCELLED, "off")), Outcome.CANCELLED),
        ((BEGAN, facts.OrderEnded(O, 15.0, Ending.FAILED, "disk")), Outcome.FAILED),
        ((BEGAN, READY, facts.NodeLost(NODE, 50.0)), Outcome.LOST),
        ((BEGAN, READY, facts.OrderUsed(O, 30.0), facts.NodeLost(NODE, 50.0)), Outcome.TIMELY),
        ((BEGAN, READY, facts.NodeLost(NodeName("other"), 50.0)), Outcome.OPEN),
    ],
)
def test_outcomes(parts: tuple[facts.Fact, ...], outcome: Outcome) -> None:
    assert story(*parts).outcome is outcome


@pytest.mark.parametrize(("ts", "premature"), [(619.9, False), (620.0, True), (1220.0, True), (1220.1, False)])
def test_premature_is_used_within_one_hold_after_its_end(ts: float, premature: bool) -> None:
    ended = facts.OrderEnded(O, 620.0, Ending.GIVEN_UP, "hold")
    assert story(BEGAN, READY, ended, facts.RowSeen(ModelName("a"), ts, Found.ABSENT)).premature is premature


def test_a_record_is_held_back_while_it_may_turn_out_premature_and_no_longer() -> None:
    ledger = Ledger()
    for fact in (facts.OrderIssued(an_order("o"), 10), BEGAN, READY, facts.OrderEnded(O, 620.0, Ending.GIVEN_UP, "hold")):
        ledger.record(fact)
    assert ledger.take_closed(1220.0) == []
    assert [e.order.decision_id for e in ledger.take_closed(1220.1)] == ["o"]
    assert ledger.take_closed(9999.0) == []
    assert ledger.snapshot()["closed"] == []


def test_what_was_moved_for_nothing_is_counted_once_whatever_comes_later() -> None:
    ledger = Ledger()
    key = WeightsKey(ModelName("a"))
    moved = facts.TransferEnded(key, Tier.DISK, Tier.HOST, 10.0, 20.0, 10, Cause.FORECAST, O)
    for name in ("o", "used"):
        ledger.record(facts.OrderIssued(an_order(name), 10))
        ledger.record(facts.OrderBegan(DecisionId(name), 10.0))
        ledger.record(facts.OrderReady(DecisionId(name), 20.0))
    ledger.record(moved)
    ledger.record(facts.OrderUsed(DecisionId("used"), 25.0))
    for name in ("o", "used"):
        ledger.record(facts.OrderEnded(DecisionId(name), 30.0, Ending.DISPLACED, "room"))
    for ts in (31.0, 32.0):
        ledger.record(facts.RowSeen(ModelName("a"), ts, Found.ABSENT))
    total = sum_totals(ledger.totals().values())
    assert (total.moved_bytes, total.wasted_moved_bytes, total.premature) == (10, 10, 1)
    assert total.early_byte_s == 10 * 10.0 + 10 * 5.0


def test_memory_is_idle_after_its_last_use_and_wasted_when_a_prefetch_was_never_used() -> None:
    ledger = Ledger()
    key = WeightsKey(ModelName("a"))
    ledger.record(facts.OrderIssued(an_order("o"), 10))
    ledger.record(facts.ResidencyEnded(key, Tier.HOST, Cause.FORECAST, 100.0, 110.0, None, 200.0, 10, DecisionId("o")))
    ledger.record(facts.ResidencyEnded(key, Tier.HOST, Cause.DEMAND, 100.0, 110.0, 150.0, 200.0, 10))
    ledger.record(facts.ResidencyEnded(key, Tier.HOST, Cause.DEMAND, 100.0, None, None, 130.0, 10))
    total = sum_totals(ledger.totals().values())
    assert (total.held_byte_s, total.idle_byte_s, total.wasted_byte_s) == (2300.0, 1000.0 + 500.0 + 300.0, 1000.0)


@pytest.mark.parametrize(
    ("used_s", "ready_s", "saved_s"),
    [(50.0, 30.0, 12.0), (30.0, 30.0, 12.0), (25.0, 30.0, 7.0), (11.0, 30.0, 0.0), (None, 30.0, 0.0)],
)
def test_what_a_prefetch_saved_is_how_long_its_bytes_had_moved(used_s: float | None, ready_s: float, saved_s: float) -> None:
    """It moved from 10 to 15, paused, and moved from 23 to 30."""
    ledger, key = Ledger(), WeightsKey(ModelName("a"))
    ledger.record(facts.OrderIssued(an_order("o"), 12))
    told: list[facts.Fact] = [BEGAN]
    told += [facts.TransferEnded(key, Tier.DISK, Tier.HOST, a, b, int(b - a), Cause.FORECAST, O) for a, b in ((10.0, 15.0), (23.0, 30.0))]
    told += [facts.OrderReady(O, ready_s), *([facts.OrderUsed(O, used_s)] if used_s is not None else [])]
    told += [facts.OrderEnded(O, 99.0, Ending.GIVEN_UP, "hold")]
    for fact in told:
        ledger.record(fact)
    assert sum_totals(ledger.totals().values()).saved_s == saved_s


def test_accuracy_and_timeliness_leave_out_what_says_nothing() -> None:
    counts = {Outcome.TIMELY: 3, Outcome.LATE: 1, Outcome.USELESS: 2, Outcome.FAILED: 2, Outcome.SUPERSEDED: 9, Outcome.CANCELLED: 9}
    totals = Totals(outcomes=counts)
    assert totals.accuracy == 0.5
    assert totals.timeliness == 0.75
    assert Totals(outcomes={Outcome.CANCELLED: 1}).accuracy is None


def test_waits_and_cold_starts() -> None:
    ledger = Ledger()
    model = ModelName("a")
    rows = ((Found.ABSENT, 5.0, False), (Found.MOVING, 2.0, False), (Found.ABSENT, 9.0, True), (Found.READY, 0.0, False))
    for found, wait_s, bypass in rows:
        ledger.record(facts.RowSeen(model, 1.0, found))
        ledger.record(facts.RowServed(model, 1.0, found, wait_s, bypass))
    ledger.record(facts.RowSeen(model, 1.0, Found.READY, lease=True))
    ledger.record(facts.RowServed(model, 1.0, Found.READY, 0.5, lease=True))
    (total,) = ledger.totals().values()
    assert (total.rows, total.cold_starts, total.wait_s, total.bypassed) == (4, 2, 16.0, 1)
    assert (total.leases, total.lease_wait_s) == (1, 0.5)


def test_a_snapshot_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="not a snapshot"):
        Ledger().restore({"open": 1})


class LedgerMachine(RuleBasedStateMachine):
    """Facts in any order that a node can make; each order is followed beside the ledger by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(keep_hours=1)
        self.now_s = 100_000.0
        self.stages: dict[str, str] = {}
        self.closed: list[OrderEntry] = []
        self.old: list[tuple[TotalsKey, Totals]] = []
        self.settled: Counter[str] = Counter()
        self.told: dict[str, str] = {}
        self.rows = 0

    def tell(self, fact: facts.Fact) -> None:
        for entry in self.ledger.record(fact):
            assert entry.outcome is not Outcome.OPEN
            self.settled[entry.order.decision_id] += 1

    def names(self, *stages: str) -> list[str]:
        return [name for name, stage in self.stages.items() if stage in stages]

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0, 650.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(model=st.sampled_from("ab"), cause=st.sampled_from([Cause.FORECAST, Cause.HINT]), arm=st.sampled_from(list(Arm)))
    def issue(self, model: str, cause: Cause, arm: Arm) -> None:
        name = f"o{len(self.stages)}"
        self.stages[name] = "issued"
        self.tell(facts.OrderIssued(an_order(name, model, cause, arm, self.now_s), 10 + len(self.stages)))

    @precondition(lambda self: self.names("issued"))
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names("issued")))
        self.stages[name] = "begun"
        self.tell(facts.OrderBegan(DecisionId(name), self.now_s))

    @precondition(lambda self: self.names("begun"))
    @rule(data=st.data(), moved=st.integers(0, 50))
    def ready(self, data: st.DataObject, moved: int) -> None:
        name = data.draw(st.sampled_from(self.names("begun")))
        self.stages[name] = "ready"
        key = WeightsKey(ModelName("a"))
        self.tell(facts.TransferEnded(key, Tier.DISK, Tier.HOST, self.now_s - 3.0, self.now_s, moved, Cause.FORECAST, DecisionId(name)))
        self.tell(facts.OrderReady(DecisionId(name), self.now_s))

    @precondition(lambda self: self.names("begun", "ready", "ended"))
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names("begun", "ready", "ended")))
        self.tell(facts.OrderUsed(DecisionId(name), self.now_s))

    @precondition(lambda self: self.names("issued", "begun", "ready", "ended"))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.names("issued", "begun", "ready", "ended")))
        endings = {
            "issued": [Ending.REPLACED],
            "begun": [Ending.CANCELLED, Ending.FAILED, Ending.LOST],
            "ready": [Ending.GIVEN_UP, Ending.DISPLACED],
            "ended": list(Ending),
        }
        ending = data.draw(st.sampled_from(endings[self.stages[name]]))
        self.stages[name] = "ended"
        self.tell(facts.OrderEnded(DecisionId(name), self.now_s, ending, "why"))

    @precondition(lambda self: self.stages)
    @rule(data=st.data(), redundant=st.booleans())
    def shadow(self, data: st.DataObject, redundant: bool) -> None:
        self.tell(facts.OrderRedundant(DecisionId(data.draw(st.sampled_from(sorted(self.stages)))), redundant))

    @rule(model=st.sampled_from("ab"), found=st.sampled_from(list(Found)))
    def row(self, model: str, found: Found) -> None:
        self.rows += 1
        self.tell(facts.RowSeen(ModelName(model), self.now_s, found))

    @rule()
    def node_lost(self) -> None:
        self.tell(facts.NodeLost(NODE, self.now_s))
        self.stages = dict.fromkeys(self.stages, "ended")

    @rule()
    def hand_out(self) -> None:
        self.closed += self.ledger.take_closed(self.now_s)
        self.old += self.ledger.take_old_totals(self.now_s).items()

    @rule()
    def restart(self) -> None:
        written = json.loads(json.dumps(self.ledger.snapshot()))
        self.ledger = Ledger(keep_hours=1)
        self.ledger.restore(written)
        assert json.loads(json.dumps(self.ledger.snapshot())) == json.loads(self.ledger.encoded()) == written

    def all_records(self) -> list[OrderEntry]:
        kept = Ledger()
        kept.restore(json.loads(json.dumps(self.ledger.snapshot())))
        return [*self.closed, *kept.open_orders(), *kept.take_closed(float("inf"))]

    @invariant()
    def every_order_has_one_record_and_at_most_one_outcome(self) -> None:
        records = self.all_records()
        assert sorted(r.order.decision_id for r in records) == sorted(self.stages)
        for record in records:
            name = record.order.decision_id
            assert self.settled[name] == (record.outcome is not Outcome.OPEN)
            if self.stages[name] == "ended":
                assert record.outcome is not Outcome.OPEN

    @invariant()
    def totals_follow_from_the_records(self) -> None:
        by_key: dict[TotalsKey, Totals] = {}
        early: Counter[tuple[Cause, Arm]] = Counter()
        for record in self.all_records():
            order = record.order
            key = TotalsKey(order.key.model, order.cause, order.arm, int(order.issued_s // 3600), "host")
            totals = by_key.setdefault(key, Totals())
            totals.orders += 1
            totals.premature += record.premature
            totals.redundant += record.redundant is True
            if record.outcome is not Outcome.OPEN:
                totals.outcomes[record.outcome] = totals.outcomes.get(record.outcome, 0) + 1
                early[order.cause, order.arm] += record.bytes * record.early_s
                totals.saved_s += record.saved_s
                if record.end_s is not None and record.outcome not in (Outcome.TIMELY, Outcome.LATE):
                    totals.wasted_moved_bytes += record.moved_bytes
        parts: dict[TotalsKey, list[Totals]] = {}
        for key, part in [*self.old, *self.ledger.totals().items()]:
            parts.setdefault(key, []).append(part)
        summed = {key: sum_totals(many) for key, many in parts.items()}
        for key, expected in by_key.items():
            found = summed[key]
            assert (found.orders, found.premature, found.redundant) == (expected.orders, expected.premature, expected.redundant)
            assert found.outcomes == expected.outcomes
            assert found.saved_s == pytest.approx(expected.saved_s)
            assert found.wasted_moved_bytes == expected.wasted_moved_bytes
        assert sum(totals.rows for totals in summed.values()) == self.rows
        for (cause, arm), ever in self.ledger.lifetime().items():
            expected = sum_totals(part for key, part in summed.items() if (key.cause, key.arm) == (cause, arm))
            for exact in ("orders", "outcomes", "premature", "redundant", "rows", "found", "leases", "moved_bytes", "wasted_moved_bytes"):
                assert getattr(ever, exact) == getattr(expected, exact)
            assert ever.early_byte_s == pytest.approx(expected.early_byte_s) == pytest.approx(early[cause, arm])
        assert {(key.cause, key.arm) for key in summed} == set(self.ledger.lifetime())

    @invariant()
    def what_changed_is_told(self) -> None:
        for entry in self.ledger.take_changed():
            self.told[entry.order.decision_id] = str(entry)
        assert self.told == {record.order.decision_id: str(record) for record in self.all_records()}


LedgerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.none() | st.sampled_from([1.0, 2.0, 3.0])] * 2, st.none() | st.sampled_from(list(Ending)))))
def test_many_outcomes_are_those_of_one_each(orders: list[tuple[float | None, float | None, Ending | None]]) -> None:
    times = [np.array([np.nan if order[i] is None else order[i] for order in orders], np.float64) for i in (0, 1)]
    endings = np.empty(len(orders), dtype=object)
    endings[:] = [order[2] for order in orders]
    found = list(outcomes_of(times[0], times[1], endings))
    assert found == [outcome_of(*order) for order in orders]
    assert all(isinstance(outcome, Outcome) for outcome in found)

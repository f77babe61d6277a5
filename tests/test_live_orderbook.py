"""What became of prefetches, from the facts of the residency machine: every outcome, once, and the sums beside it."""

from __future__ import annotations

import pytest

from prefetcher.agent.orderbook import OrderBook
from prefetcher.core import facts
from prefetcher.core.facts import Ending, Found
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, NodeName, Order, Tier, WeightsKey

KEY = WeightsKey(ModelName("m"))


def issue(book: OrderBook, number: str = "1") -> DecisionId:
    decision_id = DecisionId(number)
    order = Order(decision_id, NodeName("n"), KEY, Tier.HOST, Cause.FORECAST, Arm.TREATED, 0.0, 60.0, 600.0, 600.0, (("hazard", 1.0),))
    book.add(facts.OrderIssued(order, 1000))
    return decision_id


@pytest.mark.parametrize(
    ("begin_s", "ready_s", "use_s", "ending", "outcome"),
    [
        (1.0, 2.0, 3.0, Ending.GIVEN_UP, "timely"),
        (1.0, 2.0, 3.0, Ending.DISPLACED, "timely"),
        (1.0, None, 1.5, Ending.GIVEN_UP, "late"),
        (1.0, 2.0, None, Ending.GIVEN_UP, "useless"),
        (1.0, 2.0, None, Ending.DISPLACED, "displaced"),
        (None, None, None, Ending.REPLACED, "superseded"),
        (None, None, 0.5, Ending.REPLACED, "superseded"),
        (1.0, None, None, Ending.CANCELLED, "cancelled"),
        (1.0, None, None, Ending.FAILED, "failed"),
        (1.0, 2.0, None, Ending.LOST, "lost"),
    ],
)
def test_outcomes(begin_s: float | None, ready_s: float | None, use_s: float | None, ending: Ending, outcome: str) -> None:
    book = OrderBook()
    decision_id = issue(book)
    settled = []
    for kind, at_s in ((facts.OrderBegan, begin_s), (facts.OrderReady, ready_s), (facts.OrderUsed, use_s), (facts.OrderUsed, use_s)):
        if at_s is not None:
            settled.append(book.add(kind(decision_id, at_s)))
    settled.append(book.add(facts.OrderEnded(decision_id, 9.0, ending, "why")))
    assert [s for s in settled if s] == [outcome]
    assert book.totals["outcomes"] == {outcome: 1}
    (record,) = book.take_changed()
    assert (record.outcome, record.reason, record.end_s) == (outcome, "why", 9.0)
    assert record.contributions == (("hazard", 1.0),)
    assert book.take_changed() == []
    assert book.add(facts.OrderUsed(decision_id, 10.0)) == ""


def test_what_is_idle_and_what_is_wasted() -> None:
    book = OrderBook()
    book.add(facts.ResidencyEnded(KEY, Tier.HOST, Cause.DEMAND, 0.0, 1.0, 4.0, 10.0, 100))
    book.add(facts.ResidencyEnded(KEY, Tier.HOST, Cause.FORECAST, 0.0, 1.0, 4.0, 10.0, 100))
    assert book.totals["wasted_byte_seconds"] == 0
    book.add(facts.ResidencyEnded(KEY, Tier.HOST, Cause.FORECAST, 0.0, None, None, 10.0, 100))
    assert book.totals["held_byte_seconds"] == 3000.0
    assert book.totals["idle_byte_seconds"] == 600.0 + 600.0 + 1000.0
    assert book.totals["wasted_byte_seconds"] == 1000.0


def test_rows_and_leases_are_counted_apart_and_totals_go_on() -> None:
    book = OrderBook()
    for found, wait_s in ((Found.ABSENT, 2.0), (Found.MOVING, 1.0), (Found.READY, 0.0)):
        book.add(facts.RowSeen(KEY.model, 0.0, found))
        book.add(facts.RowServed(KEY.model, 0.0, found, wait_s))
    book.add(facts.RowSeen(KEY.model, 0.0, Found.ABSENT, lease=True))
    book.add(facts.RowServed(KEY.model, 0.0, Found.ABSENT, 2.0, lease=True))
    again = OrderBook()
    again.resume(dict(book.totals))
    again.add(facts.RowSeen(KEY.model, 0.0, Found.READY))
    totals = again.totals
    assert (totals["rows"], totals["opens"], totals["cold_starts"], totals["ready"], totals["cold_seconds"]) == (4, 1, 1, 1, 3.0)

"""The ledger as others see it: order records as they change, totals with what is still held, and a state that survives."""

from __future__ import annotations

import json

import msgspec
import pytest

from prefetcher.agent.orderbook import OrderBook
from prefetcher.controller import records
from prefetcher.core import facts
from prefetcher.core.facts import Ending, Found
from prefetcher.core.types import Arm, Cause, DecisionId, ModelName, NodeName, Order, Tier, WeightsKey
from prefetcher.errors import InputError

KEY = WeightsKey(ModelName("m"))
NODE = NodeName("n")


def issue(book: OrderBook, number: str = "1", cause: Cause = Cause.FORECAST, arm: Arm = Arm.TREATED) -> DecisionId:
    decision_id = DecisionId(number)
    order = Order(decision_id, NODE, KEY, Tier.HOST, cause, arm, 0.0, 60.0, 600.0, 600.0, (("hazard", 1.0),))
    book.add(facts.OrderIssued(order, 1000), arm)
    return decision_id


def tell(book: OrderBook, *told: facts.Fact, arm: Arm = Arm.TREATED) -> list[str]:
    return [entry.outcome.value for fact in told for entry in book.add(fact, arm)]


def held(cause: Cause, last_use_s: float | None, end_s: float = 10.0, decision_id: DecisionId | None = None) -> facts.ResidencyEnded:
    return facts.ResidencyEnded(KEY, Tier.HOST, cause, 0.0, 1.0, last_use_s, end_s, 100, decision_id)


def test_an_order_is_told_as_it_changes_and_its_outcome_is_settled_once() -> None:
    book = OrderBook()
    decision_id = issue(book)
    assert tell(book, facts.OrderBegan(decision_id, 1.0), facts.OrderUsed(decision_id, 1.5)) == []
    (record,) = book.take_changed()
    assert (record.outcome, record.begin_s, record.first_use_s, record.premature) == ("open", 1.0, 1.5, None)
    assert record.contributions == (("hazard", 1.0),)
    moved = facts.TransferEnded(KEY, Tier.DISK, Tier.HOST, 1.0, 3.0, 1000, Cause.FORECAST, decision_id)
    assert tell(book, moved, facts.OrderReady(decision_id, 3.0)) == ["late"]
    assert tell(book, facts.OrderEnded(decision_id, 9.0, Ending.DISPLACED, "room")) == []
    (record,) = book.take_changed()
    assert (record.outcome, record.reason, record.end_s, record.premature) == ("late", "room", 9.0, False)
    assert book.take_changed() == []
    totals = book.totals([], Arm.TREATED)
    assert (totals["outcomes"], totals["accuracy"], totals["timeliness"]) == ({"late": 1}, 1.0, 0.0)
    assert totals["saved_seconds"] == 0.5, "it had moved for half a second when somebody came"


def test_an_unused_order_turns_out_premature_after_its_end() -> None:
    book = OrderBook()
    decision_id = issue(book)
    tell(book, facts.OrderBegan(decision_id, 1.0), facts.OrderReady(decision_id, 2.0))
    assert tell(book, facts.OrderEnded(decision_id, 602.0, Ending.GIVEN_UP, "hold")) == ["useless"]
    assert [r.premature for r in book.take_changed()] == [False]
    book.forget(700.0)
    tell(book, facts.RowSeen(KEY.model, 700.0, Found.ABSENT))
    assert [(r.outcome, r.premature) for r in book.take_changed()] == [("useless", True)]
    assert book.totals([], Arm.TREATED)["premature"] == 1


def test_what_is_idle_and_what_is_wasted_with_what_is_still_held() -> None:
    book = OrderBook()
    unused = issue(book)
    tell(book, facts.OrderBegan(unused, 0.0), facts.OrderReady(unused, 1.0))
    tell(book, held(Cause.DEMAND, 4.0), held(Cause.FORECAST, 4.0, decision_id=DecisionId("used")))
    totals = book.totals([held(Cause.FORECAST, None, 20.0, unused)], Arm.TREATED)
    assert totals["held_byte_seconds"] == 1000.0 + 1000.0 + 2000.0
    assert totals["idle_byte_seconds"] == 600.0 + 600.0 + 2000.0
    assert totals["wasted_byte_seconds"] == 2000.0
    assert totals["early_byte_seconds"] == 100 * 19.0
    again = book.totals([], Arm.TREATED)
    assert (again["held_byte_seconds"], again["wasted_byte_seconds"]) == (2000.0, 0.0), "nothing of what goes on is kept"


def test_what_people_loaded_or_pinned_is_no_wasted_prefetch_but_a_pinned_guess_is() -> None:
    book = OrderBook()
    by_hand = issue(book, "by-hand-1", Cause.MANUAL)
    tell(book, facts.OrderBegan(by_hand, 0.0), facts.OrderReady(by_hand, 1.0), facts.OrderEnded(by_hand, 10.0, Ending.GIVEN_UP, "hold"))
    tell(book, held(Cause.MANUAL, None, decision_id=by_hand), held(Cause.MANUAL, None))
    totals = book.totals([], Arm.TREATED)
    assert (totals["idle_byte_seconds"], totals["wasted_byte_seconds"]) == (2000.0, 0.0)
    assert (totals["orders"], totals["outcomes"], totals["accuracy"]) == (0, {}, None)
    assert totals["by_cause"]["manual"]["outcomes"] == {"useless": 1}
    tell(book, held(Cause.FORECAST, None, decision_id=issue(book, "2")))
    assert book.totals([], Arm.TREATED)["wasted_byte_seconds"] == 1000.0


def test_weights_on_disk_are_no_memory() -> None:
    book = OrderBook()
    tell(book, facts.ResidencyEnded(KEY, Tier.DISK, Cause.DEMAND, 0.0, 0.0, None, 1e6, 100))
    assert book.totals([], Arm.TREATED)["idle_byte_seconds"] == 0.0


def test_a_row_and_its_open_are_one_use_and_an_unannounced_open_is_one_too() -> None:
    book = OrderBook()
    for found, wait_s in ((Found.ABSENT, 2.0), (Found.MOVING, 1.0), (Found.READY, 0.0)):
        tell(book, facts.RowSeen(KEY.model, 0.0, found), facts.RowServed(KEY.model, 0.0, found, wait_s))
        tell(book, facts.RowSeen(KEY.model, 0.0, found, lease=True), facts.RowServed(KEY.model, 0.0, found, wait_s, lease=True))
    tell(book, facts.RowSeen(KEY.model, 0.0, Found.ABSENT, lease=True, announced=False))
    tell(book, facts.RowServed(KEY.model, 0.0, Found.ABSENT, 4.0, bypass=True, lease=True, announced=False))
    totals = book.totals([], Arm.TREATED)
    assert (totals["rows"], totals["opens"], totals["ready"], totals["joined"], totals["cold_starts"]) == (4, 4, 1, 1, 2)
    assert (totals["cold_seconds"], totals["bypassed"]) == (7.0, 1), "waits of what was served from below count"


def test_each_side_of_the_experiment_has_its_own_totals() -> None:
    book = OrderBook()
    for arm, wait_s in ((Arm.TREATED, 1.0), (Arm.CONTROL, 5.0)):
        seen, served = facts.RowSeen(KEY.model, 0.0, Found.ABSENT), facts.RowServed(KEY.model, 0.0, Found.ABSENT, wait_s)
        tell(book, seen, served, held(Cause.DEMAND, 4.0), arm=arm)
    by_arm = book.totals([held(Cause.DEMAND, None)], Arm.CONTROL)["by_arm"]
    assert {arm: part["cold_seconds"] for arm, part in by_arm.items()} == {"treated": 1.0, "control": 5.0}
    assert {arm: part["idle_byte_seconds"] for arm, part in by_arm.items()} == {"treated": 600.0, "control": 1600.0}


def test_a_book_goes_on_from_what_was_written_and_tells_again_what_was_not_told() -> None:
    book = OrderBook()
    first, second = issue(book, "1"), issue(book, "2")
    told = book.take_changed()
    book.told(told[:1])
    tell(book, facts.OrderBegan(second, 1.0), facts.OrderReady(second, 2.0), facts.RowSeen(KEY.model, 1.0, Found.READY))

    again = OrderBook()
    again.restore(json.loads(book.ledger.encoded()), list(book.untold.values()))
    assert [r.decision_id for r in again.untold.values()] == ["2"]
    assert [(r.decision_id, r.ready_s) for r in again.take_changed()] == [("2", 2.0)], "changed, and not yet told"
    assert again.totals([], Arm.TREATED) == book.totals([], Arm.TREATED)
    again.lose_all(NODE, 5.0)
    assert {r.decision_id: r.outcome for r in again.take_changed()} == {first: "lost", second: "lost"}


@pytest.mark.parametrize("snapshot", [3, None, {}, {"format": 1}])
def test_a_ledger_that_is_none_is_refused(snapshot: object) -> None:
    with pytest.raises(InputError):
        OrderBook().restore(snapshot, [])


def test_records_in_the_store_can_be_read_back() -> None:
    book = OrderBook()
    issue(book)
    (record,) = book.take_changed()
    assert msgspec.json.decode(records.encode(record), type=records.OrderRecord) == record


def test_every_total_is_in_the_reference_and_can_be_shown() -> None:
    from pathlib import Path

    from rich.console import Console

    import prefetcher
    from prefetcher.api.status_view import render

    page = (Path(prefetcher.__file__).parent / "docs" / "http.md").read_text()
    book = OrderBook()
    tell(book, facts.RowSeen(KEY.model, 0.0, Found.ABSENT), facts.RowServed(KEY.model, 0.0, Found.ABSENT, 2.5, bypass=True))
    decision_id = issue(book)
    tell(book, facts.OrderBegan(decision_id, 1.0), facts.OrderReady(decision_id, 2.0), facts.OrderUsed(decision_id, 3.0))
    totals = book.totals([], Arm.TREATED)
    assert [name for name in totals if f"`{name}`" not in page] == []
    memory = {"taken_bytes": 0, "budget_bytes": 1, "warning": ""}
    node = {"node": "n", "memory": memory, "link_bytes_per_s": 1.0, "busy_ratio": 0.0, "held": [], "problems": []}
    status = {"node": node, "totals": totals, "orders": [], "prefetching": True, "observe": False, "now_s": 0.0, "problems": []}
    console = Console(width=300)
    with console.capture() as shown:
        console.print(render(status))
    assert "1 request, 1 cold start, 1 served from disk, 2.5 s waited; prefetches: 1 timely (100% used)" in shown.get()

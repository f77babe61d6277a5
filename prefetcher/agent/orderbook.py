"""The node's ledger as others see it: order records, and totals.

A thin shell around `core.ledger`, which does the arithmetic. Times are seconds since 1970 UTC, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prefetcher.controller.records import OrderRecord
from prefetcher.core.facts import Fact, Found, NodeLost, ResidencyEnded
from prefetcher.core.ledger import Ledger, OrderEntry, Totals, sum_totals
from prefetcher.core.types import Arm, Cause, DecisionId, NodeName

__all__ = ["OrderBook", "totals_of"]

#: Most of what changes an hour changes it within it, or within a hold. Whatever comes later is a part of its own.
_KEEP_HOURS = 6


class OrderBook:
    """Takes facts in, and hands changed orders out: by `take_changed` at once, by `untold` until they were `told`."""

    def __init__(self) -> None:
        self.ledger = Ledger(keep_hours=_KEEP_HOURS, tells=True)
        self.untold: dict[DecisionId, OrderRecord] = {}

    def add(self, fact: Fact, arm: Arm) -> list[OrderEntry]:
        """Takes a fact in; the orders whose outcome it settled. `arm` is the node's side of the experiment now."""
        return self.ledger.record(fact, arm=arm)

    def take_changed(self) -> list[OrderRecord]:
        """Orders that are new or changed since the last call, as they stand."""
        changed = [_record(entry) for entry in self.ledger.take_changed()]
        for record in changed:
            decision_id = DecisionId(record.decision_id)
            self.untold.pop(decision_id, None)
            self.untold[decision_id] = record
        return changed

    def told(self, records: Iterable[OrderRecord]) -> None:
        """These are in the list of orders now."""
        for record in records:
            if self.untold.get(DecisionId(record.decision_id)) == record:
                del self.untold[DecisionId(record.decision_id)]

    def forget(self, now_s: float) -> None:
        """Drops records that nothing changes any more, and hours that are no longer kept."""
        self.ledger.take_closed(now_s)
        self.ledger.take_old_totals(now_s)

    def totals(self, held: Sequence[ResidencyEnded], arm: Arm) -> dict[str, Any]:
        """All sums; memory that is still `held` counts as if it were given back now."""
        return totals_of(self.ledger.lifetime(held, arm=arm))

    def restore(self, snapshot: Any, untold: Iterable[OrderRecord]) -> None:
        """Goes on from a snapshot of the ledger. Raises InputError."""
        self.ledger.restore(snapshot)
        self.untold = {DecisionId(record.decision_id): record for record in untold}

    def lose_all(self, node: NodeName, at_s: float) -> None:
        """The machine behind these orders is gone."""
        self.ledger.record(NodeLost(node, at_s))


def _record(entry: OrderEntry) -> OrderRecord:
    order = entry.order
    return OrderRecord(
        decision_id=order.decision_id,
        node=order.node,
        model=order.key.model,
        version=order.key.version,
        tier=order.tier.name.lower(),
        cause=order.cause.value,
        arm=order.arm.value,
        issued_s=order.issued_s,
        begin_s=entry.begin_s,
        ready_s=entry.ready_s,
        first_use_s=entry.first_use_s,
        end_s=entry.end_s,
        outcome=entry.outcome.value,
        reason=entry.reason,
        bytes=entry.bytes,
        premature=None if entry.end_s is None else entry.premature,
        redundant=entry.redundant,
        contributions=order.contributions,
        source=order.source,
    )


def totals_of(sums: dict[tuple[Cause, Arm], Totals]) -> dict[str, Any]:
    """The totals as they are shown: of the node, and below that by cause and by side of the experiment.

    What is said of orders, outcomes and waste leaves out what people loaded by hand; it is under `by_cause`.
    """
    everything = sum_totals(sums.values())
    guessed = sum_totals(totals for (cause, _), totals in sums.items() if cause is not Cause.MANUAL)
    by_cause, by_arm = {}, {}
    for cause in sorted({cause for cause, _ in sums}):
        part = sum_totals(totals for (of, _), totals in sums.items() if of is cause)
        by_cause[cause.value] = _of_memory(part) | ({} if cause is Cause.DEMAND else _of_orders(part))
    for arm in sorted({arm for _, arm in sums}):
        part = sum_totals(totals for (_, of), totals in sums.items() if of is arm)
        by_arm[arm.value] = _of_rows(part) | _of_memory(part)
    return _of_rows(everything) | _of_orders(guessed) | _of_memory(everything) | {"by_cause": by_cause, "by_arm": by_arm}


def _of_rows(totals: Totals) -> dict[str, Any]:
    return {
        "rows": totals.rows,
        "ready": totals.found.get(Found.READY, 0),
        "joined": totals.found.get(Found.MOVING, 0) + totals.found.get(Found.QUEUED, 0),
        "cold_starts": totals.cold_starts,
        "bypassed": totals.bypassed,
        "dropped": totals.dropped,
        "cold_seconds": totals.wait_s,
        "opens": totals.leases,
    }


def _of_orders(totals: Totals) -> dict[str, Any]:
    return {
        "orders": totals.orders,
        "outcomes": {outcome.value: count for outcome, count in sorted(totals.outcomes.items())},
        "accuracy": totals.accuracy,
        "timeliness": totals.timeliness,
        "premature": totals.premature,
        "redundant": totals.redundant,
        "saved_seconds": totals.saved_s,
        "early_byte_seconds": totals.early_byte_s,
        "wasted_moved_bytes": totals.wasted_moved_bytes,
    }


def _of_memory(totals: Totals) -> dict[str, Any]:
    return {
        "held_byte_seconds": totals.held_byte_s,
        "idle_byte_seconds": totals.idle_byte_s,
        "wasted_byte_seconds": totals.wasted_byte_s,
        "moved_bytes": totals.moved_bytes,
    }

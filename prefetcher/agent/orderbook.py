"""What became of this node's prefetches and requests, from the facts of its residency machine: order records and running totals.

Times are seconds since 1970 UTC, sizes bytes. Covers one node, from its start or from totals that were kept; flags that need a shadow are
not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from prefetcher.controller.records import OrderRecord
from prefetcher.core import facts
from prefetcher.core.facts import Ending
from prefetcher.core.types import Cause, Outcome

__all__ = ["OrderBook"]

_OUTCOME = {
    Ending.GIVEN_UP: Outcome.USELESS,
    Ending.DISPLACED: Outcome.DISPLACED,
    Ending.REPLACED: Outcome.SUPERSEDED,
    Ending.CANCELLED: Outcome.CANCELLED,
    Ending.FAILED: Outcome.FAILED,
    Ending.LOST: Outcome.LOST,
}
_COUNTS = ("rows", "ready", "cold_starts", "bypassed", "opens", "orders")
_SUMS = (
    "cold_seconds",
    "saved_seconds",
    "idle_byte_seconds",
    "wasted_byte_seconds",
    "held_byte_seconds",
    "early_byte_seconds",
    "moved_bytes",
    "wasted_moved_bytes",
)


def _empty() -> dict[str, Any]:
    return {**dict.fromkeys(_COUNTS, 0), **dict.fromkeys(_SUMS, 0.0), "outcomes": {}}


@dataclass(slots=True)
class OrderBook:
    """Adds facts up. `changed` holds the records that changed since they were last taken (`take_changed`)."""

    totals: dict[str, Any] = field(default_factory=_empty)
    _open: dict[str, OrderRecord] = field(default_factory=dict)
    _changed: dict[str, OrderRecord] = field(default_factory=dict)

    def resume(self, totals: dict[str, Any]) -> None:
        """Goes on from totals that were kept."""
        self.totals = _empty() | totals

    def take_changed(self) -> list[OrderRecord]:
        """Records that are new or changed since the last call, oldest first."""
        changed, self._changed = list(self._changed.values()), {}
        return changed

    def add(self, fact: facts.Fact) -> str:
        """Takes a fact in; the outcome that it settled, or ''."""
        totals = self.totals
        match fact:
            case facts.OrderIssued(order, size):
                totals["orders"] += 1
                self._put(
                    OrderRecord(
                        decision_id=order.decision_id,
                        node=order.node,
                        model=order.key.model,
                        version=order.key.version,
                        tier=order.tier.name.lower(),
                        cause=order.cause.value,
                        arm=order.arm.value,
                        issued_s=order.issued_s,
                        bytes=size,
                        contributions=order.contributions,
                    )
                )
            case facts.OrderBegan(decision_id, at_s):
                self._change(decision_id, begin_s=at_s)
            case facts.OrderReady(decision_id, at_s):
                self._change(decision_id, ready_s=at_s)
            case facts.OrderUsed(decision_id, at_s):
                return self._used(decision_id, at_s)
            case facts.OrderEnded(decision_id, at_s, ending, reason):
                return self._ended(decision_id, at_s, ending, reason)
            case facts.RowSeen(lease=lease):
                totals["opens" if lease else "rows"] += 1
            case facts.RowServed(found=found, wait_s=wait_s, bypass=bypass, lease=lease):
                if lease:
                    return ""
                totals["ready"] += found is facts.Found.READY
                totals["cold_starts"] += found is facts.Found.ABSENT
                totals["bypassed"] += bypass
                totals["cold_seconds"] += wait_s
            case facts.TransferEnded():
                totals["moved_bytes"] += fact.bytes
            case facts.ResidencyEnded():
                self._residency(fact)
            case _:
                pass
        return ""

    def _residency(self, fact: facts.ResidencyEnded) -> None:
        totals = self.totals
        used = fact.last_use_s is not None
        idle = fact.bytes * (fact.end_s - (fact.last_use_s if fact.last_use_s is not None else fact.start_s))
        totals["held_byte_seconds"] += fact.bytes * (fact.end_s - fact.start_s)
        totals["idle_byte_seconds"] += idle
        if not used and fact.cause is not Cause.DEMAND:
            totals["wasted_byte_seconds"] += idle
            totals["wasted_moved_bytes"] += fact.bytes

    def _put(self, record: OrderRecord) -> None:
        self._open[record.decision_id] = record
        self._changed.pop(record.decision_id, None)
        self._changed[record.decision_id] = record

    def _change(self, decision_id: str, **changes: Any) -> OrderRecord | None:
        record = self._open.get(decision_id)
        if record is None:
            return None
        record = msgspec.structs.replace(record, **changes)
        self._put(record)
        return record

    def _settle(self, outcome: Outcome) -> str:
        counts = self.totals["outcomes"]
        counts[outcome.value] = counts.get(outcome.value, 0) + 1
        return outcome.value

    def _used(self, decision_id: str, at_s: float) -> str:
        record = self._open.get(decision_id)
        if record is None or record.first_use_s is not None:
            return ""
        if record.ready_s is not None:
            early_s = at_s - record.ready_s
            self.totals["early_byte_seconds"] += record.bytes * early_s
            self.totals["saved_seconds"] += record.ready_s - (record.begin_s or record.ready_s)
            self._change(decision_id, first_use_s=at_s, outcome=Outcome.TIMELY.value)
            return self._settle(Outcome.TIMELY)
        if record.begin_s is not None:
            self.totals["saved_seconds"] += max(0.0, at_s - record.begin_s)
            self._change(decision_id, first_use_s=at_s, outcome=Outcome.LATE.value)
            return self._settle(Outcome.LATE)
        self._change(decision_id, first_use_s=at_s)
        return ""

    def _ended(self, decision_id: str, at_s: float, ending: Ending, reason: str) -> str:
        record = self._change(decision_id, end_s=at_s, reason=reason)
        if record is None:
            return ""
        settled = ""
        if record.outcome == Outcome.OPEN.value:
            outcome = _OUTCOME[ending]
            self._change(decision_id, outcome=outcome.value)
            settled = self._settle(outcome)
        del self._open[decision_id]
        return settled

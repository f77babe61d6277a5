"""The ledgers of all nodes from the outcomes topic alone.

Of the messages about one order, and of a node's totals, the one with the highest number counts; so the topic may hold some of them twice.
What is no order, no totals and no part of a ledger is refused whole and counted. Covers no ledger arithmetic: sums by hour travel as they
are (`report.sums`), a node's totals as a whole, and the orders are counted again beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prefetcher.controller.records import OrderRecord
from prefetcher.ports import Streams, Topic
from prefetcher.report.sums import LedgerPart, NodeSums
from prefetcher.wire import OutcomeMessage, decode_outcome

__all__ = ["NodeLedger", "rebuild_ledgers"]

_AT_ONCE = 10_000
#: Real seconds without a record after which the end of the topic is reached.
_SILENCE_S = 1.0


class _Sums(msgspec.Struct):
    """The totals that people are shown; the others of a node, of this program or another version, only have to be numbers."""

    rows: float = 0.0
    cold_starts: float = 0.0
    cold_seconds: float = 0.0
    idle_byte_seconds: float = 0.0
    wasted_byte_seconds: float = 0.0


@dataclass(slots=True)
class NodeLedger:
    """What the topic says about one node: its totals as they were told last, and every order as it was told last, by decision id."""

    totals: dict[str, Any] = field(default_factory=dict)
    told_at_s: float = 0.0
    orders: dict[str, OrderRecord] = field(default_factory=dict)
    sums: NodeSums = field(default_factory=lambda: NodeSums(""))
    _seq: dict[str, int] = field(default_factory=dict)

    def take(self, message: OutcomeMessage) -> None:
        """Raises ValueError, and takes nothing, where it is no order, no totals and no part of a ledger."""
        order = totals = None
        if message.kind == "order":
            order = _order_of(message)
        elif message.kind == "totals":
            totals = _totals_of(message)
        elif message.kind == "ledger":
            self.sums.node = message.node
            self.sums.take(message.seq, _part_of(message))
            return
        else:
            raise ValueError(f"bad_field: kind is {message.kind[:40]!r}, expected order, totals or ledger")
        about = "" if order is None else order.decision_id
        if message.seq < self._seq.get(about, message.seq):
            return
        self._seq[about] = message.seq
        if order is not None:
            self.orders[about] = order
        elif totals is not None:
            self.totals, self.told_at_s = totals, message.ts

    def outcomes(self) -> dict[str, int]:
        """Orders by outcome, counted from the orders; what people loaded by hand is left out, as in the totals."""
        return dict(sorted(Counter(order.outcome for order in self.orders.values() if order.cause != "manual").items()))


def _part_of(message: OutcomeMessage) -> LedgerPart:
    try:
        return msgspec.convert(message.ledger, LedgerPart, str_keys=True)
    except msgspec.ValidationError as exc:
        raise ValueError(f"bad_field: ledger: {exc}") from exc


def _order_of(message: OutcomeMessage) -> OrderRecord:
    try:
        order = msgspec.convert(message.order, OrderRecord)
    except msgspec.ValidationError as exc:
        raise ValueError(f"bad_field: order: {exc}") from exc
    if not order.decision_id:
        raise ValueError("empty_name: the order has no decision_id")
    return order


def _totals_of(message: OutcomeMessage) -> dict[str, Any]:
    totals = message.totals
    try:
        msgspec.convert(totals, _Sums)
    except msgspec.ValidationError as exc:
        raise ValueError(f"bad_field: totals: {exc}") from exc
    if totals is None or not _are_sums(totals):
        raise ValueError("bad_field: totals holds what is no number")
    return totals


def _are_sums(value: Any) -> bool:
    """Whether it is a number, nothing (a share of nothing), or such by name: outcomes, causes."""
    if isinstance(value, dict):
        return all(map(_are_sums, value.values()))
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def rebuild_ledgers(streams: Streams, on_read: Callable[[int], None] = lambda count: None) -> tuple[dict[str, NodeLedger], int]:
    """Reads the topic from its oldest record to its end: ledgers by node, and how many records were refused.

    Raises:
        UnavailableError: the streams are away.
    """
    ledgers: dict[str, NodeLedger] = {}
    count = unread = 0
    reader = streams.reader([Topic.OUTCOMES], "rebuild", lambda partitions: {})
    try:
        while True:
            chunks = reader.poll(_AT_ONCE, _SILENCE_S)
            for chunk in chunks:
                for value in chunk.values:
                    try:
                        message = decode_outcome(value)
                        ledger = ledgers.get(message.node) or NodeLedger()
                        ledger.take(message)
                    except (ValueError, RecursionError):
                        unread += 1
                        continue
                    ledgers[message.node] = ledger
                count += len(chunk.values)
            on_read(count)
            if not chunks and not any(reader.lag().values()):
                return ledgers, unread
    finally:
        reader.close()

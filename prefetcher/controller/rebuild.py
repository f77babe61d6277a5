"""The ledgers of all nodes from the outcomes topic alone.

Of the messages about one order, and of a node's totals, the one with the highest number counts; so the topic may hold some of them twice.
Covers no ledger arithmetic: a node's totals travel as a whole, and the orders are counted again beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prefetcher.ports import Streams, Topic
from prefetcher.wire import OutcomeMessage, decode_outcome

__all__ = ["NodeLedger", "rebuild_ledgers"]

_AT_ONCE = 10_000
#: Real seconds without a record after which the end of the topic is reached.
_SILENCE_S = 1.0


@dataclass(slots=True)
class NodeLedger:
    """What the topic says about one node: its totals as they were told last, and every order as it was told last, by decision id."""

    totals: dict[str, Any] = field(default_factory=dict)
    told_at_s: float = 0.0
    orders: dict[str, dict[str, Any]] = field(default_factory=dict)
    _seq: dict[str, int] = field(default_factory=dict)

    def take(self, message: OutcomeMessage) -> None:
        order = message.order or {}
        about = str(order.get("decision_id", "")) if message.kind == "order" else ""
        if message.seq < self._seq.get(about, -1):
            return
        self._seq[about] = message.seq
        if about:
            self.orders[about] = order
        elif message.totals is not None:
            self.totals, self.told_at_s = message.totals, message.ts

    def outcomes(self) -> dict[str, int]:
        """Orders by outcome, counted from the orders; what people loaded by hand is left out, as in the totals."""
        guessed = [order for order in self.orders.values() if order.get("cause") != "manual"]
        return dict(sorted(Counter(str(order.get("outcome", "open")) for order in guessed).items()))


def rebuild_ledgers(streams: Streams, on_read: Callable[[int], None] = lambda count: None) -> tuple[dict[str, NodeLedger], int]:
    """Reads the topic from its oldest record to its end: ledgers by node, and how many records could not be read.

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
                    except ValueError:
                        unread += 1
                        continue
                    ledgers.setdefault(message.node, NodeLedger()).take(message)
                count += len(chunk.values)
            on_read(count)
            if not chunks and not any(reader.lag().values()):
                return ledgers, unread
    finally:
        reader.close()

"""What became of orders, and what the node's ledger adds up to, as messages of the outcomes topic: all that ledgers can be rebuilt from.

Of several messages about one order, and of the totals of a node, the one with the highest number counts, so one that is sent twice changes
nothing. Covers no list of orders in the state store (`state_link`).
"""

from __future__ import annotations

import msgspec

from prefetcher.agent.kept import Snapshot
from prefetcher.clock import Clock
from prefetcher.core.types import NodeName
from prefetcher.ports import StreamWriter, Topic
from prefetcher.wire import OutcomeMessage, encode

__all__ = ["Telling"]

#: Real seconds between totals while nothing became of any order: what is held and idle goes on growing.
_TOTALS_S = 60.0
_TIMEOUT_S = 2.0


class Telling:
    """Sends what a snapshot has to tell. For one thread."""

    def __init__(self, writer: StreamWriter, node: NodeName, clock: Clock) -> None:
        self._writer = writer
        self._node = node
        self._clock = clock
        self._told_at_s = float("-inf")

    def tell(self, snapshot: Snapshot, last: bool = False) -> None:
        """Sends orders that changed, and totals with them; parts of the ledger's sums, if there are any; totals alone now and then, and at
        the end.

        Raises:
            TemporaryError: not acknowledged; it is told again with the next snapshot.
        """
        real_s = self._clock.steady_s() / self._clock.speed
        parts = () if snapshot.to_tell is None else snapshot.to_tell.parts
        tells_totals = bool(snapshot.untold) or last or real_s - self._told_at_s >= _TOTALS_S
        if not tells_totals and not parts:
            return
        now_s = self._clock.now_s()
        messages = [
            OutcomeMessage("order", self._node, now_s, snapshot.seq + number, order=msgspec.to_builtins(order))
            for number, order in enumerate(snapshot.untold)
        ]
        if tells_totals:
            messages.append(OutcomeMessage("totals", self._node, now_s, snapshot.seq + len(messages), totals=dict(snapshot.totals)))
        messages += [
            OutcomeMessage("ledger", self._node, now_s, number, ledger=msgspec.to_builtins(part, str_keys=True))
            for number, part in enumerate(parts, start=snapshot.parts_seq)
        ]
        self._writer.append(Topic.OUTCOMES, [(self._node, encode(message)) for message in messages], timeout_s=_TIMEOUT_S)
        if tells_totals:
            self._told_at_s = real_s

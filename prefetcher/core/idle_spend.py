"""Weights that are kept in memory by a pin or a policy and earn less than they cost: for how long, and at what loss.

They are held to the same ledger as everything else: a held byte earns its index (seconds of waiting that it saves per second) and costs
the price. What is not kept leaves when its index is under the price; what is kept does not, so how long that has gone on is followed here.
Pure. Covers neither pins nor their release (`controller.idle_pins`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from prefetcher.core.types import ModelName, NodeName

__all__ = ["IdleSpend", "Kept", "Spend"]

#: Nobody knows how an index went while nobody looked for longer than this; what was under the price before then begins anew.
_MOST_GAP_S = 3600.0


@dataclass(frozen=True, slots=True)
class Kept:
    """Weights that a node keeps: `why` is `pin` or a policy's name, `index` what a held byte saves, in seconds of waiting a second."""

    model: ModelName
    bytes: int
    index: float
    why: str


class Spend(msgspec.Struct):
    """What kept weights cost and earned since their index fell under the price; `at_s` is the last look."""

    node: NodeName
    model: ModelName
    why: str
    bytes: int
    under_since_s: float
    at_s: float
    index_ratio: float
    byte_s: float = 0.0
    cost_s: float = 0.0
    earned_s: float = 0.0


class IdleSpend:
    """Follows kept weights over looks at their nodes."""

    def __init__(self) -> None:
        self._under: dict[tuple[NodeName, ModelName], Spend] = {}

    def look(self, node: NodeName, kept: Iterable[Kept], price_per_byte_s: float, now_s: float) -> None:
        """What `node` keeps at `now_s`, all of it. What is worth its price, or kept no more, is followed no more."""
        still: dict[tuple[NodeName, ModelName], Spend] = {}
        for each in kept:
            if price_per_byte_s <= 0.0 or each.index >= price_per_byte_s:
                continue
            place = (node, each.model)
            ratio = each.index / price_per_byte_s
            before = self._under.get(place)
            if before is None or not 0.0 <= now_s - before.at_s <= _MOST_GAP_S:
                still[place] = Spend(node, each.model, each.why, each.bytes, now_s, now_s, ratio)
                continue
            byte_s = each.bytes * (now_s - before.at_s)
            still[place] = Spend(
                node,
                each.model,
                each.why,
                each.bytes,
                before.under_since_s,
                now_s,
                ratio,
                before.byte_s + byte_s,
                before.cost_s + price_per_byte_s * byte_s,
                before.earned_s + each.index * byte_s,
            )
        for place in [place for place in self._under if place[0] == node]:
            del self._under[place]
        self._under |= still

    def forget(self, nodes: Iterable[NodeName]) -> None:
        """Follows what is kept on these nodes alone."""
        known = set(nodes)
        self._under = {place: spend for place, spend in self._under.items() if place[0] in known}

    def idle(self, after_s: float) -> list[Spend]:
        """What has been under the price for `after_s` or longer at its last look, the largest loss first."""
        found = [spend for spend in self._under.values() if spend.at_s - spend.under_since_s >= after_s]
        return sorted(found, key=lambda spend: (spend.earned_s - spend.cost_s, spend.model, spend.node))

    def releasable(self, after_s: float, nodes: Iterable[tuple[NodeName, ModelName]]) -> list[ModelName]:
        """Pinned models that are idle on every node that keeps them. `nodes`: where each is kept; a pin is for all nodes."""
        idle = {(spend.node, spend.model) for spend in self.idle(after_s) if spend.why == "pin"}
        places: dict[ModelName, set[NodeName]] = {}
        for node, model in nodes:
            places.setdefault(model, set()).add(node)
        return sorted(model for model, there in places.items() if all((node, model) in idle for node in there))

    def snapshot(self) -> list[Spend]:
        return list(self._under.values())

    def restore(self, spends: Iterable[Spend]) -> None:
        self._under = {(spend.node, spend.model): spend for spend in spends}

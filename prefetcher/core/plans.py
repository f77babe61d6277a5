"""What a plan changes on a node: prices, pins, prefetches that are queued, joined or refused, and memory that is
given back.

A plan is a whole: what it does not name any more is wanted no more. Only plans above the last (fence, revision) are
applied.
"""

from __future__ import annotations

from prefetcher.core.admission import below_price, over_cap, under_cap
from prefetcher.core.copies import IN_FLIGHT, Pending, Stage, Weights
from prefetcher.core.events import Evicted, NoteSkipped, Record, RefuseOrder, RefusePlan
from prefetcher.core.facts import Ending, OrderIssued
from prefetcher.core.links import EDGES, Links
from prefetcher.core.quotas import CAPPED, Quotas
from prefetcher.core.types import Arm, Cause, DecisionId, NodeName, Order, Plan, Tier, WeightsKey

__all__ = ["Plans"]

#: How many decision ids are remembered, so that a plan that repeats an ended one does not start it again: an hour of
#: plans of 60 orders.
_REMEMBERED_ORDERS = 4096


class Plans:
    """The last plan of `node`, and whether prefetching is allowed."""

    def __init__(self, node: NodeName, links: Links) -> None:
        self.node = node
        self.links = links
        self.transfers = links.transfers
        self.holdings = links.holdings
        self.limits = links.limits
        self.fence = -1
        self.revision = -1
        self.allows_prefetch = True
        #: Weights that something is known of: those of the plan, and those that were asked for since.
        self.planned: dict[WeightsKey, None] = {}
        self.seen: dict[DecisionId, None] = {}

    @property
    def switched_off(self) -> bool:
        return self.holdings.switched_off

    @switched_off.setter
    def switched_off(self, off: bool) -> None:
        self.holdings.switched_off = off

    def rank(self, weights: Weights, index: float) -> None:
        """What a held byte saves by what was said since the last plan; it holds until the next."""
        weights.index = index
        self.planned[weights.key] = None

    def forget_worth(self) -> None:
        """Nothing is known of any weights but their last use."""
        for key in self.planned:
            self.holdings.weights[key].index = None
            self.holdings.weights[key].in_shadow = None
            self.holdings.weights[key].pinned_by_plan = False
        self.planned = {}

    def heard_of(self, fence: int) -> None:
        """Somebody led with this `fence`: plans of a lower one are refused, whoever's they are."""
        if fence > self.fence:
            self.fence, self.revision = fence, -1

    def received(self, plan: Plan) -> None:
        why = ""
        if plan.node != self.node:
            why = "other_node"
        elif plan.fence < self.fence:
            why = "stale_fence"
        elif (plan.fence, plan.revision) <= (self.fence, self.revision):
            why = "stale_revision"
        if why:
            self.transfers.out.append(RefusePlan(plan.revision, plan.fence, why))
            return
        self.fence, self.revision = plan.fence, plan.revision
        self.links.price_per_byte_s = plan.price_per_byte_s
        self.allows_prefetch = plan.prefetch_enabled
        if plan.quotas != self.holdings.quotas.quotas:
            self.holdings.quotas = Quotas(plan.quotas)
        self.forget_worth()
        for desired in plan.desired:
            weights = self.holdings.resolve(desired.key)
            if weights is None:
                continue
            weights.index = desired.index
            weights.in_shadow = desired.shadow
            if desired.pinned and not weights.pinned and not self.links.may_claim(weights):
                self.transfers.out.append(NoteSkipped("pin", CAPPED, weights.key))
            else:
                weights.pinned_by_plan = desired.pinned
            if weights.pinned:
                self.links.active[weights.key] = None
            self.planned[weights.key] = None
        kept = {d.order.decision_id for d in plan.desired if d.order is not None}
        for weights in self.links.active_weights():
            for goal, pending in list(weights.pending.items()):
                order = pending.order
                if not pending.begun and order.cause is not Cause.MANUAL and order.decision_id not in kept:
                    self.transfers.end_pending(weights, goal, Ending.REPLACED, "newer_plan", self.links.now_s)
        if not plan.prefetch_enabled:
            self.stop_prefetching("plan")
        self._trim_to_caps()
        for rank, desired in enumerate(plan.desired):
            if desired.order is not None:
                self.order(desired.order, rank)
        self._price_eviction()

    def _trim_to_caps(self) -> None:
        for quota in self.holdings.quotas.quotas:
            for weights in over_cap(self.holdings, quota, self.links.now_s):
                if weights.copies[Tier.HOST].stage in IN_FLIGHT:
                    self.transfers.cancel(weights, Tier.HOST, Ending.CANCELLED, CAPPED, self.links.now_s)
                elif self.holdings.may_leave(weights, Tier.HOST):
                    self.transfers.evict(weights, Tier.HOST, Evicted.ROOM, self.links.now_s)

    def order(self, order: Order, rank: int) -> str:
        """Queues the prefetch, or ends it at once and says why. One that was seen before only takes its new rank, and what is
        there for it, where it says so, a later end of its hold (seconds after it was issued)."""
        if order.decision_id in self.seen:
            weights = self.holdings.resolve(order.key)
            pending = weights.pending.get(order.tier) if weights is not None else None
            if pending is not None and pending.order.decision_id == order.decision_id:
                pending.rank = rank
            copy = weights.copies.get(order.tier) if weights is not None else None
            its_own = copy is not None and copy.order is not None and copy.order.decision_id == order.decision_id
            if copy is not None and its_own and copy.stage is Stage.READY and copy.hold_until_s is not None:
                copy.hold_until_s = max(copy.hold_until_s, order.issued_s + order.hold_s)
            return "seen_before"
        self.seen[order.decision_id] = None
        while len(self.seen) > _REMEMBERED_ORDERS:
            del self.seen[next(iter(self.seen))]
        weights = self.holdings.resolve(order.key)
        self.transfers.out.append(Record(OrderIssued(order, weights.bytes if weights is not None else 0)))
        why = self._why_refuse(order, weights)
        if why or weights is None:
            self.transfers.end_order(order, Ending.REPLACED, why, self.links.now_s)
            self.transfers.out.append(RefuseOrder(order.decision_id, why))
            return why
        weights.pending[order.tier] = Pending(order, rank)
        self.links.active[weights.key] = None
        return ""

    def _why_refuse(self, order: Order, weights: Weights | None) -> str:
        """Why nothing is begun for an order, or ''. Weights that are there or on their way are joined: their hold moves out, at most."""
        by_hand = order.cause is Cause.MANUAL
        if weights is None:
            return "unknown_weights"
        if self.holdings.observing:
            return "observe"
        checks = (
            (order.node != self.node, "other_node"),
            (order.arm is Arm.CONTROL and not by_hand, "control_group"),
            (self.switched_off and not by_hand, "switched_off"),
            (not self.allows_prefetch and not by_hand, "plan"),
            (order.deadline_s <= self.links.now_s, "deadline"),
            (weights.retired, "old_version"),
            (order.tier < Tier.DISK or not self._has_tier(order.tier), "no_such_tier"),
            (weights.highest_ready() is None, "no_copy"),
        )
        for holds, why in checks:
            if holds:
                return why
        copy = weights.copies.get(order.tier)
        if copy is not None and copy.stage is Stage.READY:
            if copy.hold_until_s is not None:
                copy.hold_until_s = max(copy.hold_until_s, self.links.now_s + order.hold_s)
            return "resident"
        if copy is not None and copy.stage in IN_FLIGHT:
            return "moving"
        if order.tier in weights.pending:
            return "queued"
        if weights.demanded and order.tier <= self.limits.serving_tier:
            return "demanded"
        if not under_cap(self.holdings, weights, self.links.now_s, guess=not by_hand, tier=order.tier)[1]:
            return CAPPED
        return self.why_never(weights, order.tier, prefetch=not by_hand)

    def _has_tier(self, tier: Tier) -> bool:
        return tier <= self.limits.serving_tier or tier in self.limits.budget_bytes

    def why_never(self, weights: Weights, tier: Tier, *, prefetch: bool) -> str:
        """Why weights can never come into `tier`, or '': larger than its budget (`too_large`), or than what pins leave of it."""
        base = weights.highest_ready() or Tier.REMOTE
        for step in EDGES:
            budget = self.holdings.budget(step, prefetch=prefetch)
            if base < step <= tier and budget is not None:
                if weights.bytes > budget:
                    return "too_large"
                if weights.bytes > budget - self.holdings.pinned_bytes(step, weights.key):
                    return "does_not_fit"
        return ""

    def stop_prefetching(self, reason: str) -> None:
        for weights in self.links.active_weights():
            for goal, pending in list(weights.pending.items()):
                if not pending.begun and pending.order.cause is not Cause.MANUAL:
                    self.transfers.end_pending(weights, goal, Ending.REPLACED, reason, self.links.now_s)
            for tier, copy in weights.copies.items():
                if copy.stage in IN_FLIGHT and self.links.is_guess(weights, tier):
                    self.transfers.cancel(weights, tier, Ending.CANCELLED, reason, self.links.now_s)

    def _price_eviction(self) -> None:
        for tier in (Tier.HOST, Tier.DEVICE):
            for key, copy in sorted(self.holdings.in_tier[tier].items()):
                weights = self.holdings.weights[key]
                if not below_price(weights, self.holdings, self.links.price_per_byte_s, self.links.now_s):
                    continue
                by_hand = copy.order is not None and copy.order.cause is Cause.MANUAL and not copy.used
                if copy.stage is Stage.PAUSED and self.links.is_guess(weights, tier):
                    self.transfers.cancel(weights, tier, Ending.CANCELLED, "price", self.links.now_s)
                elif not by_hand and self.holdings.may_leave(weights, tier):
                    # What batch has no need of any more is worth less than nothing to the plan.
                    released = weights.index is not None and weights.index < 0.0
                    self.transfers.evict(weights, tier, Evicted.WINDOW if released else Evicted.PRICE, self.links.now_s)

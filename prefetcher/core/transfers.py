"""How copies change stage: one method a transition, with the instruction that asks for it and the facts that it makes.

Decides nothing. `core.residency` calls it; the table of transitions is in that module's docstring.
"""

from __future__ import annotations

import random

from prefetcher.core.copies import IN_FLIGHT, Copy, Holdings, Pending, Stage, Weights
from prefetcher.core.events import (
    CancelLoad,
    Evicted,
    EvictWeights,
    GrantLease,
    Instruction,
    LoadWeights,
    PauseLoad,
    Record,
)
from prefetcher.core.facts import (
    STAGE_INTO,
    Ending,
    Found,
    OrderBegan,
    OrderEnded,
    OrderReady,
    OrderRedundant,
    OrderUsed,
    ResidencyEnded,
    RowServed,
    StageEnded,
    TransferEnded,
)
from prefetcher.core.types import Cause, Order, Tier, WeightsKey

__all__ = ["Transfers"]


class Transfers:
    """The moves that a machine can make on its holdings. What is to be done goes to `out`, in order."""

    def __init__(self, holdings: Holdings, seed: int) -> None:
        self.holdings = holdings
        self.limits = holdings.limits
        self.out: list[Instruction] = []
        self.seed = seed
        #: How many back-offs were drawn: with the seed, all of the generator's state.
        self.draws = 0

    # --- orders ---

    def pending_behind(self, weights: Weights, tier: Tier) -> Pending | None:
        """The prefetch that a transfer into `tier` serves: of those that lead there or further, the nearest."""
        goal = min((goal for goal in weights.pending if goal >= tier), default=None)
        return None if goal is None else weights.pending[goal]

    def end_order(self, order: Order, ending: Ending, reason: str, now_s: float) -> None:
        self.out.append(Record(OrderEnded(order.decision_id, now_s, ending, reason)))

    def end_pending(self, weights: Weights, goal: Tier, ending: Ending, reason: str, now_s: float) -> None:
        self.end_order(weights.pending.pop(goal).order, ending, reason, now_s)

    def mark_wanted(self, weights: Weights, serving: Tier, now_s: float) -> None:
        """Demand came while the weights move: prefetches that have begun are used; those that have not are joined and end."""
        for goal, pending in list(weights.pending.items()):
            if not pending.begun:
                if goal <= serving:
                    self.end_pending(weights, goal, Ending.REPLACED, "joined_by_demand", now_s)
            elif not pending.used:
                pending.used = True
                self._first_use(weights, pending.order, now_s)

    def _first_use(self, weights: Weights, order: Order, at_s: float) -> None:
        self.out.append(Record(OrderUsed(order.decision_id, at_s)))
        if weights.in_shadow is not None:
            self.out.append(Record(OrderRedundant(order.decision_id, weights.in_shadow)))

    def mark_used(self, weights: Weights, copy: Copy, ts: float, now_s: float) -> None:
        """A row or lease is served from a ready copy; a row that is heard of late may have come (at `ts`) before it was ready."""
        if copy.order is not None and not copy.used:
            self._first_use(weights, copy.order, max(ts, copy.start_s))
        copy.used = True
        copy.hold_until_s = None
        used_s = max(ts, copy.ready_s or ts)
        copy.last_use_s = max(used_s, copy.last_use_s or used_s)
        weights.last_use_s = max(weights.last_use_s, now_s)

    def end_ready(self, copy: Copy, reason: Evicted, now_s: float, *, lost: bool = False) -> None:
        """The prefetch that brought a ready copy ends with it."""
        if copy.order is not None:
            ending = Ending.DISPLACED if reason is Evicted.ROOM else Ending.LOST if lost else Ending.GIVEN_UP
            self.end_order(copy.order, ending, reason.value, now_s)
            copy.order = None

    # --- loads ---

    def start(self, weights: Weights, tier: Tier, cause: Cause, pending: Pending | None, now_s: float) -> None:
        """PAUSED, PART or nothing -> MOVING; `pending` is the prefetch that this transfer begins or goes on with, if it is one."""
        copy = weights.copies.get(tier)
        resumed = copy is not None and copy.stage is Stage.PAUSED
        if copy is None or not resumed:
            part_bytes = weights.part_bytes(tier)
            if part_bytes:
                self.gone(weights, tier, now_s)
            copy = Copy(tier, Stage.MOVING, cause, now_s, bytes_done=part_bytes)
            copy.decision_id = pending.order.decision_id if pending is not None else None
            self.holdings.add(weights, copy)
        copy.stage = Stage.MOVING
        copy.segment_start_s = now_s
        copy.segment_from_bytes = copy.bytes_done
        copy.deadline_s = now_s + self.limits.stall_s
        copy.nudges = 0
        if pending is not None and not pending.begun:
            pending.begun = True
            self.out.append(Record(OrderBegan(pending.order.decision_id, now_s)))
        self.holdings.mover[tier] = weights.key
        self.out.append(
            LoadWeights(
                weights.key,
                Tier(tier - 1),
                tier,
                copy.cause,
                weights.bytes,
                order=pending.order if pending is not None else None,
                resumed=resumed,
                resume_from_bytes=copy.bytes_done,
            )
        )

    def pause(self, weights: Weights, tier: Tier, now_s: float, to: WeightsKey | None = None) -> None:
        """MOVING -> PAUSING; `to` is what a demand load gives way to."""
        copy = weights.copies[tier]
        copy.stage = Stage.PAUSING
        copy.yields = to is not None
        copy.deadline_s = now_s + self.limits.answer_s
        self.out.append(PauseLoad(weights.key, tier, to))

    def paused(self, weights: Weights, tier: Tier, bytes_done: int, now_s: float) -> None:
        """MOVING or PAUSING -> PAUSED; the link is free, the memory stays taken."""
        copy = weights.copies[tier]
        self.end_segment(weights, copy, min(bytes_done, weights.bytes), now_s)
        copy.yields = copy.yields and copy.stage is Stage.PAUSING
        copy.stage = Stage.PAUSED
        copy.paused_s = now_s
        pending = self.pending_behind(weights, tier)
        hold_s = pending.order.hold_s if pending is not None else self.limits.adopted_hold_s
        copy.deadline_s = now_s + hold_s
        copy.nudges = 0
        del self.holdings.mover[tier]

    def cancel(self, weights: Weights, tier: Tier, ending: Ending, reason: str, now_s: float) -> None:
        """MOVING, PAUSING or PAUSED -> CANCELLING; the prefetches behind it end."""
        copy = weights.copies[tier]
        if copy.stage is not Stage.PAUSED:
            self.end_segment(weights, copy, copy.bytes_done, now_s)
        for goal, pending in list(weights.pending.items()):
            if pending.begun and goal >= tier:
                self.end_pending(weights, goal, ending, reason, now_s)
        copy.stage = Stage.CANCELLING
        copy.deadline_s = now_s + self.limits.answer_s
        copy.nudges = 0
        self.out.append(CancelLoad(weights.key, tier, reason))

    def loaded(self, weights: Weights, tier: Tier, now_s: float) -> Copy:
        """MOVING or PAUSING -> READY."""
        copy = weights.copies[tier]
        self.end_segment(weights, copy, weights.bytes, now_s)
        self.out.append(Record(StageEnded(weights.key, STAGE_INTO[tier], now_s, copy.moved_s)))
        del self.holdings.mover[tier]
        copy.stage = Stage.READY
        copy.ready_s = now_s
        copy.deadline_s = 0.0
        weights.failures = 0
        weights.retry_at_s = 0.0
        pending = self.pending_behind(weights, tier)
        is_goal = pending is not None and pending.order.tier == tier
        if pending is not None and pending.begun and not pending.used and (is_goal or tier > Tier.DISK):
            # What lies on disk on the way to a higher tier stays until room is needed.
            copy.hold_until_s = now_s + pending.order.hold_s
        if pending is not None and pending.begun and pending.order.tier == tier:
            del weights.pending[tier]
            copy.order = pending.order
            copy.used = pending.used
            copy.last_use_s = now_s if pending.used else None
            self.out.append(Record(OrderReady(pending.order.decision_id, now_s)))
        return copy

    def failed(self, weights: Weights, tier: Tier, reason: str, retry_after_s: float, now_s: float) -> None:
        """Any stage of a load -> nothing; the next try not before a back-off has passed."""
        copy = weights.copies[tier]
        if copy.stage in (Stage.MOVING, Stage.PAUSING):
            self.end_segment(weights, copy, copy.bytes_done, now_s)
        for goal, pending in list(weights.pending.items()):
            if pending.begun and goal >= tier:
                self.end_pending(weights, goal, Ending.FAILED, reason, now_s)
        self.gone(weights, tier, now_s)
        self.back_off(weights, retry_after_s, now_s)

    def back_off(self, weights: Weights, at_least_s: float, now_s: float) -> None:
        weights.failures += 1
        doubled = self.limits.backoff_s * 2.0 ** min(weights.failures - 1, 30)
        span_s = min(doubled, self.limits.backoff_cap_s)
        share = 0.5 + 0.5 * random.Random(f"{self.seed}:{self.draws}").random()
        self.draws += 1
        weights.retry_at_s = now_s + max(at_least_s, span_s * share)

    # --- memory ---

    def evict(
        self, weights: Weights, tier: Tier, reason: Evicted, now_s: float, room_for: WeightsKey | None = None, keep_bytes: int = 0
    ) -> None:
        """READY or PART -> EVICTING; nobody is given the copy from now on, and its bytes count until the kernel has them back."""
        copy = weights.copies[tier]
        self.end_ready(copy, reason, now_s)
        copy.stage = Stage.EVICTING
        copy.keep_bytes = keep_bytes
        copy.deadline_s = now_s + self.limits.answer_s
        copy.nudges = 0
        self.out.append(EvictWeights(weights.key, tier, reason, room_for, keep_bytes))

    def trimmed(self, weights: Weights, tier: Tier, kept_bytes: int, now_s: float) -> None:
        """EVICTING -> PART: the kernel has all but the first bytes. Their memory is booked anew, as nobody's guess."""
        self.gone(weights, tier, now_s)
        self.holdings.add(weights, Copy(tier, Stage.PART, Cause.DEMAND, now_s, bytes_done=kept_bytes, part_bytes=kept_bytes))

    def gone(self, weights: Weights, tier: Tier, now_s: float) -> None:
        """Any stage -> nothing: the kernel has the bytes."""
        ended = self.residency(weights, weights.copies[tier], now_s)
        self.holdings.remove(weights, tier)
        if self.holdings.mover.get(tier) == weights.key:
            del self.holdings.mover[tier]
        self.out.append(Record(ended))

    def repeat(self, weights: Weights, copy: Copy, now_s: float) -> None:
        """The answer to an instruction is overdue: say it again, ever less often."""
        copy.nudges += 1
        copy.deadline_s = now_s + min(self.limits.answer_s * 2.0 ** min(copy.nudges, 20), self.limits.backoff_cap_s)
        if copy.stage is Stage.PAUSING:
            self.out.append(PauseLoad(weights.key, copy.tier))
        elif copy.stage is Stage.CANCELLING:
            self.out.append(CancelLoad(weights.key, copy.tier, "overdue"))
        elif copy.stage is Stage.EVICTING:
            self.out.append(EvictWeights(weights.key, copy.tier, Evicted.OVERDUE, keep_bytes=copy.keep_bytes))

    # --- serving ---

    def serve(self, weights: Weights, tier: Tier, now_s: float, *, bypass: bool = False, reason: str = "") -> None:
        """Everything that waits for the weights gets the copy in `tier`.

        A row waited until they were ready there, however late it was heard of; served from below, while it was kept waiting and for the
        links above.
        """
        copy = weights.copies[tier]
        link_s = self.link_s_above(weights, tier) if bypass else 0.0
        there_s = now_s if copy.ready_s is None else copy.ready_s
        for row in weights.rows:
            self.mark_used(weights, copy, row.ts, now_s)
            wait_s = now_s - row.seen_s + link_s if bypass else max(0.0, there_s - row.ts)
            self.out.append(Record(RowServed(weights.key.model, row.ts, row.found, wait_s, bypass, tier=tier, tenant=row.tenant)))
        for waiter in weights.waiters:
            self.mark_used(weights, copy, waiter.seen_s, now_s)
            copy.leases[waiter.holder] = copy.leases.get(waiter.holder, 0) + 1
            self.out.append(GrantLease(waiter.holder, weights.key, tier, bypass, reason, waiter.token))
            wait_s = max(0.0, now_s - waiter.seen_s) + link_s
            fact = RowServed(
                weights.key.model, waiter.seen_s, waiter.found, wait_s, bypass, lease=True, announced=waiter.announced, tier=tier
            )
            self.out.append(Record(fact))
        weights.rows.clear()
        weights.waiters.clear()

    def link_s_above(self, weights: Weights, tier: Tier) -> float:
        """Seconds that the links from `tier` up to the serving tier take."""
        return sum(s for to_tier, s in weights.link_s.items() if tier < to_tier <= self.limits.serving_tier)

    def found(self, weights: Weights) -> Found:
        """What a row finds that comes now."""
        serving = self.limits.serving_tier
        if any(c.stage is Stage.READY and t >= serving for t, c in weights.copies.items()):
            return Found.READY
        flying = [c for t, c in weights.copies.items() if c.stage in IN_FLIGHT and t <= serving]
        # A prefetch that pauses although somebody joined it has to wait for the link again; a load that gives way moves to its block's end.
        moving = any(c.stage is Stage.MOVING or (c.stage is Stage.PAUSING and c.yields) for c in flying)
        if moving or (flying and not weights.demanded):
            return Found.MOVING
        if weights.demanded or any(goal <= serving for goal in weights.pending):
            return Found.QUEUED
        return Found.ABSENT

    def residency(self, weights: Weights, copy: Copy, end_s: float) -> ResidencyEnded:
        """The fact that the copy's memory was held until `end_s`."""
        size, ready_s = weights.held_bytes(copy.tier), copy.ready_s
        return ResidencyEnded(weights.key, copy.tier, copy.cause, copy.start_s, ready_s, copy.last_use_s, end_s, size, copy.decision_id)

    def end_segment(self, weights: Weights, copy: Copy, bytes_done: int, now_s: float) -> None:
        """The bytes stop moving, for good or for a while."""
        copy.bytes_done = bytes_done
        copy.moved_s += now_s - copy.segment_start_s
        self.out.append(
            Record(
                TransferEnded(
                    weights.key,
                    Tier(copy.tier - 1),
                    copy.tier,
                    copy.segment_start_s,
                    now_s,
                    bytes_done - copy.segment_from_bytes,
                    copy.cause,
                    copy.decision_id,
                )
            )
        )

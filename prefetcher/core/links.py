"""Who gets the link into each tier next, and what becomes of demand that does not.

One transfer at a time on each edge. Works on the holdings through `core.transfers`; the events that lead here are
`core.residency`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prefetcher.core.admission import Rank, Verdict, admit, under_cap
from prefetcher.core.copies import IN_FLIGHT, Holdings, Pending, Stage, Waiter, Weights
from prefetcher.core.events import Evicted, Record, RefuseLease, RefuseOrder, SwitchVersion
from prefetcher.core.facts import Ending, Found, RowServed
from prefetcher.core.planner import next_in_smith_order, outranks
from prefetcher.core.quotas import CAPPED
from prefetcher.core.transfers import Transfers
from prefetcher.core.types import Cause, Tier, WeightsKey

__all__ = ["EDGES", "Links"]

#: The tiers that an edge leads to.
EDGES = (Tier.DISK, Tier.HOST, Tier.DEVICE)


class Links:
    """The queues of a node's links. `now_s` and `price_per_byte_s` are set by the machine."""

    def __init__(self, holdings: Holdings, transfers: Transfers) -> None:
        self.holdings = holdings
        self.transfers = transfers
        self.limits = holdings.limits
        self.now_s = 0.0
        self.price_per_byte_s = 0.0
        #: Weights that want a transfer, or may: demand, prefetches, pins, new versions.
        self.active: dict[WeightsKey, None] = {}
        #: Weights that somebody came for, or that came to a link, since it was last looked at.
        self._came: set[WeightsKey] = set()

    def active_weights(self) -> list[Weights]:
        return [self.holdings.weights[key] for key in sorted(self.active)]

    # --- demand ---

    def demand(self, weights: Weights, found: Found) -> None:
        """Rows or waiters were added to `weights`, which they found as `found`: serve them, or have them wait for a load."""
        weights.last_use_s = max(weights.last_use_s, self.now_s)
        if found is Found.READY:
            self.serve(weights)
            return
        if found is not Found.MOVING:
            base = weights.highest_ready()
            reason = self._why_bypass(weights, base)
            if reason:
                self.settle(weights, reason, self.limits.backoff_cap_s)
                return
        self.transfers.mark_wanted(weights, self.limits.serving_tier, self.now_s)
        self.active[weights.key] = None
        self.came(weights)

    def came(self, weights: Weights) -> None:
        """Demand waits for a link since now: what moves there may give way."""
        self._came.add(weights.key)

    def _why_bypass(self, weights: Weights, base: Tier | None) -> str:
        """Why demand should not wait for a load but be served as things are, or ''."""
        if base is None:
            return "no_copy"
        if self.holdings.observing:
            return "observe"
        if weights.retired:
            return "old_version"
        if base < Tier.DISK:
            return ""  # nothing can be opened there: it waits
        if weights.retry_at_s > self.now_s:
            return "load_failed"
        found = admit(self.holdings, weights, Tier(base + 1), Rank.DEMAND, self.price_per_byte_s, self.now_s)
        return found.reason if found.verdict in (Verdict.BYPASS, Verdict.NEVER, Verdict.NO_ROOM) else ""

    def serve(self, weights: Weights) -> None:
        """Who waits gets the weights from the serving tier, or from above it, if they are there."""
        serving = self.limits.serving_tier
        tier = min((t for t in Tier if t >= serving and weights.ready(t)), default=None)
        if tier is Tier.HOST and weights.waiters and not self.may_claim(weights):
            # Rows are served where the weights are: they hold nothing.
            waiters, weights.waiters = weights.waiters, []
            self.transfers.serve(weights, tier, self.now_s)
            weights.waiters = waiters
            if weights.ready(Tier.DISK):
                self.transfers.serve(weights, Tier.DISK, self.now_s, bypass=True, reason=CAPPED)
            else:
                self.give_up(weights, CAPPED, self.limits.backoff_s)
        elif tier is not None:
            self.transfers.serve(weights, tier, self.now_s)

    def may_claim(self, weights: Weights) -> bool:
        """Whether weights may be pinned or leased in the host tier under their tenant's cap; what it gives up for that leaves."""
        given_up, fits = under_cap(self.holdings, weights, self.now_s, guess=False)
        for victim in given_up:
            self.transfers.evict(victim, Tier.HOST, Evicted.ROOM, self.now_s, weights.key)
        return fits

    def settle(self, weights: Weights, reason: str, retry_after_s: float | None) -> None:
        """Demand that can't wait for the link: from the tier below if it can be opened there, else refused."""
        base = weights.highest_ready()
        if base is not None and base >= Tier.DISK:
            self.transfers.serve(weights, base, self.now_s, bypass=True, reason=reason)
        else:
            self.give_up(weights, reason, retry_after_s)

    def give_up(self, weights: Weights, reason: str, retry_after_s: float | None) -> None:
        """Nobody gets anything: rows count as dropped, waiters are refused."""
        for row in weights.rows:
            wait_s = max(0.0, self.now_s - row.ts)
            self.transfers.out.append(Record(RowServed(weights.key.model, row.ts, row.found, wait_s, dropped=True, tenant=row.tenant)))
        for waiter in weights.waiters:
            self.drop_waiter(weights, waiter)
            self.transfers.out.append(RefuseLease(waiter.holder, weights.key, reason, retry_after_s, waiter.token))
        weights.rows.clear()
        weights.waiters.clear()

    def drop_waiter(self, weights: Weights, waiter: Waiter) -> None:
        wait_s = self.now_s - waiter.seen_s
        fact = RowServed(weights.key.model, waiter.seen_s, waiter.found, wait_s, dropped=True, lease=True, announced=waiter.announced)
        self.transfers.out.append(Record(fact))

    # --- whose turn ---

    def rank(self, weights: Weights, tier: Tier) -> Rank | None:
        """For whom a transfer into `tier` would be, or None if nobody wants one."""
        serving = self.limits.serving_tier
        if weights.demanded and tier <= serving:
            return Rank.DEMAND
        goals = [p for goal, p in weights.pending.items() if goal >= tier]
        by_hand = any(p.order.cause is Cause.MANUAL for p in goals)
        # A pin stands while the node only observes, and is loaded once it does not.
        pinned = weights.pinned and not weights.retired and not self.holdings.observing
        if by_hand or (pinned and tier <= serving):
            return Rank.HAND
        if weights.carry_to is not None and tier <= weights.carry_to:
            return Rank.CARRY
        return Rank.PREFETCH if goals else None

    def is_guess(self, weights: Weights, tier: Tier) -> bool:
        """Whether a transfer into `tier` would be for prefetching only, or for nobody."""
        return self.rank(weights, tier) in (Rank.PREFETCH, None)

    def advance(self, *, yields: bool = True) -> None:
        """Start, pause and make room as things now stand, on every edge. `yields`: demand loads give way to denser ones."""
        if not yields:
            self._came.clear()
        for key in [k for k in self.active if not self._wants_anything(self.holdings.weights[k])]:
            del self.active[key]
        for tier in EDGES:
            self._advance_edge(tier)
        self._came.clear()

    def _wants_anything(self, weights: Weights) -> bool:
        in_flight = any(copy.stage in IN_FLIGHT for copy in weights.copies.values())
        wanted = weights.demanded or weights.pinned or bool(weights.pending) or weights.carry_to is not None
        return wanted or in_flight

    def _queue(self, tier: Tier) -> dict[Rank, list[Weights]]:
        queue: dict[Rank, list[Weights]] = {}
        for weights in self.active_weights():
            if weights.highest_ready() != tier - 1 or weights.retry_at_s > self.now_s:
                continue
            copy = weights.copies.get(tier)
            if copy is not None and copy.stage not in (Stage.PAUSED, Stage.CANCELLING, Stage.EVICTING, Stage.PART):
                continue
            rank = self.rank(weights, tier)
            if rank is not None:
                queue.setdefault(rank, []).append(weights)
        return queue

    def _advance_edge(self, tier: Tier) -> None:
        queue = self._queue(tier)
        mover = self.holdings.mover.get(tier)
        if mover is not None:
            self._give_way(self.holdings.weights[mover], tier, queue.get(Rank.DEMAND, []))
            return
        claimed_bytes = 0
        demand_waits = False
        for rank, weights in self._in_order(queue, tier):
            if rank is Rank.PREFETCH and demand_waits:
                return
            found = admit(self.holdings, weights, tier, rank, self.price_per_byte_s, self.now_s, claimed_bytes)
            if found.verdict is Verdict.START:
                self._start(weights, tier, rank)
                return
            if found.verdict is Verdict.WAIT or found.verdict is Verdict.EVICT:
                for paused in found.dropped:
                    self.transfers.cancel(paused, tier, Ending.CANCELLED, "room", self.now_s)
                for victim in found.victims:
                    kept = found.kept_bytes if victim is found.victims[-1] else 0
                    self.transfers.evict(victim, tier, Evicted.ROOM, self.now_s, weights.key, kept)
                if self._memory_is_at_hand(tier):
                    return
                if found.reason != "behind_another" and (tier not in weights.copies or weights.part_bytes(tier)):
                    claimed_bytes += weights.bytes - weights.part_bytes(tier)
                demand_waits = demand_waits or rank is Rank.DEMAND
                continue
            self._turned_away(weights, tier, rank, found.verdict, found.reason)

    def _memory_is_at_hand(self, tier: Tier) -> bool:
        """Whether what leaves was told so just now: then the link waits these milliseconds, or a load of minutes would go first."""
        soon_s = self.limits.answer_s - self.limits.give_back_s
        leaving = [c for c in self.holdings.in_tier[tier].values() if c.leaving]
        return bool(leaving) and all(copy.nudges == 0 and copy.deadline_s - self.now_s > soon_s for copy in leaving)

    def _in_order(self, queue: dict[Rank, list[Weights]], tier: Tier) -> Iterator[tuple[Rank, Weights]]:
        demand = sorted(queue.get(Rank.DEMAND, []), key=lambda w: (w.queued_since_s(tier), w.key))
        while demand:
            waiting = np.array([w.waiting for w in demand], dtype=np.float64)
            remaining = np.array([w.remaining_bytes(tier) for w in demand], dtype=np.float64)
            yield Rank.DEMAND, demand.pop(next_in_smith_order(waiting, remaining))
        for rank in (Rank.HAND, Rank.CARRY):
            for weights in queue.get(rank, []):
                yield rank, weights
        guesses = queue.get(Rank.PREFETCH, [])
        for weights in sorted(guesses, key=lambda w: (w.held_bytes(tier) == w.part_bytes(tier), self._plan_rank(w, tier), w.key)):
            yield Rank.PREFETCH, weights

    def _plan_rank(self, weights: Weights, tier: Tier) -> int:
        pending = self.transfers.pending_behind(weights, tier)
        return pending.rank if pending is not None else 0

    def _start(self, weights: Weights, tier: Tier, rank: Rank) -> None:
        pending: Pending | None = None
        cause = Cause.DEMAND
        if rank is not Rank.DEMAND:
            pending = self.transfers.pending_behind(weights, tier)
            cause = pending.order.cause if pending is not None else Cause.MANUAL
        self.transfers.start(weights, tier, cause, pending, self.now_s)

    def _give_way(self, weights: Weights, tier: Tier, demand: list[Weights]) -> None:
        """What is on the link pauses for demand; what is demanded itself does for denser demand alone, and only when that comes."""
        if weights.copies[tier].stage is not Stage.MOVING:
            return
        demanded = self.rank(weights, tier) is Rank.DEMAND
        for other in demand:
            if demanded and not (other.key in self._came and self._denser(other, weights, tier)):
                continue
            # Only for demand that could then go: pausing for one that stays stuck would stop and start for ever.
            found = admit(self.holdings, other, tier, Rank.DEMAND, self.price_per_byte_s, self.now_s)
            if found.verdict in (Verdict.START, Verdict.EVICT, Verdict.WAIT):
                self.transfers.pause(weights, tier, self.now_s, other.key if demanded else None)
                return

    def _denser(self, weights: Weights, other: Weights, tier: Tier) -> bool:
        """Whether more rows wait per byte that is left."""
        mine, theirs = weights.remaining_bytes(tier), other.remaining_bytes(tier)
        return bool(outranks(float(weights.waiting), float(mine), float(other.waiting), float(theirs)))

    def _turned_away(self, weights: Weights, tier: Tier, rank: Rank, verdict: Verdict, reason: str) -> None:
        base = weights.highest_ready()
        if rank is Rank.DEMAND:
            if (base is not None and base >= Tier.DISK) or verdict is Verdict.NEVER:
                self.settle(weights, reason, None if verdict is Verdict.NEVER else self.limits.backoff_cap_s)
            return
        if rank is Rank.CARRY and base is not None and base >= Tier.DISK:
            self.switch(weights)
            return
        if verdict is Verdict.NEVER:
            for goal, pending in list(weights.pending.items()):
                if goal >= tier:
                    ending = Ending.CANCELLED if pending.begun else Ending.REPLACED
                    self.transfers.end_pending(weights, goal, ending, reason, self.now_s)
                    self.transfers.out.append(RefuseOrder(pending.order.decision_id, reason))

    # --- versions ---

    def switch(self, new: Weights) -> None:
        """`new` serves from now on, in one step; what waits for its predecessor waits for it, and the predecessor leaves."""
        key = new.predecessor
        old = self.holdings.weights[key] if key is not None else None
        new.predecessor = None
        new.carry_to = None
        if old is None:
            return
        self.holdings.serving[new.key.model] = new.key
        self.transfers.out.append(SwitchVersion(new.key.model, old.key, new.key))
        new.pinned_by_hand, old.pinned_by_hand = new.pinned_by_hand or old.pinned_by_hand, False
        old.pinned_by_plan = False
        new.last_use_s = max(new.last_use_s, old.last_use_s)
        if new.index is None:
            new.index = old.index
        if new.pinned:
            self.active[new.key] = None
        waited = old.demanded
        new.rows, old.rows = new.rows + old.rows, []
        new.waiters, old.waiters = new.waiters + old.waiters, []
        old.retired = True
        self.retire(old)
        if waited:
            self.demand(new, self.transfers.found(new))

    def retire(self, old: Weights) -> None:
        """A replaced version gives up memory, tier by tier, as its leases end; what is on disk stays until room is needed."""
        for goal in list(old.pending):
            pending = old.pending[goal]
            if not pending.begun:
                self.transfers.end_pending(old, goal, Ending.REPLACED, "newer_version", self.now_s)
        for tier, copy in sorted(old.copies.items(), reverse=True):
            if copy.stage in IN_FLIGHT:
                self.transfers.cancel(old, tier, Ending.CANCELLED, "newer_version", self.now_s)
            elif tier >= Tier.HOST and self.holdings.may_leave(old, tier):
                self.transfers.evict(old, tier, Evicted.VERSION, self.now_s)

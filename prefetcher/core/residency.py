"""A node's residency machine: what it hears and what time it is, to what is to be done. One instance a node; pure,
and the same in the
agent, in tests and after a restart.

A copy of weights in a tier goes through these stages (nothing = not in the tier; its bytes count in every stage, in
full):

| stage      | event or decision                                  | next       | instruction  |
| ---------- | -------------------------------------------------- | ---------- | ------------ |
| nothing    | its turn on the link, and the memory is there      | MOVING     | LoadWeights  |
| nothing    | `CatalogSeen` says it is complete there            | READY      |              |
| MOVING     | `BytesVerified`                                    | MOVING     |              |
| MOVING     | demand waits for the link, and this is none        | PAUSING    | PauseLoad    |
| MOVING     | denser demand comes than this is                   | PAUSING    | PauseLoad    |
| MOVING     | no progress for `stall_s`; prefetching switched off| CANCELLING | CancelLoad   |
| MOVING     | `WeightsLoaded`                                    | READY      | GrantLease … |
| MOVING     | `LoadFailed`                                       | nothing    |              |
| PAUSING    | `LoadPaused`                                       | PAUSED     |              |
| PAUSING    | `WeightsLoaded`, `LoadFailed`                      | as MOVING  |              |
| PAUSING    | no answer in time                                  | PAUSING    | PauseLoad    |
| PAUSED     | its turn again (at once when demand joined)        | MOVING     | LoadWeights  |
| PAUSED     | a demand load needs its memory; hold, price, off   | CANCELLING | CancelLoad   |
| CANCELLING | `WeightsEvicted`, `LoadFailed`                     | nothing    |              |
| CANCELLING | no answer in time                                  | CANCELLING | CancelLoad   |
| READY      | victim, hold, price, newer version, by hand        | EVICTING   | EvictWeights |
| EVICTING   | `WeightsEvicted`                                   | nothing    |              |
| EVICTING   | `WeightsEvicted`, and the first bytes stay         | PART       |              |
| EVICTING   | no answer in time                                  | EVICTING   | EvictWeights |
| PART       | its turn on the link, and the memory is there      | MOVING     | LoadWeights  |
| PART       | victim, price, newer version, by hand              | EVICTING   | EvictWeights |

Who goes next on a free link: demand in Smith's order; what people asked for; a new version that follows its
predecessor; prefetches, those
that were paused first, then as the plan ranks them, and only while no demand waits. What does not fit just now is
skipped. Demand that is
not worth its victims or its price, or finds no room, is served from the tier below (bypass); an order that can never fit is refused.

A demand load gives way when somebody comes for weights of which more rows wait per byte that is left, at the end of its block; it keeps its
memory and what it has read, and waits again in Smith's order. While somebody waits for it its memory is nobody else's: a newcomer that
finds no room beside such loads is served from the tier below. One that did not move for `demand_deadline_s` in all is served from there
itself. Prefetching switched off, nothing gives way but prefetches.

Of what makes room in host memory, the last victim keeps what the room does not need, in whole blocks. Such a part serves nobody; its
memory counts, its weights need so much less to come back, and it leaves as what is ready and idle does. While somebody waits for it, it
is no victim. Prefetching switched off, nothing is kept, and parts make room first.

Prefetches (`Order`): issued -> refused or joined (ends `replaced`) | begun -> ready -> given up or displaced, used or
not | cancelled | failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prefetcher.core import events as ev
from prefetcher.core.copies import IN_FLIGHT, Copy, Holdings, NodeLimits, Row, Stage, Waiter, Weights
from prefetcher.core.events import Event, Evicted, Instruction, Record
from prefetcher.core.facts import Ending, ResidencyEnded, RowSeen
from prefetcher.core.links import Links
from prefetcher.core.node_snapshot import encode_node, restore_node, snapshot_node
from prefetcher.core.plans import Plans
from prefetcher.core.quotas import CAPPED
from prefetcher.core.transfers import Transfers
from prefetcher.core.types import Arm, Cause, DecisionId, NodeName, Order, Tier, WeightsKey

__all__ = ["NodeLimits", "ResidencyMachine"]


class ResidencyMachine:
    """`handle(event, now_s)` changes the state and returns what is to be done, in order. Time that goes back is taken as standing still."""

    def __init__(self, node: NodeName, limits: NodeLimits, *, seed: int = 0) -> None:
        self.node = node
        self.limits = limits
        self.holdings = Holdings(limits)
        self.transfers = Transfers(self.holdings, seed)
        self.links = Links(self.holdings, self.transfers)
        self.plans = Plans(node, self.links)

    # --- the one way in ---

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """What follows from `event` at `now_s`."""
        if isinstance(event, ev.AgentRestarted):
            # Nobody knows what the old process still did: its end is the last time that it was heard of.
            self._restarted(event)
        self.links.now_s = max(self.links.now_s, now_s)
        self._dispatch(event)
        if not isinstance(event, ev.BytesVerified):
            self.links.advance(yields=not self.plans.switched_off)
        out, self.transfers.out = self.transfers.out, []
        return out

    def _dispatch(self, event: Event) -> None:
        match event:
            case ev.Requested():
                self._requested(event)
            case ev.BytesVerified():
                self._bytes_verified(event)
            case ev.LeaseRequested():
                self._lease_requested(event)
            case ev.LeaseReleased():
                self._lease_released(event)
            case ev.HolderLost():
                self._holder_lost(event.holder)
            case ev.WeightsLoaded():
                self._weights_loaded(event)
            case ev.LoadPaused():
                self._load_paused(event)
            case ev.LoadFailed():
                self._load_failed(event)
            case ev.WeightsEvicted():
                self._weights_evicted(event)
            case ev.PlanReceived():
                self.plans.received(event.plan)
            case ev.CatalogSeen():
                self._catalog_seen(event)
            case ev.VersionPublished():
                self._version_published(event)
            case ev.Pinned():
                self._pinned(event)
            case ev.Unpinned():
                self._unpinned(event)
            case ev.LoadAsked():
                self._load_asked(event)
            case ev.EvictAsked():
                self._evict_asked(event)
            case ev.SwitchedOff():
                self.plans.switched_off = True
                self.holdings.observing = self.limits.observe
                # First the plan's pins: what moved for one of them is nobody's now.
                self.plans.forget_worth()
                self.plans.stop_prefetching("switched_off")
            case ev.SwitchedOn():
                self.plans.switched_off = False
                self.holdings.observing = self.limits.observe or event.observe
                if self.holdings.observing:
                    self.plans.stop_prefetching("observe")
            case ev.AgentRestarted():
                self._adopt(event.kept)
            case ev.SpaceSeen():
                self.holdings.budgets[event.tier] = event.budget_bytes
            case ev.Ticked():
                self._ticked()

    @property
    def _now_s(self) -> float:
        return self.links.now_s

    def _say(self, instruction: Instruction) -> None:
        self.transfers.out.append(instruction)

    def _skip(self, what: str, reason: str, key: WeightsKey | None = None) -> None:
        self._say(ev.NoteSkipped(what, reason, key))

    def _copy(self, key: WeightsKey, tier: Tier) -> tuple[Weights | None, Copy | None]:
        weights = self.holdings.weights.get(key)
        return weights, weights.copies.get(tier) if weights is not None else None

    # --- the catalog and its versions ---

    def _catalog_seen(self, event: ev.CatalogSeen) -> None:
        weights = self.holdings.weights.get(event.key)
        if weights is None:
            weights = Weights(event.key, event.bytes, dict(event.link_s))
            self.holdings.weights[event.key] = weights
            self.holdings.serving.setdefault(event.key.model, event.key)
        elif weights.bytes != event.bytes:
            self._skip("catalog", "bytes_changed", event.key)
            return
        weights.link_s = dict(event.link_s)
        for tier in sorted(event.complete):
            if tier not in weights.copies:
                self._found_complete(weights, tier)

    def _found_complete(self, weights: Weights, tier: Tier) -> None:
        copy = Copy(tier, Stage.READY, Cause.DEMAND, self._now_s, bytes_done=weights.bytes, ready_s=self._now_s)
        if tier <= Tier.DISK:
            self.holdings.add(weights, copy)
            return
        budget = self.holdings.budget(tier)
        if budget is None or weights.bytes > budget - self.holdings.used_bytes[tier]:
            # It never enters our books: the shell removes it, and says so or not.
            self._say(ev.EvictWeights(weights.key, tier, Evicted.NO_ROOM))
            return
        copy.hold_until_s = self._now_s + self.limits.adopted_hold_s
        self.holdings.add(weights, copy)

    def _version_published(self, event: ev.VersionPublished) -> None:
        old, new = self.holdings.weights.get(event.old), self.holdings.weights.get(event.new)
        if old is None or new is None or event.old.model != event.new.model or old is new:
            self._skip("version", "unknown_weights", event.new)
            return
        if self.holdings.serving.get(event.old.model) != event.old:
            self._skip("version", "not_serving", event.old)
            return
        for other in self.holdings.weights.values():
            if other.predecessor == old.key and other is not new:
                other.predecessor, other.carry_to, other.retired = None, None, True
                self.links.retire(other)
        new.retired = False
        new.predecessor = old.key
        if new.index is None:
            new.index = old.index
        for goal in [g for g, pending in old.pending.items() if not pending.begun]:
            self.transfers.end_pending(old, goal, Ending.REPLACED, "newer_version", self._now_s)
        loads = not self.holdings.observing
        near = [t for t, c in old.copies.items() if loads and (c.stage in IN_FLIGHT or c.stage is Stage.READY)]
        new.carry_to = max(near, default=Tier.REMOTE)
        base = new.highest_ready()
        if base is not None and base >= new.carry_to:
            self.links.switch(new)
        else:
            self.links.active[new.key] = None

    # --- demand ---

    def _requested(self, event: ev.Requested) -> None:
        weights = self.holdings.resolve(event.target)
        if weights is None:
            self._skip("request", "unknown_model")
            return
        if event.index is not None and not self.plans.switched_off:
            self.plans.rank(weights, event.index)
        if event.counted:
            return
        found = self.transfers.found(weights)
        self._say(Record(RowSeen(weights.key.model, event.ts, found, tenant=event.tenant)))
        weights.rows.append(Row(event.ts, found, self._now_s, event.tenant))
        self.links.demand(weights, found)

    def _lease_requested(self, event: ev.LeaseRequested) -> None:
        weights = self.holdings.resolve(event.target)
        if weights is None:
            self._say(ev.RefuseLease(event.holder, event.target, "unknown_model", None, event.token))
            return
        found = self.transfers.found(weights)
        self._say(Record(RowSeen(weights.key.model, self._now_s, found, lease=True, announced=event.announced)))
        weights.waiters.append(Waiter(event.holder, event.token, found, self._now_s, event.announced))
        self.links.demand(weights, found)

    def _lease_released(self, event: ev.LeaseReleased) -> None:
        weights = self.holdings.weights.get(event.key)
        tiers = [event.tier] if event.tier is not None else list(reversed(Tier))
        for tier in tiers:
            copy = weights.copies.get(tier) if weights is not None else None
            if weights is None or copy is None or event.holder not in copy.leases:
                continue
            copy.leases[event.holder] -= 1
            if copy.leases[event.holder] == 0:
                del copy.leases[event.holder]
            self._used_until_now(weights, copy)
            return
        self._skip("release", "no_such_lease", event.key)

    def _holder_lost(self, holder: str) -> None:
        for weights in self.holdings.weights.values():
            for copy in list(weights.copies.values()):
                if copy.leases.pop(holder, None) is not None:
                    self._used_until_now(weights, copy)
            if any(waiter.holder == holder for waiter in weights.waiters):
                for waiter in [w for w in weights.waiters if w.holder == holder]:
                    self.links.drop_waiter(weights, waiter)
                weights.waiters = [w for w in weights.waiters if w.holder != holder]

    def _used_until_now(self, weights: Weights, copy: Copy) -> None:
        weights.last_use_s = self._now_s
        copy.last_use_s = self._now_s
        self._let_go(weights, copy)

    def _let_go(self, weights: Weights, copy: Copy) -> None:
        """The last lease may have ended on a copy that only leases kept."""
        if copy.leases or copy.stage is not Stage.READY:
            return
        if copy.bad:
            self.transfers.evict(weights, copy.tier, Evicted.BAD, self._now_s)
        elif weights.retired:
            self.links.retire(weights)

    # --- what the loader says ---

    def _bytes_verified(self, event: ev.BytesVerified) -> None:
        _, copy = self._copy(event.key, event.tier)
        if copy is not None and copy.stage in (Stage.MOVING, Stage.PAUSING) and event.bytes_done > copy.bytes_done:
            copy.bytes_done = event.bytes_done
            if copy.stage is Stage.MOVING:
                copy.deadline_s = self._now_s + self.limits.stall_s

    def _weights_loaded(self, event: ev.WeightsLoaded) -> None:
        weights, copy = self._copy(event.key, event.tier)
        if weights is None or copy is None or copy.stage not in (Stage.MOVING, Stage.PAUSING):
            # A cancel that was under way is answered by `WeightsEvicted`, whatever the load came to.
            self._skip("loaded", "not_moving", event.key)
            return
        self.transfers.loaded(weights, event.tier, self._now_s)
        if event.tier >= self.limits.serving_tier:
            self.links.serve(weights)
        elif weights.demanded:
            self.links.came(weights)
        if weights.carry_to is not None and event.tier >= weights.carry_to:
            self.links.switch(weights)

    def _load_paused(self, event: ev.LoadPaused) -> None:
        weights, copy = self._copy(event.key, event.tier)
        if weights is None or copy is None or copy.stage not in (Stage.MOVING, Stage.PAUSING):
            self._skip("paused", "not_moving", event.key)
            return
        self.transfers.paused(weights, event.tier, event.bytes_done, self._now_s)
        if event.retry_after_s > 0.0:
            weights.retry_at_s = self._now_s + event.retry_after_s

    def _load_failed(self, event: ev.LoadFailed) -> None:
        weights, copy = self._copy(event.key, event.tier)
        if weights is None or copy is None or copy.stage in (Stage.READY, Stage.EVICTING):
            self._skip("failed", "not_moving", event.key)
            return
        if copy.stage is Stage.CANCELLING:
            self.transfers.gone(weights, event.tier, self._now_s)
        else:
            self.transfers.failed(weights, event.tier, event.reason, event.retry_after_s, self._now_s)
        source = weights.copies.get(Tier(event.tier - 1))
        if event.source_bad and source is not None and source.stage is Stage.READY:
            source.bad = True
            self._let_go(weights, source)
        base = weights.highest_ready()
        if weights.demanded and weights.retry_at_s > self._now_s and (base is None or base >= Tier.DISK):
            self.links.settle(weights, "load_failed", weights.retry_at_s - self._now_s)

    def _weights_evicted(self, event: ev.WeightsEvicted) -> None:
        weights, copy = self._copy(event.key, event.tier)
        if weights is None or copy is None or copy.stage in IN_FLIGHT or event.kept_bytes > copy.keep_bytes:
            self._skip("evicted", "not_leaving", event.key)
            return
        if event.kept_bytes > 0:
            self.transfers.trimmed(weights, event.tier, event.kept_bytes, self._now_s)
            return
        if copy.stage is Stage.READY:
            # The memory went without our doing (a file was removed): nobody needs to be told to evict it.
            self.transfers.end_ready(copy, Evicted.GONE, self._now_s)
        self.transfers.gone(weights, event.tier, self._now_s)
        if weights.demanded and weights.highest_ready() is None:
            self.links.settle(weights, "no_copy", self.limits.backoff_cap_s)

    # --- by hand ---

    def _answer(self, ask_id: str, ok: bool, reason: str) -> None:
        if ask_id:
            self._say(ev.Answer(ask_id, ok, reason))

    def _pinned(self, event: ev.Pinned) -> None:
        weights = self.holdings.resolve(event.target)
        if weights is None:
            self._answer(event.ask_id, False, "unknown_model")
        elif weights.retired:
            self._answer(event.ask_id, False, "old_version")
        elif weights.highest_ready() is None:
            self._answer(event.ask_id, False, "no_copy")
        elif why := self.plans.why_never(weights, self.limits.serving_tier, prefetch=False):
            self._answer(event.ask_id, False, why)
        elif not self.links.may_claim(weights):
            self._answer(event.ask_id, False, CAPPED)
        else:
            weights.pinned_by_hand = True
            self.links.active[weights.key] = None
            there = weights.ready(self.limits.serving_tier)
            self._answer(event.ask_id, True, "resident" if there else "observe" if self.holdings.observing else "loading")

    def _unpinned(self, event: ev.Unpinned) -> None:
        weights = self.holdings.resolve(event.target)
        if weights is None:
            self._answer(event.ask_id, False, "unknown_model")
        elif not weights.pinned_by_hand:
            self._answer(event.ask_id, False, "not_pinned")
        else:
            weights.pinned_by_hand = False
            self._answer(event.ask_id, True, "pinned_by_plan" if weights.pinned_by_plan else "unpinned")

    def _load_asked(self, event: ev.LoadAsked) -> None:
        weights = self.holdings.resolve(event.target)
        if weights is None:
            self._answer(event.ask_id, False, "unknown_model")
            return
        order = Order(
            decision_id=DecisionId(f"by-hand-{event.ask_id}"),
            node=self.node,
            key=weights.key,
            tier=event.tier if event.tier is not None else self.limits.serving_tier,
            cause=Cause.MANUAL,
            arm=Arm.TREATED,
            issued_s=self._now_s,
            expected_use_s=self._now_s,
            deadline_s=self._now_s + event.hold_s,
            hold_s=event.hold_s,
        )
        why = self.plans.order(order, 0)
        self._answer(event.ask_id, why in ("", "resident", "moving", "queued", "demanded"), why or "loading")

    def _evict_asked(self, event: ev.EvictAsked) -> None:
        weights = self.holdings.resolve(event.target)
        if weights is None:
            self._answer(event.ask_id, False, "unknown_model")
            return
        held = [t for t in weights.copies if t >= Tier.HOST]
        tier = event.tier if event.tier is not None else max(held, default=self.limits.serving_tier)
        copy = weights.copies.get(tier)
        why = self._why_stays(weights, tier)
        if copy is None or why:
            observes = copy is None and self.holdings.observing
            self._answer(event.ask_id, False, "observe" if observes else why or "not_resident")
        elif copy.stage in IN_FLIGHT:
            self.transfers.cancel(weights, tier, Ending.CANCELLED, "asked", self._now_s)
            self._answer(event.ask_id, True, "cancelling")
        else:
            if not copy.leaving:
                self.transfers.evict(weights, tier, Evicted.ASKED, self._now_s)
            self._answer(event.ask_id, True, "evicting")

    def _why_stays(self, weights: Weights, tier: Tier) -> str:
        copy = weights.copies.get(tier)
        if copy is None:
            return "not_resident"
        if copy.leases:
            return "leased"
        if weights.pinned:
            return "pinned"
        if copy.stage in IN_FLIGHT or copy.stage is Stage.PART:
            return "demanded" if weights.demanded else ""
        if copy.stage is Stage.READY and not self.holdings.may_leave(weights, tier):
            return "in_use"
        return ""

    # --- time ---

    def _ticked(self) -> None:
        for tier in Tier:
            for key in sorted(self.holdings.in_tier[tier]):
                copy = self.holdings.in_tier[tier][key]
                self._look_at(self.holdings.weights[key], copy)
        for weights in self.links.active_weights():
            self._deadlines(weights)

    def _look_at(self, weights: Weights, copy: Copy) -> None:
        tier, now_s = copy.tier, self._now_s
        if copy.stage is Stage.READY:
            held_out = copy.hold_until_s is not None and copy.hold_until_s <= now_s and not copy.used
            order = copy.order
            batch_over = order is not None and order.cause is Cause.BATCH and order.issued_s + order.hold_s <= now_s
            if (held_out or batch_over) and self.holdings.may_leave(weights, tier):
                # What a batch job needed goes at its end, used or not.
                self.transfers.evict(weights, tier, Evicted.WINDOW if batch_over else Evicted.HOLD, now_s)
            elif copy.bad or weights.retired:
                self._let_go(weights, copy)
        elif copy.stage is Stage.PART:
            if weights.retired:
                self.links.retire(weights)
        elif copy.stage is Stage.PAUSED:
            unwanted = self.links.rank(weights, tier) is None
            if unwanted or (copy.deadline_s <= now_s and self.links.is_guess(weights, tier)):
                self.transfers.cancel(weights, tier, Ending.CANCELLED, "hold", now_s)
        elif copy.deadline_s <= now_s:
            if copy.stage is Stage.MOVING:
                self.transfers.cancel(weights, tier, Ending.FAILED, "stalled", now_s)
                self.transfers.back_off(weights, 0.0, now_s)
                if weights.demanded:
                    self.links.settle(weights, "stalled", weights.retry_at_s - now_s)
                return
            self.transfers.repeat(weights, copy, now_s)
            if copy.stage is not Stage.PAUSING and weights.demanded:
                self.links.settle(weights, "still_leaving", copy.deadline_s - now_s)

    def _deadlines(self, weights: Weights) -> None:
        now_s = self._now_s
        moving = any(c.stage in (Stage.MOVING, Stage.PAUSING) for c in weights.copies.values())
        stuck = not any(c.stage in IN_FLIGHT for c in weights.copies.values())
        for goal, pending in list(weights.pending.items()):
            # One that has begun and waits half-way for its next edge ends too, or it would hold its memory for ever.
            if pending.order.deadline_s <= now_s and (stuck or not pending.begun):
                ending = Ending.CANCELLED if pending.begun else Ending.REPLACED
                self.transfers.end_pending(weights, goal, ending, "deadline", now_s)
        if weights.demanded and not moving and weights.still_s(now_s) >= self.limits.demand_deadline_s:
            self.links.settle(weights, "deadline", self.limits.backoff_cap_s)

    # --- restarts ---

    def _restarted(self, event: ev.AgentRestarted) -> None:
        for weights in self.holdings.weights.values():
            if weights.demanded:
                self.links.give_up(weights, "restarted", 0.0)
            exists = event.catalog is None or weights.key in event.catalog
            for copy in weights.copies.values():
                if copy.leases:
                    weights.last_use_s = copy.last_use_s = self._now_s
                    copy.leases.clear()
                if copy.stage in (Stage.MOVING, Stage.PAUSING):
                    self.transfers.end_segment(weights, copy, copy.bytes_done, self._now_s)
            for goal in [g for g, pending in weights.pending.items() if pending.begun]:
                self.transfers.end_pending(weights, goal, Ending.LOST, "restarted", self._now_s)
            for tier, copy in list(weights.copies.items()):
                if copy.stage is Stage.READY and ((exists and tier <= Tier.DISK) or (weights.key, tier) in event.kept):
                    continue
                if copy.stage is Stage.READY:
                    self.transfers.end_ready(copy, Evicted.GONE, self._now_s, lost=True)
                self.transfers.gone(weights, tier, self._now_s)
        self.holdings.mover.clear()
        for key in [k for k, w in self.holdings.weights.items() if event.catalog is not None and k not in event.catalog and not w.copies]:
            self._forget(key)

    def _adopt(self, kept: frozenset[tuple[WeightsKey, Tier]]) -> None:
        for key, tier in sorted(kept):
            weights = self.holdings.weights.get(key)
            if weights is not None and tier not in weights.copies:
                self._found_complete(weights, tier)

    def _forget(self, key: WeightsKey) -> None:
        weights = self.holdings.weights[key]
        for goal in list(weights.pending):
            self.transfers.end_pending(weights, goal, Ending.REPLACED, "no_copy", self._now_s)
        self.holdings.forget(key)
        self.links.active.pop(key, None)
        self.plans.planned.pop(key, None)

    # --- memory, for the ledger ---

    def held(self, now_s: float) -> list[ResidencyEnded]:
        """What would be recorded if all memory were given back at `now_s`; what is leased or waited for is in use until then."""
        now_s = max(self._now_s, now_s)
        found = []
        for tier in (Tier.HOST, Tier.DEVICE):
            for key, copy in self.holdings.in_tier[tier].items():
                weights = self.holdings.weights[key]
                fact = self.transfers.residency(weights, copy, now_s)
                awaited = weights.demanded and copy.stage in IN_FLIGHT
                found.append(replace(fact, last_use_s=now_s) if copy.leases or awaited else fact)
        return found

    # --- the whole state ---

    def snapshot(self) -> dict[str, Any]:
        """Everything that a machine with the same node, limits and seed needs to go on; JSON types only."""
        return snapshot_node(self.links, self.plans)

    def encoded(self) -> bytes:
        """The snapshot as JSON, several times as fast."""
        return encode_node(self.links, self.plans)

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Takes over a snapshot. Raises `InputError` when it is not one."""
        restore_node(snapshot, self.links, self.plans)

    def check(self) -> list[str]:
        """What is wrong with the state; nothing, ever. For tests and self-tests."""
        return self.holdings.violations()

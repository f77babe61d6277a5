"""What a node holds: copies of weights in tiers, what they are doing, who leases them, and how many bytes that takes.

Book-keeping only: nothing here decides. `core.admission` says who may come in and who makes room, `core.residency`
what happens next.
A copy's bytes count in full from the moment its transfer starts until the kernel gave them back; a part counts with what it kept. Times
are seconds since 1970-01-01 UTC.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from prefetcher.core.facts import Found
from prefetcher.core.quotas import Quotas
from prefetcher.core.types import Cause, DecisionId, ModelName, Order, TenantQuota, Tier, WeightsKey

__all__ = ["IN_FLIGHT", "Copy", "Holdings", "NodeLimits", "Pending", "Row", "Stage", "Waiter", "Weights"]


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What a node may hold and how patient its machine is. Tiers without a budget are unbounded; REMOTE always is."""

    budget_bytes: dict[Tier, int]
    #: Bytes of a tier that only demand may use (the KV reserve of DEVICE).
    reserve_bytes: dict[Tier, int] = field(default_factory=dict)
    #: The tier in which a lease is a hit.
    serving_tier: Tier = Tier.HOST
    #: A typical speed of the edge into the serving tier: it turns the recency of weights of unknown index into an
    #: index.
    link_bytes_per_s: float = 3.5e9
    #: A load without progress for this long is stopped. Four times the slowest block seen on a busy disk (64 MiB at 2
    #: MB/s) with room to spare.
    stall_s: float = 120.0
    #: An instruction without an answer for this long is repeated, the next time after twice as long, at most
    #: `backoff_cap_s`.
    answer_s: float = 30.0
    #: The link is kept for a load whose victims have just been told to leave: that takes milliseconds, unless an engine still maps them.
    give_back_s: float = 1.0
    #: What was told to leave so long ago is still mapped by somebody, and may be for hours: requests don't wait for its memory.
    linger_s: float = 5.0
    #: A row or lease that waits for weights that don't move is served from the tier below, or refused, after this long; while they move it
    #: goes on waiting.
    demand_deadline_s: float = 300.0
    #: Back-off after failed loads: doubles from the first to the cap; jitter takes it to between half and all of it.
    backoff_s: float = 1.0
    backoff_cap_s: float = 300.0
    #: How long weights that were found in a tier at start may stay unused.
    adopted_hold_s: float = 600.0
    #: Decide and record, load nothing.
    observe: bool = False
    #: The last victim keeps what the room does not need.
    parts: bool = True

    def on_clock(self, speed: float) -> NodeLimits:
        """The same patience in the machine's seconds, where the clock runs `speed` times as fast."""
        return replace(
            self,
            stall_s=self.stall_s * speed,
            answer_s=self.answer_s * speed,
            give_back_s=self.give_back_s * speed,
            linger_s=self.linger_s * speed,
            demand_deadline_s=self.demand_deadline_s * speed,
            backoff_s=self.backoff_s * speed,
            backoff_cap_s=self.backoff_cap_s * speed,
        )


class Stage(StrEnum):
    """What a copy is doing."""

    MOVING = "moving"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    READY = "ready"
    EVICTING = "evicting"
    PART = "part"


#: The stages of a load that may still become ready.
IN_FLIGHT = frozenset({Stage.MOVING, Stage.PAUSING, Stage.PAUSED})


@dataclass(slots=True)
class Copy:
    """Weights in one tier: there, on their way in, or on their way out."""

    tier: Tier
    stage: Stage
    cause: Cause
    start_s: float
    #: The stage must be left, or its instruction repeated, by then (0: no deadline).
    deadline_s: float = 0.0
    bytes_done: int = 0
    #: The memory of a part, also while it leaves; 0: all of the weights.
    part_bytes: int = 0
    #: What an eviction leaves there.
    keep_bytes: int = 0
    segment_start_s: float = 0.0
    segment_from_bytes: int = 0
    #: How long its bytes moved so far, pauses left out.
    moved_s: float = 0.0
    #: When it was paused last, and whether it then gave way, as a demand load, to a denser one.
    paused_s: float = 0.0
    yields: bool = False
    #: The prefetch that started its transfer.
    decision_id: DecisionId | None = None
    #: The prefetch that it answers, from ready to the end.
    order: Order | None = None
    #: Somebody wants, or wanted, it: it is no guess any more.
    used: bool = False
    ready_s: float | None = None
    last_use_s: float | None = None
    #: Unused, it leaves then.
    hold_until_s: float | None = None
    leases: dict[str, int] = field(default_factory=dict)
    #: How often the last instruction was repeated.
    nudges: int = 0
    #: The bytes proved not to be what was promised: nobody is given them any more.
    bad: bool = False

    @property
    def leaving(self) -> bool:
        return self.stage is Stage.EVICTING or self.stage is Stage.CANCELLING


@dataclass(slots=True)
class Row:
    """A request row that waits for weights."""

    ts: float
    found: Found
    seen_s: float
    tenant: str = ""


@dataclass(slots=True)
class Waiter:
    """A request for a lease that waits for weights; `announced` by a request row, or a row itself."""

    holder: str
    token: str
    found: Found
    seen_s: float
    announced: bool = True


@dataclass(slots=True)
class Pending:
    """A prefetch that is not ready yet. `rank` is its place in the plan, best first."""

    order: Order
    rank: int
    begun: bool = False
    used: bool = False


@dataclass(slots=True)
class Weights:
    """One version of one model on this node."""

    key: WeightsKey
    bytes: int
    link_s: dict[Tier, float]
    copies: dict[Tier, Copy] = field(default_factory=dict)
    #: From the plan; None where the plan does not say.
    index: float | None = None
    #: Whether the node would have them without prefetching, as the plan knows.
    in_shadow: bool | None = None
    pinned_by_plan: bool = False
    pinned_by_hand: bool = False
    last_use_s: float = 0.0
    rows: list[Row] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    #: Prefetches by the tier they lead to.
    pending: dict[Tier, Pending] = field(default_factory=dict)
    #: A new version follows its predecessor into this tier before it serves.
    carry_to: Tier | None = None
    predecessor: WeightsKey | None = None
    #: A newer version serves: these leave when their leases end.
    retired: bool = False
    failures: int = 0
    retry_at_s: float = 0.0

    @property
    def pinned(self) -> bool:
        return self.pinned_by_hand or self.pinned_by_plan

    @property
    def demanded(self) -> bool:
        return bool(self.rows or self.waiters)

    @property
    def waiting(self) -> int:
        """How many wait. A client that posts its row and then asks for a lease is one, not two."""
        return max(len(self.rows), len(self.waiters))

    @property
    def demanded_since_s(self) -> float:
        return min([r.seen_s for r in self.rows[:1]] + [w.seen_s for w in self.waiters[:1]], default=0.0)

    def ready(self, tier: Tier) -> bool:
        copy = self.copies.get(tier)
        return copy is not None and copy.stage is Stage.READY and not copy.bad

    def highest_ready(self) -> Tier | None:
        return max((t for t in self.copies if self.ready(t)), default=None)

    def queued_since_s(self, tier: Tier) -> float:
        """Since when demand waits for the link into `tier`: a load that gave way came to its queue anew."""
        copy = self.copies.get(tier)
        gave_way = copy is not None and copy.stage is Stage.PAUSED and copy.yields
        return copy.paused_s if copy is not None and gave_way else self.demanded_since_s

    def still_s(self, now_s: float) -> float:
        """How long demand has waited while no byte moved; of a load that gave way, all its pauses together."""
        moved_s = sum(copy.moved_s for copy in self.copies.values() if copy.stage is Stage.PAUSED)
        return now_s - self.demanded_since_s - moved_s

    def remaining_bytes(self, tier: Tier) -> int:
        """What the link into `tier` has to bring; of what is on its way out there, all but what stays."""
        copy = self.copies.get(tier)
        return self.bytes - (0 if copy is None else copy.keep_bytes if copy.leaving else copy.bytes_done)

    def held_bytes(self, tier: Tier) -> int:
        """The memory that they take in the tier."""
        copy = self.copies.get(tier)
        return 0 if copy is None else copy.part_bytes or self.bytes

    def part_bytes(self, tier: Tier) -> int:
        """What they kept when they made room: so much less they need to come back."""
        copy = self.copies.get(tier)
        return copy.part_bytes if copy is not None and copy.stage is Stage.PART else 0


class Holdings:
    """All weights of a node, with running totals per tier."""

    def __init__(self, limits: NodeLimits) -> None:
        self.limits = limits
        #: Bytes that may be taken by tier, as they were said last.
        self.budgets = dict(limits.budget_bytes)
        #: Whether nothing is loaded, for as long as the switch says so.
        self.observing = limits.observe
        self.switched_off = False
        self.weights: dict[WeightsKey, Weights] = {}
        self.serving: dict[ModelName, WeightsKey] = {}
        self.in_tier: dict[Tier, dict[WeightsKey, Copy]] = {tier: {} for tier in Tier}
        self.used_bytes: dict[Tier, int] = dict.fromkeys(Tier, 0)
        #: What tenants may hold of the host tier beyond demand.
        self.quotas = Quotas()
        #: The transfer that has the link into a tier.
        self.mover: dict[Tier, WeightsKey] = {}

    def resolve(self, target: WeightsKey | ModelName) -> Weights | None:
        """The weights that are meant: by key, or by model name (or a key without a known version) the version that serves."""
        if isinstance(target, WeightsKey):
            exact = self.weights.get(target)
            if exact is not None or target.version:
                return exact
            target = target.model
        key = self.serving.get(target)
        return None if key is None else self.weights.get(key)

    def add(self, weights: Weights, copy: Copy) -> None:
        weights.copies[copy.tier] = copy
        self.in_tier[copy.tier][weights.key] = copy
        self.used_bytes[copy.tier] += weights.held_bytes(copy.tier)

    def remove(self, weights: Weights, tier: Tier) -> Copy:
        self.used_bytes[tier] -= weights.held_bytes(tier)
        del self.in_tier[tier][weights.key]
        return weights.copies.pop(tier)

    def forget(self, key: WeightsKey) -> None:
        """Weights of which there is no copy left are known no more; if they served, another version of the model does, if there is one."""
        del self.weights[key]
        for other in self.weights.values():
            if other.predecessor == key:
                other.predecessor, other.carry_to = None, None
        if self.serving.get(key.model) == key:
            del self.serving[key.model]
            heirs = [w for w in self.weights.values() if w.key.model == key.model and w.copies]
            for heir in sorted(heirs, key=lambda w: (w.retired, w.key))[:1]:
                heir.retired = False
                self.serving[key.model] = heir.key

    def budget(self, tier: Tier, *, prefetch: bool = False) -> int | None:
        """Bytes that may be taken in the tier in all, or None: unbounded."""
        whole = None if tier is Tier.REMOTE else self.budgets.get(tier)
        if whole is None or not prefetch:
            return whole
        return whole - self.limits.reserve_bytes.get(tier, 0)

    def claims(self, weights: Weights) -> bool:
        """Whether they hold the host tier, or will, for another reason than demand: pinned, leased, or a prefetch that nobody used yet."""
        if weights.pinned and not weights.retired:
            return True
        copy = weights.copies.get(Tier.HOST)
        if copy is None or copy.stage in (Stage.EVICTING, Stage.CANCELLING):
            return False
        return bool(copy.leases) or self.is_unused_guess(weights)

    def is_unused_guess(self, weights: Weights) -> bool:
        """Whether their copy in the host tier, there or on its way, is a prefetch that nobody used yet."""
        copy = weights.copies.get(Tier.HOST)
        if copy is None or copy.stage in (Stage.EVICTING, Stage.CANCELLING):
            return False
        if copy.stage is Stage.READY:
            return copy.order is not None and not copy.used
        return any(pending.begun and not pending.used for goal, pending in weights.pending.items() if goal >= Tier.HOST)

    def claimed_bytes(self, quota: TenantQuota) -> int:
        """What a tenant's weights hold so."""
        return sum(w.bytes for w in self.weights.values() if self.quotas.of(w.key.model) is quota and self.claims(w))

    def freeing_bytes(self, tier: Tier, now_s: float, *, soon: bool) -> int:
        """Bytes that are on their way back to the kernel; `soon`: but for those that linger."""
        return sum(
            self.weights[key].held_bytes(tier) - copy.keep_bytes
            for key, copy in self.in_tier[tier].items()
            if copy.leaving and not (soon and self.lingers(copy, now_s))
        )

    def lingers(self, copy: Copy, now_s: float) -> bool:
        """Whether the copy was told to leave a while ago and has not: some process still maps it."""
        told_s = copy.deadline_s - self.limits.answer_s
        return copy.stage is Stage.EVICTING and (copy.nudges > 0 or now_s - told_s >= self.limits.linger_s)

    def keeps_parts(self, tier: Tier) -> bool:
        """Whether what makes room in the tier keeps what the room does not need."""
        return tier is Tier.HOST and self.limits.parts and not self.switched_off

    def pinned_bytes(self, tier: Tier, but: WeightsKey) -> int:
        """Bytes that no room is made of: of pins, and on disk of what is nowhere below."""
        others = [self.weights[key] for key in self.in_tier[tier] if key != but]
        return sum(w.bytes for w in others if w.pinned or (tier is Tier.DISK and not (w.ready(Tier.REMOTE) or w.retired)))

    def may_leave(self, weights: Weights, tier: Tier) -> bool:
        """Whether the copy can be given up: ready, unleased, unpinned, no transfer's source, wanted by nobody, not the last copy; or a part
        that nobody waits for."""
        copy = weights.copies.get(tier)
        if copy is None or copy.leases or (weights.pinned and not weights.retired):
            return False
        if copy.stage is Stage.PART:
            return not weights.demanded
        if copy.stage is not Stage.READY:
            return False
        above = weights.copies.get(Tier(tier + 1)) if tier < Tier.DEVICE else None
        if above is not None and above.stage not in (Stage.READY, Stage.EVICTING, Stage.PART):
            return False
        if weights.demanded and tier < self.limits.serving_tier:
            return False
        if any(pending.begun and goal > tier for goal, pending in weights.pending.items()):
            return False
        if weights.retired and tier is Tier.DISK:
            return True  # nobody is given it any more
        return any(weights.ready(lower) for lower in Tier if lower < tier)

    def candidates(self, tier: Tier, but: Weights) -> Iterator[Weights]:
        """What could make room for `but`, least recently used first; the version that it is to replace stays until it does."""
        found = [
            self.weights[key]
            for key in self.in_tier[tier]
            if key != but.key and key != but.predecessor and self.may_leave(self.weights[key], tier)
        ]
        yield from sorted(found, key=lambda w: (w.last_use_s, w.key))

    def violations(self) -> list[str]:
        """Which invariants of the books do not hold (none, ever)."""
        found = []
        for tier in Tier:
            copies = self.in_tier[tier]
            there = {key for key, weights in self.weights.items() if tier in weights.copies}
            if there != set(copies):
                found.append(f"{tier.name}: the index of copies differs from the weights' own")
            taken = sum(self.weights[key].held_bytes(tier) for key in copies)
            if taken != self.used_bytes[tier]:
                found.append(f"{tier.name}: {self.used_bytes[tier]} bytes booked, {taken} held")
            budget = self.budget(tier)
            if tier >= Tier.HOST and budget is not None and taken > budget:
                found.append(f"{tier.name}: {taken} bytes held, budget {budget}")
            on_link = [k for k, c in copies.items() if c.stage is Stage.MOVING or c.stage is Stage.PAUSING]
            if any(self.mover.get(tier) != key for key in on_link):
                found.append(f"{tier.name}: {on_link} move, the link is {self.mover.get(tier)}'s")
            for key, copy in copies.items():
                found += self._copy_violations(self.weights[key], copy)
        for key, weights in self.weights.items():
            if any(weights.ready(tier) for tier in Tier if tier >= self.limits.serving_tier) and weights.demanded:
                found.append(f"{key}: somebody waits for weights that are there")
        return found

    def _copy_violations(self, weights: Weights, copy: Copy) -> list[str]:
        found = []
        where = f"{weights.key} in {copy.tier.name}"
        if copy.leases and copy.stage is not Stage.READY:
            found.append(f"{where}: leased and {copy.stage}")
        if any(count < 1 for count in copy.leases.values()):
            found.append(f"{where}: a lease that nobody holds")
        if copy.stage not in (Stage.READY, Stage.PART) and copy.deadline_s <= 0.0:
            found.append(f"{where}: {copy.stage} without a deadline")
        if (copy.stage is Stage.PART or copy.keep_bytes or copy.part_bytes) and not self._is_part(weights, copy):
            found.append(f"{where}: {copy.stage} with {copy.part_bytes} bytes, {copy.keep_bytes} to stay")
        if copy.order is not None and copy.stage is not Stage.READY:
            found.append(f"{where}: an order that is ready and {copy.stage}")
        if copy.stage in (Stage.MOVING, Stage.PAUSING) and not self._has_source(weights, copy.tier):
            found.append(f"{where}: moving from nowhere")
        return found

    def _is_part(self, weights: Weights, copy: Copy) -> bool:
        """Whether its bytes are those of a part, or of what leaves but for a part."""
        if copy.stage is Stage.PART:
            return 0 < copy.part_bytes == copy.bytes_done < weights.bytes and not copy.keep_bytes
        return copy.stage is Stage.EVICTING and copy.keep_bytes < (copy.part_bytes or weights.bytes)

    def _has_source(self, weights: Weights, tier: Tier) -> bool:
        below = weights.copies.get(Tier(tier - 1)) if tier > Tier.REMOTE else None
        return below is not None

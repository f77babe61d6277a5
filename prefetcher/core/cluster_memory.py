"""Memory and links of a cluster's caches: taking memory in a tier, giving it back, finding room, starting a transfer.

The rules are those of `core.node_memory`, tier by tier: victims are ready weights only, and none that is being read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefetcher.core.cluster import ClusterCaches, ClusterWorld
from prefetcher.core.cluster_ranking import key_of, protected, sieve_leave, sieve_next
from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand
from prefetcher.core.node import (
    ABSENT,
    CANCELLED,
    DISPLACED,
    LOADING,
    OPEN,
    PART,
    PREFETCH,
    PREFETCHING,
    READY,
    USELESS,
    EventLog,
    Hazard,
    Rank,
)
from prefetcher.core.planner import choose_parts, choose_victims, outbids, victims_in_order

__all__ = [
    "evict",
    "evictable",
    "give_back",
    "hold_time",
    "link_of",
    "make_room",
    "rest",
    "set_expiry",
    "start_transfer",
    "sweep_expired",
    "sweep_priced",
    "take_memory",
]

GDSF, SIEVE = int(Rank.GDSF), int(Rank.SIEVE)
#: Weight of the newest in the mean of what room would have saved: a node's victims change within tens of loads.
WORTH_WEIGHT = 0.1


@kernel_part
def link_of(tier: int, node: int, world: ClusterWorld) -> int:
    """The number of the link that fills `tier` of `node`, among those of its edge."""
    return 0 if tier == 0 and world.shared else node


@kernel_part
def hold_time(e: int, now_s: float, caches: ClusterCaches) -> None:
    cache = caches.cache[e]
    if now_s > cache.held_at_s:
        cache.period_cost_s += cache.cost_per_s * (now_s - cache.held_at_s)
        cache.held_at_s = now_s


@kernel_part
def _hold(e: int, tier: int, slot: int, held: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    """From now on a copy takes `held` bytes of its tier."""
    copy = caches.copy[e, tier, slot]
    caches.tier[e, tier, slot // len(world.size_bytes)].used += held - copy.held_bytes
    caches.cache[e].cost_per_s += (held - copy.held_bytes) * caches.price[e, tier]
    copy.held_bytes = held


@kernel_part
def _log_residency(e: int, tier: int, slot: int, end_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    if log.slot[e] < 0:
        return
    models = len(world.size_bytes)
    copy = caches.copy[e, tier, slot]
    event = log.residency[log.filled[0]]
    log.filled[0] += 1
    event.cache = e
    event.node = slot // models
    event.tier = tier
    event.model = slot % models
    event.start_s = copy.taken_s
    event.ready_s = copy.ready_s
    event.last_use_s = np.nan if copy.unused or np.isnan(copy.ready_s) else max(caches.seen[e, slot].last_row_s, copy.ready_s)
    event.end_s = end_s
    event.prefetch = copy.prefetched
    event.order = copy.order
    event.bytes = copy.held_bytes


@kernel_part
def take_memory(
    e: int, tier: int, slot: int, now_s: float, prefetched: bool, world: ClusterWorld, caches: ClusterCaches, log: EventLog
) -> None:
    """Takes all the memory of a copy that holds none, or the rest of it."""
    hold_time(e, now_s, caches)
    copy = caches.copy[e, tier, slot]
    if copy.held_bytes > 0.0:
        _log_residency(e, tier, slot, now_s, world, caches, log)
    _hold(e, tier, slot, world.size_bytes[slot % len(world.size_bytes)], world, caches)
    copy.taken_s = now_s
    copy.ready_s = np.nan
    copy.prefetched = prefetched
    copy.unused = prefetched


@kernel_part
def rest(e: int, tier: int, slot: int, world: ClusterWorld, caches: ClusterCaches) -> None:
    """A copy that is on no link and not ready: absent, or a part of it is there."""
    model = slot % len(world.size_bytes)
    copy = caches.copy[e, tier, slot]
    caches.status[e, tier, slot] = PART if copy.held_bytes > 0.0 else ABSENT
    copy.left_s = world.link_s[tier, model] * (1.0 - copy.held_bytes / world.size_bytes[model])


@kernel_part
def evict(e: int, tier: int, slot: int, at_s: float, outcome: int, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    """Frees all that a copy holds; `outcome` is what an unused prefetch ends as."""
    give_back(e, tier, slot, at_s, outcome, 0.0, world, caches, log)


@kernel_part
def give_back(
    e: int, tier: int, slot: int, at_s: float, outcome: int, kept: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog
) -> None:
    """Frees what a copy holds, but for its first `kept` bytes; `outcome` is what an unused prefetch ends as."""
    hold_time(e, at_s, caches)
    models = len(world.size_bytes)
    node, model = slot // models, slot % models
    status = caches.status[e, tier, slot]
    copy = caches.copy[e, tier, slot]
    if status == READY:
        caches.ready[e, tier, model] -= 1
        if caches.policy[e].rank == SIEVE:
            sieve_leave(e, tier, node, slot, caches)
    elif status == PREFETCH:
        caches.claims[e, model] -= 1
    if copy.order >= 0:
        order = log.orders[copy.order]
        order.end_s = at_s
        if order.outcome == OPEN:
            order.outcome = outcome
            if outcome != CANCELLED:
                copy.refused_after_s = at_s
    _log_residency(e, tier, slot, at_s, world, caches, log)
    _hold(e, tier, slot, kept, world, caches)
    rest(e, tier, slot, world, caches)
    copy.taken_s = at_s
    copy.ready_s = np.nan
    copy.order = -1
    copy.prefetched = False
    copy.unused = False
    copy.expiry_s = np.inf
    link = caches.link[e, tier, link_of(tier, node, world)]
    if link.partial == slot:
        link.partial = -1


@kernel_part
def set_expiry(e: int, tier: int, slot: int, expiry_s: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    caches.copy[e, tier, slot].expiry_s = expiry_s
    here = caches.tier[e, tier, slot // len(world.size_bytes)]
    if expiry_s < here.expiry_s:
        here.expiry_s = expiry_s


@kernel_part
def sweep_expired(e: int, tier: int, node: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    here = caches.tier[e, tier, node]
    if here.expiry_s > now_s:
        return
    models = len(world.size_bytes)
    earliest = np.inf
    for slot in range(node * models, (node + 1) * models):
        if caches.status[e, tier, slot] == READY:
            expiry_s = caches.copy[e, tier, slot].expiry_s
            if expiry_s > now_s or protected(e, tier, slot, caches):
                earliest = min(earliest, expiry_s)
            else:
                evict(e, tier, slot, expiry_s, USELESS, world, caches, log)
    here.expiry_s = earliest


@kernel_part
def sweep_priced(
    e: int, tier: int, node: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog
) -> None:
    """Gives back the weights of a tier whose bytes are worth less than their price there."""
    variant = caches.policy[e].variant
    price = caches.price[e, tier]
    for slot in evictable(e, tier, node, -1, world, caches):
        if key_of(e, tier, node, int(slot) % len(world.size_bytes), variant, True, now_s, world, demand, hazard, caches) < price:
            evict(e, tier, int(slot), now_s, USELESS, world, caches, log)


@kernel_part
def evictable(e: int, tier: int, node: int, but: int, world: ClusterWorld, caches: ClusterCaches) -> npt.NDArray[np.int64]:
    """Slots of a node's tier that may make room: ready and not being read, and parts that nobody waits for."""
    models = len(world.size_bytes)
    out = np.empty(models, np.int64)
    number = 0
    status = caches.status[e, tier]
    for slot in range(node * models, (node + 1) * models):
        idle = status[slot] == PART or (status[slot] == READY and not protected(e, tier, slot, caches))
        if idle and slot != but:
            out[number] = slot
            number += 1
    return out[:number]


@kernel_part
def _make_room_by_hand(
    e: int, tier: int, node: int, need: float, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog
) -> bool:
    """SIEVE: victims one by one, where the residents hold enough at all."""
    models = len(world.size_bytes)
    held = 0.0
    for slot in evictable(e, tier, node, -1, world, caches):
        held += world.size_bytes[slot % models]
    if held < need:
        return False
    got = 0.0
    while got < need:
        victim = sieve_next(e, tier, node, caches)
        got += world.size_bytes[victim % models]
        evict(e, tier, victim, now_s, DISPLACED, world, caches, log)
    return True


@kernel_part
def make_room(
    e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog
) -> bool:
    """Room in a tier for a demand load, with evictions; False: serve it through the tier, uncached."""
    policy = caches.policy[e]
    models = len(world.size_bytes)
    node, model = slot // models, slot % models
    here = caches.tier[e, tier, node]
    if world.size_bytes[model] > here.capacity:
        return False
    size = world.size_bytes[model] - caches.copy[e, tier, slot].held_bytes
    sweep_expired(e, tier, node, now_s, world, caches, log)
    entrant = 0.0
    if policy.load_aware or policy.bypass:
        entrant = key_of(e, tier, node, model, policy.variant, True, now_s, world, demand, hazard, caches)
        if policy.load_aware and entrant < caches.price[e, tier]:
            return False
    need = here.used + size - here.capacity
    partial = caches.link[e, tier, link_of(tier, node, world)].partial
    if need > 0.0 and partial >= 0 and partial // models == node:
        evict(e, tier, partial, now_s, CANCELLED, world, caches, log)
        need = here.used + size - here.capacity
    if need <= 0.0:
        return True
    if policy.rank == SIEVE:
        return _make_room_by_hand(e, tier, node, need, now_s, world, caches, log)
    slots = evictable(e, tier, node, slot, world, caches)
    key = np.empty(len(slots))
    sizes = np.empty(len(slots))
    for c in range(len(slots)):
        resident = int(slots[c]) % models
        key[c] = key_of(e, tier, node, resident, policy.variant, True, now_s, world, demand, hazard, caches)
        sizes[c] = caches.copy[e, tier, slots[c]].held_bytes
    candidates = np.arange(len(slots))
    kept = 0.0
    if policy.parts and tier == world.parts_tier:
        victims, suffice, kept = choose_parts(key, sizes, candidates, need)
    elif policy.as_set:
        victims, suffice = choose_victims(key, sizes, candidates, need)
    else:
        victims, suffice = victims_in_order(key, sizes, candidates, need)
    if not suffice:
        return False
    if policy.load_aware:
        value, room = 0.0, 0.0
        for c in victims:
            value += key[c] * sizes[c]
            room += sizes[c]
        here.worth += WORTH_WEIGHT * (value / room - here.worth)
    if policy.bypass and not outbids(entrant, world.size_bytes[model], key, sizes, victims, kept):
        return False
    for c in victims:
        if policy.rank == GDSF:
            here.clock = caches.copy[e, tier, slots[c]].priority
        give_back(e, tier, int(slots[c]), now_s, DISPLACED, kept if c == victims[-1] else 0.0, world, caches, log)
    return True


@kernel_part
def start_transfer(e: int, tier: int, slot: int, use: int, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    link = caches.link[e, tier, link_of(tier, slot // len(world.size_bytes), world)]
    link.use = use
    link.moving = slot
    link.segment_s = now_s
    link.finish_s = now_s + caches.copy[e, tier, slot].left_s
    caches.status[e, tier, slot] = PREFETCH if use == PREFETCHING else LOADING
    caches.next_event_s[e] = min(caches.next_event_s[e], link.finish_s)

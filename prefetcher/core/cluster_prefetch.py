"""What a cluster's caches fetch without demand: the guarded prefetch by index of `core.node_prefetch`, tier by tier and node by node.

A model is fetched into a tier from the one below it on the same node, and only where no other copy serves it as well. What is on no node
goes to the first idle link for which it is the best that is left.
"""

from __future__ import annotations

import math

import numpy as np

from prefetcher.core.cluster import ClusterCaches, ClusterWorld
from prefetcher.core.cluster_memory import evict, evictable, give_back, link_of, start_transfer, take_memory
from prefetcher.core.cluster_ranking import column_of, covered, key_of, key_of_rate, rate_of
from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand
from prefetcher.core.node import ABSENT, CANCELLED, DISPLACED, OPEN, PART, PREFETCH, PREFETCHING, READY, EventLog, Hazard
from prefetcher.core.node_prefetch import BUSY_TAU_S, CANDIDATES, RESUME_BONUS, SECOND_CHANCE
from prefetcher.core.planner import choose_parts, choose_victims, outbids
from prefetcher.core.value import MOST_HOLDS, load_discount

__all__ = ["prefetch_by_index", "stay_on"]


@kernel_part
def _issue(e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    """Starts a prefetch whose room is there."""
    models = len(world.size_bytes)
    link = caches.link[e, tier, link_of(tier, slot // models, world)]
    if link.partial >= 0 and link.partial != slot:
        evict(e, tier, link.partial, now_s, CANCELLED, world, caches, log)
    if link.partial != slot:
        take_memory(e, tier, slot, now_s, True, world, caches, log)
        number = log.filled[2]
        log.filled[2] += 1
        order = log.orders[number]
        order.cache = e
        order.node = slot // models
        order.tier = tier
        order.model = slot % models
        order.issued_s = now_s
        order.ready_s = np.nan
        order.first_use_s = np.nan
        order.end_s = np.nan
        order.outcome = OPEN
        order.premature = False
        order.first_row = -1
        order.hint = False
        caches.copy[e, tier, slot].order = number
        caches.copy[e, tier, slot].last_order = number
        caches.claims[e, slot % models] += 1
        link.partial = slot
    start_transfer(e, tier, slot, PREFETCHING, now_s, world, caches)


@kernel_part
def _score(
    e: int, tier: int, node: int, model: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches
) -> float:
    rate = rate_of(e, node, model, caches.policy[e].prefetch_variant, now_s, world, demand, hazard, caches)
    if rate <= 0.0:
        return 0.0
    slot = node * len(world.size_bytes) + model
    load_s = caches.copy[e, tier, slot].left_s if caches.status[e, tier, slot] == PART else world.link_s[tier, model]
    return key_of_rate(e, tier, node, model, rate, False, now_s, world, demand, caches) * load_discount(rate, load_s)


@kernel_part
def prefetch_by_index(
    e: int, tier: int, node: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog
) -> None:
    """On a quiet link, the highest discounted index first, at `margin` times what it displaces."""
    policy = caches.policy[e]
    models = len(world.size_bytes)
    here = caches.tier[e, tier, node]
    link = caches.link[e, tier, link_of(tier, node, world)]
    price = caches.price[e, tier]
    status = caches.status[e, tier]
    if link.busy_s * math.exp(-(now_s - link.busy_at_s) / BUSY_TAU_S) / BUSY_TAU_S > policy.busy_ratio:
        return
    best = np.full(CANDIDATES, -1, np.int64)
    score = np.zeros(CANDIDATES)
    for m in range(models):
        slot = node * models + m
        own = status[slot] == PREFETCH and link.partial == slot
        there = status[slot] != ABSENT and status[slot] != PART
        if (there and not own) or world.size_bytes[m] > here.capacity or demand.rows[column_of(node, m, world)] == 0:
            continue
        if caches.claims[e, m] > int(own) or (tier > 0 and caches.status[e, tier - 1, slot] != READY):
            continue
        if covered(e, tier, node, m, world, caches):
            continue
        value = _score(e, tier, node, m, now_s, world, demand, hazard, caches)
        copy = caches.copy[e, tier, slot]
        if own:
            value *= RESUME_BONUS
        elif copy.refused_after_s > caches.seen[e, slot].last_row_s and value < SECOND_CHANCE * copy.priority:
            continue
        if value <= price or value <= score[CANDIDATES - 1]:
            continue
        place = CANDIDATES - 1
        while place > 0 and value > score[place - 1]:
            score[place] = score[place - 1]
            best[place] = best[place - 1]
            place -= 1
        score[place] = value
        best[place] = slot
    if best[0] < 0:
        return
    key = np.empty(0)
    sizes = np.empty(0)
    residents = np.empty(0, np.int64)
    looked = False
    partial_bytes = world.size_bytes[link.partial % models] if link.partial >= 0 and link.partial // models == node else 0.0
    for place in range(CANDIDATES):
        slot = int(best[place])
        if slot < 0:
            return
        if slot == link.partial:
            _issue(e, tier, slot, now_s, world, caches, log)
            return
        size = world.size_bytes[slot % models] - caches.copy[e, tier, slot].held_bytes
        kept = 0.0
        need = here.used - partial_bytes + size - here.capacity
        victims = residents[:0]
        if need > 0.0:
            if not looked:
                looked = True
                residents = evictable(e, tier, node, -1, world, caches)
                key = np.empty(len(residents))
                sizes = np.empty(len(residents))
                for c in range(len(residents)):
                    m = int(residents[c]) % models
                    key[c] = key_of(e, tier, node, m, policy.prefetch_variant, False, now_s, world, demand, hazard, caches)
                    sizes[c] = caches.copy[e, tier, residents[c]].held_bytes
            others = np.flatnonzero(residents != slot)
            if policy.parts and tier == world.parts_tier:
                victims, suffice, kept = choose_parts(key, sizes, others, need)
            else:
                victims, suffice = choose_victims(key, sizes, others, need)
            whole = world.size_bytes[slot % models]
            if not suffice or not outbids(score[place] / policy.margin, whole, key, sizes, victims, kept):
                continue
            highest = 0.0
            for c in victims:
                highest = max(highest, key[c])
            if score[place] <= policy.margin * highest:
                continue
        for c in victims:
            give_back(e, tier, int(residents[c]), now_s, DISPLACED, kept if c == victims[-1] else 0.0, world, caches, log)
        caches.copy[e, tier, slot].priority = score[place]
        _issue(e, tier, slot, now_s, world, caches, log)
        return


@kernel_part
def stay_on(e: int, tier: int, node: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches) -> None:
    """At a tick, holds of unused forecasts that would end before the next one go on for a tick where the policy's `stays_at` says so."""
    policy = caches.policy[e]
    models = len(world.size_bytes)
    next_s = now_s + world.tick_s
    if policy.stays_at == np.inf or caches.tier[e, tier, node].expiry_s > next_s:
        return
    for slot in range(node * models, (node + 1) * models):
        copy = caches.copy[e, tier, slot]
        if caches.status[e, tier, slot] != READY or not copy.unused or copy.expiry_s <= now_s or copy.expiry_s > next_s:
            continue
        if _score(e, tier, node, slot % models, now_s, world, demand, hazard, caches) >= policy.stays_at * copy.priority:
            copy.expiry_s = max(copy.expiry_s, min(copy.expiry_s + world.tick_s, copy.ready_s + MOST_HOLDS * policy.hold_s))

"""Where a cluster's caches send a row that names no node.

Where rows go to their model's home, that is all. Ours sends them by the rule of live placement (`core.placement_rule`), on what the
caches themselves know: where the model is ready in the last tier, else where rows wait for it already, else where its load costs least,
all the edges that are left taken together. Covers only the reading of state; rows come one by one, so there is no burst to decide.
"""

from __future__ import annotations

import numpy as np

from prefetcher.core.cluster import ClusterCaches, ClusterWorld
from prefetcher.core.cluster_memory import link_of
from prefetcher.core.cluster_ranking import key_of
from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand
from prefetcher.core.node import DEMAND, IDLE, PAUSING, PREFETCH, PREFETCHING, READY, UNCACHED, YIELDING, Hazard
from prefetcher.core.placement_rule import ABSENT, MOVING, best_node, displaced_s, most_present, wait_on_link
from prefetcher.core.placement_rule import READY as THERE

__all__ = ["choose_node"]


@kernel_part
def _is_ready(e: int, tier: int, slot: int, now_s: float, caches: ClusterCaches) -> bool:
    return bool(caches.status[e, tier, slot] == READY and caches.copy[e, tier, slot].expiry_s > now_s)


@kernel_part
def _wait_s(e: int, tier: int, slot: int, rows: float, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> tuple[float, float]:
    """How long rows would wait for this transfer if it came to its link now, and how long it would make others wait."""
    number = link_of(tier, slot // len(world.size_bytes), world)
    link = caches.link[e, tier, number]
    left_s = caches.copy[e, tier, slot].left_s
    if link.use == PREFETCHING and link.moving == slot:
        return link.finish_s - now_s, 0.0
    queue_s = np.empty(link.queued + 1)
    queue_rows = np.empty(link.queued + 1)
    count, running_s = 0, 0.0
    if link.use == UNCACHED or link.use == PAUSING or (link.use == DEMAND and not caches.policy[e].yields):
        running_s = link.finish_s - now_s
    elif link.use == DEMAND or link.use == YIELDING:
        queue_s[0] = caches.copy[e, tier, link.moving].left_s - (now_s - link.segment_s)
        queue_rows[0] = caches.seen[e, link.moving].rows
        count = 1
    for q in range(link.queued):
        other = caches.queue[e, tier, number, q]
        if other != slot:
            queue_s[count] = caches.copy[e, tier, other].left_s
            queue_rows[count] = caches.seen[e, other].rows
            count += 1
    return wait_on_link(rows, left_s, running_s, queue_s, queue_rows, count)


@kernel_part
def _displaced_s(
    e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches
) -> float:
    """What its room in a tier displaces, by what room there was worth lately."""
    models = len(world.size_bytes)
    node, model = slot // models, slot % models
    here = caches.tier[e, tier, node]
    # What is there of it already needs no room.
    size = world.size_bytes[model] - caches.copy[e, tier, slot].held_bytes
    free, hold_s = here.capacity - here.used, caches.place[0]
    if size <= free or here.worth <= 0.0 or hold_s <= 0.0 or caches.status[e, tier, slot] == PREFETCH:
        return 0.0
    own = key_of(e, tier, node, model, caches.policy[e].variant, True, now_s, world, demand, hazard, caches) * world.size_bytes[model]
    return displaced_s(size, free, here.worth * hold_s, own * hold_s)


@kernel_part
def choose_node(
    e: int, row: int, model: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches
) -> int:
    """The node that row `row` of `model` goes to."""
    if world.node[row] >= 0:
        return int(world.node[row])
    if world.by_slot or world.nodes == 1:
        return int(world.home[model])
    models, nodes, tiers = len(world.size_bytes), world.nodes, len(world.link_s)
    rank = world.rank[model]
    at = np.full(nodes, ABSENT, np.int8)
    wait = np.zeros(nodes)
    if caches.ready[e, tiers - 1, model] > 0:
        for node in range(nodes):
            if _is_ready(e, tiers - 1, node * models + model, now_s, caches):
                at[node] = THERE
        there = most_present(at, wait, rank)
        if there >= 0:
            return there
    cost = np.zeros(nodes)
    able = np.ones(nodes, np.bool_)
    fits = np.ones(nodes, np.bool_)
    idle = np.ones(nodes, np.bool_)
    for node in range(nodes):
        slot = node * models + model
        stage = caches.seen[e, slot].stage
        rows = caches.seen[e, slot].rows + 1.0
        first = tiers - 1
        if stage >= 0:
            at[node] = MOVING
            first = stage
        else:
            while first > 0 and not _is_ready(e, first - 1, slot, now_s, caches):
                first -= 1
        for tier in range(first, tiers):
            wait_s, delay_s = _wait_s(e, tier, slot, rows, now_s, world, caches)
            number = link_of(tier, node, world)
            link = caches.link[e, tier, number]
            if stage >= 0 and tier == first and link.moving == slot:
                wait_s = link.finish_s - now_s
            wait[node] += wait_s
            cost[node] += wait_s + delay_s
            if caches.status[e, tier, slot] == PREFETCH and at[node] < MOVING:
                at[node] = MOVING
            if link.queued > 0 or not (link.use == IDLE or link.use == PREFETCHING or link.use == PAUSING):
                idle[node] = False
            if world.size_bytes[model] > caches.tier[e, tier, node].capacity:
                fits[node] = False
    if caches.claims[e, model] > 0:
        there = most_present(at, wait, rank)
        if there >= 0:
            return there
    for node in range(nodes):
        slot = node * models + model
        first = tiers - 1
        while first > 0 and not _is_ready(e, first - 1, slot, now_s, caches):
            first -= 1
        if fits[node]:
            for tier in range(first, tiers):
                cost[node] += _displaced_s(e, tier, slot, now_s, world, demand, hazard, caches)
    best, _ = best_node(cost, wait, able, fits, idle, rank)
    return best

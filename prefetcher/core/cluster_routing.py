"""Where a cluster's caches send a row that names no node.

Where rows go to their model's home, that is all. Ours sends them where the model is ready in the last tier, else where rows already wait
for it, else to the node where it costs least: the queues and loads that are left there, what it delays, and what its room displaces.
"""

from __future__ import annotations

import numpy as np

from prefetcher.core.cluster import ClusterCaches, ClusterWorld
from prefetcher.core.cluster_memory import link_of
from prefetcher.core.cluster_ranking import key_of
from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand
from prefetcher.core.node import DEMAND, PAUSING, PREFETCH, PREFETCHING, READY, UNCACHED, YIELDING, Hazard

__all__ = ["choose_node"]


@kernel_part
def _is_ready(e: int, tier: int, slot: int, now_s: float, caches: ClusterCaches) -> bool:
    return bool(caches.status[e, tier, slot] == READY and caches.copy[e, tier, slot].expiry_s > now_s)


@kernel_part
def _link_cost_s(e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> float:
    """Seconds until this transfer would be over, and what it delays others, if it came to its link now; in Smith's order."""
    models = len(world.size_bytes)
    number = link_of(tier, slot // models, world)
    link = caches.link[e, tier, number]
    left_s = caches.copy[e, tier, slot].left_s
    cost_s = left_s
    if link.use == PREFETCHING and link.moving == slot:
        return float(link.finish_s - now_s)
    if link.use == DEMAND or link.use == UNCACHED or link.use == PAUSING or link.use == YIELDING:
        cost_s += link.finish_s - now_s
    for q in range(link.queued):
        other = caches.queue[e, tier, number, q]
        rows = caches.seen[e, other].rows
        other_left_s = caches.copy[e, tier, other].left_s
        cost_s += other_left_s if rows * left_s >= other_left_s else rows * left_s
    return float(cost_s)


@kernel_part
def _displaced_per_s(
    e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches
) -> float:
    """What its room in a tier displaces, by what room there was worth lately; or what it loses itself, where that is less or it can't be
    kept. Seconds per second."""
    models = len(world.size_bytes)
    node, model = slot // models, slot % models
    here = caches.tier[e, tier, node]
    size = world.size_bytes[model]
    need = here.used + size - here.capacity
    if size <= here.capacity and need <= 0.0:
        return 0.0
    own = key_of(e, tier, node, model, caches.policy[e].variant, True, now_s, world, demand, hazard, caches) * size
    return float(own if size > here.capacity else min(here.worth * need, own))


@kernel_part
def choose_node(
    e: int, row: int, model: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches
) -> int:
    """The node that row `row` of `model` goes to; of equals the first from the model's home on."""
    if world.node[row] >= 0:
        return int(world.node[row])
    home = int(world.home[model])
    if world.by_slot or world.nodes == 1:
        return home
    models, nodes, tiers = len(world.size_bytes), world.nodes, len(world.link_s)
    if caches.ready[e, tiers - 1, model] > 0:
        for i in range(nodes):
            node = (home + i) % nodes
            if _is_ready(e, tiers - 1, node * models + model, now_s, caches):
                return node
    if caches.claims[e, model] > 0:
        for i in range(nodes):
            node = (home + i) % nodes
            if caches.seen[e, node * models + model].stage >= 0:
                return node
    best = home
    least_s = np.inf
    for i in range(nodes):
        node = (home + i) % nodes
        slot = node * models + model
        first = tiers - 1
        while first > 0 and not _is_ready(e, first - 1, slot, now_s, caches):
            first -= 1
        cost_s = 0.0
        for tier in range(first, tiers):
            cost_s += _link_cost_s(e, tier, slot, now_s, world, caches)
            if caches.place[0] > 0.0 and cost_s < least_s and caches.status[e, tier, slot] != PREFETCH:
                cost_s += caches.place[0] * _displaced_per_s(e, tier, slot, now_s, world, demand, hazard, caches)
        if cost_s < least_s:
            least_s = cost_s
            best = node
    return best

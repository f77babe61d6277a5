"""What residents and candidates of a tier are ranked by on a cluster: the keys of `core.ranking`, priced by the edges that a copy saves.

A copy in tier j saves the edges from the next copy below it up to j. Where there is a copy above it, or another one beside it, it saves
nothing until that one goes. Where nodes serve their own rows (`ClusterWorld.apart`), copies of other nodes don't count.
"""

from __future__ import annotations

from prefetcher.core.cluster import ClusterCaches, ClusterWorld
from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand, decayed_rate
from prefetcher.core.node import PREFETCH, READY, Hazard, Rank
from prefetcher.core.ranking import JOINERS_TAU, WAITING_PRIOR_LOADS, next_use_per_s
from prefetcher.core.value import index_per_byte, mean_load_s

__all__ = [
    "column_of",
    "copies_at",
    "covered",
    "key_of",
    "key_of_rate",
    "protected",
    "rate_of",
    "sieve_enter",
    "sieve_leave",
    "sieve_next",
]

LRU, GDSF, NEXT_USE_BYTES = int(Rank.LRU), int(Rank.GDSF), int(Rank.NEXT_USE_BYTES)


@kernel_part
def column_of(node: int, model: int, world: ClusterWorld) -> int:
    """Where demand keeps a model's rows: by slot or by model."""
    return int(node * len(world.size_bytes) + model) if world.by_slot else int(model)


@kernel_part
def copies_at(e: int, tier: int, node: int, model: int, world: ClusterWorld, caches: ClusterCaches) -> int:
    """Ready copies in a tier that a row of this node's could be served from."""
    if world.apart:
        return int(caches.status[e, tier, node * len(world.size_bytes) + model] == READY)
    return int(caches.ready[e, tier, model])


@kernel_part
def covered(e: int, tier: int, node: int, model: int, world: ClusterWorld, caches: ClusterCaches) -> bool:
    """Whether other copies serve the model as well as one in `tier` of `node` does, or would."""
    others = copies_at(e, tier, node, model, world, caches)
    if caches.status[e, tier, node * len(world.size_bytes) + model] == READY:
        others -= 1
    for above in range(tier + 1, len(world.link_s)):
        others += copies_at(e, above, node, model, world, caches)
    return others > 0


@kernel_part
def protected(e: int, tier: int, slot: int, caches: ClusterCaches) -> bool:
    """Whether a ready copy is read, or about to be, by rows that wait or by a prefetch into the tier above: such is no victim."""
    above = tier + 1
    if above >= caches.status.shape[1]:
        return False
    return bool(caches.seen[e, slot].stage == above or caches.status[e, above, slot] == PREFETCH)


@kernel_part
def rate_of(
    e: int, node: int, model: int, variant: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches
) -> float:
    """h, the rate at which the next use comes, as the policy sees it."""
    policy = caches.policy[e]
    if policy.rank == NEXT_USE_BYTES:
        until_s = caches.next_ts[column_of(node, model, world)] - now_s
        return float(1.0 / (max(until_s, 1e-3) * world.size_bytes[model]))
    column = column_of(node, model, world)
    # It reads of the world what both kinds have.
    return next_use_per_s(policy.rank, policy.tau, variant, column, now_s, demand, hazard, world, caches.next_ts)  # type: ignore[arg-type]


@kernel_part
def key_of_rate(
    e: int,
    tier: int,
    node: int,
    model: int,
    rate: float,
    own_waiting: bool,
    now_s: float,
    world: ClusterWorld,
    demand: Demand,
    caches: ClusterCaches,
) -> float:
    """The key of a model in `tier` of `node` whose rate of next use is known: the index where the policy is load-aware, else the rate."""
    if not caches.policy[e].load_aware or rate <= 0.0:
        return rate
    if covered(e, tier, node, model, world, caches):
        turnover = caches.place[1]
        rate = rate * turnover / (rate + turnover)
    load_s = 0.0
    others_s = 0.0
    edge = tier
    while True:
        link_s = world.link_s[edge, model]
        waiting = caches.edge[e, edge].waiting_mean
        if own_waiting:
            own = caches.others[e, edge, model]
            waiting = (own.others + WAITING_PRIOR_LOADS * waiting) / (own.loads + WAITING_PRIOR_LOADS)
        load_s += mean_load_s(link_s, caches.edge[e, edge].recent_wait_s)
        others_s += waiting * link_s
        edge -= 1
        if edge < 0 or copies_at(e, edge, node, model, world, caches) > 0:
            break
    joiners = decayed_rate(demand, JOINERS_TAU, column_of(node, model, world), now_s)
    cost_s = load_s * (1.0 + joiners * load_s / 2.0) + others_s
    return index_per_byte(rate, cost_s, world.size_bytes[model])


@kernel_part
def key_of(
    e: int,
    tier: int,
    node: int,
    model: int,
    variant: int,
    own_waiting: bool,
    now_s: float,
    world: ClusterWorld,
    demand: Demand,
    hazard: Hazard,
    caches: ClusterCaches,
) -> float:
    """The key of one model in `tier` of `node`; `own_waiting` takes μ by model (keep and bypass), else the edge's (prefetch)."""
    rank = caches.policy[e].rank
    slot = node * len(world.size_bytes) + model
    if rank == LRU:
        return float(max(caches.seen[e, slot].last_row_s, caches.copy[e, tier, slot].load_end_s))
    if rank == GDSF:
        return float(caches.copy[e, tier, slot].priority)
    rate = rate_of(e, node, model, variant, now_s, world, demand, hazard, caches)
    return key_of_rate(e, tier, node, model, rate, own_waiting, now_s, world, demand, caches)


@kernel_part
def sieve_enter(e: int, tier: int, node: int, slot: int, caches: ClusterCaches) -> None:
    """Puts a loaded model at the head of its tier's queue. Source: Zhang et al., SIEVE, NSDI 2024."""
    here = caches.tier[e, tier, node]
    copy = caches.copy[e, tier]
    copy[slot].visited = False
    copy[slot].older = here.sieve_head
    copy[slot].newer = -1
    if here.sieve_head >= 0:
        copy[here.sieve_head].newer = slot
    here.sieve_head = slot
    if here.sieve_tail < 0:
        here.sieve_tail = slot


@kernel_part
def sieve_leave(e: int, tier: int, node: int, slot: int, caches: ClusterCaches) -> None:
    """Takes an evicted model out of the queue; the hand moves on to the next newer one."""
    here = caches.tier[e, tier, node]
    copy = caches.copy[e, tier]
    older, newer = copy[slot].older, copy[slot].newer
    if older >= 0:
        copy[older].newer = newer
    else:
        here.sieve_tail = newer
    if newer >= 0:
        copy[newer].older = older
    else:
        here.sieve_head = older
    if here.sieve_hand == slot:
        here.sieve_hand = newer


@kernel_part
def sieve_next(e: int, tier: int, node: int, caches: ClusterCaches) -> int:
    """The next victim: the hand goes from old to new, clears marks, passes over what is protected, and stops at the first other one.

    Something in the queue must be unprotected.
    """
    here = caches.tier[e, tier, node]
    copy = caches.copy[e, tier]
    hand = here.sieve_hand
    if hand < 0:
        hand = here.sieve_tail
    while copy[hand].visited or protected(e, tier, hand, caches):
        copy[hand].visited = False
        hand = copy[hand].newer
        if hand < 0:
            hand = here.sieve_tail
    here.sieve_hand = hand
    return int(hand)

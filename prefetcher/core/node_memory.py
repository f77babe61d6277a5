"""Memory and link of one cache of a node without bytes: taking memory, giving it back, finding room, starting a transfer.

What happens to an unused prefetch and to the event log when weights go is here too, since every way of going ends in `give_back`. Who
is loaded is in `core.node_steps` (demand) and `core.node_prefetch`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
    Caches,
    EventLog,
    Hazard,
    Rank,
    World,
)
from prefetcher.core.planner import choose_parts, choose_victims, outbids, victims_in_order
from prefetcher.core.ranking import key_of, sieve_leave, sieve_next

__all__ = [
    "evict",
    "evictable",
    "give_back",
    "make_room",
    "rest",
    "set_expiry",
    "start_transfer",
    "sweep_expired",
    "sweep_priced",
    "take_memory",
]

GDSF, SIEVE = int(Rank.GDSF), int(Rank.SIEVE)


@kernel_part
def _hold_time(e: int, now_s: float, caches: Caches) -> None:
    cache = caches.cache[e]
    if now_s > cache.held_at_s:
        cache.period_byte_s += cache.used * (now_s - cache.held_at_s)
        cache.held_at_s = now_s


@kernel_part
def _log_residency(e: int, model: int, end_s: float, demand: Demand, caches: Caches, log: EventLog) -> None:
    if log.slot[e] < 0:
        return
    w = caches.weights[e][model]
    event = log.residency[log.filled[0]]
    log.filled[0] += 1
    event.cache = e
    event.model = model
    event.start_s = w.taken_s
    event.ready_s = w.ready_s
    event.last_use_s = np.nan if w.unused or np.isnan(w.ready_s) else max(demand.last_s[model], w.ready_s)
    event.end_s = end_s
    event.prefetch = w.prefetched
    event.order = w.order
    event.bytes = w.held_bytes


@kernel_part
def take_memory(e: int, model: int, now_s: float, prefetched: bool, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """Takes all the memory of a model that holds none, or the rest of it."""
    _hold_time(e, now_s, caches)
    w = caches.weights[e][model]
    if w.held_bytes > 0.0:
        _log_residency(e, model, now_s, demand, caches, log)
    caches.cache[e].used += world.size_bytes[model] - w.held_bytes
    w.held_bytes = world.size_bytes[model]
    w.taken_s = now_s
    w.ready_s = np.nan
    w.prefetched = prefetched
    w.unused = prefetched


@kernel_part
def rest(e: int, model: int, world: World, caches: Caches) -> None:
    """A model that is on no link and not ready: absent, or a part of it is there."""
    w = caches.weights[e][model]
    w.status = PART if w.held_bytes > 0.0 else ABSENT
    w.left_s = world.link_s[model] * (1.0 - w.held_bytes / world.size_bytes[model])


@kernel_part
def evict(e: int, model: int, at_s: float, outcome: int, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """Frees all that a model holds; `outcome` is what an unused prefetch ends as."""
    give_back(e, model, at_s, outcome, 0.0, world, demand, caches, log)


@kernel_part
def give_back(
    e: int, model: int, at_s: float, outcome: int, kept: float, world: World, demand: Demand, caches: Caches, log: EventLog
) -> None:
    """Frees what a model holds, but for its first `kept` bytes; `outcome` is what an unused prefetch ends as."""
    _hold_time(e, at_s, caches)
    cache = caches.cache[e]
    w = caches.weights[e][model]
    if caches.policy[e].rank == SIEVE and w.status == READY:
        sieve_leave(e, model, caches)
    cache.used -= w.held_bytes - kept
    if w.unused and outcome != OPEN:
        cache.period_wasted_byte_s += w.held_bytes * (at_s - w.taken_s)
    if w.order >= 0:
        order = log.orders[w.order]
        order.end_s = at_s
        if order.outcome == OPEN:
            order.outcome = outcome
            if outcome != CANCELLED:
                w.refused_after_s = at_s
    _log_residency(e, model, at_s, demand, caches, log)
    w.held_bytes = kept
    rest(e, model, world, caches)
    w.taken_s = at_s
    w.ready_s = np.nan
    w.order = -1
    w.prefetched = False
    w.unused = False
    w.expiry_s = np.inf
    if cache.partial == model:
        cache.partial = -1


@kernel_part
def set_expiry(e: int, model: int, expiry_s: float, caches: Caches) -> None:
    caches.weights[e][model].expiry_s = expiry_s
    if expiry_s < caches.cache[e].expiry_s:
        caches.cache[e].expiry_s = expiry_s


@kernel_part
def sweep_expired(e: int, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    cache = caches.cache[e]
    if cache.expiry_s > now_s:
        return
    weights = caches.weights[e]
    earliest = np.inf
    for m in range(len(weights)):
        if weights[m].status == READY:
            if weights[m].expiry_s <= now_s:
                evict(e, m, weights[m].expiry_s, USELESS, world, demand, caches, log)
            else:
                earliest = min(earliest, weights[m].expiry_s)
    cache.expiry_s = earliest


@kernel_part
def sweep_priced(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """Gives back the weights whose bytes are worth less than their price."""
    policy = caches.policy[e]
    weights = caches.weights[e]
    for m in range(len(weights)):
        idle = weights[m].status == READY or weights[m].status == PART
        if idle and key_of(e, m, policy.variant, True, now_s, world, demand, hazard, caches) < policy.price:
            evict(e, m, now_s, USELESS, world, demand, caches, log)


@kernel_part
def evictable(e: int, but: int, caches: Caches) -> npt.NDArray[np.int64]:
    """What may make room: what is ready, and parts that nobody waits for."""
    weights = caches.weights[e]
    out = np.empty(len(weights), np.int64)
    number = 0
    for m in range(len(weights)):
        if (weights[m].status == READY or weights[m].status == PART) and m != but:
            out[number] = m
            number += 1
    return out[:number]


@kernel_part
def _make_room_by_hand(e: int, need: float, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> bool:
    """SIEVE: victims one by one, where the residents hold enough at all."""
    held = 0.0
    for m in evictable(e, -1, caches):
        held += world.size_bytes[m]
    if held < need:
        return False
    got = 0.0
    while got < need:
        victim = sieve_next(e, caches)
        got += world.size_bytes[victim]
        evict(e, victim, now_s, DISPLACED, world, demand, caches, log)
    return True


@kernel_part
def make_room(e: int, model: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> bool:
    """Room for a demand load, with evictions; False: serve it uncached."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    weights = caches.weights[e]
    if world.size_bytes[model] > cache.capacity:
        return False
    size = world.size_bytes[model] - weights[model].held_bytes
    sweep_expired(e, now_s, world, demand, caches, log)
    if policy.price > 0.0 and policy.load_aware:
        entrant = key_of(e, model, policy.variant, True, now_s, world, demand, hazard, caches)
        if entrant < policy.price:
            return False
    need = cache.used + size - cache.capacity
    if need > 0.0 and cache.partial >= 0:
        evict(e, cache.partial, now_s, CANCELLED, world, demand, caches, log)
        need = cache.used + size - cache.capacity
    if need <= 0.0:
        return True
    if policy.rank == SIEVE:
        return _make_room_by_hand(e, need, now_s, world, demand, caches, log)
    candidates = evictable(e, model, caches)
    key = np.empty(len(weights))
    held = np.empty(len(weights))
    for m in candidates:
        key[m] = key_of(e, m, policy.variant, True, now_s, world, demand, hazard, caches)
        held[m] = weights[m].held_bytes
    kept = 0.0
    if policy.parts:
        victims, suffice, kept = choose_parts(key, held, candidates, need)
    elif policy.as_set:
        victims, suffice = choose_victims(key, held, candidates, need)
    else:
        victims, suffice = victims_in_order(key, held, candidates, need)
    if not suffice:
        return False
    if policy.bypass:
        entrant = key_of(e, model, policy.variant, True, now_s, world, demand, hazard, caches)
        if not outbids(entrant, world.size_bytes[model], key, held, victims, kept):
            return False
    for m in victims:
        if policy.rank == GDSF:
            cache.clock = weights[m].priority
        give_back(e, m, now_s, DISPLACED, kept if m == victims[-1] else 0.0, world, demand, caches, log)
    return True


@kernel_part
def start_transfer(e: int, model: int, use: int, now_s: float, caches: Caches) -> None:
    cache = caches.cache[e]
    cache.link = use
    cache.moving = model
    cache.segment_s = now_s
    cache.finish_s = now_s + caches.weights[e][model].left_s
    caches.weights[e][model].status = PREFETCH if use == PREFETCHING else LOADING

"""The transitions of a node without bytes: rows come, transfers end, ticks pass; who is loaded, who goes, what was found.

Kernels over `core.node` state. `advance` takes all caches of a node through a stretch of the log; replay, the Hedge's shadow caches and the
tests all call it. Order at one instant: transfer ends, then ticks and pre-warming, then the row.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel
from prefetcher.core.demand import Demand, observe
from prefetcher.core.node import (
    CANCELLED,
    DISPLACED,
    IDLE_BINS,
    LATE,
    OPEN,
    TIMELY,
    USELESS,
    Caches,
    EventLog,
    Found,
    Hazard,
    LinkUse,
    PrefetchRule,
    Rank,
    Status,
    World,
)
from prefetcher.core.planner import choose_victims, next_in_smith_order, outbids
from prefetcher.core.ranking import idle_window, key_of, next_use_per_s, sieve_enter, sieve_leave, sieve_next
from prefetcher.core.value import load_discount

__all__ = ["advance", "close"]

ABSENT, QUEUED, LOADING, READY, PREFETCH, HELD = (int(s) for s in Status)
IDLE, DEMAND, UNCACHED, PREFETCHING, PAUSING = (int(u) for u in LinkUse)
FOUND_READY, FOUND_MOVING, FOUND_QUEUED, FOUND_ABSENT = (int(f) for f in Found)
NO_PREFETCH, BY_INDEX, BY_EARLIEST, BY_IDLE_WINDOW = (int(r) for r in PrefetchRule)
GDSF, SIEVE = int(Rank.GDSF), int(Rank.SIEVE)

#: Weight of the newest load in the moving means of wait and waiting rows.
LOAD_WEIGHT = 0.02
#: Link use is measured with this time constant.
BUSY_TAU_S = 600.0
#: A paused prefetch is worth this much more than one that would start from nothing.
RESUME_BONUS = 1.2
#: Candidates tried when the best one does not outbid its victims.
CANDIDATES = 4
#: A prefetch given up unused comes back only for a row of its model or for a score this many times higher.
SECOND_CHANCE = 2.0


@kernel
def _hold_time(e: int, now_s: float, caches: Caches) -> None:
    cache = caches.cache[e]
    if now_s > cache.held_at_s:
        cache.period_byte_s += cache.used * (now_s - cache.held_at_s)
        cache.held_at_s = now_s


@kernel
def _take_memory(e: int, model: int, now_s: float, prefetched: bool, world: World, caches: Caches) -> None:
    _hold_time(e, now_s, caches)
    weights = caches.weights[e]
    caches.cache[e].used += world.size_bytes[model]
    weights[model].taken_s = now_s
    weights[model].ready_s = np.nan
    weights[model].prefetched = prefetched
    weights[model].unused = prefetched


@kernel
def _evict(e: int, model: int, at_s: float, outcome: int, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """Frees a resident or partial model; `outcome` is what an unused prefetch ends as."""
    _hold_time(e, at_s, caches)
    cache = caches.cache[e]
    w = caches.weights[e][model]
    if caches.policy[e].rank == SIEVE and w.status == READY:
        sieve_leave(e, model, caches)
    cache.used -= world.size_bytes[model]
    if w.order >= 0:
        order = log.orders[w.order]
        order.end_s = at_s
        if order.outcome == OPEN:
            order.outcome = outcome
            if outcome != CANCELLED:
                w.refused_after_s = at_s
    event = log.residency[log.filled[0]]
    log.filled[0] += 1
    event.cache = e
    event.model = model
    event.start_s = w.taken_s
    event.ready_s = w.ready_s
    event.last_use_s = np.nan if w.unused or np.isnan(w.ready_s) else max(demand.last_s[model], w.ready_s)
    event.end_s = at_s
    event.prefetch = w.prefetched
    event.order = w.order
    w.status = ABSENT
    w.left_s = world.link_s[model]
    w.order = -1
    w.unused = False
    w.expiry_s = np.inf
    if cache.partial == model:
        cache.partial = -1


@kernel
def _set_expiry(e: int, model: int, expiry_s: float, caches: Caches) -> None:
    caches.weights[e][model].expiry_s = expiry_s
    if expiry_s < caches.cache[e].expiry_s:
        caches.cache[e].expiry_s = expiry_s


@kernel
def _sweep_expired(e: int, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    cache = caches.cache[e]
    if cache.expiry_s > now_s:
        return
    weights = caches.weights[e]
    earliest = np.inf
    for m in range(len(weights)):
        if weights[m].status == READY:
            if weights[m].expiry_s <= now_s:
                _evict(e, m, weights[m].expiry_s, USELESS, world, demand, caches, log)
            else:
                earliest = min(earliest, weights[m].expiry_s)
    cache.expiry_s = earliest


@kernel
def _log_segment(e: int, now_s: float, caches: Caches, log: EventLog) -> None:
    cache = caches.cache[e]
    event = log.transfers[log.filled[1]]
    log.filled[1] += 1
    event.cache = e
    event.model = cache.moving
    event.start_s = cache.segment_s
    event.end_s = now_s
    event.prefetch = caches.weights[e][cache.moving].prefetched and cache.link != UNCACHED
    cache.busy_s = cache.busy_s * math.exp(-(now_s - cache.busy_at_s) / BUSY_TAU_S) + (now_s - cache.segment_s)
    cache.busy_at_s = now_s


@kernel
def _start(e: int, model: int, use: int, now_s: float, caches: Caches) -> None:
    cache = caches.cache[e]
    cache.link = use
    cache.moving = model
    cache.segment_s = now_s
    cache.finish_s = now_s + caches.weights[e][model].left_s
    caches.weights[e][model].status = PREFETCH if use == PREFETCHING else LOADING


@kernel
def _serve(e: int, model: int, now_s: float, caches: Caches, log: EventLog) -> None:
    """Gives the weights to every row that waits for them."""
    cache = caches.cache[e]
    w = caches.weights[e][model]
    cache.period_wait_s += w.rows * now_s - w.row_sum_s
    cache.waiting -= w.rows
    slot = log.slot[e]
    if slot >= 0:
        row = w.wait_head
        while row >= 0:
            log.wait_s[slot, row] = now_s - log.wait_s[slot, row]
            row = log.next_row[slot, row]
    w.wait_head = -1
    w.rows = 0.0
    w.row_sum_s = 0.0


@kernel
def _after_use(e: int, model: int, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """Keep-alives and idle windows, from a use of ready weights at `now_s`."""
    policy = caches.policy[e]
    w = caches.weights[e][model]
    w.last_use_s = now_s
    w.expiry_s = np.inf
    if policy.idle_windows:
        prewarm_s, keep_s = idle_window(caches.idle[e, model], w.idle_count, w.idle_outside)
        w.tail_s = now_s + keep_s
        if prewarm_s >= 60.0:
            _evict(e, model, now_s, USELESS, world, demand, caches, log)
            w.warm_s = now_s + prewarm_s
            caches.cache[e].next_warm_s = min(caches.cache[e].next_warm_s, w.warm_s)
        else:
            w.warm_s = np.inf
            _set_expiry(e, model, w.tail_s, caches)
    elif policy.keep_alive_s < np.inf:
        _set_expiry(e, model, now_s + policy.keep_alive_s, caches)


@kernel
def _end_transfer(e: int, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    cache = caches.cache[e]
    policy = caches.policy[e]
    now_s = cache.finish_s
    model = cache.moving
    w = caches.weights[e][model]
    use = cache.link
    _log_segment(e, now_s, caches, log)
    cache.link = IDLE
    cache.moving = -1
    cache.finish_s = np.inf
    if use == PAUSING:
        w.left_s = max(w.left_s - (now_s - cache.segment_s), 0.0)
        return
    w.left_s = world.link_s[model]
    w.load_end_s = now_s
    if use == UNCACHED:
        _serve(e, model, now_s, caches, log)
        w.status = ABSENT
        return
    w.status = READY
    w.ready_s = now_s
    if w.order >= 0:
        log.orders[w.order].ready_s = now_s
    if policy.rank == SIEVE:
        sieve_enter(e, model, caches)
    if use == DEMAND:
        w.priority = cache.clock + demand.rows[model]
        _serve(e, model, now_s, caches, log)
        _after_use(e, model, now_s, world, demand, caches, log)
    else:
        cache.partial = -1
        w.priority = max(w.priority, cache.clock)
        _set_expiry(e, model, w.tail_s if policy.idle_windows else now_s + policy.hold_s, caches)


@kernel
def _residents(e: int, but: int, caches: Caches) -> npt.NDArray[np.int64]:
    weights = caches.weights[e]
    out = np.empty(len(weights), np.int64)
    number = 0
    for m in range(len(weights)):
        if weights[m].status == READY and m != but:
            out[number] = m
            number += 1
    return out[:number]


@kernel
def _make_room_by_hand(e: int, need: float, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> bool:
    """SIEVE: victims one by one, where the residents hold enough at all."""
    held = 0.0
    for m in _residents(e, -1, caches):
        held += world.size_bytes[m]
    if held < need:
        return False
    got = 0.0
    while got < need:
        victim = sieve_next(e, caches)
        got += world.size_bytes[victim]
        _evict(e, victim, now_s, DISPLACED, world, demand, caches, log)
    return True


@kernel
def _victims_in_order(
    key: npt.NDArray[np.float64], size_bytes: npt.NDArray[np.float64], candidates: npt.NDArray[np.int64], need: float
) -> tuple[npt.NDArray[np.int64], bool]:
    """The classic way: lowest key first until the room suffices."""
    total = 0.0
    for m in candidates:
        total += size_bytes[m]
    if total < need:
        return candidates[:0], False
    order = candidates[np.argsort(key[candidates], kind="mergesort")]
    got = 0.0
    number = 0
    while got < need:
        got += size_bytes[order[number]]
        number += 1
    return order[:number], True


@kernel
def _make_room(e: int, model: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> bool:
    """Room for a demand load, with evictions; False: serve it uncached."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    size = world.size_bytes[model]
    if size > cache.capacity:
        return False
    _sweep_expired(e, now_s, world, demand, caches, log)
    if policy.price > 0.0 and policy.load_aware:
        entrant = key_of(e, model, policy.variant, True, now_s, world, demand, hazard, caches)
        if entrant < policy.price:
            return False
    need = cache.used + size - cache.capacity
    if need > 0.0 and cache.partial >= 0:
        _evict(e, cache.partial, now_s, CANCELLED, world, demand, caches, log)
        need = cache.used + size - cache.capacity
    if need <= 0.0:
        return True
    if policy.rank == SIEVE:
        return _make_room_by_hand(e, need, now_s, world, demand, caches, log)
    candidates = _residents(e, model, caches)
    key = np.empty(len(world.size_bytes))
    for m in candidates:
        key[m] = key_of(e, m, policy.variant, True, now_s, world, demand, hazard, caches)
    if policy.as_set:
        victims, suffice = choose_victims(key, world.size_bytes, candidates, need)
    else:
        victims, suffice = _victims_in_order(key, world.size_bytes, candidates, need)
    if not suffice:
        return False
    if policy.bypass:
        entrant = key_of(e, model, policy.variant, True, now_s, world, demand, hazard, caches)
        if not outbids(entrant, size, key, world.size_bytes, victims):
            return False
    for m in victims:
        if policy.rank == GDSF:
            cache.clock = caches.weights[e][m].priority
        _evict(e, m, now_s, DISPLACED, world, demand, caches, log)
    return True


@kernel
def _start_demand(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    cache = caches.cache[e]
    weights = caches.weights[e]
    queue = caches.queue[e]
    position = 0
    if caches.policy[e].smith:
        waiting = np.empty(cache.queued)
        left_s = np.empty(cache.queued)
        for q in range(cache.queued):
            waiting[q] = weights[queue[q]].rows
            left_s[q] = max(weights[queue[q]].left_s, 1e-9)
        position = next_in_smith_order(waiting, left_s)
    model = int(queue[position])
    for q in range(position, cache.queued - 1):
        queue[q] = queue[q + 1]
    cache.queued -= 1
    w = weights[model]
    cache.recent_wait_s += LOAD_WEIGHT * (now_s - w.first_row_s - cache.recent_wait_s)
    cache.waiting_mean += LOAD_WEIGHT * (cache.waiting - cache.waiting_mean)
    w.others += cache.waiting - w.rows
    w.loads += 1.0
    if w.status == HELD:
        _start(e, model, DEMAND, now_s, caches)
    elif _make_room(e, model, now_s, world, demand, hazard, caches, log):
        _take_memory(e, model, now_s, False, world, caches)
        _start(e, model, DEMAND, now_s, caches)
    else:
        _start(e, model, UNCACHED, now_s, caches)


@kernel
def _issue(e: int, model: int, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """Starts a prefetch whose room is there."""
    cache = caches.cache[e]
    if cache.partial >= 0 and cache.partial != model:
        _evict(e, cache.partial, now_s, CANCELLED, world, demand, caches, log)
    if cache.partial != model:
        _take_memory(e, model, now_s, True, world, caches)
        number = log.filled[2]
        log.filled[2] += 1
        order = log.orders[number]
        order.cache = e
        order.model = model
        order.issued_s = now_s
        order.ready_s = np.nan
        order.first_use_s = np.nan
        order.end_s = np.nan
        order.outcome = OPEN
        order.premature = False
        caches.weights[e][model].order = number
        caches.weights[e][model].last_order = number
        cache.partial = model
    _start(e, model, PREFETCHING, now_s, caches)


@kernel
def _prefetch_by_index(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """The guarded prefetch: on a quiet link, the highest discounted index first, at `margin` times what it displaces."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    weights = caches.weights[e]
    if cache.busy_s * math.exp(-(now_s - cache.busy_at_s) / BUSY_TAU_S) / BUSY_TAU_S > policy.busy_ratio:
        return
    best = np.full(CANDIDATES, -1, np.int64)
    score = np.zeros(CANDIDATES)
    for m in range(len(weights)):
        status = weights[m].status
        if (status != ABSENT and status != PREFETCH) or demand.rows[m] == 0 or world.size_bytes[m] > cache.capacity:
            continue
        rate = next_use_per_s(policy.rank, policy.tau, policy.prefetch_variant, m, now_s, demand, hazard, world, caches.next_ts)
        value = key_of(e, m, policy.prefetch_variant, False, now_s, world, demand, hazard, caches)
        value *= load_discount(rate, world.link_s[m])
        if status == PREFETCH:
            value *= RESUME_BONUS
        elif weights[m].refused_after_s > demand.last_s[m] and value < SECOND_CHANCE * weights[m].priority:
            continue
        if value <= policy.price or value <= score[CANDIDATES - 1]:
            continue
        place = CANDIDATES - 1
        while place > 0 and value > score[place - 1]:
            score[place] = score[place - 1]
            best[place] = best[place - 1]
            place -= 1
        score[place] = value
        best[place] = m
    if best[0] < 0:
        return
    key = np.empty(0)
    residents = np.empty(0, np.int64)
    partial_bytes = world.size_bytes[cache.partial] if cache.partial >= 0 else 0.0
    for place in range(CANDIDATES):
        model = best[place]
        if model < 0:
            return
        if model == cache.partial:
            _issue(e, model, now_s, world, demand, caches, log)
            return
        need = cache.used - partial_bytes + world.size_bytes[model] - cache.capacity
        if need <= 0.0:
            victims = residents[:0]
        else:
            if len(key) == 0:
                residents = _residents(e, -1, caches)
                key = np.empty(len(weights))
                for resident in residents:
                    key[resident] = key_of(e, int(resident), policy.prefetch_variant, False, now_s, world, demand, hazard, caches)
            victims, suffice = choose_victims(key, world.size_bytes, residents, need)
            if not suffice or not outbids(score[place] / policy.margin, world.size_bytes[model], key, world.size_bytes, victims):
                continue
            highest = 0.0
            for victim in victims:
                highest = max(highest, key[victim])
            if score[place] <= policy.margin * highest:
                continue
        for victim in victims:
            _evict(e, victim, now_s, DISPLACED, world, demand, caches, log)
        weights[model].priority = score[place]
        _issue(e, model, now_s, world, demand, caches, log)
        return


@kernel
def _prefetch_earliest(e: int, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """With knowledge of the future: the absent model with the earliest next use, at the cost only of what is needed later."""
    cache = caches.cache[e]
    weights = caches.weights[e]
    model = -1
    for m in range(len(weights)):
        absent = weights[m].status == ABSENT or weights[m].status == PREFETCH
        if absent and world.size_bytes[m] <= cache.capacity and (model < 0 or caches.next_ts[m] < caches.next_ts[model]):
            model = m
    if model < 0 or caches.next_ts[model] == np.inf:
        return
    if model != cache.partial:
        partial_bytes = world.size_bytes[cache.partial] if cache.partial >= 0 else 0.0
        need = cache.used - partial_bytes + world.size_bytes[model] - cache.capacity
        if need > 0.0:
            key = np.empty(len(weights))
            later = np.empty(len(weights), np.int64)
            number = 0
            for m in range(len(weights)):
                if weights[m].status == READY and caches.next_ts[m] > caches.next_ts[model]:
                    key[m] = 1.0 / max(caches.next_ts[m] - now_s, 1e-3)
                    later[number] = m
                    number += 1
            victims, suffice = _victims_in_order(key, world.size_bytes, later[:number], need)
            if not suffice:
                return
            for m in victims:
                _evict(e, m, now_s, DISPLACED, world, demand, caches, log)
    _issue(e, model, now_s, world, demand, caches, log)


@kernel
def _prewarm(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """Hybrid: what is due comes back, the earliest first, evicting by recency when full."""
    weights = caches.weights[e]
    model = -1
    following = np.inf
    for m in range(len(weights)):
        if weights[m].warm_s > now_s:
            following = min(following, weights[m].warm_s)
        elif weights[m].status != ABSENT or weights[m].tail_s <= now_s:
            weights[m].warm_s = np.inf
        elif model < 0 or weights[m].warm_s < weights[model].warm_s:
            if model >= 0:
                following = min(following, weights[model].warm_s)
            model = m
        else:
            following = min(following, weights[m].warm_s)
    caches.cache[e].next_warm_s = following
    if model < 0:
        return
    weights[model].warm_s = np.inf
    if _make_room(e, model, now_s, world, demand, hazard, caches, log):
        _issue(e, model, now_s, world, demand, caches, log)


@kernel
def _next_transfer(
    e: int, now_s: float, opportunity: bool, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog
) -> None:
    """An idle link takes the next demand load, or at an opportunity (a transfer's end, a tick) a prefetch."""
    cache = caches.cache[e]
    if cache.queued > 0:
        _start_demand(e, now_s, world, demand, hazard, caches, log)
    elif now_s >= world.t1_s:
        cache.next_warm_s = np.inf
    elif opportunity:
        rule = caches.policy[e].prefetch
        if rule == BY_INDEX:
            _sweep_expired(e, now_s, world, demand, caches, log)
            _prefetch_by_index(e, now_s, world, demand, hazard, caches, log)
        elif rule == BY_EARLIEST:
            _prefetch_earliest(e, now_s, world, demand, caches, log)
        elif rule == BY_IDLE_WINDOW and cache.next_warm_s <= now_s:
            _prewarm(e, now_s, world, demand, hazard, caches, log)


@kernel
def _sweep_priced(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """Gives back what a byte of is worth less than its price."""
    policy = caches.policy[e]
    weights = caches.weights[e]
    for m in range(len(weights)):
        if weights[m].status == READY and key_of(e, m, policy.variant, True, now_s, world, demand, hazard, caches) < policy.price:
            _evict(e, m, now_s, USELESS, world, demand, caches, log)


@kernel
def _schedule(e: int, caches: Caches) -> None:
    cache = caches.cache[e]
    due_s = min(cache.finish_s, cache.next_tick_s)
    if cache.link == IDLE:
        due_s = min(due_s, cache.next_warm_s)
    caches.next_event_s[e] = due_s


@kernel
def _has_space(models: int, caches: int, log: EventLog) -> bool:
    room = caches * (models + 8)
    fullest = max(log.filled[0] - len(log.residency), log.filled[1] - len(log.transfers), log.filled[2] - len(log.orders))
    return bool(fullest + room < 0)


@kernel
def _run_until(e: int, until_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> bool:
    """Transfer ends, ticks and pre-warming up to `until_s`, inclusive; False when the log is full and the caller must grow it."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    while caches.next_event_s[e] <= until_s and caches.next_event_s[e] < np.inf:
        if not _has_space(len(world.size_bytes), 1, log):
            return False
        now_s = caches.next_event_s[e]
        opportunity = True
        if cache.finish_s <= now_s:
            _end_transfer(e, world, demand, caches, log)
        elif cache.next_tick_s <= now_s:
            cache.next_tick_s += world.tick_s
            if cache.next_tick_s > world.t1_s or (policy.prefetch != BY_INDEX and (policy.price == 0.0 or not policy.load_aware)):
                cache.next_tick_s = np.inf
            if policy.price > 0.0 and policy.load_aware:
                _sweep_priced(e, now_s, world, demand, hazard, caches, log)
            opportunity = policy.prefetch == BY_INDEX
        if cache.link == IDLE:
            _next_transfer(e, now_s, opportunity, world, demand, hazard, caches, log)
        _schedule(e, caches)
    return True


@kernel
def _wait(e: int, row: int, model: int, now_s: float, caches: Caches, log: EventLog) -> None:
    w = caches.weights[e][model]
    w.rows += 1.0
    w.row_sum_s += now_s
    caches.cache[e].waiting += 1.0
    slot = log.slot[e]
    if slot >= 0:
        log.wait_s[slot, row] = now_s
        log.next_row[slot, row] = w.wait_head
        w.wait_head = row


@kernel
def _first_use(e: int, model: int, now_s: float, outcome: int, caches: Caches, log: EventLog) -> None:
    w = caches.weights[e][model]
    w.unused = False
    if w.order >= 0:
        log.orders[w.order].first_use_s = now_s
        log.orders[w.order].outcome = outcome


@kernel
def _row(e: int, row: int, model: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> int:
    """One row meets one cache; what it found."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    w = caches.weights[e][model]
    if w.status == READY and w.expiry_s <= now_s:
        _evict(e, model, w.expiry_s, USELESS, world, demand, caches, log)
    if policy.idle_windows:
        if demand.rows[model] > 1:
            minute = int((now_s - w.last_use_s) / 60.0)
            if 0 <= minute < IDLE_BINS:
                caches.idle[e, model, minute] += 1.0
                w.idle_count += 1.0
            elif minute >= IDLE_BINS:
                w.idle_outside += 1.0
        w.last_use_s = now_s
    if w.last_order >= 0:
        last = log.orders[w.last_order]
        if last.outcome >= USELESS:
            last.premature = now_s - last.end_s <= min(policy.hold_s, 600.0)
            w.last_order = -1
    if w.status == READY:
        if w.unused:
            _first_use(e, model, now_s, TIMELY, caches, log)
        w.priority = cache.clock + demand.rows[model]
        w.visited = True
        _after_use(e, model, now_s, world, demand, caches, log)
        return FOUND_READY
    found = FOUND_QUEUED
    if w.status == ABSENT:
        found = FOUND_ABSENT
        w.status = QUEUED
        w.first_row_s = now_s
        caches.queue[e, cache.queued] = model
        cache.queued += 1
    elif w.status == LOADING:
        found = FOUND_MOVING
    elif w.status == PREFETCH:
        found = FOUND_MOVING
        w.first_row_s = now_s
        _first_use(e, model, now_s, LATE, caches, log)
        cache.partial = -1
        if cache.link == PREFETCHING and cache.moving == model:
            cache.link = DEMAND
            w.status = LOADING
        else:
            w.status = HELD
            caches.queue[e, cache.queued] = model
            cache.queued += 1
    _wait(e, row, model, now_s, caches, log)
    if cache.link == PREFETCHING:
        block_s = world.block_s[cache.moving]
        end_s = cache.segment_s + math.ceil((now_s - cache.segment_s) / block_s + 1e-9) * block_s
        if end_s < cache.finish_s:
            cache.link = PAUSING
            cache.finish_s = end_s
    return found


@kernel
def advance(first: int, last: int, until_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> int:
    """Takes every cache through rows `first` to `last` (exclusive), then through events up to `until_s`.

    Returns the row it got to: `last` + 1 when all is done; less when `log` must grow, then call again from there.
    """
    count = len(caches.policy)
    models = len(world.size_bytes)
    for row in range(first, last):
        now_s = world.ts[row]
        model = world.model[row]
        for e in range(count):
            if caches.next_event_s[e] <= now_s and not _run_until(e, now_s, world, demand, hazard, caches, log):
                return row
        if not _has_space(models, count, log):
            return row
        observe(demand, model, now_s)
        caches.next_ts[model] = world.next_ts[row]
        if hazard.after_row.shape[1] > row - hazard.first_row:
            for v in range(len(hazard.latest)):
                hazard.latest[v, model] = hazard.after_row[v, row - hazard.first_row]
        for e in range(count):
            found = _row(e, row, model, now_s, world, demand, hazard, caches, log)
            slot = log.slot[e]
            if slot >= 0:
                log.found[slot, row] = found
            if caches.cache[e].link == IDLE:
                _next_transfer(e, now_s, caches.policy[e].prefetch == BY_EARLIEST, world, demand, hazard, caches, log)
            _schedule(e, caches)
    for e in range(count):
        if not _run_until(e, until_s, world, demand, hazard, caches, log):
            return last
    return last + 1


@kernel
def close(until_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> bool:
    """Ends what is still held at `until_s`; False when `log` must grow first."""
    for e in range(len(caches.policy)):
        if not _has_space(len(world.size_bytes), 1, log):
            return False
        _sweep_expired(e, until_s, world, demand, caches, log)
        weights = caches.weights[e]
        for m in range(len(weights)):
            if weights[m].status == READY or weights[m].status == PREFETCH:
                _evict(e, m, max(until_s, weights[m].taken_s), OPEN, world, demand, caches, log)
    return True

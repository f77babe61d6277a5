"""The transitions of a node without bytes: rows and hints come, transfers end, ticks pass; who is loaded next, what was found.

Kernels over `core.node` state. `advance` takes all caches of a node through a stretch of the log; replay, the Hedge's shadow caches and the
tests all call it. Order at one instant: transfer ends, then ticks and pre-warming, then hints, then the row. Room is found by
`core.node_memory`, what is fetched without demand by `core.node_prefetch`.
"""

from __future__ import annotations

import math

import numpy as np

from prefetcher.core.compiled import kernel, kernel_part
from prefetcher.core.demand import Demand, observe
from prefetcher.core.node import (
    ABSENT,
    CANCELLED,
    DEMAND,
    HELD,
    IDLE,
    IDLE_BINS,
    LATE,
    LOADING,
    OPEN,
    PART,
    PART_QUEUED,
    PAUSING,
    PREFETCH,
    PREFETCHING,
    QUEUED,
    READY,
    TIMELY,
    UNCACHED,
    USELESS,
    YIELDED,
    YIELDING,
    Caches,
    EventLog,
    Found,
    Hazard,
    PrefetchRule,
    Rank,
    World,
)
from prefetcher.core.node_memory import evict, make_room, rest, set_expiry, start_transfer, sweep_expired, sweep_priced, take_memory
from prefetcher.core.node_prefetch import BUSY_TAU_S, is_likely, prefetch_by_index, prefetch_earliest, prewarm, stay_on
from prefetcher.core.planner import next_in_smith_order, outranks
from prefetcher.core.ranking import idle_window, sieve_enter
from prefetcher.core.references import by_reference

__all__ = ["advance", "close"]

FOUND_READY, FOUND_MOVING, FOUND_QUEUED, FOUND_ABSENT = (int(f) for f in Found)
BY_INDEX, BY_EARLIEST, BY_IDLE_WINDOW = int(PrefetchRule.INDEX), int(PrefetchRule.EARLIEST), int(PrefetchRule.IDLE_WINDOW)
SIEVE = int(Rank.SIEVE)

#: Weight of the newest load in the moving means of wait and waiting rows.
LOAD_WEIGHT = 0.02


@kernel_part
def _log_segment(e: int, now_s: float, caches: Caches, log: EventLog) -> None:
    cache = caches.cache[e]
    if log.slot[e] >= 0:
        event = log.transfers[log.filled[1]]
        log.filled[1] += 1
        event.cache = e
        event.model = cache.moving
        event.start_s = cache.segment_s
        event.end_s = now_s
        event.prefetch = caches.weights[e][cache.moving].prefetched and cache.link != UNCACHED
        event.order = caches.weights[e][cache.moving].order
    cache.busy_s = cache.busy_s * math.exp(-(now_s - cache.busy_at_s) / BUSY_TAU_S) + (now_s - cache.segment_s)
    cache.busy_at_s = now_s


@kernel_part
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


@kernel_part
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
            evict(e, model, now_s, USELESS, world, demand, caches, log)
            w.warm_s = now_s + prewarm_s
            caches.cache[e].next_warm_s = min(caches.cache[e].next_warm_s, w.warm_s)
        else:
            w.warm_s = np.inf
            set_expiry(e, model, w.tail_s, caches)
    elif policy.keep_alive_s < np.inf:
        set_expiry(e, model, now_s + policy.keep_alive_s, caches)


@kernel_part
def _enqueue(e: int, model: int, status: int, caches: Caches) -> None:
    """A model that rows wait for waits for the link."""
    cache = caches.cache[e]
    caches.weights[e][model].status = status
    caches.queue[e, cache.queued] = model
    cache.queued += 1


@kernel_part
def _end_transfer(e: int, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
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
    if use in (PAUSING, YIELDING):
        w.left_s = max(w.left_s - (now_s - cache.segment_s), 0.0)
        if use == YIELDING:
            _enqueue(e, model, YIELDED, caches)
        return
    w.load_end_s = now_s
    if use == UNCACHED:
        _serve(e, model, now_s, caches, log)
        rest(e, model, world, caches)
        return
    w.left_s = world.link_s[model]
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
        hold_until_s = now_s + caches.windows[e, model].hold_s
        if w.order >= 0 and log.orders[w.order].hint:
            hold_until_s = max(hazard.hinted[model].until_s, now_s)
        set_expiry(e, model, w.tail_s if policy.idle_windows else hold_until_s, caches)


@kernel_part
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
    if w.status == YIELDED:
        start_transfer(e, model, DEMAND, now_s, caches)
        return
    cache.recent_wait_s += LOAD_WEIGHT * (now_s - w.first_row_s - cache.recent_wait_s)
    cache.waiting_mean += LOAD_WEIGHT * (cache.waiting - cache.waiting_mean)
    w.others += cache.waiting - w.rows
    w.loads += 1.0
    if w.status == HELD:
        start_transfer(e, model, DEMAND, now_s, caches)
    elif make_room(e, model, now_s, world, demand, hazard, caches, log):
        take_memory(e, model, now_s, False, world, demand, caches, log)
        start_transfer(e, model, DEMAND, now_s, caches)
    else:
        w.left_s = world.link_s[model]
        start_transfer(e, model, UNCACHED, now_s, caches)


@kernel_part
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
        if rule == BY_INDEX or caches.policy[e].hints:
            sweep_expired(e, now_s, world, demand, caches, log)
            prefetch_by_index(e, now_s, world, demand, hazard, caches, log)
        elif rule == BY_EARLIEST:
            prefetch_earliest(e, now_s, world, demand, caches, log)
        elif rule == BY_IDLE_WINDOW and cache.next_warm_s <= now_s:
            prewarm(e, now_s, world, demand, hazard, caches, log)


@kernel_part
def _schedule(e: int, caches: Caches) -> None:
    cache = caches.cache[e]
    due_s = min(cache.finish_s, cache.next_tick_s)
    if cache.link == IDLE:
        due_s = min(due_s, cache.next_warm_s)
    caches.next_event_s[e] = due_s


@kernel_part
def _has_space(models: int, caches: int, log: EventLog) -> bool:
    room = caches * (models + 8)
    fullest = max(log.filled[0] - len(log.residency), log.filled[1] - len(log.transfers), log.filled[2] - len(log.orders))
    return bool(fullest + room < 0)


@kernel_part
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
            _end_transfer(e, world, demand, hazard, caches, log)
        elif cache.next_tick_s <= now_s:
            cache.next_tick_s += world.tick_s
            if cache.next_tick_s > world.t1_s or (policy.prefetch != BY_INDEX and (policy.price == 0.0 or not policy.load_aware)):
                cache.next_tick_s = np.inf
            if policy.price > 0.0 and policy.load_aware:
                sweep_priced(e, now_s, world, demand, hazard, caches, log)
            opportunity = policy.prefetch == BY_INDEX
            if opportunity:
                stay_on(e, now_s, world, demand, hazard, caches, log)
        if cache.link == IDLE:
            _next_transfer(e, now_s, opportunity, world, demand, hazard, caches, log)
        _schedule(e, caches)
    return True


@kernel_part
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


@kernel_part
def _first_use(e: int, row: int, model: int, now_s: float, outcome: int, caches: Caches, log: EventLog) -> None:
    w = caches.weights[e][model]
    w.unused = False
    if w.order >= 0:
        log.orders[w.order].first_use_s = now_s
        log.orders[w.order].first_row = row
        log.orders[w.order].outcome = outcome


@kernel_part
def _row(e: int, row: int, model: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> int:
    """One row meets one cache; what it found."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    w = caches.weights[e][model]
    if w.status == READY and w.expiry_s <= now_s:
        evict(e, model, w.expiry_s, USELESS, world, demand, caches, log)
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
            last.premature = now_s - last.end_s <= min(caches.windows[e, model].hold_s, 600.0)
            w.last_order = -1
    if w.status == READY:
        if w.unused:
            _first_use(e, row, model, now_s, TIMELY, caches, log)
        w.priority = cache.clock + demand.rows[model]
        w.visited = True
        _after_use(e, model, now_s, world, demand, caches, log)
        return FOUND_READY
    found = FOUND_QUEUED
    if w.status == ABSENT or w.status == PART:
        found = FOUND_ABSENT
        w.first_row_s = now_s
        _enqueue(e, model, QUEUED if w.status == ABSENT else PART_QUEUED, caches)
    elif w.status == LOADING:
        found = FOUND_MOVING
    elif w.status == PREFETCH:
        found = FOUND_MOVING
        w.first_row_s = now_s
        _first_use(e, row, model, now_s, LATE, caches, log)
        cache.partial = -1
        if cache.link == PREFETCHING and cache.moving == model:
            cache.link = DEMAND
            w.status = LOADING
        else:
            _enqueue(e, model, HELD, caches)
    _wait(e, row, model, now_s, caches, log)
    if cache.link == PREFETCHING:
        _pause(e, PAUSING, now_s, world, caches)
    elif cache.link == DEMAND and cache.moving != model and policy.yields:
        _yield(e, model, now_s, world, caches)
    return found


@kernel_part
def _yield(e: int, model: int, now_s: float, world: World, caches: Caches) -> None:
    """The demand load on the link gives way to that of `model`, which waits for it, where Smith's order says so."""
    cache = caches.cache[e]
    moving, w = caches.weights[e][cache.moving], caches.weights[e][model]
    if outranks(w.rows, w.left_s, moving.rows, cache.finish_s - now_s):
        _pause(e, YIELDING, now_s, world, caches)


@kernel_part
def _pause(e: int, use: int, now_s: float, world: World, caches: Caches) -> None:
    """What is on the link ends with its block, unless that is its last; `use`: PAUSING or YIELDING."""
    cache = caches.cache[e]
    block_s = world.block_s[cache.moving]
    end_s = cache.segment_s + math.ceil((now_s - cache.segment_s) / block_s + 1e-9) * block_s
    if end_s < cache.finish_s:
        cache.link = use
        cache.finish_s = end_s


@kernel_part
def _hear(e: int, event: int, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """What hints say of one model has changed, and one cache is told."""
    now_s = hazard.hint_events[event].ts
    news = hazard.hint_events[event].news
    model = int(hazard.hint_events[event].model)
    said = hazard.hinted[model]
    cache = caches.cache[e]
    w = caches.weights[e][model]
    likely = is_likely(e, model, now_s, hazard, caches)
    if w.order >= 0 and log.orders[w.order].hint:
        if w.status == READY and w.unused and said.probability > 0.0:
            set_expiry(e, model, max(w.expiry_s, said.until_s), caches)
        elif w.status == PREFETCH and not likely and not news:
            if cache.link == PREFETCHING and cache.moving == model:
                _pause(e, PAUSING, now_s, world, caches)
            elif cache.moving != model:
                evict(e, model, now_s, CANCELLED, world, demand, caches, log)
    wanted = news and likely and (w.status == ABSENT or w.status == PART) and world.size_bytes[model] <= cache.capacity
    # What moves for a forecast can wait for what is due; what moves for a hint was first.
    if wanted and cache.link == PREFETCHING and not log.orders[caches.weights[e][cache.moving].order].hint:
        _pause(e, PAUSING, now_s, world, caches)
    if news and cache.link == IDLE:
        _next_transfer(e, now_s, True, world, demand, hazard, caches, log)
    _schedule(e, caches)


@kernel_part
def _hear_until(until_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> bool:
    """Hints up to `until_s`, inclusive; False when the log is full and the caller must grow it."""
    events = hazard.hint_events
    taken = hazard.hints_taken
    count = len(caches.policy)
    while taken[0] < len(events) and events[taken[0]].ts <= until_s:
        event = int(taken[0])
        for e in range(count):
            if caches.next_event_s[e] <= events[event].ts and not _run_until(e, events[event].ts, world, demand, hazard, caches, log):
                return False
        if not _has_space(len(world.size_bytes), count, log):
            return False
        said = hazard.hinted[events[event].model]
        said.probability = events[event].probability
        said.at_s = events[event].at_s
        said.end_s = events[event].end_s
        said.until_s = events[event].until_s
        said.announced = events[event].announced
        said.lead_s = events[event].lead_s
        taken[0] += 1
        for e in range(count):
            if caches.policy[e].hints:
                _hear(e, event, world, demand, hazard, caches, log)
    return True


@kernel
def advance(first: int, last: int, until_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> int:
    """Takes every cache through rows `first` to `last` (exclusive), then through events up to `until_s`.

    Returns the row it got to: `last` + 1 when all is done; less when `log` must grow, then call again from there.
    """
    world, demand, hazard = by_reference(world), by_reference(demand), by_reference(hazard)
    caches, log = by_reference(caches), by_reference(log)
    count = len(caches.policy)
    models = len(world.size_bytes)
    for row in range(first, last):
        now_s = world.ts[row]
        model = int(world.model[row])
        if len(hazard.hint_events) > 0 and not _hear_until(now_s, world, demand, hazard, caches, log):
            return row
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
        if len(hazard.hinted) > 0:
            hazard.hinted[model].probability = 0.0  # kept
    if len(hazard.hint_events) > 0 and not _hear_until(until_s, world, demand, hazard, caches, log):
        return last
    for e in range(count):
        if not _run_until(e, until_s, world, demand, hazard, caches, log):
            return last
    return last + 1


@kernel
def close(until_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> bool:
    """Ends what is still held at `until_s`; False when `log` must grow first."""
    world, demand, caches, log = by_reference(world), by_reference(demand), by_reference(caches), by_reference(log)
    for e in range(len(caches.policy)):
        if not _has_space(len(world.size_bytes), 1, log):
            return False
        sweep_expired(e, until_s, world, demand, caches, log)
        weights = caches.weights[e]
        for m in range(len(weights)):
            if weights[m].status == READY or weights[m].status == PREFETCH or weights[m].status == PART:
                evict(e, m, max(until_s, weights[m].taken_s), OPEN, world, demand, caches, log)
    return True

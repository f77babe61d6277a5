"""The transitions of a cluster without bytes: rows come, transfers end, ticks pass; which edge a model crosses next, what was found.

Kernels over `core.cluster` state; `advance_cluster` takes all caches through a stretch of the log, all nodes by one clock. A row that finds
its model ready in a lower tier, or nowhere, waits for the edges that are left, one after the other; each is a queue of its node's (or the
shared) link. What finds no room in a tier passes through it. Order at one instant: transfer ends, then ticks, then the row.
"""

from __future__ import annotations

import math

import numpy as np

from prefetcher.core.cluster import NOT_WAITING, ClusterCaches, ClusterWorld
from prefetcher.core.cluster_memory import (
    evict,
    hold_time,
    link_of,
    make_room,
    rest,
    set_expiry,
    start_transfer,
    sweep_expired,
    sweep_priced,
    take_memory,
)
from prefetcher.core.cluster_prefetch import prefetch_by_index, stay_on
from prefetcher.core.cluster_ranking import column_of, protected, sieve_enter
from prefetcher.core.cluster_routing import choose_node
from prefetcher.core.compiled import kernel, kernel_part
from prefetcher.core.demand import Demand, observe
from prefetcher.core.node import (
    DEMAND,
    HELD,
    IDLE,
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
    EventLog,
    Found,
    Hazard,
    PrefetchRule,
    Rank,
)
from prefetcher.core.node_prefetch import BUSY_TAU_S
from prefetcher.core.node_steps import LOAD_WEIGHT
from prefetcher.core.planner import next_in_smith_order, outranks
from prefetcher.core.references import by_reference

__all__ = ["advance_cluster", "close_cluster", "settle_cluster"]

FOUND_READY, FOUND_MOVING, FOUND_QUEUED, FOUND_ABSENT = (int(f) for f in Found)
BY_INDEX = int(PrefetchRule.INDEX)
SIEVE = int(Rank.SIEVE)


@kernel_part
def _log_segment(e: int, tier: int, number: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    link = caches.link[e, tier, number]
    if log.slot[e] >= 0:
        models = len(world.size_bytes)
        event = log.transfers[log.filled[1]]
        log.filled[1] += 1
        event.cache = e
        event.node = link.moving // models
        event.tier = tier
        event.model = link.moving % models
        event.start_s = link.segment_s
        event.end_s = now_s
        event.prefetch = caches.copy[e, tier, link.moving].prefetched and link.use != UNCACHED
        event.order = caches.copy[e, tier, link.moving].order
    link.busy_s = link.busy_s * math.exp(-(now_s - link.busy_at_s) / BUSY_TAU_S) + (now_s - link.segment_s)
    link.busy_at_s = now_s


@kernel_part
def _serve(e: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    """Gives the weights to every row that waits for them, and renews the keep-alives of all copies on the node."""
    seen = caches.seen[e, slot]
    caches.cache[e].period_wait_s += seen.rows * now_s - seen.row_sum_s
    number = log.slot[e]
    if number >= 0:
        row = seen.wait_head
        while row >= 0:
            log.wait_s[number, row] = now_s - log.wait_s[number, row]
            row = log.next_row[number, row]
    seen.wait_head = -1
    seen.rows = 0.0
    seen.row_sum_s = 0.0
    seen.stage = NOT_WAITING
    caches.claims[e, slot % len(world.size_bytes)] -= 1
    for tier in range(len(world.link_s)):
        _keep_alive(e, tier, slot, now_s, world, caches)


@kernel_part
def _keep_alive(e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    """From a use of ready weights at `now_s` on."""
    if caches.status[e, tier, slot] != READY:
        return
    caches.copy[e, tier, slot].expiry_s = np.inf
    if caches.policy[e].keep_alive_s < np.inf:
        set_expiry(e, tier, slot, now_s + caches.policy[e].keep_alive_s, world, caches)


@kernel_part
def _pause(e: int, tier: int, number: int, use: int, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    """What is on the link ends with its block, unless that is its last; `use`: PAUSING or YIELDING."""
    link = caches.link[e, tier, number]
    block_s = world.block_s[tier, link.moving % len(world.size_bytes)]
    end_s = link.segment_s + math.ceil((now_s - link.segment_s) / block_s + 1e-9) * block_s
    if end_s < link.finish_s:
        link.use = use
        link.finish_s = end_s
        caches.next_event_s[e] = min(caches.next_event_s[e], end_s)


@kernel_part
def _give_way(e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    """A prefetch gives way to rows that wait for `slot`, and so does a demand load that comes after it in Smith's order."""
    number = link_of(tier, slot // len(world.size_bytes), world)
    link = caches.link[e, tier, number]
    if link.use == PREFETCHING:
        _pause(e, tier, number, PAUSING, now_s, world, caches)
    elif link.use == DEMAND and link.moving != slot and caches.policy[e].yields:
        rows, left_s = caches.seen[e, slot].rows, caches.copy[e, tier, slot].left_s
        if outranks(rows, left_s, caches.seen[e, link.moving].rows, link.finish_s - now_s):
            _pause(e, tier, number, YIELDING, now_s, world, caches)


@kernel_part
def _put_in_queue(e: int, tier: int, slot: int, status: int, world: ClusterWorld, caches: ClusterCaches) -> None:
    number = link_of(tier, slot // len(world.size_bytes), world)
    link = caches.link[e, tier, number]
    caches.status[e, tier, slot] = status
    caches.queue[e, tier, number, link.queued] = slot
    link.queued += 1


@kernel_part
def _enqueue(e: int, tier: int, slot: int, status: int, now_s: float, world: ClusterWorld, caches: ClusterCaches) -> None:
    """A demanded model comes to the link into `tier`, and waits for it."""
    if caches.status[e, tier, slot] == PART:
        status = PART_QUEUED
    _put_in_queue(e, tier, slot, status, world, caches)
    seen = caches.seen[e, slot]
    seen.stage = tier
    seen.stage_s = now_s


@kernel_part
def _go_on(e: int, tier: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    """A demanded model has crossed the edge into `tier`: its rows are served, or it waits for the next edge."""
    number = link_of(tier, slot // len(world.size_bytes), world)
    caches.link[e, tier, number].waiting -= caches.seen[e, slot].rows
    if tier + 1 == len(world.link_s):
        _serve(e, slot, now_s, world, caches, log)
        return
    _keep_alive(e, tier, slot, now_s, world, caches)
    following = link_of(tier + 1, slot // len(world.size_bytes), world)
    caches.link[e, tier + 1, following].waiting += caches.seen[e, slot].rows
    _enqueue(e, tier + 1, slot, QUEUED, now_s, world, caches)
    _give_way(e, tier + 1, slot, now_s, world, caches)


@kernel_part
def _end_transfer(e: int, tier: int, number: int, world: ClusterWorld, demand: Demand, caches: ClusterCaches, log: EventLog) -> int:
    """Ends what is on a link; returns its slot."""
    link = caches.link[e, tier, number]
    policy = caches.policy[e]
    models = len(world.size_bytes)
    now_s = link.finish_s
    slot = int(link.moving)
    node, model = slot // models, slot % models
    copy = caches.copy[e, tier, slot]
    use = link.use
    _log_segment(e, tier, number, now_s, world, caches, log)
    link.use = IDLE
    link.moving = -1
    link.finish_s = np.inf
    if use in (PAUSING, YIELDING):
        copy.left_s = max(copy.left_s - (now_s - link.segment_s), 0.0)
        if use == YIELDING:
            _put_in_queue(e, tier, slot, YIELDED, world, caches)
        return slot
    copy.load_end_s = now_s
    if use == UNCACHED:
        rest(e, tier, slot, world, caches)
        _go_on(e, tier, slot, now_s, world, caches, log)
        return slot
    copy.left_s = world.link_s[tier, model]
    caches.status[e, tier, slot] = READY
    caches.ready[e, tier, model] += 1
    copy.ready_s = now_s
    if copy.order >= 0:
        log.orders[copy.order].ready_s = now_s
    if policy.rank == SIEVE:
        sieve_enter(e, tier, node, slot, caches)
    if use == DEMAND:
        copy.priority = caches.tier[e, tier, node].clock + caches.seen[e, slot].seen
        _go_on(e, tier, slot, now_s, world, caches, log)
    else:
        caches.claims[e, model] -= 1
        link.partial = -1
        copy.priority = max(copy.priority, caches.tier[e, tier, node].clock)
        set_expiry(e, tier, slot, now_s + policy.hold_s, world, caches)
    return slot


@kernel_part
def _start_demand(
    e: int, tier: int, number: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog
) -> None:
    link = caches.link[e, tier, number]
    queue = caches.queue[e, tier, number]
    position = 0
    if caches.policy[e].smith:
        waiting = np.empty(link.queued)
        left_s = np.empty(link.queued)
        for q in range(link.queued):
            waiting[q] = caches.seen[e, queue[q]].rows
            left_s[q] = max(caches.copy[e, tier, queue[q]].left_s, 1e-9)
        position = next_in_smith_order(waiting, left_s)
    slot = int(queue[position])
    for q in range(position, link.queued - 1):
        queue[q] = queue[q + 1]
    link.queued -= 1
    if caches.status[e, tier, slot] == YIELDED:
        start_transfer(e, tier, slot, DEMAND, now_s, world, caches)
        return
    seen = caches.seen[e, slot]
    edge = caches.edge[e, tier]
    others = caches.others[e, tier, slot % len(world.size_bytes)]
    edge.recent_wait_s += LOAD_WEIGHT * (now_s - seen.stage_s - edge.recent_wait_s)
    edge.waiting_mean += LOAD_WEIGHT * (link.waiting - edge.waiting_mean)
    others.others += link.waiting - seen.rows
    others.loads += 1.0
    seen.started = True
    if caches.status[e, tier, slot] == HELD:
        start_transfer(e, tier, slot, DEMAND, now_s, world, caches)
    elif make_room(e, tier, slot, now_s, world, demand, hazard, caches, log):
        take_memory(e, tier, slot, now_s, False, world, caches, log)
        start_transfer(e, tier, slot, DEMAND, now_s, world, caches)
    else:
        caches.copy[e, tier, slot].left_s = world.link_s[tier, slot % len(world.size_bytes)]
        start_transfer(e, tier, slot, UNCACHED, now_s, world, caches)


@kernel_part
def _next_transfer(
    e: int,
    tier: int,
    number: int,
    now_s: float,
    opportunity: bool,
    world: ClusterWorld,
    demand: Demand,
    hazard: Hazard,
    caches: ClusterCaches,
    log: EventLog,
) -> None:
    """An idle link takes the next demand load, or at an opportunity (a transfer's end, a tick) a prefetch."""
    link = caches.link[e, tier, number]
    if link.use != IDLE:
        return
    if link.queued > 0:
        _start_demand(e, tier, number, now_s, world, demand, hazard, caches, log)
    elif opportunity and now_s < world.t1_s and caches.policy[e].prefetch == BY_INDEX:
        last = world.nodes if tier == 0 and world.shared else number + 1
        for node in range(number, last):
            sweep_expired(e, tier, node, now_s, world, caches, log)
            prefetch_by_index(e, tier, node, now_s, world, demand, hazard, caches, log)
            if link.use != IDLE:
                return


@kernel_part
def _schedule(e: int, world: ClusterWorld, caches: ClusterCaches) -> None:
    due_s = caches.cache[e].next_tick_s
    for tier in range(len(world.link_s)):
        for number in range(1 if tier == 0 and world.shared else world.nodes):
            due_s = min(due_s, caches.link[e, tier, number].finish_s)
    caches.next_event_s[e] = due_s


@kernel_part
def _has_space(nodes: int, world: ClusterWorld, log: EventLog) -> bool:
    room = nodes * len(world.link_s) * (len(world.size_bytes) + 8)
    fullest = max(log.filled[0] - len(log.residency), log.filled[1] - len(log.transfers), log.filled[2] - len(log.orders))
    return bool(fullest + room < 0)


@kernel_part
def _tick(e: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog) -> None:
    cache = caches.cache[e]
    policy = caches.policy[e]
    cache.next_tick_s += world.tick_s
    prefetches = policy.prefetch == BY_INDEX
    if cache.next_tick_s > world.t1_s or not (prefetches or policy.load_aware):
        cache.next_tick_s = np.inf
    for tier in range(len(world.link_s)):
        for node in range(world.nodes):
            if policy.load_aware and caches.price[e, tier] > 0.0:
                sweep_priced(e, tier, node, now_s, world, demand, hazard, caches, log)
            if prefetches:
                stay_on(e, tier, node, now_s, world, demand, hazard, caches)
    if prefetches:
        for tier in range(len(world.link_s)):
            for number in range(1 if tier == 0 and world.shared else world.nodes):
                _next_transfer(e, tier, number, now_s, True, world, demand, hazard, caches, log)


@kernel_part
def _run_until(e: int, until_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog) -> bool:
    """Transfer ends and ticks up to `until_s`, inclusive; False when the log is full and the caller must grow it."""
    tiers, models = len(world.link_s), len(world.size_bytes)
    while caches.next_event_s[e] <= until_s and caches.next_event_s[e] < np.inf:
        if not _has_space(world.nodes, world, log):
            return False
        now_s = caches.next_event_s[e]
        ended = False
        for tier in range(tiers):
            for number in range(1 if tier == 0 and world.shared else world.nodes):
                if caches.link[e, tier, number].finish_s <= now_s and not ended:
                    ended = True
                    slot = _end_transfer(e, tier, number, world, demand, caches, log)
                    _next_transfer(e, tier, number, now_s, True, world, demand, hazard, caches, log)
                    if tier + 1 < tiers:
                        _next_transfer(
                            e, tier + 1, link_of(tier + 1, slot // models, world), now_s, True, world, demand, hazard, caches, log
                        )
        if not ended and caches.cache[e].next_tick_s <= now_s:
            _tick(e, now_s, world, demand, hazard, caches, log)
        _schedule(e, world, caches)
    return True


@kernel_part
def _wait(e: int, row: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> None:
    seen = caches.seen[e, slot]
    seen.rows += 1.0
    seen.row_sum_s += now_s
    caches.link[e, seen.stage, link_of(seen.stage, slot // len(world.size_bytes), world)].waiting += 1.0
    number = log.slot[e]
    if number >= 0:
        log.wait_s[number, row] = now_s
        log.next_row[number, row] = seen.wait_head
        seen.wait_head = row


@kernel_part
def _first_use(e: int, tier: int, row: int, slot: int, now_s: float, outcome: int, caches: ClusterCaches, log: EventLog) -> None:
    copy = caches.copy[e, tier, slot]
    copy.unused = False
    if copy.order >= 0:
        log.orders[copy.order].first_use_s = now_s
        log.orders[copy.order].first_row = row
        log.orders[copy.order].outcome = outcome


@kernel_part
def _meet_copies(e: int, row: int, slot: int, now_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> int:
    """A row touches all copies on its node; the highest tier where its model is ready, −1 for none."""
    policy = caches.policy[e]
    highest = -1
    for tier in range(len(world.link_s)):
        copy = caches.copy[e, tier, slot]
        if caches.status[e, tier, slot] == READY and copy.expiry_s <= now_s and not protected(e, tier, slot, caches):
            evict(e, tier, slot, copy.expiry_s, USELESS, world, caches, log)
        if copy.last_order >= 0:
            last = log.orders[copy.last_order]
            if last.outcome >= USELESS:
                last.premature = now_s - last.end_s <= min(policy.hold_s, 600.0)
                copy.last_order = -1
        if caches.status[e, tier, slot] == READY:
            if copy.unused:
                _first_use(e, tier, row, slot, now_s, TIMELY, caches, log)
            copy.priority = caches.tier[e, tier, slot // len(world.size_bytes)].clock + caches.seen[e, slot].seen
            copy.visited = True
            _keep_alive(e, tier, slot, now_s, world, caches)
            highest = tier
    return highest


@kernel_part
def _row(
    e: int, row: int, slot: int, now_s: float, world: ClusterWorld, demand: Demand, hazard: Hazard, caches: ClusterCaches, log: EventLog
) -> int:
    """One row meets one node of one cache; what it found in the last tier."""
    tiers, models = len(world.link_s), len(world.size_bytes)
    seen = caches.seen[e, slot]
    seen.last_row_s = now_s
    seen.seen += 1.0
    highest = _meet_copies(e, row, slot, now_s, world, caches, log)
    if highest == tiers - 1:
        return FOUND_READY
    if seen.stage >= 0:
        _wait(e, row, slot, now_s, world, caches, log)
        _give_way(e, int(seen.stage), slot, now_s, world, caches)
        return FOUND_MOVING if seen.started else FOUND_QUEUED
    tier = highest + 1
    number = link_of(tier, slot // models, world)
    link = caches.link[e, tier, number]
    found = FOUND_ABSENT
    caches.claims[e, slot % models] += 1
    seen.started = False
    if caches.status[e, tier, slot] == PREFETCH:
        found = FOUND_MOVING
        caches.claims[e, slot % models] -= 1
        _first_use(e, tier, row, slot, now_s, LATE, caches, log)
        seen.started = True
        link.partial = -1
        if link.use == PREFETCHING and link.moving == slot:
            link.use = DEMAND
            caches.status[e, tier, slot] = LOADING
            seen.stage = tier
            seen.stage_s = now_s
        else:
            _enqueue(e, tier, slot, HELD, now_s, world, caches)
    else:
        _enqueue(e, tier, slot, QUEUED, now_s, world, caches)
    _wait(e, row, slot, now_s, world, caches, log)
    _give_way(e, tier, slot, now_s, world, caches)
    _next_transfer(e, tier, number, now_s, False, world, demand, hazard, caches, log)
    return found


@kernel
def advance_cluster(
    first: int,
    last: int,
    until_s: float,
    world: ClusterWorld,
    demand: Demand,
    hazard: Hazard,
    caches: ClusterCaches,
    log: EventLog,
) -> int:
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
        for e in range(count):
            if caches.next_event_s[e] <= now_s and not _run_until(e, now_s, world, demand, hazard, caches, log):
                return row
        if not _has_space(count, world, log):
            return row
        named = int(world.node[row])
        column = column_of(named if named >= 0 else int(world.home[model]), model, world)
        observe(demand, column, now_s)
        caches.next_ts[column] = world.next_ts[row]
        if hazard.after_row.shape[1] > row - hazard.first_row:
            for v in range(len(hazard.latest)):
                hazard.latest[v, model] = hazard.after_row[v, row - hazard.first_row]
        for e in range(count):
            node = choose_node(e, row, model, now_s, world, demand, hazard, caches)
            found = _row(e, row, node * models + model, now_s, world, demand, hazard, caches, log)
            number = log.slot[e]
            if number >= 0:
                log.found[number, row] = found
                caches.log_node[number, row] = node
    for e in range(count):
        if not _run_until(e, until_s, world, demand, hazard, caches, log):
            return last
    return last + 1


@kernel
def settle_cluster(until_s: float, caches: ClusterCaches) -> None:
    """Counts what was held up to `until_s` into the period."""
    caches = by_reference(caches)
    for e in range(len(caches.policy)):
        hold_time(e, until_s, caches)


@kernel
def close_cluster(until_s: float, world: ClusterWorld, caches: ClusterCaches, log: EventLog) -> bool:
    """Ends what is still held at `until_s`; False when `log` must grow first."""
    world, caches, log = by_reference(world), by_reference(caches), by_reference(log)
    models = len(world.size_bytes)
    for e in range(len(caches.policy)):
        for tier in range(len(world.link_s)):
            for node in range(world.nodes):
                if not _has_space(1, world, log):
                    return False
                sweep_expired(e, tier, node, until_s, world, caches, log)
                for slot in range(node * models, (node + 1) * models):
                    if caches.status[e, tier, slot] in (READY, PREFETCH, PART):
                        evict(e, tier, slot, max(until_s, caches.copy[e, tier, slot].taken_s), OPEN, world, caches, log)
    return True

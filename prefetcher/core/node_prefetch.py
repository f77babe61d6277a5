"""What a cache fetches without demand, by rule: the guarded prefetch by index and by hints, the earliest next use, hybrid's pre-warming.

Called only when the link is idle and no demand waits (`core.node_steps`); each rule starts at most one transfer.
"""

from __future__ import annotations

import math

import numpy as np

from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand
from prefetcher.core.node import (
    ABSENT,
    CANCELLED,
    DISPLACED,
    OPEN,
    PART,
    PREFETCH,
    PREFETCHING,
    READY,
    Caches,
    EventLog,
    Hazard,
    PrefetchRule,
    World,
)
from prefetcher.core.node_memory import evict, evictable, give_back, make_room, start_transfer, take_memory
from prefetcher.core.planner import choose_parts, choose_victims, outbids, victims_in_order
from prefetcher.core.ranking import hint_per_s, key_of, key_of_rate, next_use_per_s
from prefetcher.core.value import LEAST_CHANCE, MOST_HOLDS, beyond_hints, head_start, load_discount, may_start

__all__ = ["BUSY_TAU_S", "is_likely", "prefetch_by_index", "prefetch_earliest", "prewarm", "stay_on"]

BY_INDEX = int(PrefetchRule.INDEX)
#: Link use is measured with this time constant.
BUSY_TAU_S = 600.0
#: A paused prefetch is worth this much more than one that would start from nothing.
RESUME_BONUS = 1.2
#: Candidates tried when the best one does not outbid its victims.
CANDIDATES = 4
#: A prefetch given up unused comes back only for a row of its model or for a score this many times higher.
SECOND_CHANCE = 2.0


@kernel_part
def _issue(e: int, model: int, now_s: float, hint: bool, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
    """Starts a prefetch whose room is there; `hint`: for a hint, not for a forecast."""
    cache = caches.cache[e]
    if cache.partial >= 0 and cache.partial != model:
        evict(e, cache.partial, now_s, CANCELLED, world, demand, caches, log)
    if cache.partial != model:
        take_memory(e, model, now_s, True, world, demand, caches, log)
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
        order.first_row = -1
        order.hint = hint
        caches.weights[e][model].order = number
        caches.weights[e][model].last_order = number
        cache.partial = model
    start_transfer(e, model, PREFETCHING, now_s, caches)


@kernel_part
def is_likely(e: int, model: int, now_s: float, hazard: Hazard, caches: Caches) -> bool:
    """Whether open hints say that `model` is used soon, likely enough to displace others for it."""
    return hint_per_s(e, model, now_s, hazard, caches) > 0.0 and hazard.hinted[model].probability >= LEAST_CHANCE


@kernel_part
def _variant(e: int, model: int, caches: Caches) -> int:
    """The rate that ranks prefetches of `model`, and what they displace: its window's, else the policy's."""
    variant = caches.windows[e, model].variant
    if variant < 0:
        variant = caches.policy[e].prefetch_variant
    return int(variant)


@kernel_part
def _forecast_value(
    e: int, model: int, rate: float, load_s: float, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches
) -> float:
    """What a prefetch by forecast is worth per byte: the index, but for what comes while it loads, and for what hints will say in time."""
    value = key_of_rate(e, model, rate, False, now_s, world, demand, caches) * load_discount(rate, load_s)
    if caches.policy[e].hints and len(hazard.hinted) > 0:
        value *= beyond_hints(hazard.hinted[model].announced, hazard.hinted[model].lead_s, load_s)
    return float(value)


@kernel_part
def prefetch_by_index(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """The guarded prefetch: on a quiet link, the highest discounted index first, at `margin` times what it displaces. What is hinted is
    fetched on a busy link too, and by caches that don't prefetch otherwise."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    weights = caches.weights[e]
    if cache.partial >= 0 and log.orders[weights[cache.partial].order].hint and not is_likely(e, cache.partial, now_s, hazard, caches):
        evict(e, cache.partial, now_s, CANCELLED, world, demand, caches, log)
    hinted_only = policy.prefetch != BY_INDEX
    if cache.busy_s * math.exp(-(now_s - cache.busy_at_s) / BUSY_TAU_S) / BUSY_TAU_S > policy.busy_ratio:
        if not policy.hints:
            return
        hinted_only = True
    best = np.full(CANDIDATES, -1, np.int64)
    by_hint = np.zeros(CANDIDATES, np.bool_)
    score = np.zeros(CANDIDATES)
    for m in range(len(weights)):
        status = weights[m].status
        if (status != ABSENT and status != PART and status != PREFETCH) or world.size_bytes[m] > cache.capacity:
            continue
        load_s = weights[m].left_s if status == PART else world.link_s[m]
        rate = 0.0
        if not hinted_only and demand.rows[m] > 0:
            rate = next_use_per_s(policy.rank, policy.tau, _variant(e, m, caches), m, now_s, demand, hazard, world, caches.next_ts)
            # What has begun and is paused may go on.
            if status != PREFETCH and not may_start(rate, load_s, cache.recent_wait_s, caches.windows[e, m].lead_s):
                rate = 0.0
        hinted = hint_per_s(e, m, now_s, hazard, caches)
        if rate <= 0.0 and hinted <= 0.0:
            continue
        value = _forecast_value(e, m, rate, load_s, now_s, world, demand, hazard, caches)
        if hinted > 0.0:
            share = head_start(hazard.hinted[m].at_s, hazard.hinted[m].end_s, now_s, load_s)
            value = max(value, key_of_rate(e, m, hinted, False, now_s, world, demand, caches) * share)
        if status == PREFETCH:
            value *= RESUME_BONUS
        elif hinted <= 0.0 and weights[m].refused_after_s > demand.last_s[m] and value < SECOND_CHANCE * weights[m].priority:
            continue
        if value <= policy.price or value <= score[CANDIDATES - 1]:
            continue
        place = CANDIDATES - 1
        while place > 0 and value > score[place - 1]:
            score[place] = score[place - 1]
            best[place] = best[place - 1]
            by_hint[place] = by_hint[place - 1]
            place -= 1
        score[place] = value
        best[place] = m
        by_hint[place] = hinted > 0.0 and hinted >= rate
    if best[0] < 0:
        return
    key = np.empty(0)
    held = np.empty(0)
    residents = np.empty(0, np.int64)
    partial_bytes = world.size_bytes[cache.partial] if cache.partial >= 0 else 0.0
    for place in range(CANDIDATES):
        model = best[place]
        if model < 0:
            return
        if model == cache.partial:
            _issue(e, model, now_s, by_hint[place], world, demand, caches, log)
            return
        size = world.size_bytes[model] - weights[model].held_bytes
        need = cache.used - partial_bytes + size - cache.capacity
        kept = 0.0
        if need <= 0.0:
            victims = residents[:0]
        else:
            if by_hint[place] and not is_likely(e, model, now_s, hazard, caches):
                continue
            if len(key) == 0:
                residents = evictable(e, -1, caches)
                key = np.empty(len(weights))
                held = np.empty(len(weights))
                for resident in residents:
                    held[resident] = weights[resident].held_bytes
                    variant = _variant(e, int(resident), caches)
                    key[resident] = key_of(e, int(resident), variant, False, now_s, world, demand, hazard, caches)
            others = residents[residents != model]
            if policy.parts:
                victims, suffice, kept = choose_parts(key, held, others, need)
            else:
                victims, suffice = choose_victims(key, held, others, need)
            whole = world.size_bytes[model]
            if not suffice or not outbids(score[place] / policy.margin, whole, key, held, victims, kept):
                continue
            highest = 0.0
            for victim in victims:
                highest = max(highest, key[victim])
            if score[place] <= policy.margin * highest:
                continue
        for victim in victims:
            give_back(e, victim, now_s, DISPLACED, kept if victim == victims[-1] else 0.0, world, demand, caches, log)
        weights[model].priority = score[place]
        _issue(e, model, now_s, by_hint[place], world, demand, caches, log)
        return


@kernel_part
def stay_on(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
    """At a tick, holds of unused forecasts that would end before the next one go on for a tick where the policy's `stays_at` says so:
    giving up what is still worth its room would only make room for what is worth less."""
    cache = caches.cache[e]
    policy = caches.policy[e]
    weights = caches.weights[e]
    next_s = now_s + world.tick_s
    if policy.stays_at == np.inf or cache.expiry_s > next_s:
        return
    for m in range(len(weights)):
        w = weights[m]
        if w.status != READY or not w.unused or log.orders[w.order].hint or w.expiry_s <= now_s or w.expiry_s > next_s:
            continue
        rate = next_use_per_s(policy.rank, policy.tau, _variant(e, m, caches), m, now_s, demand, hazard, world, caches.next_ts)
        score = _forecast_value(e, m, rate, world.link_s[m], now_s, world, demand, hazard, caches)
        if score >= policy.stays_at * w.priority:
            w.expiry_s = max(w.expiry_s, min(w.expiry_s + world.tick_s, w.ready_s + MOST_HOLDS * caches.windows[e, m].hold_s))


@kernel_part
def prefetch_earliest(e: int, now_s: float, world: World, demand: Demand, caches: Caches, log: EventLog) -> None:
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
            victims, suffice = victims_in_order(key, world.size_bytes, later[:number], need)
            if not suffice:
                return
            for m in victims:
                evict(e, m, now_s, DISPLACED, world, demand, caches, log)
    _issue(e, model, now_s, False, world, demand, caches, log)


@kernel_part
def prewarm(e: int, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches, log: EventLog) -> None:
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
    if make_room(e, model, now_s, world, demand, hazard, caches, log):
        _issue(e, model, now_s, False, world, demand, caches, log)

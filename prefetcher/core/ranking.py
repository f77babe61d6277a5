"""What residents and candidates are ranked by, for every policy: one key a model, lowest goes first.

For policies that weigh bytes (`as_set`, `bypass`, prefetch) the key is proportional to the index h·C/s; for the classic rivals it is their
own priority. SIEVE has no key but a hand, kept here as well.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel_part
from prefetcher.core.demand import Demand, decayed_rate, hit_density
from prefetcher.core.node import IDLE_BINS, Caches, Hazard, Rank, World
from prefetcher.core.value import hinted_rate, index_per_byte, miss_cost_s

__all__ = ["hint_per_s", "idle_window", "key_of", "key_of_rate", "next_use_per_s", "sieve_enter", "sieve_leave", "sieve_next"]

LRU, LFU, MIX, GDSF, SIEVE, LHD, HAZARD, HAZARD_MIX, NEXT_USE, NEXT_USE_BYTES = (int(r) for r in Rank)
#: Columns of STANDARD_TAUS_S that the mix averages, and the one that tells how many join a load.
MIX_TAUS = (0, 1, 2, 3)
JOINERS_TAU = 1
#: Pseudo-loads that shrink a model's own count of waiting rows to the node's.
WAITING_PRIOR_LOADS = 3.0


@kernel_part
def _hazard_rate(hazard: Hazard, variant: int, model: int, now_s: float, demand: Demand, world: World) -> float:
    tick = int((now_s - world.t0_s) / world.tick_s)
    tick_at_s = world.t0_s + tick * world.tick_s
    if demand.last_s[model] >= tick_at_s:
        rate = hazard.latest[variant, model]
    else:
        column = min(max(tick - hazard.first_tick, 0), hazard.at_tick.shape[1] - 1)
        rate = hazard.at_tick[variant, column, model]
    return 0.0 if np.isnan(rate) else float(rate)


@kernel_part
def _mix_rate(demand: Demand, model: int, now_s: float) -> float:
    rate = 0.0
    for k in MIX_TAUS:
        rate += decayed_rate(demand, k, model, now_s)
    return float(rate / len(MIX_TAUS))


@kernel_part
def next_use_per_s(
    rank: int,
    tau: int,
    variant: int,
    model: int,
    now_s: float,
    demand: Demand,
    hazard: Hazard,
    world: World,
    next_ts: npt.NDArray[np.float64],
) -> float:
    """h, the rate at which the next use comes, as the expert sees it; 0 for a model without a row (unless the future is known)."""
    if rank == NEXT_USE:
        return float(1.0 / max(next_ts[model] - now_s, 1e-3))
    if rank == NEXT_USE_BYTES:
        return float(1.0 / (max(next_ts[model] - now_s, 1e-3) * world.size_bytes[model]))
    if demand.rows[model] == 0:
        return 0.0
    if rank == LFU:
        return decayed_rate(demand, tau, model, now_s)
    if rank == MIX:
        return _mix_rate(demand, model, now_s)
    if rank == LHD:
        return hit_density(demand, model, now_s)
    if rank == HAZARD:
        return _hazard_rate(hazard, variant, model, now_s, demand, world)
    if rank == HAZARD_MIX:
        learned = _hazard_rate(hazard, variant, model, now_s, demand, world)
        return math.exp(0.7 * math.log(learned + 1e-12) + 0.3 * math.log(_mix_rate(demand, model, now_s) + 1e-12))
    return 0.0


@kernel_part
def hint_per_s(e: int, model: int, now_s: float, hazard: Hazard, caches: Caches) -> float:
    """The rate of next use that open hints alone speak of; 0 for a cache that is not told of them."""
    if not caches.policy[e].hints or len(hazard.hinted) == 0:
        return 0.0
    said = hazard.hinted[model]
    return hinted_rate(said.probability, said.at_s, said.end_s, now_s)


@kernel_part
def key_of_rate(e: int, model: int, rate: float, own_waiting: bool, now_s: float, world: World, demand: Demand, caches: Caches) -> float:
    """The key of a model whose rate of next use is known: the index where the policy is load-aware, else the rate itself."""
    if not caches.policy[e].load_aware:
        return rate
    weights = caches.weights[e]
    cache = caches.cache[e]
    waiting = cache.waiting_mean
    if own_waiting:
        waiting = (weights[model].others + WAITING_PRIOR_LOADS * waiting) / (weights[model].loads + WAITING_PRIOR_LOADS)
    cost_s = miss_cost_s(world.link_s[model], cache.recent_wait_s, decayed_rate(demand, JOINERS_TAU, model, now_s), waiting)
    return index_per_byte(rate, cost_s, world.size_bytes[model])


@kernel_part
def key_of(
    e: int, model: int, variant: int, own_waiting: bool, now_s: float, world: World, demand: Demand, hazard: Hazard, caches: Caches
) -> float:
    """The key of one model in cache `e`. `own_waiting` takes μ by model (keep and bypass), else the node's (prefetch)."""
    policy = caches.policy[e]
    weights = caches.weights[e]
    rank = policy.rank
    if rank == LRU:
        return float(max(demand.last_s[model], weights[model].load_end_s))
    if rank == GDSF:
        return float(weights[model].priority)
    rate = next_use_per_s(rank, policy.tau, variant, model, now_s, demand, hazard, world, caches.next_ts)
    rate = max(rate, hint_per_s(e, model, now_s, hazard, caches))
    return key_of_rate(e, model, rate, own_waiting, now_s, world, demand, caches)


@kernel_part
def sieve_enter(e: int, model: int, caches: Caches) -> None:
    """Puts a loaded model at the head of the queue. Source: Zhang et al., SIEVE, NSDI 2024."""
    cache = caches.cache[e]
    weights = caches.weights[e]
    weights[model].visited = False
    weights[model].older = cache.sieve_head
    weights[model].newer = -1
    if cache.sieve_head >= 0:
        weights[cache.sieve_head].newer = model
    cache.sieve_head = model
    if cache.sieve_tail < 0:
        cache.sieve_tail = model


@kernel_part
def sieve_leave(e: int, model: int, caches: Caches) -> None:
    """Takes an evicted model out of the queue; the hand moves on to the next newer one."""
    cache = caches.cache[e]
    weights = caches.weights[e]
    older, newer = weights[model].older, weights[model].newer
    if older >= 0:
        weights[older].newer = newer
    else:
        cache.sieve_tail = newer
    if newer >= 0:
        weights[newer].older = older
    else:
        cache.sieve_head = older
    if cache.sieve_hand == model:
        cache.sieve_hand = newer


@kernel_part
def sieve_next(e: int, caches: Caches) -> int:
    """The next victim: the hand goes from old to new, clears marks, and stops at the first resident without one."""
    cache = caches.cache[e]
    weights = caches.weights[e]
    hand = cache.sieve_hand
    if hand < 0:
        hand = cache.sieve_tail
    while weights[hand].visited:
        weights[hand].visited = False
        hand = weights[hand].newer
        if hand < 0:
            hand = cache.sieve_tail
    cache.sieve_hand = hand
    return int(hand)


@kernel_part
def idle_window(histogram: npt.NDArray[np.float32], inside: float, outside: float) -> tuple[float, float]:
    """(pre-warm after, keep until), seconds after the last use, from minutes of idle time. Source: Shahrad et al., USENIX ATC 2020.

    Head P5 × 0.9, tail P99 × 1.1. Without 60 idle times, with most of them outside, or with a coefficient of variation of the bin counts
    under 2: no pre-warming and four hours.
    """
    always = (0.0, 4.0 * 3600.0)
    if inside + outside < 60.0 or outside > inside:
        return always
    mean = inside / IDLE_BINS
    spread = 0.0
    for b in range(IDLE_BINS):
        spread += (histogram[b] - mean) ** 2
    if math.sqrt(spread / IDLE_BINS) < 2.0 * mean:
        return always
    seen = 0.0
    head = -1
    tail = IDLE_BINS - 1
    for b in range(IDLE_BINS):
        seen += histogram[b]
        if head < 0 and seen >= 0.05 * inside:
            head = b
        if seen >= 0.99 * inside:
            tail = b
            break
    return 0.9 * head * 60.0, 1.1 * (tail + 1) * 60.0

"""Who may come into a tier, who makes room, and who is served from the tier below instead.

Works out, for one transfer that could start now, one of the admissions below; `core.residency` acts on it. The rules
themselves (victims as
a set, bypass) are `core.planner`'s. Nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np

from prefetcher.core.copies import IN_FLIGHT, Holdings, Stage, Weights
from prefetcher.core.planner import choose_parts, choose_victims, outbids
from prefetcher.core.quotas import CAPPED, gives_up
from prefetcher.core.types import TenantQuota, Tier

__all__ = ["Admission", "Rank", "Verdict", "admit", "below_price", "index_of", "over_cap", "under_cap"]

#: The index window of the decision: weights that nobody knows anything about are taken to be used once in it at most.
UNKNOWN_WINDOW_S = 600.0


class Rank(IntEnum):
    """Whose transfer it is; lower goes first."""

    DEMAND = 0
    HAND = 1
    CARRY = 2
    PREFETCH = 3


class Verdict(StrEnum):
    START = "start"  # the memory is there
    EVICT = "evict"  # it is there once `victims` (and what was paused, `dropped`) have left
    WAIT = "wait"  # it is there once the kernel gives back what already leaves
    BYPASS = "bypass"  # not worth its victims, or its price
    NO_ROOM = "no_room"  # what could leave does not suffice just now
    NEVER = "does_not_fit"  # larger than what the tier may ever give it


@dataclass(frozen=True, slots=True)
class Admission:
    verdict: Verdict
    reason: str = ""
    victims: list[Weights] = field(default_factory=list)
    dropped: list[Weights] = field(default_factory=list)
    #: What the last victim keeps: the room does not need it.
    kept_bytes: int = 0


def index_of(weights: Weights, holdings: Holdings, now_s: float) -> float:
    """What a held byte saves per second: the plan's figure, else one from recency alone, so that the unknown are
    ranked as LRU would.

    The hazard of weights of which only the last use is known is taken as 1 / max(age, 600 s), and a miss costs the
    bytes' own link time.
    """
    if weights.index is not None:
        return weights.index
    return 1.0 / (holdings.limits.link_bytes_per_s * max(now_s - weights.last_use_s, UNKNOWN_WINDOW_S))


def below_price(weights: Weights, holdings: Holdings, price_per_byte_s: float, now_s: float) -> bool:
    """Whether a held byte costs more than it saves; of unknown index, whether they idled for their ski-rental time C / (λ·s)."""
    if weights.index is not None:
        return weights.index < price_per_byte_s
    age_s = max(0.0, now_s - weights.last_use_s)
    return age_s * price_per_byte_s * holdings.limits.link_bytes_per_s > 1.0


def admit(
    holdings: Holdings,
    weights: Weights,
    tier: Tier,
    rank: Rank,
    price_per_byte_s: float,
    now_s: float,
    claimed_bytes: int = 0,
) -> Admission:
    """What would have to happen for `weights` to move into `tier` now. `claimed_bytes` are promised to a transfer ahead of it."""
    copy = weights.copies.get(tier)
    # Nothing can be opened below the disk: demand comes there whatever it is worth.
    may_bypass = rank is Rank.DEMAND and not weights.pinned and tier > Tier.DISK
    if copy is not None and copy.stage is not Stage.PART:
        if may_bypass and holdings.lingers(copy, now_s):
            return Admission(Verdict.BYPASS, "still_mapped")
        return Admission(Verdict.START if copy.stage is Stage.PAUSED else Verdict.WAIT)
    guess = rank in (Rank.PREFETCH, Rank.CARRY)
    if may_bypass and below_price(weights, holdings, price_per_byte_s, now_s):
        return Admission(Verdict.BYPASS, "price")
    if may_bypass and not weights.rows and not under_cap(holdings, weights, now_s, guess=False, tier=tier)[1]:
        # Only programs wait, and none of them would be given what was loaded.
        return Admission(Verdict.BYPASS, CAPPED)
    if rank in (Rank.PREFETCH, Rank.HAND):
        given_up, fits = under_cap(holdings, weights, now_s, guess=rank is Rank.PREFETCH, tier=tier)
        if not fits:
            return Admission(Verdict.NO_ROOM, CAPPED)
        if given_up:
            return Admission(Verdict.EVICT, CAPPED, given_up)
    budget = holdings.budget(tier, prefetch=guess)
    if budget is None:
        return Admission(Verdict.START)
    if weights.bytes > budget:
        return Admission(Verdict.NEVER, "too_large")
    if weights.bytes > budget - holdings.pinned_bytes(tier, weights.key):
        return Admission(Verdict.NEVER, "does_not_fit")
    free = budget - holdings.used_bytes[tier]
    freeing = holdings.freeing_bytes(tier, now_s, soon=may_bypass)
    missing = weights.bytes - weights.part_bytes(tier)
    if missing <= free + freeing - claimed_bytes:
        return Admission(Verdict.START if missing <= free else Verdict.WAIT)
    if claimed_bytes:
        return Admission(Verdict.WAIT, "behind_another")
    return _make_room(holdings, weights, tier, rank, float(missing - free - freeing), now_s)


def under_cap(holdings: Holdings, weights: Weights, now_s: float, *, guess: bool, tier: Tier = Tier.HOST) -> tuple[list[Weights], bool]:
    """What their tenant gives up so that `weights` may be prefetched, pinned or leased in the host tier, and whether it may hold them then.

    Only prefetches of its own that nobody used yet are given up; for a `guess` only those that are worth less.
    """
    quota = holdings.quotas.of(weights.key.model)
    budget = holdings.budget(Tier.HOST)
    if quota is None or tier is not Tier.HOST or budget is None or holdings.claims(weights):
        return [], True
    own = [
        other
        for other in sorted((holdings.weights[key] for key in holdings.in_tier[Tier.HOST]), key=lambda w: (w.last_use_s, w.key))
        if other is not weights
        and holdings.quotas.of(other.key.model) is quota
        and holdings.is_unused_guess(other)
        and holdings.may_leave(other, Tier.HOST)
    ]
    index, sizes = _arrays(own, tier, holdings, now_s)
    most = index_of(weights, holdings, now_s) if guess else np.inf
    cap, claimed = holdings.quotas.cap_bytes(quota, budget), float(holdings.claimed_bytes(quota))
    chosen, enough = gives_up(cap, claimed, float(weights.bytes), most, index, sizes)
    return [own[int(position)] for position in chosen] if enough else [], enough


def over_cap(holdings: Holdings, quota: TenantQuota, now_s: float) -> list[Weights]:
    """What a tenant whose cap fell gives up: unused prefetches, lowest index first, until it holds no more than that or has none left."""
    budget = holdings.budget(Tier.HOST)
    over = 0.0 if budget is None else holdings.claimed_bytes(quota) - holdings.quotas.cap_bytes(quota, budget)
    there = (holdings.weights[key] for key in holdings.in_tier[Tier.HOST])
    own = [w for w in there if holdings.quotas.of(w.key.model) is quota and holdings.is_unused_guess(w)]
    found = []
    for weights in sorted(own, key=lambda w: (index_of(w, holdings, now_s), w.key)):
        if over <= 0.0:
            break
        if not weights.pinned and not weights.copies[Tier.HOST].leases:
            over -= weights.bytes
            found.append(weights)
    return found


def _make_room(holdings: Holdings, weights: Weights, tier: Tier, rank: Rank, need: float, now_s: float) -> Admission:
    own = index_of(weights, holdings, now_s)
    guess = rank in (Rank.PREFETCH, Rank.CARRY)
    dropped: list[Weights] = []
    if rank in (Rank.DEMAND, Rank.HAND):
        paused = list(_droppable(holdings, weights, tier))
        dropped = _as_set(paused, tier, holdings, need, now_s) or paused
        need -= sum(w.bytes for w in dropped)
    moving = any(w.copies[tier].stage is not Stage.PAUSED for w in dropped)
    if need <= 0:
        return Admission(Verdict.WAIT, "pause_first") if moving else Admission(Verdict.EVICT, "room", [], dropped)
    candidates = list(holdings.candidates(tier, weights))
    if guess:
        # A part that another prefetch waits for stays for that one.
        candidates = [w for w in candidates if index_of(w, holdings, now_s) < own and not (w.pending and w.part_bytes(tier))]
    if holdings.keeps_parts(tier):
        victims, kept = _as_parts(candidates, tier, holdings, need, now_s)
    else:
        victims, kept = _as_set(candidates, tier, holdings, need, now_s), 0.0
    if not victims:
        return Admission(Verdict.NO_ROOM, "no_room")
    forced = rank is Rank.HAND or (rank is Rank.DEMAND and tier <= Tier.DISK)
    if forced or weights.pinned or _worth(weights, victims, kept, tier, holdings, now_s):
        return Admission(Verdict.WAIT, "pause_first") if moving else Admission(Verdict.EVICT, "room", victims, dropped, int(kept))
    return Admission(Verdict.BYPASS, "victims_worth_more")


def _droppable(holdings: Holdings, weights: Weights, tier: Tier) -> Iterator[Weights]:
    """What has begun and nobody waits for: it goes before any victim is looked for, once it is paused."""
    for key, copy in sorted(holdings.in_tier[tier].items(), key=lambda item: item[0]):
        other = holdings.weights[key]
        if copy.stage in IN_FLIGHT and key != weights.key and not other.demanded and not other.pinned:
            yield other


def _as_set(candidates: list[Weights], tier: Tier, holdings: Holdings, need: float, now_s: float) -> list[Weights]:
    index, sizes = _arrays(candidates, tier, holdings, now_s)
    chosen, enough = choose_victims(index, sizes, np.arange(len(candidates), dtype=np.int64), need)
    return [candidates[int(v)] for v in chosen] if enough else []


def _as_parts(candidates: list[Weights], tier: Tier, holdings: Holdings, need: float, now_s: float) -> tuple[list[Weights], float]:
    """The victims, none where they do not suffice, and what the last of them keeps."""
    index, sizes = _arrays(candidates, tier, holdings, now_s)
    chosen, enough, kept = choose_parts(index, sizes, np.arange(len(candidates), dtype=np.int64), need)
    return ([candidates[int(v)] for v in chosen], kept) if enough else ([], 0.0)


def _worth(weights: Weights, victims: list[Weights], kept: float, tier: Tier, holdings: Holdings, now_s: float) -> bool:
    # Among weights of which nothing is known but their last use, the rule is LRU, and LRU does not bypass.
    if weights.index is None and all(v.index is None for v in victims):
        return True
    index, sizes = _arrays(victims, tier, holdings, now_s)
    everyone = np.arange(len(victims), dtype=np.int64)
    return bool(outbids(index_of(weights, holdings, now_s), float(weights.bytes), index, sizes, everyone, kept))


def _arrays(
    weights: list[Weights], tier: Tier, holdings: Holdings, now_s: float
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    index = np.array([index_of(w, holdings, now_s) for w in weights], dtype=np.float64)
    if holdings.switched_off:
        # Plain LRU knows no parts: those that are there go first.
        index[[w.part_bytes(tier) > 0 for w in weights]] = 0.0
    sizes = np.array([w.held_bytes(tier) for w in weights], dtype=np.float64)
    return index, sizes

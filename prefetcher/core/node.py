"""The node without bytes: struct-of-arrays state of one node's caches under one demand, and what a policy is made of.

A *cache* here is one policy's residency of a node: replay runs each policy as one, and the Hedge's experts run as shadow caches, in
production and in replay alike. The state is NumPy record arrays so that a snapshot is a copy of them; the transitions are kernels in
`core.node_steps`, the rankings in `core.ranking`. Semantics: one link, one transfer at a time, memory taken when a transfer starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.value import DEFAULT_PRICE_S_PER_GB_H, price_per_byte_s

__all__ = [
    "BLOCK_BYTES",
    "HINTED",
    "HINT_EVENT",
    "Caches",
    "EventLog",
    "Found",
    "Hazard",
    "LinkUse",
    "Policy",
    "PrefetchRule",
    "Rank",
    "Status",
    "World",
    "new_caches",
    "new_event_log",
    "no_hazard",
    "set_policy",
    "set_windows",
]

BLOCK_BYTES = 64 * 1024 * 1024  #: a running transfer pauses only at multiples of this
IDLE_BINS = 240  #: one-minute bins of idle time (hybrid)
_EVENT_ROWS = 4096


class Rank(IntEnum):
    """What ranks residents (lowest goes first)."""

    LRU = 0
    LFU = 1
    MIX = 2  #: mean of the decayed rates at 10 min, 1 h, 6 h, 1 d
    GDSF = 3
    SIEVE = 4
    LHD = 5
    HAZARD = 6
    HAZARD_MIX = 7  #: geometric blend of hazard and mix
    NEXT_USE = 8  #: knows the future
    NEXT_USE_BYTES = 9  #: knows the future


class PrefetchRule(IntEnum):
    """When and what a policy fetches without demand."""

    NONE = 0
    INDEX = 1  #: the guarded prefetch of the decision
    EARLIEST = 2  #: the absent model with the earliest next use; knows the future
    IDLE_WINDOW = 3  #: hybrid's pre-warming


class Status(IntEnum):
    """Where a model's weights are in one cache."""

    ABSENT = 0
    QUEUED = 1  #: demand, waits for the link, holds no memory
    LOADING = 2  #: demand, on the link
    READY = 3
    PREFETCH = 4  #: prefetch, on the link or paused with its memory
    HELD = 5  #: a paused prefetch that demand joined: queued with its memory
    YIELDED = 6  #: a demand load that gave way: queued again, with its memory and what it has read
    PART = 7  #: the rest made room, and nobody waits for it
    PART_QUEUED = 8  #: demand, waits for the link, holds a part of its memory


class LinkUse(IntEnum):
    """What the link does."""

    IDLE = 0
    DEMAND = 1
    UNCACHED = 2
    PREFETCH = 3
    PAUSING = 4  #: a prefetch that finishes its block
    YIELDING = 5  #: a demand load that finishes its block


class Found(IntEnum):
    """What a row found."""

    READY = 0
    MOVING = 1
    QUEUED = 2
    ABSENT = 3


# The same codes as plain integers, for kernels.
ABSENT, QUEUED, LOADING, READY, PREFETCH, HELD, YIELDED, PART, PART_QUEUED = (int(s) for s in Status)
IDLE, DEMAND, UNCACHED, PREFETCHING, PAUSING, YIELDING = (int(u) for u in LinkUse)


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy, in words. `tau` and `variant` are column numbers in `Demand.taus_s` and `Hazard`.

    `yields`: a demand load that takes memory gives way, at its block's end, to one that goes before it in Smith's order (`smith`). `parts`:
    the last victim keeps what the room does not need. `load_aware`: cost counts queue wait, joiners and those who wait for the
    link. `margin`: how many times the displaced value a prefetch must be worth. `hold_s`: how long an unused prefetch stays of a model that
    no window bounds (`Caches.windows`). `busy_ratio`: link use over ten minutes above which nothing is prefetched but what is hinted.
    `hints`: it is told of hints, and fetches for them also where it would not prefetch. `stays_at`: an unused prefetch stays beyond its
    hold, at most `value.MOST_HOLDS` of them, while its score is at least so many times that at which it was fetched. Seconds and bytes
    throughout.
    """

    rank: Rank
    smith: bool = True
    yields: bool = False
    parts: bool = False
    as_set: bool = True
    bypass: bool = True
    load_aware: bool = False
    tau: int = 1
    variant: int = 0
    prefetch: PrefetchRule = PrefetchRule.NONE
    prefetch_variant: int = 0
    margin: float = 1.6
    busy_ratio: float = 0.6
    hold_s: float = float("inf")
    keep_alive_s: float = float("inf")
    idle_windows: bool = False
    hints: bool = False
    stays_at: float = float("inf")
    price_per_byte_s: float = price_per_byte_s(DEFAULT_PRICE_S_PER_GB_H)


POLICY = np.dtype(
    [
        ("rank", "i8"), ("smith", "?"), ("as_set", "?"), ("bypass", "?"), ("load_aware", "?"), ("tau", "i8"), ("variant", "i8"),
        ("prefetch", "i8"), ("prefetch_variant", "i8"), ("margin", "f8"), ("busy_ratio", "f8"), ("hold_s", "f8"),
        ("keep_alive_s", "f8"), ("idle_windows", "?"), ("price", "f8"), ("hints", "?"),
        ("stays_at", "f8"), ("yields", "?"), ("parts", "?"),
    ]
)  # fmt: skip

CACHE = np.dtype(
    [
        ("capacity", "f8"), ("used", "f8"),
        ("link", "i8"), ("moving", "i8"), ("finish_s", "f8"), ("segment_s", "f8"), ("partial", "i8"), ("queued", "i8"),
        ("recent_wait_s", "f8"),  # moving mean over loads of the time from first row to transfer
        ("waiting_mean", "f8"),  # moving mean over loads of the rows that wait (μ)
        ("waiting", "f8"), ("busy_s", "f8"), ("busy_at_s", "f8"),  # link seconds, decayed over ten minutes
        ("next_tick_s", "f8"), ("next_warm_s", "f8"), ("clock", "f8"),
        ("sieve_hand", "i8"), ("sieve_head", "i8"), ("sieve_tail", "i8"),
        ("period_wait_s", "f8"), ("period_byte_s", "f8"), ("held_at_s", "f8"),  # what the Hedge compares
        ("period_wasted_byte_s", "f8"),  # of what ended in the period
        ("expiry_s", "f8"),  # no resident expires before this
    ]
)  # fmt: skip

WEIGHTS = np.dtype(
    [
        ("status", "i8"), ("left_s", "f8"), ("rows", "f8"), ("row_sum_s", "f8"), ("first_row_s", "f8"), ("load_end_s", "f8"),
        ("taken_s", "f8"), ("ready_s", "f8"), ("prefetched", "?"), ("unused", "?"), ("order", "i8"), ("expiry_s", "f8"),
        ("priority", "f8"), ("others", "f8"), ("loads", "f8"), ("older", "i8"), ("newer", "i8"), ("visited", "?"),
        ("idle_count", "f8"), ("idle_outside", "f8"), ("warm_s", "f8"), ("tail_s", "f8"), ("last_use_s", "f8"),
        ("last_order", "i8"), ("refused_after_s", "f8"), ("wait_head", "i8"),
        ("held_bytes", "f8"),  # memory that it takes
    ]
)  # fmt: skip

#: What bounds a model's forecast prefetches (`core.windows`). `lead_s` is inf for no limit; `variant` is the number of the rate that ranks
#: them, -1 for the policy's `prefetch_variant`.
WINDOW = np.dtype([("lead_s", "f8"), ("hold_s", "f8"), ("variant", "i8")])

RESIDENCY_EVENT = np.dtype(
    [
        ("cache", "i8"), ("model", "i8"), ("start_s", "f8"), ("ready_s", "f8"), ("last_use_s", "f8"), ("end_s", "f8"),
        ("prefetch", "?"), ("order", "i8"), ("bytes", "f8"),
    ]
)  # fmt: skip
TRANSFER_EVENT = np.dtype([("cache", "i8"), ("model", "i8"), ("start_s", "f8"), ("end_s", "f8"), ("prefetch", "?"), ("order", "i8")])
ORDER_EVENT = np.dtype(
    [
        ("cache", "i8"), ("model", "i8"), ("issued_s", "f8"), ("ready_s", "f8"), ("first_use_s", "f8"), ("end_s", "f8"),
        ("outcome", "i8"), ("premature", "?"), ("first_row", "i8"),  # the row of the first use, -1 for none
        ("hint", "?"),  # issued for a hint, not for a forecast
    ]
)  # fmt: skip

#: What open hints say of a model (`core.hints.Expected`), 0 for nothing; and how far hints announce it (`core.announced`).
HINTED = np.dtype([("probability", "f8"), ("at_s", "f8"), ("end_s", "f8"), ("until_s", "f8"), ("announced", "f8"), ("lead_s", "f8")])
#: From `ts` on they say this; `news`: somebody said so, and it is acted on at once.
HINT_EVENT = np.dtype(
    [
        ("ts", "f8"), ("model", "i8"), ("probability", "f8"), ("at_s", "f8"), ("end_s", "f8"), ("until_s", "f8"), ("news", "?"),
        ("announced", "f8"), ("lead_s", "f8"),
    ]
)  # fmt: skip
_NO_HINTED = np.zeros(0, HINTED)
_NO_HINT_EVENTS = np.zeros(0, HINT_EVENT)
_NO_HINTS_TAKEN = np.zeros(1, np.int64)

#: Codes of `ORDER_EVENT.outcome`, by position.
OUTCOMES: tuple[str, ...] = ("open", "timely", "late", "useless", "displaced", "cancelled")
OPEN, TIMELY, LATE, USELESS, DISPLACED, CANCELLED = range(6)


class World(NamedTuple):
    """What does not change: models and rows of one node's log."""

    size_bytes: npt.NDArray[np.float64]  #: float64[n]
    link_s: npt.NDArray[np.float64]  #: float64[n], whole transfer on an idle link
    block_s: npt.NDArray[np.float64]  #: float64[n], one BLOCK_BYTES of it
    ts: npt.NDArray[np.float64]  #: float64[N], sorted
    model: npt.NDArray[np.int32]  #: int32[N]
    next_ts: npt.NDArray[np.float64]  #: float64[N], the same model's next row, inf where none; only for who knows the future
    first_ts: npt.NDArray[np.float64]  #: float64[n], likewise before the first row
    t0_s: float
    t1_s: float
    tick_s: float


class Hazard(NamedTuple):
    """Rates of next use (`core.value.next_use_rate`) per variant: at each tick for all models, and right after each row. And hints, for
    the caches that are told of them; none unless given."""

    at_tick: npt.NDArray[np.float32]  #: float32[V, ticks, n]
    after_row: npt.NDArray[np.float32]  #: float32[V, rows of this block]
    latest: npt.NDArray[np.float32]  #: float32[V, n], after each model's latest row; carried from block to block
    first_tick: int  #: number of `at_tick[:, 0]`, ticks since t0
    first_row: int  #: number of `after_row[:, 0]`
    hinted: npt.NDArray[np.void] = _NO_HINTED  #: HINTED[n], carried from block to block
    hint_events: npt.NDArray[np.void] = _NO_HINT_EVENTS  #: HINT_EVENT[K], sorted by time
    hints_taken: npt.NDArray[np.int64] = _NO_HINTS_TAKEN  #: int64[1], how many of them have come


class Caches(NamedTuple):
    """E caches of one node in lockstep."""

    policy: npt.NDArray[np.void]  #: POLICY[E]
    cache: npt.NDArray[np.void]  #: CACHE[E]
    weights: npt.NDArray[np.void]  #: WEIGHTS[E, n]
    windows: npt.NDArray[np.void]  #: WINDOW[E, n]
    queue: npt.NDArray[np.int64]  #: int64[E, n], queued models in the order of their first row
    idle: npt.NDArray[np.float32]  #: float32[E or 1, n or 1, IDLE_BINS]; hybrid only
    next_ts: npt.NDArray[np.float64]  #: float64[n], next row of each model; only for who knows the future
    next_event_s: npt.NDArray[np.float64]  #: float64[E], earliest transfer end, tick or pre-warming


class EventLog(NamedTuple):
    """What happened, appended by the kernels; `filled` holds the used rows of each array.

    Residency, transfers and rows' waits only of caches with a slot; orders of all, since the caches look at them again.
    """

    residency: npt.NDArray[np.void]
    transfers: npt.NDArray[np.void]
    orders: npt.NDArray[np.void]
    filled: npt.NDArray[np.int64]  #: int64[3]
    slot: npt.NDArray[np.int64]  #: int64[E], row of `wait_s` and `found`, -1 for none
    wait_s: npt.NDArray[np.float64]  #: float64[S, N]
    found: npt.NDArray[np.int8]  #: int8[S, N]
    next_row: npt.NDArray[np.int32]  #: int32[S, N], chain of rows that wait for the same load


def set_policy(record: np.void, policy: Policy) -> None:
    """Writes a policy into its record (POLICY)."""
    record["rank"] = int(policy.rank)
    record["prefetch"] = int(policy.prefetch)
    record["price"] = policy.price_per_byte_s
    for name in (
        "smith", "as_set", "bypass", "load_aware", "tau", "variant", "prefetch_variant", "margin", "busy_ratio", "hold_s",
        "keep_alive_s", "idle_windows", "hints", "stays_at", "yields", "parts",
    ):  # fmt: skip
        record[name] = getattr(policy, name)


def set_windows(caches: Caches, e: int | slice, lead_s: Any, hold_s: Any, variant: Any) -> None:
    """Bounds the prefetches of cache `e` (or of some): one value for all models, or float64[n], float64[n], int64[n]. What is there stays
    for as long as it was to stay when it came."""
    windows = caches.windows[e]
    windows["lead_s"], windows["hold_s"], windows["variant"] = lead_s, hold_s, variant


def new_caches(policies: list[Policy], world: World, capacity_bytes: float) -> Caches:
    """Empty caches of one node, one a policy, each with `capacity_bytes`."""
    count, models = len(policies), len(world.size_bytes)
    caches = Caches(
        policy=np.zeros(count, POLICY),
        cache=np.zeros(count, CACHE),
        weights=np.zeros((count, models), WEIGHTS),
        windows=np.zeros((count, models), WINDOW),
        queue=np.zeros((count, models), np.int64),
        idle=np.zeros((count, models, IDLE_BINS) if any(p.idle_windows for p in policies) else (1, 1, IDLE_BINS), np.float32),
        next_ts=world.first_ts.copy(),
        next_event_s=np.full(count, np.inf),
    )
    for record, policy in zip(caches.policy, policies, strict=True):
        set_policy(record, policy)
    caches.windows["lead_s"], caches.windows["variant"] = np.inf, -1
    caches.windows["hold_s"] = caches.policy["hold_s"][:, np.newaxis]
    cache, weights = caches.cache, caches.weights
    cache["capacity"] = capacity_bytes
    cache["moving"] = cache["partial"] = cache["sieve_hand"] = cache["sieve_head"] = cache["sieve_tail"] = -1
    cache["busy_at_s"] = cache["held_at_s"] = world.t0_s
    cache["finish_s"] = cache["next_warm_s"] = cache["expiry_s"] = np.inf
    cache["next_tick_s"] = world.t0_s + world.tick_s
    weights["left_s"] = world.link_s
    weights["order"] = weights["last_order"] = weights["older"] = weights["newer"] = weights["wait_head"] = -1
    weights["expiry_s"] = weights["warm_s"] = np.inf
    weights["tail_s"] = np.inf
    weights["refused_after_s"] = weights["last_use_s"] = -np.inf
    caches.next_event_s[:] = cache["next_tick_s"]
    return caches


def new_event_log(caches: int, rows: int, logged: list[int]) -> EventLog:
    """An empty log for `caches` caches over `rows` rows; waits are kept for the caches in `logged`."""
    slot = np.full(caches, -1, np.int64)
    slot[logged] = np.arange(len(logged))
    shape = (len(logged), rows) if logged else (1, 1)
    return EventLog(
        residency=np.zeros(_EVENT_ROWS, RESIDENCY_EVENT),
        transfers=np.zeros(_EVENT_ROWS, TRANSFER_EVENT),
        orders=np.zeros(_EVENT_ROWS, ORDER_EVENT),
        filled=np.zeros(3, np.int64),
        slot=slot,
        wait_s=np.zeros(shape),
        found=np.zeros(shape, np.int8),
        next_row=np.full(shape, -1, np.int32),
    )


def no_hazard(models: int, variants: int = 1) -> Hazard:
    """For policies that learn nothing, or have not yet."""
    return Hazard(
        at_tick=np.zeros((variants, 1, models), np.float32),
        after_row=np.zeros((variants, 0), np.float32),
        latest=np.zeros((variants, models), np.float32),
        first_tick=0,
        first_row=0,
    )

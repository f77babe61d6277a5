"""On which node a wanted model is loaded, of all that could: decided for a whole burst at once. Pure.

The cost of a load on a node is what it adds to everybody's waiting there, in seconds: the rows that want it wait for what the link has
before it and for the load itself, those whose turn comes after it wait for it, and what its memory displaces would have saved its own.
Links serve demand in Smith's order (`core.planner`), so a load waits for what is denser (rows per second of load) and holds up what is
not. Ready beats moving, moving beats placed, and none of them is loaded again. No load of a burst queues behind another while the link of
a node is idle, unless the load alone takes far longer there. Covers neither whether a model is worth loading at all
(`controller.planning`), nor a second copy (`core.routing_shares`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.placement_rule import (
    PLACED,
    READY,
    UNKNOWN,
    At,
    best_node,
    displaced_s,
    is_far_sooner,
    most_present,
    wait_on_link,
)
from prefetcher.core.rendezvous import by_rendezvous

__all__ = ["At", "Placed", "Site", "Wanted", "place"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

#: What was placed and did not begin moves when it costs less than this share elsewhere, and not for less than so many seconds a row: a
#: report is a second old, and a link that looks busy for one is no reason.
_MOVES_AT = 0.5
_MOVES_S = 2.0
#: A single load goes elsewhere for this share of its cost and less: what it gains otherwise is no reason to go round again.
_GAINS_AT = 0.999
#: Rounds of putting single loads elsewhere; two or three are the rule.
_ROUNDS = 16


class _Burst(NamedTuple):
    """W models that are wanted together and the N nodes that they may go to; shapes in brackets.

    By model: `rows` float64[W] that wait for it, or are expected to, above 0; `size` float64[W] in bytes; `class_of` int64[W], the number
    of the quota that it falls under, −1 for none. By model and node: `load_s` float64[W, N], how long it takes the link, above 0; `at`
    int8[W, N] (`At`); `ready_in_s` float64[W, N] of what is moving; `rank` int64[W, N], the model's preference where costs are equal, 0
    first. By node: `running_s` float64[N], what is left of the load that runs and does not yield; `free` float64[N], bytes that are not
    taken and not in a reserve; `evictable` float64[N], bytes that could go; `displaced_s` float64[N], the seconds of waiting that each of
    those would save. By node and place in its queue, in any order, zeros where there is none: `queue_s` float64[N, Q], link time of the
    loads that wait, and `queue_rows` float64[N, Q] that wait for each. `quota_left` float64[C, N], bytes by class and node.
    """

    rows: Floats
    size: Floats
    class_of: Ints
    load_s: Floats
    at: npt.NDArray[np.int8]
    ready_in_s: Floats
    rank: Ints
    running_s: Floats
    free: Floats
    evictable: Floats
    displaced_s: Floats
    queue_s: Floats
    queue_rows: Floats
    quota_left: Floats


class _Work(NamedTuple):
    """What is decided so far. `loading` int64[W]: the node on which a model of the burst is loaded, −1 for none; `free` and `quota_left`
    as that leaves them, below 0 for what it evicts; by model and node its `wait`, `cost` and whether it `fits`."""

    loading: Ints
    cached: Flags
    free: Floats
    quota_left: Floats
    wait: Floats
    cost: Floats
    fits: Flags


def _look(burst: _Burst, work: _Work, w: int, n: int) -> None:
    """Prices model `w` at node `n` beside all that is loaded there; its own memory is not taken."""
    if burst.at[w, n] == UNKNOWN:
        return
    own_s, own_rows = burst.load_s[w, n], burst.rows[w]
    wait_s, delay_s = wait_on_link(own_rows, own_s, burst.running_s[n], burst.queue_s[n], burst.queue_rows[n], burst.queue_s.shape[1])
    for other in range(len(work.loading)):
        if work.loading[other] != n or other == w:
            continue
        # Of equals in a burst, the earlier one goes first.
        theirs, ours = burst.rows[other] * own_s, own_rows * burst.load_s[other, n]
        if theirs > ours or (theirs == ours and other < w):
            wait_s += burst.load_s[other, n]
        else:
            delay_s += own_s * burst.rows[other]
    free, c = max(work.free[n], 0.0), burst.class_of[w]
    # What the burst evicts already is no longer there to be evicted.
    room = free + burst.evictable[n] + min(work.free[n], 0.0)
    work.fits[w, n] = burst.size[w] <= room and (c < 0 or burst.size[w] <= work.quota_left[c, n])
    work.wait[w, n] = wait_s
    work.cost[w, n] = own_rows * wait_s + delay_s
    if work.fits[w, n]:
        work.cost[w, n] += displaced_s(burst.size[w], free, burst.displaced_s[n], np.inf)


def _put(burst: _Burst, work: _Work, w: int, n: int) -> None:
    """Loads `w` on `n`, with memory where there is some."""
    work.loading[w], work.cached[w] = n, work.fits[w, n]
    if work.cached[w]:
        work.free[n] -= burst.size[w]
        if burst.class_of[w] >= 0:
            work.quota_left[burst.class_of[w], n] -= burst.size[w]


def _take_back(burst: _Burst, work: _Work, w: int) -> None:
    n = work.loading[w]
    if work.cached[w]:
        work.free[n] += burst.size[w]
        if burst.class_of[w] >= 0:
            work.quota_left[burst.class_of[w], n] += burst.size[w]
    work.loading[w] = -1


def _is_idle(burst: _Burst, work: _Work, n: int) -> bool:
    return bool(burst.running_s[n] <= 0.0 and not (burst.queue_s[n] > 0.0).any() and not (work.loading == n).any())


def _best_node(burst: _Burst, work: _Work, w: int, idle: Flags) -> tuple[int, float]:
    return best_node(work.cost[w], work.wait[w], burst.at[w] != UNKNOWN, work.fits[w], idle, burst.rank[w])


def _stays(burst: _Burst, work: _Work, w: int) -> int:
    """The node where `w` was placed and stays, or −1: it was not, or it is far better off elsewhere."""
    placed = -1
    for n in range(len(burst.running_s)):
        _look(burst, work, w, n)
        if burst.at[w, n] == PLACED and (placed < 0 or burst.rank[w, n] < burst.rank[w, placed]):
            placed = n
    if placed < 0 or not work.fits[w, placed]:
        return -1
    here, least = work.cost[w, placed], np.inf
    for n in range(len(burst.running_s)):
        if burst.at[w, n] != UNKNOWN and work.fits[w, n]:
            least = min(least, work.cost[w, n])
    return placed if least >= _MOVES_AT * here or here - least < _MOVES_S * burst.rows[w] else -1


def _densest_s(burst: _Burst, w: int) -> float:
    """The rows of `w` per second of its shortest load."""
    least = np.inf
    for n in range(len(burst.running_s)):
        if burst.at[w, n] != UNKNOWN:
            least = min(least, burst.load_s[w, n])
    return float(burst.rows[w] / least)


def _improve(burst: _Burst, work: _Work, loose: Flags, idle: Flags) -> None:
    """Puts single loads elsewhere as long as that gains, or one queues beside an idle link; in place."""
    models, nodes = burst.load_s.shape
    for _ in range(_ROUNDS):
        changed = False
        for w in range(models):
            if not loose[w]:
                continue
            here, had_memory = work.loading[w], work.cached[w]
            _take_back(burst, work, w)
            idle[here] = _is_idle(burst, work, here)
            for n in range(nodes):
                _look(burst, work, w, n)
            n, _ = _best_node(burst, work, w, idle)
            gains = work.cost[w, n] < _GAINS_AT * work.cost[w, here]
            queues = idle[n] and not idle[here] and not is_far_sooner(work.wait[w, here], work.wait[w, n])
            if work.fits[w, n] == had_memory and not gains and not queues:
                n = here
            changed = changed or n != here
            _put(burst, work, w, n)
            idle[n] = False
        if not changed:
            break


def _place_together(burst: _Burst) -> tuple[Ints, Flags, Floats]:
    """The node of each model: int64[W], −1 where none can load it; whether it finds memory there: bool[W] (else it is served without being
    cached); and how long its rows wait: float64[W], seconds, NaN without a node.

    Ties fall to the lower rank, between models to the earlier one: whoever wants one answer for every order of models sorts them
    (`place` does). Bounded by W²·N·(W + Q) steps.
    """
    models, nodes = burst.load_s.shape
    shape = (models, nodes)
    work = _Work(
        np.full(models, -1, np.int64), np.ones(models, np.bool_), burst.free.copy(), burst.quota_left.copy(),
        np.full(shape, np.inf), np.full(shape, np.inf), np.zeros(shape, np.bool_),
    )  # fmt: skip
    there = np.empty(models, np.int64)
    loose = np.zeros(models, np.bool_)
    left = 0
    for w in range(models):
        there[w] = most_present(burst.at[w], burst.ready_in_s[w], burst.rank[w])
    for w in range(models):
        if there[w] >= 0:
            continue
        stays = _stays(burst, work, w)
        if stays >= 0:
            _put(burst, work, w, stays)
        else:
            loose[w] = True
            left += 1
    idle = np.empty(nodes, np.bool_)
    for n in range(nodes):
        idle[n] = _is_idle(burst, work, n)
    for w in range(models):
        if loose[w]:
            for n in range(nodes):
                _look(burst, work, w, n)
    # By regret: whoever loses most by not getting its best node chooses first; then the densest.
    open_ = loose.copy()
    while left > 0:
        chosen, chosen_node, most = -1, -1, 0.0
        for w in range(models):
            if not open_[w]:
                continue
            n, regret = _best_node(burst, work, w, idle)
            if chosen < 0 or regret > most or (regret == most and _densest_s(burst, w) > _densest_s(burst, chosen)):
                chosen, chosen_node, most = w, n, regret
        open_[chosen] = False
        left -= 1
        if chosen_node < 0:
            loose[chosen] = False
            continue
        _put(burst, work, chosen, chosen_node)
        idle[chosen_node] = False
        for w in range(models):
            if open_[w]:
                _look(burst, work, w, chosen_node)
    _improve(burst, work, loose, idle)
    wait = np.full(models, np.nan)
    for w in range(models):
        if there[w] >= 0:
            wait[w] = 0.0 if burst.at[w, there[w]] == READY else burst.ready_in_s[w, there[w]]
        elif work.loading[w] >= 0:
            there[w] = work.loading[w]
            _look(burst, work, w, there[w])
            wait[w] = work.wait[w, there[w]]
    return there, work.cached, wait


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model that is wanted now or soon: `rows` wait for it, or are expected to (at least a little); `quota` names what it falls under."""

    model: str
    rows: float
    size_bytes: float
    quota: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """A node as placement sees it.

    `at` and `ready_in_s` by model, `load_s` by every model that can be loaded there; a model of `load_s` without an `at` is absent.
    `queue`: (seconds of link, rows that wait) of what waits for the link; `quota_left`: bytes by quota, none where it is not named. The
    rest as in `Burst`.
    """

    node: str
    load_s: Mapping[str, float]
    at: Mapping[str, At] = field(default_factory=dict)
    ready_in_s: Mapping[str, float] = field(default_factory=dict)
    running_s: float = 0.0
    queue: Sequence[tuple[float, float]] = ()
    free_bytes: float = 0.0
    evictable_bytes: float = 0.0
    displaced_s_per_byte: float = 0.0
    quota_left: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a model goes: what it is `at` there now, how long its rows wait, and whether it finds memory."""

    model: str
    node: str
    at: At
    wait_s: float
    cached: bool = True


#: Rows are above 0, seconds of a load too.
_LEAST_ROWS = 1e-6
_LEAST_S = 1e-6
#: More nodes than this are looked at for each model by itself first.
_MOST_SITES = 12


@lru_cache(maxsize=4096)
def _ranked(model: str, names: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(by_rendezvous(model, names))


def _burst_of(wanted: Sequence[Wanted], sites: Sequence[Site]) -> _Burst:
    """The arrays of `_place_together`, in the order of `wanted` and `sites`."""
    shape = (len(wanted), len(sites))
    classes = sorted({want.quota for want in wanted} - {""})
    names = tuple(site.node for site in sites)
    longest = max((len(site.queue) for site in sites), default=0)
    at, load_s, ready_in_s, rank = np.zeros(shape, np.int8), np.full(shape, np.inf), np.zeros(shape), np.zeros(shape, np.int64)
    queue_s, queue_rows = np.zeros((len(sites), longest)), np.zeros((len(sites), longest))
    for w, want in enumerate(wanted):
        rank[w, list(_ranked(want.model, names))] = np.arange(len(names))
        for n, site in enumerate(sites):
            takes_s = site.load_s.get(want.model)
            found = site.at.get(want.model, At.UNKNOWN if takes_s is None else At.ABSENT)
            at[w, n] = int(found)
            ready_in_s[w, n] = site.ready_in_s.get(want.model, 0.0)
            load_s[w, n] = np.inf if takes_s is None else max(takes_s, _LEAST_S)
            if takes_s is None and found in (At.ABSENT, At.PLACED):
                at[w, n] = UNKNOWN
    for n, site in enumerate(sites):
        for q, (takes_s, rows) in enumerate(sorted(site.queue)):
            queue_s[n, q], queue_rows[n, q] = takes_s, rows
    return _Burst(
        rows=np.array([max(want.rows, _LEAST_ROWS) for want in wanted], np.float64),
        size=np.array([want.size_bytes for want in wanted], np.float64),
        class_of=np.array([classes.index(want.quota) if want.quota else -1 for want in wanted], np.int64),
        load_s=load_s,
        at=at,
        ready_in_s=ready_in_s,
        rank=rank,
        running_s=np.array([site.running_s for site in sites], np.float64),
        free=np.array([site.free_bytes for site in sites], np.float64),
        evictable=np.array([site.evictable_bytes for site in sites], np.float64),
        displaced_s=np.array([site.displaced_s_per_byte for site in sites], np.float64),
        queue_s=queue_s,
        queue_rows=queue_rows,
        quota_left=np.array([[site.quota_left.get(name, np.inf) for site in sites] for name in classes], np.float64).reshape(
            len(classes), len(sites)
        ),
    )


def _worth_a_look(wanted: Sequence[Wanted], sites: Sequence[Site]) -> Sequence[Site]:
    """Of very many sites, those where a model is, and for each model the best for it alone: the others of its burst take no more than one
    each. In their order."""
    if len(sites) <= _MOST_SITES:
        return sites
    ahead_s = [site.running_s + sum(takes_s for takes_s, _ in site.queue) for site in sites]
    chosen: set[int] = set()
    for want in wanted:
        chosen |= {n for n, site in enumerate(sites) if site.at.get(want.model, At.UNKNOWN) > At.ABSENT}
        able = [(n, site) for n, site in enumerate(sites) if want.model in site.load_s]
        liked = {n: place_ for place_, n in enumerate(_ranked(want.model, tuple(site.node for site in sites)))}

        def cost_s(n: int, site: Site, want: Wanted = want, liked: dict[int, int] = liked) -> tuple[bool, float, int]:
            short = max(0.0, want.size_bytes - max(site.free_bytes, 0.0))
            wait_s = want.rows * (ahead_s[n] + site.load_s[want.model])
            return short > site.evictable_bytes, round(wait_s + short * site.displaced_s_per_byte, 1), liked[n]

        most = len(wanted) + 1
        best = sorted(able, key=lambda pair: cost_s(*pair))
        idle = [(n, site) for n, site in best if ahead_s[n] <= 0.0]
        chosen |= {n for n, _ in [*best[:most], *idle[:most]]}
    return [sites[n] for n in sorted(chosen)]


def place(wanted: Sequence[Wanted], sites: Sequence[Site]) -> dict[str, Placed]:
    """By model, where it goes; models that no node can load are left out. The same for every order of `wanted` and `sites`; a model that
    is named twice is wanted by the rows of both."""
    rows: dict[str, float] = {}
    for want in wanted:
        rows[want.model] = rows.get(want.model, 0.0) + want.rows
    of = {want.model: want for want in sorted(wanted, key=lambda want: (want.model, want.quota), reverse=True)}
    merged = [Wanted(model, rows[model], of[model].size_bytes, of[model].quota) for model in sorted(of)]
    sites = sorted(sites, key=lambda site: site.node)
    if not merged or not sites:
        return {}
    sites = _worth_a_look(merged, sites)
    burst = _burst_of(merged, sites)
    node, cached, wait = _place_together(burst)
    return {
        want.model: Placed(want.model, sites[n].node, At(int(burst.at[w, n])), float(wait[w]), bool(cached[w]))
        for w, (want, n) in enumerate(zip(merged, node.tolist(), strict=True))
        if n >= 0
    }

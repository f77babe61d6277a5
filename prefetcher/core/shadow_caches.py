"""One node's shadow caches: every expert without bytes, in step with the arrivals, and the Hedge that says which of them decides. Pure.

A controller has one for each node. Beside the experts runs the node's **shadow**, the deciding expert with prefetching off: what it would
have had to wait for is what prefetching is measured against. Covers neither forecasts (they come in as rates, `core.experts`) nor plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel
from prefetcher.core.demand import STANDARD_TAUS_S, Demand, decayed_rate, new_demand
from prefetcher.core.experts import EXPERTS, PERIOD_S, VARIANT_OF_HORIZON, VARIANTS, expert_policies, without_prefetch
from prefetcher.core.hedge import Hedge
from prefetcher.core.holdout import HoldoutSettings
from prefetcher.core.node import (
    BLOCK_BYTES,
    CACHE,
    ORDER_EVENT,
    WEIGHTS,
    Caches,
    Hazard,
    LinkUse,
    Policy,
    PrefetchRule,
    Rank,
    Status,
    World,
    new_caches,
    new_event_log,
    set_policy,
)
from prefetcher.core.node_run import run_rows
from prefetcher.core.ranking import JOINERS_TAU, next_use_per_s
from prefetcher.core.references import by_reference
from prefetcher.core.types import Window
from prefetcher.core.value import price_per_byte_s
from prefetcher.core.window_caches import apply_windows
from prefetcher.core.windows import NO_LEAD_LIMIT_S, OWN_HORIZON_S, WindowTable

__all__ = ["Outlook", "ShadowCaches"]

SHADOW = len(EXPERTS)
#: After a longer silence the ticks in between are left out: a day of them settles every rate that decays within days.
_MOST_SILENCE_S = 86_400.0
_WASHOUT_S = HoldoutSettings().washout_s
#: Hours of the shadow that are kept: reports look back a week.
_HOURS_KEPT = 192
_NAMES = tuple(EXPERTS)
#: Ranks that go by the learned forecast.
_LEARNED = frozenset({Rank.HAZARD, Rank.HAZARD_MIX})
#: What an order says led to it: the parts of each kind of index, with their shares.
_PARTS: dict[Rank, tuple[tuple[str, float], ...]] = {
    Rank.HAZARD: (("hazard", 1.0),),
    Rank.HAZARD_MIX: (("hazard", 0.7), ("recent rates", 0.3)),
    Rank.LHD: (("hit density", 1.0),),
    Rank.MIX: (("recent rates", 1.0),),
    Rank.LFU: (("rate", 1.0),),
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the deciding expert says of the next use, by model number, per second: float64[n] each; 0 for a model never used.

    `keep_per_s` ranks what is held and what asks to come in; `prefetch_per_s` ranks prefetches, by each model's own horizon, None when the
    expert does not prefetch; `joiners_per_s` is the row rate over an hour. `parts`: what it is made of, with shares.
    """

    expert: str
    policy: Policy
    keep_per_s: Floats
    prefetch_per_s: Floats | None
    joiners_per_s: Floats
    parts: tuple[tuple[str, float], ...]


@kernel
def _next_use(
    rank: int, tau: int, variant: int, now_s: float, world: World, demand: Demand, hazard: Hazard, next_ts: Floats, out: Floats
) -> None:
    world, demand, hazard = by_reference(world), by_reference(demand), by_reference(hazard)
    for m in range(len(out)):
        out[m] = next_use_per_s(rank, tau, variant, m, now_s, demand, hazard, world, next_ts)


@kernel
def _joiners(now_s: float, demand: Demand, out: Floats) -> None:
    demand = by_reference(demand)
    for m in range(len(out)):
        out[m] = decayed_rate(demand, JOINERS_TAU, m, now_s)


class ShadowCaches:
    """The shadow caches of one node, from `start_s` on. Models are numbered from 0; the node's catalog is told by `serve`.

    Not for two threads at once.
    """

    def __init__(self, *, price_s_per_gb_h: float, hold_s: float, tick_s: float, start_s: float) -> None:
        self._price = price_per_byte_s(price_s_per_gb_h)
        self._policies = expert_policies(price_s_per_gb_h, hold_s)
        self._hedge = Hedge(len(EXPERTS))
        self._tick_s = tick_s
        self._t0_s = start_s // tick_s * tick_s
        self._at_s = start_s
        self._period_end_s = (start_s // PERIOD_S + 1.0) * PERIOD_S
        #: Seconds that rows of the shadow have waited so far.
        self.shadow_wait_s = 0.0
        #: The same by hour since 1970, for hours that the shadow was there for from beginning to end; the last ones.
        self.shadow_hours: dict[int, float] = {}
        self._whole = start_s % PERIOD_S == 0.0
        #: Of the same hours, what was waited after the experiment's wash-out.
        self.shadow_measured: dict[int, float] = {}
        self._washout_wait_s: float | None = None
        self._size = np.zeros(0)
        self._link_s = np.zeros(0)
        self._served = np.zeros(0, np.bool_)
        self._capacity = 0.0
        #: What a model's prefetches are bounded by of which nothing was said, and what was said: (numbers, windows).
        self._unbounded = Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, hold_s)
        self._bounded: tuple[npt.NDArray[np.int64], WindowTable] | None = None
        self._variant = np.zeros(0, np.int64)
        self._column = np.zeros((VARIANTS, 0), np.float32)
        self._latest = np.zeros((VARIANTS, 0), np.float32)
        self._log = new_event_log(SHADOW + 1, 0, [])
        self._demand = new_demand(0, self._t0_s, STANDARD_TAUS_S)
        self._caches = self._fresh()

    @property
    def expert(self) -> str:
        """The name of the expert that decides."""
        return _NAMES[self._hedge.live]

    @property
    def costs_s(self) -> dict[str, float]:
        """What each expert cost lately: discounted seconds of waiting and of holding."""
        return dict(zip(_NAMES, self._hedge.cost.tolist(), strict=True))

    # --- the node's catalog ---

    def serve(self, numbers: npt.NDArray[np.int64], size_bytes: Floats, link_s: Floats, capacity_bytes: float) -> None:
        """The node serves models `numbers` int64[k] of these sizes (float64[k]) and times on an idle link (float64[k], above 0)."""
        self._grow(int(numbers.max()) + 1 if len(numbers) else 0)
        self._capacity = capacity_bytes
        self._served[:] = False
        self._served[numbers] = True
        self._size[numbers] = size_bytes
        self._link_s[numbers] = link_s
        weights, cache = self._caches.weights, self._caches.cache
        cache["capacity"] = capacity_bytes
        status = weights["status"]
        at_rest = (status == Status.ABSENT) | (status == Status.QUEUED) | (status == Status.READY)
        part = (status == Status.PART) | (status == Status.PART_QUEUED)
        on_link = np.arange(len(self._size)) == cache["moving"][:, None]
        uncached = on_link & (cache["link"] == LinkUse.UNCACHED)[:, None]
        whole = ~((status == Status.ABSENT) | (status == Status.QUEUED) | part | uncached)
        weights["held_bytes"] = np.where(whole, self._size, np.minimum(weights["held_bytes"], self._size))
        left_s = self._link_s * (1.0 - weights["held_bytes"] / self._size)
        weights["left_s"] = np.where(part, left_s, np.where(at_rest, self._link_s, weights["left_s"]))
        cache["used"] = weights["held_bytes"].sum(axis=1)

    def bound(self, numbers: npt.NDArray[np.int64] | None, windows: WindowTable | None) -> None:
        """From here on prefetches of models `numbers` int64[k] are bounded by these windows, all others by none; None: no window at all."""
        self._bounded = None if numbers is None or windows is None else (numbers, windows)
        self._grow(0 if self._bounded is None or not len(self._bounded[0]) else int(self._bounded[0].max()) + 1)
        self._apply_windows()

    def _apply_windows(self) -> None:
        n, none = len(self._size), self._unbounded
        table = WindowTable(*(np.full(n, value) for value in (none.lead_s, none.horizon_s, none.hold_s)))
        if self._bounded is not None:
            numbers, windows = self._bounded
            for whole, part in zip(table, windows, strict=True):
                whole[numbers] = part
        self._variant = np.array([VARIANT_OF_HORIZON[float(horizon)] for horizon in table.horizon_s], np.int64)
        for e in range(SHADOW + 1):
            apply_windows(self._caches, e, table)

    def _grow(self, models: int) -> None:
        have = len(self._size)
        if models <= have:
            return
        more = models - have
        self._size = np.concatenate([self._size, np.ones(more)])
        self._link_s = np.concatenate([self._link_s, np.ones(more)])
        self._served = np.concatenate([self._served, np.zeros(more, np.bool_)])
        self._column = np.concatenate([self._column, np.full((VARIANTS, more), np.nan, np.float32)], axis=1)
        self._latest = np.concatenate([self._latest, np.zeros((VARIANTS, more), np.float32)], axis=1)
        old, known = self._caches, self._demand
        self._demand = new_demand(models, self._t0_s, STANDARD_TAUS_S)
        for name in ("decayed", "last_s", "rows", "mean_gap_s", "class_"):
            getattr(self._demand, name)[..., :have] = getattr(known, name)
        for name in ("reuses", "density", "due_s"):
            getattr(self._demand, name)[...] = getattr(known, name)
        self._caches = self._fresh()
        self._caches.weights[:, :have] = old.weights
        self._caches.queue[:, :have] = old.queue
        self._caches.cache[:] = old.cache
        self._caches.next_event_s[:] = old.next_event_s
        self._apply_windows()

    def _world(self, ts: Floats, model: npt.NDArray[np.int32]) -> World:
        unknown = np.full(len(ts), np.inf)
        return World(
            size_bytes=self._size,
            link_s=self._link_s,
            block_s=BLOCK_BYTES / self._size * self._link_s,
            ts=ts,
            model=model,
            next_ts=unknown,
            first_ts=np.full(len(self._size), np.inf),
            t0_s=self._t0_s,
            t1_s=np.inf,
            tick_s=float(self._tick_s),
        )

    def _fresh(self) -> Caches:
        policies = [*self._policies, without_prefetch(self._policies[self._hedge.live])]
        return new_caches(policies, self._world(np.zeros(0), np.zeros(0, np.int32)), self._capacity)

    # --- time and rows ---

    def advance(
        self,
        ts: Floats,
        model: npt.NDArray[np.int64],
        after_row: npt.NDArray[np.float32],
        ticks: Floats,
        at_tick: npt.NDArray[np.float32],
        until_s: float,
    ) -> None:
        """Takes in rows in stream order, then lets time pass up to `until_s`.

        `after_row` float32[VARIANTS, N] are the rates right after each row; `ticks` float64[T], consecutive multiples of the tick, and
        `at_tick` float32[VARIANTS, T, n] those of all models then. A row that is late counts as if it came now, rows of models that
        the node does not serve not at all.
        """
        self._grow(max(int(model.max()) + 1 if len(model) else 0, at_tick.shape[2]))
        here = self._served[model] if len(model) else np.zeros(0, np.bool_)
        times = np.maximum.accumulate(np.maximum(ts[here], self._at_s))
        until_s = max(until_s, self._at_s, float(times[-1]) if len(times) else -np.inf)
        self._pass_over(until_s if not len(times) else float(times[0]))
        columns, first_tick = self._column[:, None, :], 0
        if len(ticks):
            new = np.full((VARIANTS, len(ticks), len(self._size)), np.nan, np.float32)
            new[:, :, : at_tick.shape[2]] = at_tick
            columns = np.concatenate([columns, new], axis=1)
            first_tick = round((float(ticks[0]) - self._t0_s) / self._tick_s) - 1
        hazard = Hazard(
            at_tick=np.ascontiguousarray(columns),
            after_row=np.ascontiguousarray(after_row[:, here]),
            latest=self._latest,
            first_tick=first_tick,
            first_row=0,
        )
        world = self._world(np.ascontiguousarray(times), np.ascontiguousarray(model[here], dtype=np.int32))
        first = 0
        while (mark_s := self._next_mark()) <= until_s:
            last = int(np.searchsorted(times, mark_s))
            self._run(first, last, mark_s, world, hazard)
            first, self._at_s = last, mark_s
            if mark_s == self._period_end_s:
                self._end_period()
            else:
                self._washout_wait_s = float(self._caches.cache["period_wait_s"][SHADOW])
        self._run(first, len(times), until_s, world, hazard)
        self._at_s = until_s
        self._column = columns[:, -1].copy()
        asked = np.unique(world.model[times >= (ticks[-1] if len(ticks) else -np.inf)])
        # Should the next tick be late, what was thought at the last one must not come back.
        self._column[:, asked] = self._latest[:, asked]

    def _next_mark(self) -> float:
        """The end of the wash-out, or of the period."""
        washout_s = self._period_end_s - PERIOD_S + _WASHOUT_S
        return washout_s if self._washout_wait_s is None and self._at_s < washout_s else self._period_end_s

    def _pass_over(self, until_s: float) -> None:
        """After a long silence, leaves out all of it but its last day."""
        from_s = until_s - _MOST_SILENCE_S
        if self._at_s >= from_s:
            return
        self._at_s = from_s
        self._whole = False
        self._period_end_s = max(self._period_end_s, (from_s // PERIOD_S + 1.0) * PERIOD_S)
        cache = self._caches.cache
        waits = np.isfinite(cache["next_tick_s"]) & (cache["next_tick_s"] < from_s)
        cache["next_tick_s"][waits] = self._t0_s + np.ceil((from_s - self._t0_s) / self._tick_s) * self._tick_s
        self._caches.next_event_s[:] = np.minimum(cache["finish_s"], cache["next_tick_s"])

    def _run(self, first: int, last: int, until_s: float, world: World, hazard: Hazard) -> None:
        self._log = run_rows(first, last, until_s, world, self._demand, hazard, self._caches, self._log)
        self._forget_events()

    def _forget_events(self) -> None:
        """Empties the event log but for orders that weights still refer to."""
        log, weights = self._log, self._caches.weights
        log.filled[:2] = 0
        if log.filled[2] == 0:
            return
        named = np.concatenate([weights["order"].ravel(), weights["last_order"].ravel()])
        kept = np.unique(named[named >= 0])
        log.orders[: len(kept)] = log.orders[kept]
        log.filled[2] = len(kept)
        for name in ("order", "last_order"):
            number = weights[name]
            weights[name] = np.where(number >= 0, np.searchsorted(kept, number), number)

    def _end_period(self) -> None:
        cache = self._caches.cache
        cost = cache["period_wait_s"] + self._price * cache["period_byte_s"]
        self._hedge.learn(cost[:SHADOW], PERIOD_S)
        waited_s = float(cache["period_wait_s"][SHADOW])
        self.shadow_wait_s += waited_s
        if self._whole:
            hour = int(self._period_end_s // PERIOD_S) - 1
            self.shadow_hours[hour] = waited_s
            if self._washout_wait_s is not None:
                self.shadow_measured[hour] = waited_s - self._washout_wait_s
            for kept in (self.shadow_hours, self.shadow_measured):
                while len(kept) > _HOURS_KEPT:
                    del kept[min(kept)]
        self._washout_wait_s = None
        self._whole = True
        cache["period_wait_s"] = cache["period_byte_s"] = 0.0
        set_policy(self._caches.policy[SHADOW], without_prefetch(self._policies[self._hedge.live]))
        self._period_end_s += PERIOD_S

    # --- what it says ---

    def outlook(self, now_s: float, sent: npt.NDArray[np.bool_] | None = None) -> Outlook:
        """What the deciding expert says at `now_s`. `sent` bool[≤ n]: models whose requests are to come here. Of those that never did, only
        the learned forecast says anything, and it is taken as it is."""
        policy, n = self._policies[self._hedge.live], len(self._size)
        now_s = max(now_s, self._at_s)
        world = self._world(np.zeros(0), np.zeros(0, np.int32))
        hazard = Hazard(self._column[:, None, :].copy(), np.zeros((VARIANTS, 0), np.float32), self._latest, 0, 0)

        def rates(variant: int) -> Floats:
            out = np.zeros(n)
            _next_use(int(policy.rank), policy.tau, variant, now_s, world, self._demand, hazard, self._caches.next_ts, out)
            if sent is not None and policy.rank in _LEARNED:
                new = np.flatnonzero(sent & (self._demand.rows[: len(sent)] == 0))
                out[new] = np.nan_to_num(self._column[variant, new])
            return out

        joiners = np.zeros(n)
        _joiners(now_s, self._demand, joiners)
        prefetch_per_s = None
        if policy.prefetch is not PrefetchRule.NONE:
            prefetch_per_s = rates(policy.prefetch_variant)
            for variant in np.unique(self._variant[self._variant >= 0]).tolist():
                prefetch_per_s = np.where(self._variant == variant, rates(variant), prefetch_per_s)
        return Outlook(
            expert=self.expert,
            policy=policy,
            keep_per_s=rates(policy.variant),
            prefetch_per_s=prefetch_per_s,
            joiners_per_s=joiners,
            parts=_PARTS[policy.rank],
        )

    def shadow_holds(self) -> npt.NDArray[np.bool_]:
        """bool[n]: what the node would hold, ready, without prefetching."""
        ready: npt.NDArray[np.bool_] = self._caches.weights["status"][SHADOW] == Status.READY
        return ready

    # --- the whole state ---

    def snapshot(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """(arrays, JSON types): all that `restore` needs."""
        arrays = {f"demand/{name}": value.copy() for name, value in self._demand._asdict().items()}
        arrays |= {"size": self._size.copy(), "link_s": self._link_s.copy(), "served": self._served.copy()}
        arrays |= {"column": self._column.copy(), "latest": self._latest.copy(), "queue": self._caches.queue.copy()}
        arrays |= {"next_event_s": self._caches.next_event_s.copy()}
        orders = self._log.orders[: self._log.filled[2]]
        for name, records in (("cache", self._caches.cache), ("weights", self._caches.weights), ("orders", orders)):
            arrays[name] = np.frombuffer(records.tobytes(), np.uint8).copy()
        facts = {
            "experts": list(_NAMES),
            "orders": list(ORDER_EVENT.names or ()),
            "hedge": self._hedge.snapshot(),
            "t0_s": self._t0_s,
            "at_s": self._at_s,
            "period_end_s": self._period_end_s,
            "shadow_wait_s": self.shadow_wait_s,
            "shadow_hours": sorted(self.shadow_hours.items()),
            "whole": self._whole,
            "shadow_measured": sorted(self.shadow_measured.items()),
            "washout_wait_s": self._washout_wait_s,
            "capacity": self._capacity,
        }
        return arrays, facts

    def restore(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Goes on from a snapshot, at its own price, hold and tick. Raises ValueError for one that is of other experts or another shape."""
        if facts.get("experts") != list(_NAMES):
            raise ValueError(f"shadow caches of {facts.get('experts')}, expected {list(_NAMES)}")
        if facts.get("orders") != list(ORDER_EVENT.names or ()):
            raise ValueError("shadow caches whose orders have other fields")
        n = len(arrays["size"])
        shapes = ((len(_NAMES) + 1) * CACHE.itemsize, (len(_NAMES) + 1) * n * WEIGHTS.itemsize)
        if (len(arrays["cache"]), len(arrays["weights"])) != shapes or len(arrays["orders"]) % ORDER_EVENT.itemsize:
            raise ValueError("shadow caches whose records have another shape")
        self._hedge.restore(facts["hedge"])
        self._t0_s, self._at_s, self._period_end_s = float(facts["t0_s"]), float(facts["at_s"]), float(facts["period_end_s"])
        self.shadow_wait_s, self._capacity = float(facts["shadow_wait_s"]), float(facts["capacity"])
        self.shadow_hours = {int(hour): float(wait_s) for hour, wait_s in facts.get("shadow_hours", ())}
        self._whole = bool(facts.get("whole", False))
        self.shadow_measured = {int(hour): float(wait_s) for hour, wait_s in facts.get("shadow_measured", ())}
        waited_s = facts.get("washout_wait_s")
        self._washout_wait_s = None if waited_s is None else float(waited_s)
        self._size, self._link_s = np.array(arrays["size"]), np.array(arrays["link_s"])
        self._served = np.array(arrays["served"])
        self._column, self._latest = np.array(arrays["column"]), np.array(arrays["latest"])
        self._demand = Demand(**{name: np.array(arrays[f"demand/{name}"]) for name in Demand._fields})
        self._caches = self._fresh()
        self._caches.cache[:] = np.frombuffer(arrays["cache"].tobytes(), CACHE)
        self._caches.weights[:] = np.frombuffer(arrays["weights"].tobytes(), WEIGHTS).reshape(len(_NAMES) + 1, n)
        self._caches.queue[:] = arrays["queue"]
        self._caches.next_event_s[:] = arrays["next_event_s"]
        self._bounded = None
        self._apply_windows()
        orders = np.frombuffer(arrays["orders"].tobytes(), ORDER_EVENT)
        self._log = new_event_log(SHADOW + 1, 0, [])
        room = max(len(orders), len(self._log.orders))
        self._log = self._log._replace(orders=np.zeros(room, ORDER_EVENT))
        self._log.orders[: len(orders)] = orders
        self._log.filled[2] = len(orders)

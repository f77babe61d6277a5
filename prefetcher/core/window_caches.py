"""One node's shadow caches of candidate windows: what each of them would have cost, segment by segment. Pure.

Cache 0 has the windows in force. Then, for each segment, one cache for each candidate: that segment has the candidate, all others are as in
force. So what tells candidates of one segment apart is that segment's window alone, and everything that it does to the others is counted.
All go through the same rows in lockstep and prefetch by the same expert. Covers neither the choice (`core.tuner`) nor forecasts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefetcher.core.demand import STANDARD_TAUS_S, new_demand
from prefetcher.core.experts import VARIANT_OF_HORIZON, VARIANTS
from prefetcher.core.node import Caches, Hazard, Policy, World, new_caches, new_event_log, no_hazard, set_policy, set_windows
from prefetcher.core.node_run import run_rows
from prefetcher.core.types import Window
from prefetcher.core.windows import NO_LEAD_LIMIT_S, WindowTable

__all__ = ["COSTS", "WindowCaches", "apply_windows"]

#: What a cost is made of: seconds of waiting, GB·h held, and GB·h of prefetches that ended unused.
COSTS = 3
_GB_H = 3.6e12


def apply_windows(caches: Caches, e: int, windows: WindowTable) -> None:
    """Bounds the forecast prefetches of cache `e` by these windows, one for each model."""
    lead_s = np.where(windows.lead_s >= NO_LEAD_LIMIT_S, np.inf, windows.lead_s)
    variant = np.array([VARIANT_OF_HORIZON[float(h)] for h in windows.horizon_s], np.int64)
    set_windows(caches, e, lead_s, windows.hold_s, variant)


class WindowCaches:
    """The shadow caches of a node for `segments` segments with `candidates` each; `policy` is the expert that prefetches.

    `extra` windows, each for all models, run beside them for comparison. Where fewer segments are told than there is room for, the caches
    of the others stand still from then on. Not for two threads at once.
    """

    def __init__(
        self, world: World, capacity_bytes: float, policy: Policy, segments: int, candidates: int, extra: Sequence[Window] = ()
    ) -> None:
        self.world = world
        self._candidates = candidates
        #: Cache 0 is in force, the extra ones follow, then segment by segment the candidates.
        self._first = 1 + len(extra)
        count = self._first + segments * candidates
        self._caches = new_caches([policy] * count, world, capacity_bytes)
        self._log = new_event_log(count, 0, [])
        self._demand = new_demand(len(world.size_bytes), world.t0_s, STANDARD_TAUS_S)
        self._hazard = no_hazard(len(world.size_bytes), VARIANTS)
        self._rows = 0
        self._held_to_s = world.t0_s
        for k, window in enumerate(extra):
            apply_windows(self._caches, 1 + k, _same(window, len(world.size_bytes)))
        self._running = self._caches

    def decide_by(self, policy: Policy) -> None:
        """Another expert prefetches from here on, in all caches."""
        for record in self._caches.policy:
            set_policy(record, policy)

    def set_windows(self, number: npt.NDArray[np.int64], windows: Sequence[Window], candidates: Sequence[Sequence[Window]]) -> None:
        """The windows in force and the candidates from here on.

        `number` int64[n] is the segment of each model, −1 for none; `windows` has one for each segment and last that of the rest;
        `candidates` a row for each segment, as many rows as at first or fewer, and never more again.
        """
        columns = np.array([(w.lead_s, w.horizon_s, w.hold_s) for w in windows], np.float64)[number]
        apply_windows(self._caches, 0, WindowTable(*columns.T))
        for s, row in enumerate(candidates):
            for c, window in enumerate(row):
                of = columns.copy()
                of[number == s] = (window.lead_s, window.horizon_s, window.hold_s)
                apply_windows(self._caches, self._first + s * self._candidates + c, WindowTable(*of.T))
        running = min(self._first + len(candidates) * self._candidates, len(self._running.policy))
        caches = self._caches
        self._running = caches._replace(
            policy=caches.policy[:running],
            cache=caches.cache[:running],
            weights=caches.weights[:running],
            windows=caches.windows[:running],
            queue=caches.queue[:running],
            next_event_s=caches.next_event_s[:running],
        )

    def see(self, hazard: Hazard) -> None:
        """The rates of next use from here on: `latest` is carried over, whatever the new ones bring."""
        self._hazard = hazard._replace(latest=self._hazard.latest, first_row=self._rows)

    def go(self, rows: int, until_s: float) -> None:
        """Goes through the node's rows up to `rows` (exclusive), then through events up to `until_s`, inclusive."""
        self._log = run_rows(self._rows, rows, until_s, self.world, self._demand, self._hazard, self._running, self._log)
        self._rows = rows
        self._forget_events()

    def costs(self, until_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """What passed since the last call: float64[COSTS] in force, float64[segments, candidates, COSTS] of those that run, and
        float64[extra, COSTS]."""
        cache = self._running.cache
        # What is held counts up to now, and not only to the last change.
        held = cache["period_byte_s"] + cache["used"] * np.maximum(until_s - cache["held_at_s"], 0.0)
        cache["held_at_s"] = np.maximum(cache["held_at_s"], until_s)
        every = np.stack([cache["period_wait_s"], held / _GB_H, cache["period_wasted_byte_s"] / _GB_H], axis=1)
        for name in ("period_wait_s", "period_byte_s", "period_wasted_byte_s"):
            cache[name] = 0.0
        return every[0], every[self._first :].reshape(-1, self._candidates, COSTS), every[1 : self._first]

    def _forget_events(self) -> None:
        """Empties the event log but for orders that weights still refer to."""
        log, weights = self._log, self._caches.weights
        log.filled[:2] = 0
        named = np.concatenate([weights["order"].ravel(), weights["last_order"].ravel()])
        kept = np.unique(named[named >= 0])
        log.orders[: len(kept)] = log.orders[kept]
        log.filled[2] = len(kept)
        for name in ("order", "last_order"):
            weights[name] = np.where(weights[name] >= 0, np.searchsorted(kept, weights[name]), weights[name])


def _same(window: Window, models: int) -> WindowTable:
    return WindowTable(*(np.full(models, value) for value in (window.lead_s, window.horizon_s, window.hold_s)))

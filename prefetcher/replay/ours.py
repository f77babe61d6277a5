"""Our policy over a log: the hazard's forecasts, experts as shadow caches, the Hedge, and the live cache that follows it.

All of it is production code (`HazardStream`, `core.node_steps`, `core.hedge`); here is the order in which a log drives it: an hour of rows
is scored, every cache goes through it, the Hedge looks at what each expert's hour cost and the live cache takes the chosen expert's rules.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefetcher.core.demand import STANDARD_TAUS_S, new_demand
from prefetcher.core.experts import EXPERTS, HORIZONS, PERIOD_S, WINDOWS_S, expert_policies, rates_of_next_use, without_prefetch
from prefetcher.core.hedge import Hedge
from prefetcher.core.node import EventLog, Hazard, new_caches, new_event_log, set_policy
from prefetcher.core.node_run import run_rows
from prefetcher.core.value import price_per_byte_s
from prefetcher.replay.engine import NodeLog, close_node
from prefetcher.replay.trace import Trace
from prefetcher_models.hazard import HazardSettings
from prefetcher_models.stream import HazardStream

__all__ = ["LIVE", "SHADOW", "Rates", "run_ours", "score_log"]

LIVE = len(EXPERTS)  #: number of the live cache
SHADOW = LIVE + 1  #: number of its twin without prefetching

Progress = Callable[[float, str], None]


class Rates:
    """Rates of next use over the whole log: `at_tick` float32[V, ticks, n], `after_row` float32[V, N], as in `core.node.Hazard`."""

    def __init__(self, at_tick: npt.NDArray[np.float32], after_row: npt.NDArray[np.float32]) -> None:
        self.at_tick = at_tick
        self.after_row = after_row


def score_log(trace: Trace, seed: int, progress: Progress) -> Rates:
    """The hazard over the log, strictly from the past at every row and tick. Forecasts don't depend on decisions."""
    stream = HazardStream(len(trace.models), trace.t0, horizons=HORIZONS, settings=HazardSettings(seed=seed))
    model, user, count = trace.model.astype(np.int64), trace.user.astype(np.int64), trace.count.astype(np.int64)
    ticks = int((trace.t1 - trace.t0) / 60.0) + 1
    rates = Rates(
        np.full((len(WINDOWS_S), ticks, len(trace.models)), np.nan, np.float32), np.zeros((len(WINDOWS_S), len(trace)), np.float32)
    )
    first, tick, start_s = 0, 0, trace.t0
    while first < len(trace):
        until_s = start_s + 4 * PERIOD_S
        last = int(np.searchsorted(trace.ts, until_s))
        block = stream.advance(
            trace.ts[first:last], model[first:last], user[first:last] if trace.users else None, count[first:last], until_s
        )
        taken = min(len(block.ticks), ticks - tick)
        rates.after_row[:, first:last] = rates_of_next_use(block.p_rows)
        flat = block.p_ticks[:taken].reshape(-1, len(HORIZONS))
        rates.at_tick[:, tick : tick + taken] = rates_of_next_use(flat).reshape(len(WINDOWS_S), taken, -1)
        tick, first, start_s = tick + taken, last, until_s
        progress(min(1.0, (start_s - trace.t0) / max(trace.t1 - trace.t0, 1.0)), "learning from arrivals")
    return rates


def run_ours(
    part: NodeLog,
    rates: Rates,
    capacity_bytes: float,
    price_s_per_gb_h: float,
    hold_s: float,
    progress: Progress,
    schedule: list[int] | None = None,
) -> tuple[EventLog, list[int], list[str]]:
    """One node: (event log, expert of every period, their names). Slots of the log: LIVE and SHADOW.

    With `schedule`, the experts of an earlier run are followed and not run again: only LIVE and SHADOW have events then.
    """
    world = part.world
    price = price_per_byte_s(price_s_per_gb_h)
    experts = expert_policies(price_s_per_gb_h, hold_s)
    hedge = Hedge(len(experts))
    follow = schedule is not None
    chosen = schedule if schedule is not None else []
    policies = [experts[0], without_prefetch(experts[0])] if follow else [*experts, experts[0], without_prefetch(experts[0])]
    live = 0 if follow else LIVE
    caches = new_caches(policies, world, capacity_bytes)
    log = new_event_log(len(policies), len(world.ts), [live, live + 1])
    demand = new_demand(len(world.size_bytes), world.t0_s, STANDARD_TAUS_S)
    latest = np.zeros((len(WINDOWS_S), len(world.size_bytes)), np.float32)
    after_row = np.ascontiguousarray(rates.after_row[:, part.rows])
    first, period, start_s = 0, 0, world.t0_s
    while start_s <= world.t1_s:
        number = chosen[period] if follow else hedge.live
        if not follow:
            chosen.append(number)
        set_policy(caches.policy[live], experts[number])
        set_policy(caches.policy[live + 1], without_prefetch(experts[number]))
        end_s = start_s + PERIOD_S
        last = int(np.searchsorted(world.ts, end_s))
        hazard = Hazard(rates.at_tick, after_row, latest, 0, 0)
        log = run_rows(first, last, min(end_s, world.t1_s), world, demand, hazard, caches, log)
        if not follow:
            cost = caches.cache["period_wait_s"] + price * caches.cache["period_byte_s"]
            hedge.learn(cost[: len(experts)], PERIOD_S)
        caches.cache["period_wait_s"] = caches.cache["period_byte_s"] = 0.0
        first, period, start_s = last, period + 1, end_s
        progress(min(1.0, (start_s - world.t0_s) / max(world.t1_s - world.t0_s, 1.0)), "experts and the live cache")
    log = close_node(world, demand, Hazard(rates.at_tick, after_row, latest, 0, 0), caches, log)
    return log, chosen, list(EXPERTS)

"""Our policy over a log: the hazard's forecasts, experts as shadow caches, the Hedge, and the live cache that follows it.

All of it is production code (`HazardStream`, `core.node_steps`, `core.hedge`); here is the order in which a log drives it: a few hours
of rows are scored (`score_blocks`) and dropped again once every cache went through them; each hour the Hedge looks at what each expert
cost and the live cache takes the chosen expert's rules (`NodeRun`). Which node a row goes to is for `replay.engine` and `replay.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefetcher.core.demand import STANDARD_TAUS_S, new_demand
from prefetcher.core.experts import EXPERTS, HORIZONS, PERIOD_S, VARIANTS, expert_policies, rates_of_next_use, without_prefetch
from prefetcher.core.hedge import Hedge
from prefetcher.core.node import (
    ABSENT,
    HINTED,
    QUEUED,
    READY,
    Found,
    Hazard,
    World,
    new_caches,
    new_event_log,
    no_hazard,
    set_policy,
)
from prefetcher.core.node_run import run_rows
from prefetcher.core.segments import SORTED_S, facts_before
from prefetcher.core.value import price_per_byte_s
from prefetcher.core.window_caches import apply_windows
from prefetcher.core.windows import WindowBook
from prefetcher.replay.engine import TICK_S, close_node
from prefetcher.replay.trace import Trace
from prefetcher_models.hazard import HazardSettings
from prefetcher_models.registry import hazard_sources
from prefetcher_models.stream import HazardStream

__all__ = ["AT_PRICE", "LIVE", "SHADOW", "NodeRun", "RateBlock", "computed_ahead", "score_blocks"]

LIVE = len(EXPERTS)  #: number of the live cache
SHADOW = LIVE + 1  #: number of its twin without prefetching
AT_PRICE = SHADOW + 1  #: number of the first cache that follows the live one's experts at another price

#: Hours that are scored at once: enough rows for the trees' kernel to be quick, few enough to hold 10,000 models' minutes.
_BLOCK_PERIODS = 4

Progress = Callable[[float, str], None]
Floats32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RateBlock:
    """Rates of next use over a stretch [from_s, until_s) of the log, as in `core.node.Hazard`; whole periods.

    `at_tick` float32[V, ticks, n] begins at tick `first_tick` since the log's start and reaches one tick beyond the stretch on both sides
    where there is one; `after_row` float32[V, rows] begins at row `first_row` of the whole log.
    """

    from_s: float
    until_s: float
    first_row: int
    first_tick: int
    at_tick: Floats32
    after_row: Floats32

    @property
    def last_row(self) -> int:
        """The first row after the block."""
        return self.first_row + int(self.after_row.shape[1])

    def periods(self, t1_s: float) -> Iterator[tuple[float, float]]:
        """Of each period that begins by `t1_s`: its end, which its rows come before, and the last moment of events in it. Seconds."""
        end_s = self.from_s
        while end_s < self.until_s and end_s <= t1_s:
            end_s += PERIOD_S
            yield end_s, min(end_s, t1_s)


def score_blocks(trace: Trace, seed: int, progress: Progress, periods: int = _BLOCK_PERIODS) -> Iterator[RateBlock]:
    """The hazard over the log, block after block, strictly from the past at every row and tick. Forecasts don't depend on decisions."""
    settings, sources = HazardSettings(seed=seed), hazard_sources()
    stream = HazardStream(len(trace.models), trace.t0, tick_s=TICK_S, horizons=HORIZONS, settings=settings, sources=sources)
    first, tick, from_s = 0, 0, trace.t0
    waiting: RateBlock | None = None
    while first < len(trace):
        until_s = from_s
        for _ in range(periods):
            until_s += PERIOD_S
        last = int(np.searchsorted(trace.ts, until_s))
        model, user, count = (column[first:last].astype(np.int64) for column in (trace.model, trace.user, trace.count))
        scored = stream.advance(trace.ts[first:last], model, user if trace.users else None, count, until_s)
        ticks = len(scored.ticks)
        at_tick = rates_of_next_use(scored.p_ticks.reshape(-1, len(HORIZONS))).reshape(VARIANTS, ticks, -1)
        block = RateBlock(from_s, until_s, first, tick, at_tick, rates_of_next_use(scored.p_rows))
        # Events at a period's end are the period's, and see the tick of that moment: it is the next block's first.
        if waiting is not None:
            yield _joined(waiting, at_tick[:, :1])
            block = RateBlock(from_s, until_s, first, tick - 1, np.concatenate([waiting.at_tick[:, -1:], at_tick], axis=1), block.after_row)
        waiting = block
        progress(min(1.0, (until_s - trace.t0) / max(trace.t1 - trace.t0, 1.0)), "learning, and ours")
        first, tick, from_s = last, tick + ticks, until_s
    if waiting is not None:
        yield waiting


def computed_ahead(blocks: Iterator[RateBlock]) -> Iterator[RateBlock]:
    """The same blocks, each computed on a second core while the one before it is used."""
    with ThreadPoolExecutor(1, "scores") as pool:
        following = pool.submit(next, blocks, None)
        while (block := following.result()) is not None:
            following = pool.submit(next, blocks, None)
            yield block


def _joined(block: RateBlock, following: Floats32) -> RateBlock:
    at_tick = np.concatenate([block.at_tick, following], axis=1)
    return RateBlock(block.from_s, block.until_s, block.first_row, block.first_tick, at_tick, block.after_row)


class NodeRun:
    """Ours on one node: the experts, the live cache, its twin without prefetching, and the live cache at other `prices`, in lockstep.

    Slots of its log: LIVE, SHADOW, and AT_PRICE + k for prices[k]. `chosen` is the expert of every period. Prices in seconds per GB·h.
    With `hints`, the live cache is told of hints, at every price; experts and twin are not, as in production. `windows` bound the
    prefetches of all, model by model, by what this node's rows of the last week said of each; sorted anew after each day of the log.
    """

    def __init__(
        self,
        world: World,
        capacity_bytes: float,
        price_s_per_gb_h: float,
        hold_s: float,
        prices: Sequence[float] = (),
        hints: bool = False,
        windows: WindowBook | None = None,
    ) -> None:
        self.world = world
        self._windows = windows
        self.chosen: list[int] = []
        self._price = price_per_byte_s(price_s_per_gb_h)
        self._experts = expert_policies(price_s_per_gb_h, hold_s)
        self._live = [replace(policy, hints=hints) for policy in self._experts]
        self._at_price = [[replace(policy, hints=hints) for policy in expert_policies(price, hold_s)] for price in prices]
        self._hedge = Hedge(len(EXPERTS))
        first = [self._live[0], without_prefetch(self._experts[0]), *(experts[0] for experts in self._at_price)]
        self._caches = new_caches([*self._experts, *first], world, capacity_bytes)
        count = len(self._caches.policy)
        self.log = new_event_log(count, len(world.ts), list(range(LIVE, count)))
        self._demand = new_demand(len(world.size_bytes), world.t0_s, STANDARD_TAUS_S)
        self._hazard = no_hazard(len(world.size_bytes), VARIANTS)
        if hints:
            self._hazard = self._hazard._replace(hinted=np.zeros(len(world.size_bytes), HINTED))
        self._rows = 0

    def take(self, block: RateBlock, rows: npt.NDArray[np.int64], hints: npt.NDArray[np.void] | None = None) -> None:
        """Goes through a block; `rows` are the node's, as positions in the whole log, `hints` HINT_EVENT[K] what the node is told in it."""
        first, last = np.searchsorted(rows, (block.first_row, block.last_row))
        self.see(block, np.ascontiguousarray(block.after_row[:, rows[first:last] - block.first_row]), hints)
        for end_s, until_s in block.periods(self.world.t1_s):
            self.begin_period()
            self.go(int(np.searchsorted(self.world.ts, end_s)), until_s)
            self.end_period()

    def see(self, block: RateBlock, after_row: Floats32, hints: npt.NDArray[np.void] | None = None) -> None:
        """Takes a block's rates, `after_row` float32[V, rows of this node from here on], and its hints."""
        before = self._hazard
        self._hazard = Hazard(block.at_tick, after_row, before.latest, block.first_tick, self._rows, before.hinted)
        if hints is not None:
            self._hazard = self._hazard._replace(hint_events=hints, hints_taken=np.zeros(1, np.int64))

    def go(self, rows: int, until_s: float) -> None:
        """Goes through the node's rows up to `rows` (exclusive), then through events up to `until_s`, inclusive."""
        self.log = run_rows(self._rows, rows, until_s, self.world, self._demand, self._hazard, self._caches, self.log)
        self._rows = rows

    def begin_period(self) -> None:
        """The Hedge's expert decides from here on."""
        if self._windows is not None and len(self.chosen) * PERIOD_S % SORTED_S == 0.0:
            self._bound(self._windows)
        number = self._hedge.live
        self.chosen.append(number)
        policy = self._caches.policy
        set_policy(policy[LIVE], self._live[number])
        set_policy(policy[SHADOW], without_prefetch(self._experts[number]))
        for k, experts in enumerate(self._at_price):
            set_policy(policy[AT_PRICE + k], experts[number])

    def _bound(self, windows: WindowBook) -> None:
        world, rows = self.world, self._rows
        now_s = world.t0_s + len(self.chosen) * PERIOD_S
        table = windows.windows_of(facts_before(world.ts[:rows], world.model[:rows], world.size_bytes, world.t0_s, now_s))
        for e in range(len(self._caches.policy)):
            apply_windows(self._caches, e, table)

    def end_period(self) -> None:
        """The Hedge learns what the period cost each expert."""
        cache = self._caches.cache
        cost = cache["period_wait_s"] + self._price * cache["period_byte_s"]
        self._hedge.learn(cost[: len(EXPERTS)], PERIOD_S)
        cache["period_wait_s"] = cache["period_byte_s"] = 0.0

    def found(self, model: int, now_s: float) -> Found:
        """What a row of `model` would find in the live cache, which must have come to `now_s`."""
        weights = self._caches.weights[LIVE, model]
        status = int(weights["status"])
        if status == READY:
            return Found.READY if weights["expiry_s"] > now_s else Found.ABSENT
        return Found.ABSENT if status == ABSENT else Found.QUEUED if status == QUEUED else Found.MOVING

    def close(self) -> None:
        """Lets running loads finish and ends what is held at the log's end."""
        self.log = close_node(self._rows, self.world, self._demand, self._hazard, self._caches, self.log)

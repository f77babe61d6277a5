"""The residency machine and the node without bytes decide alike: what every row finds and how long it waits, on random small logs.

The machine is driven by a loader in virtual time whose loads take bytes over link, whose pauses come at the end of a block, and whose
memory is back at once. Both are given the same index for every model at every instant. What then still differs is by design, and rows that
meet it are taken out before the rest is compared, all of it:

* Live serves what is not worth caching from disk at once and does not take the link for it; replay queues it and serves it over the link.
  They agree where the link was free and nobody else wanted it meanwhile (`Difference.BYPASS_ON_A_BUSY_LINK`).
* Before replay serves a load uncached it drops a paused prefetch; live drops nothing for what it does not cache
  (`BYPASS_BESIDE_A_PREFETCH`).
* Live goes on with a paused prefetch as soon as the link is free; replay first asks again which prefetch is the best (`NOT_RESUMED`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefetcher.core import events as ev
from prefetcher.core import facts
from prefetcher.core.copies import Stage
from prefetcher.core.demand import STANDARD_TAUS_S, new_demand, observe
from prefetcher.core.ledger import Ledger
from prefetcher.core.node import (
    BLOCK_BYTES,
    OUTCOMES,
    Found,
    Hazard,
    Policy,
    PrefetchRule,
    Rank,
    World,
    new_caches,
    new_event_log,
)
from prefetcher.core.node_steps import advance, close
from prefetcher.core.ranking import next_use_per_s
from prefetcher.core.residency import NodeLimits, ResidencyMachine
from prefetcher.core.types import Arm, Cause, DecisionId, DesiredWeights, ModelName, NodeName, Order, Plan, Tier, WeightsKey
from prefetcher.replay.log_tables import outcome_codes

NODE = NodeName("n")
#: A block a second, and whole blocks only: every time of a load is exact.
LINK_BYTES_PER_S = float(BLOCK_BYTES)
TAUS_S = (60.0, *STANDARD_TAUS_S[1:])
HOLD_S = 60.0
TICK_S = 10.0
FOREVER_S = 1e12
#: The first ones that come, some with long queues, and some in which a paused prefetch goes on.
SEEDS = (0, 1, 4, 6, 13, 18, 22, 44, 59, 77, 85, 86, 17, 39, 33, 127)
#: In which many loads give way.
BURSTS = (5, 8, 9, 10)


class Difference(Enum):
    """Why a row was taken out."""

    BYPASS_ON_A_BUSY_LINK = auto()
    BYPASS_BESIDE_A_PREFETCH = auto()
    NOT_RESUMED = auto()


@dataclass(frozen=True)
class Log:
    """Rows of models numbered from 0, whose sizes are in blocks.

    Without prefetching the index is a decayed rate; with it, a noisy look ahead, `at_tick` float32[ticks, models] and `after_row`.
    """

    ts: np.ndarray
    model: np.ndarray
    blocks: np.ndarray
    capacity_blocks: int
    prefetch: bool
    at_tick: np.ndarray
    after_row: np.ndarray
    t0_s: float
    t1_s: float
    parts: bool = True

    def without(self, rows: set[int]) -> Log:
        keep = [i for i in range(len(self.ts)) if i not in rows]
        return replace(self, ts=self.ts[keep], model=self.model[keep], after_row=self.after_row[keep])

    @property
    def rank(self) -> Rank:
        return Rank.HAZARD if self.prefetch else Rank.LFU

    def world(self) -> World:
        models = len(self.blocks)
        size, link_s = self.blocks * float(BLOCK_BYTES), self.blocks.astype(np.float64)
        never = np.full(len(self.ts), np.inf)
        known = (self.ts, self.model.astype(np.int32), never, np.full(models, np.inf))
        return World(size, link_s, np.ones(models), *known, self.t0_s, self.t1_s, TICK_S)

    def hazard(self) -> Hazard:
        latest = np.zeros((1, len(self.blocks)), np.float32)
        return Hazard(self.at_tick[np.newaxis].copy(), self.after_row[np.newaxis].copy(), latest, 0, 0)


def a_log(seed: int, rows: int = 300, models: int = 8, *, bursts: bool = False) -> Log:
    """From a link that is nearly idle to one that is overloaded, from room for hardly one model to room for nearly all, of one size or of
    many; who is asked for changes every thirty rows. With `bursts`, several rows in a second and then none for a while, for models of
    which half are small and half large.
    """
    rng = np.random.default_rng(seed)
    if bursts:
        blocks = np.where(rng.random(models) < 0.5, rng.integers(1, 4, models), rng.integers(10, 40, models))
        capacity = int(rng.integers(int(blocks.sum()) // 2, int(blocks.sum()) + 1))
    else:
        most = int(rng.choice([3, 9, 20]))
        blocks = rng.integers(1, most, models) if rng.random() < 0.6 else np.full(models, int(rng.integers(1, most)))
        capacity = int(rng.integers(int(blocks.max()) - 1, int(blocks.sum())))
    gap_s = float(rng.choice([0.3, 1.0, 3.0, 10.0, 30.0]))
    model = np.zeros(rows, np.int64)
    for first in range(0, rows, 30):
        weights = rng.pareto(1.0, models) + 0.05
        model[first : first + 30] = rng.choice(models, len(model[first : first + 30]), p=weights / weights.sum())
    gaps_s = rng.exponential(gap_s, rows) + 1e-3
    if bursts:
        gaps_s *= np.where(rng.random(rows) < 0.2, 5.0, 0.2)
    ts = 1000.0 + np.cumsum(gaps_s)

    def foreseen(at_s: float, m: int) -> float:
        coming = ts[(ts > at_s) & (model == m)]
        return float(np.exp(rng.normal()) / ((coming[0] if len(coming) else 1e6) - at_s + 2.0))

    ticks = np.arange(ts[0], ts[-1] + TICK_S, TICK_S)
    at_tick = np.array([[foreseen(at_s, m) for m in range(models)] for at_s in ticks], np.float32)
    after_row = np.array([foreseen(at_s, m) for at_s, m in zip(ts, model, strict=True)], np.float32)
    return Log(ts, model, blocks, capacity, bool(seed % 2), at_tick, after_row, float(ts[0]), float(ts[-1]))


@dataclass
class Story:
    """What one of both made of a log. Of residencies (model, start, ready, last use, end, bytes) only those that ended before the log did;
    orders that did not, and were not used, are open.
    """

    found: list[str]
    wait_s: list[float]
    residencies: list[tuple[float, ...]]
    orders: list[tuple[float, int, str]]
    #: (model, start, end, uncached)
    segments: list[tuple[int, float, float, bool]] = field(default_factory=list)
    by_design: dict[Difference, set[int]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


def replayed(log: Log) -> Story:
    """The node without bytes."""
    models, rows, world, hazard = len(log.blocks), len(log.ts), log.world(), log.hazard()
    policy = Policy(
        log.rank, yields=True, parts=log.parts, tau=0, price_per_byte_s=0.0, hold_s=HOLD_S, busy_ratio=float("inf"), margin=1.0,
        prefetch=PrefetchRule.INDEX if log.prefetch else PrefetchRule.NONE,
    )  # fmt: skip
    caches = new_caches([policy], world, log.capacity_blocks * float(BLOCK_BYTES))
    events, demand = new_event_log(1, rows, [0]), new_demand(models, world.t0_s, TAUS_S)
    assert advance(0, rows, np.inf, world, demand, hazard, caches, events) == rows + 1
    assert close(world.t1_s, world, demand, caches, events)
    held, moved, orders = (part[: events.filled[i]] for i, part in enumerate((events.residency, events.transfers, events.orders)))
    assert outcome_codes(orders).tolist() == orders["outcome"].tolist(), "the ledger's rule says of the same times what the kernel says"
    names = [f.name.lower() for f in Found]
    story = Story(
        found=[names[code] for code in events.found[0][:rows]],
        wait_s=events.wait_s[0][:rows].tolist(),
        residencies=sorted(
            (float(h["model"]), h["start_s"], h["ready_s"], h["last_use_s"], h["end_s"], h["bytes"])
            for h in held
            if h["end_s"] < world.t1_s
        ),
        orders=[
            (float(o["issued_s"]), int(o["model"]), OUTCOMES[o["outcome"]] if o["end_s"] < log.t1_s or o["first_use_s"] > 0.0 else "open")
            for o in orders
        ],
    )
    cached = {(int(h["model"]), float(h["ready_s"])) for h in held}
    for segment in moved:
        model, end_s = int(segment["model"]), float(segment["end_s"])
        whole = held[held["bytes"] == world.size_bytes[model]]
        paused = any(int(h["model"]) == model and h["start_s"] <= segment["start_s"] and end_s < h["end_s"] for h in whole)
        uncached = not segment["prefetch"] and (model, end_s) not in cached and not paused
        story.segments.append((model, float(segment["start_s"]), end_s, uncached))
    return story


class Live:
    """The machine and its loader. `orders` are (issued_s, model), given to it as plans."""

    def __init__(self, log: Log, orders: list[tuple[float, int]]) -> None:
        self.log = log
        self.keys = [WeightsKey(ModelName(f"m{m}")) for m in range(len(log.blocks))]
        limits = NodeLimits(
            {Tier.HOST: log.capacity_blocks * BLOCK_BYTES},
            link_bytes_per_s=LINK_BYTES_PER_S, stall_s=FOREVER_S, demand_deadline_s=FOREVER_S, parts=log.parts,
        )  # fmt: skip
        self.machine = ResidencyMachine(NODE, limits)
        self.ledger = Ledger()
        self.demand = new_demand(len(log.blocks), log.t0_s, TAUS_S)
        self.world, self.hazard = log.world(), log.hazard()
        self.to_come = sorted(orders, key=lambda o: o[0])
        self.given: dict[int, Order] = {}
        self.revision = 0
        self.now_s = log.t0_s - 1.0
        self.row = -1
        self.mover: WeightsKey | None = None
        self.segment_s = self.end_s = math.inf
        self.from_bytes = 0
        self.pauses = False
        self.story = Story([""] * len(log.ts), [math.nan] * len(log.ts), [], [])
        self.resumed: list[tuple[int, float, int]] = []
        self.number = {(self.keys[m].model, float(t)): i for i, (t, m) in enumerate(zip(log.ts, log.model, strict=True))}
        for key, blocks in zip(self.keys, log.blocks.tolist(), strict=True):
            self.tell(ev.CatalogSeen(key, blocks * BLOCK_BYTES, {Tier.HOST: float(blocks)}))

    def run(self) -> Story:
        for i, (ts, model) in enumerate(zip(self.log.ts.tolist(), self.log.model.tolist(), strict=True)):
            self.until(ts)
            self.now_s, self.row = ts, i
            observe(self.demand, model, ts)
            self.hazard.latest[0, model] = self.log.after_row[i]
            self.plan()
            if self.mover is not None:
                done = self.from_bytes + round((ts - self.segment_s) * LINK_BYTES_PER_S)
                self.tell(ev.BytesVerified(self.mover, Tier.HOST, done))
            self.tell(ev.Requested(self.keys[model].model, ts))
        self.until(math.inf)
        for entry in [*self.ledger.open_orders(), *self.ledger.take_closed(math.inf)]:
            ended = entry.end_s is not None and entry.end_s < self.log.t1_s
            used = entry.first_use_s is not None
            outcome = entry.outcome.value if ended or used else "open"
            self.story.orders.append((entry.order.issued_s, self.keys.index(entry.order.key), outcome))
        self.story.orders.sort()
        self.story.residencies.sort()
        return self.story

    def until(self, ts: float) -> None:
        """All that happens up to `ts`, in replay's order at one instant: ends of transfers, ends of holds, prefetches, then the row."""
        while True:
            holds = [
                copy.hold_until_s
                for copy in self.machine.holdings.in_tier[Tier.HOST].values()
                if copy.hold_until_s is not None and copy.stage is Stage.READY and not copy.used
            ]
            end_s = self.end_s if self.mover is not None else math.inf
            order_s = self.to_come[0][0] if self.to_come else math.inf
            due_s = min([end_s, order_s, *holds])
            if due_s > ts or due_s == math.inf:
                return
            self.now_s = due_s
            if end_s == due_s:
                self.segment_ends()
            elif due_s in holds:
                self.plan()
                self.tell(ev.Ticked())
            else:
                self.plan(self.to_come.pop(0))

    def segment_ends(self) -> None:
        key, self.mover = self.mover, None
        assert key is not None
        self.plan()
        if self.pauses:
            done = self.from_bytes + round(self.end_s - self.segment_s) * BLOCK_BYTES
            self.tell(ev.LoadPaused(key, Tier.HOST, done))
        else:
            self.tell(ev.WeightsLoaded(key, Tier.HOST))

    def plan(self, new: tuple[float, int] | None = None) -> None:
        """Every model's index as it is now, and the prefetches that were given so far."""
        if new is not None:
            number = len(self.given)
            self.given[number] = Order(
                DecisionId(f"o{number}"), NODE, self.keys[new[1]], Tier.HOST, Cause.FORECAST, Arm.TREATED, new[0], new[0], FOREVER_S, HOLD_S
            )
        newest = {order.key: order for order in self.given.values()}
        desired = tuple(DesiredWeights(key, self.index(m), 0.0, False, newest.get(key)) for m, key in enumerate(self.keys))
        self.revision += 1
        self.tell(ev.PlanReceived(Plan(NODE, self.revision, 1, self.now_s, 0.0, desired)))

    def index(self, model: int) -> float:
        nothing = np.full(len(self.keys), np.inf)
        return float(next_use_per_s(int(self.log.rank), 0, 0, model, self.now_s, self.demand, self.hazard, self.world, nothing))

    def tell(self, event: ev.Event) -> None:
        for told in self.machine.handle(event, self.now_s):
            self.obey(told)
        assert self.machine.check() == []

    def obey(self, told: ev.Instruction) -> None:
        match told:
            case ev.LoadWeights(key, resumed=resumed, resume_from_bytes=from_bytes):
                self.mover, self.segment_s, self.from_bytes, self.pauses = key, self.now_s, from_bytes, False
                self.end_s = self.now_s + (told.bytes - from_bytes) / LINK_BYTES_PER_S
                self.story.counts["resumed"] += resumed
                self.story.counts["of a part"] += not resumed and from_bytes > 0
                if resumed and not self.machine.holdings.weights[key].demanded:
                    self.resumed.append((self.keys.index(key), self.now_s, self.paused_by))
                self.story.counts["went on after it gave way"] += self.machine.holdings.weights[key].copies[Tier.HOST].yields
            case ev.PauseLoad(to=to):
                end_s = self.segment_s + math.ceil(self.now_s - self.segment_s + 1e-9)
                if end_s < self.end_s:
                    self.end_s, self.pauses, self.paused_by = end_s, True, self.row
                    self.story.counts["pauses"] += 1
                    self.story.counts["yields"] += to is not None
            case ev.EvictWeights(key) | ev.CancelLoad(key):
                kept_bytes = told.keep_bytes if isinstance(told, ev.EvictWeights) else 0
                self.story.counts["evictions"] += isinstance(told, ev.EvictWeights)
                self.story.counts["parts"] += kept_bytes > 0
                self.tell(ev.WeightsEvicted(key, Tier.HOST, kept_bytes=kept_bytes))
            case ev.Record(fact):
                self.note(fact)
            case _:
                pass

    def note(self, fact: facts.Fact) -> None:
        self.ledger.record(fact)
        match fact:
            case facts.RowSeen(model, found=found):
                # That a load is in its last block, and pauses no more, the loader alone knows.
                last_block = self.mover is not None and self.mover.model == model and not self.pauses
                self.story.found[self.row] = "moving" if last_block and found is facts.Found.QUEUED else found.value
            case facts.RowServed(model, ts, wait_s=wait_s, bypass=bypass):
                row = self.number[model, ts]
                self.story.wait_s[row] = wait_s
                if bypass:
                    self.story.counts["bypasses"] += 1
                    if self.mover is not None:
                        self.differs(Difference.BYPASS_ON_A_BUSY_LINK, row)
                    held = self.machine.holdings.in_tier[Tier.HOST].items()
                    if any(c.stage is Stage.PAUSED and not self.machine.holdings.weights[key].demanded for key, c in held):
                        self.differs(Difference.BYPASS_BESIDE_A_PREFETCH, row)
            case facts.ResidencyEnded() if fact.end_s < self.log.t1_s:
                ready_s, used_s = (math.nan if s is None else s for s in (fact.ready_s, fact.last_use_s))
                self.story.residencies.append(
                    (float(self.keys.index(fact.key)), fact.start_s, ready_s, used_s, fact.end_s, float(fact.bytes))
                )
            case _:
                pass

    def differs(self, why: Difference, row: int) -> None:
        self.story.by_design.setdefault(why, set()).add(row)


def over_a_wanted_link(log: Log, story: Story) -> set[int]:
    """Rows that replay served uncached while somebody else wanted the link, or the same weights."""
    found: set[int] = set()
    wait_s = np.array(story.wait_s)
    for model, start_s, end_s, uncached in story.segments:
        if not uncached:
            continue
        theirs = (log.model == model) & (log.ts <= start_s) & (np.abs(log.ts + wait_s - end_s) < 1e-6)
        meanwhile = (log.ts < end_s) & (log.ts + wait_s > start_s) & (wait_s > 0.0) & ~theirs
        if meanwhile.any():
            found |= set(np.flatnonzero(theirs).tolist())
    return found


def both(log: Log) -> tuple[Log, Story, Story, Counter[Difference]]:
    """The log without the rows at which they differ by design, and what each made of it."""
    out: Counter[Difference] = Counter()
    while True:
        replay = replayed(log)
        live_node = Live(log, [(issued_s, model) for issued_s, model, _ in replay.orders])
        live = live_node.run()
        by_design = dict(live.by_design)
        over = by_design.setdefault(Difference.BYPASS_ON_A_BUSY_LINK, set())
        over |= over_a_wanted_link(log, replay)
        starts = {(model, start_s) for model, start_s, _, _ in replay.segments}
        by_design[Difference.NOT_RESUMED] = {
            row for model, at_s, row in live_node.resumed if at_s < log.t1_s and (model, at_s) not in starts
        }
        rows = {row: why for why, of in by_design.items() for row in of}
        if not rows:
            return log, replay, live, out
        # Only what comes first is sure to differ in the shorter log as well; the rest goes with it to be done in few rounds.
        first = sorted(rows)[: max(1, len(rows) // 2)]
        out.update(rows[row] for row in first)
        log = log.without(set(first))


def assert_alike(log: Log, replay: Story, live: Story) -> None:
    assert live.found == replay.found
    assert live.wait_s == pytest.approx(replay.wait_s, abs=1e-6)
    assert [(i, m) for i, m, _ in live.orders] == [(i, m) for i, m, _ in sorted(replay.orders)]
    assert [o for _, _, o in live.orders] == [o for _, _, o in sorted(replay.orders)]
    assert len(live.residencies) == len(replay.residencies)
    for mine, theirs in zip(live.residencies, replay.residencies, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6, nan_ok=True)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**9), bursts=st.booleans())
# Two loads with as many rows for each second that is left, but for rounding.
@example(seed=17105883, bursts=True)
def test_every_row_finds_the_same_and_waits_as_long(seed: int, bursts: bool) -> None:
    assert_alike(*both(a_log(seed, rows=80, bursts=bursts))[:3])


def test_the_logs_have_everything_in_them_and_most_rows_are_compared() -> None:
    found, counts, outcomes, out = Counter[str](), Counter[str](), Counter[str](), Counter[Difference]()
    rows = 0
    for seed, bursts in [*((seed, False) for seed in SEEDS), *((seed, True) for seed in BURSTS)]:
        log, replay, live, taken_out = both(a_log(seed, rows=100, bursts=bursts))
        assert_alike(log, replay, live)
        rows += len(log.ts)
        found.update(replay.found)
        counts += live.counts
        outcomes.update(outcome for _, _, outcome in live.orders)
        out += taken_out
    assert rows > 0.75 * 100 * (len(SEEDS) + len(BURSTS))
    assert min(found[f.name.lower()] for f in Found) > 50
    assert counts["evictions"] > 100
    assert counts["bypasses"] > 30
    assert counts["parts"] > counts["of a part"] > 20
    assert counts["pauses"] > counts["resumed"]
    assert counts["resumed"] - counts["went on after it gave way"] >= 2, "prefetches"
    assert counts["went on after it gave way"] > 15
    assert set(outcomes) >= {"timely", "late", "useless", "displaced", "cancelled", "open"}
    assert out[Difference.BYPASS_ON_A_BUSY_LINK] > 0


def told(blocks: list[int], capacity: int, rows: list[tuple[float, int, float]], ticks: dict[int, dict[int, float]]) -> Log:
    """Rows are (time, model, index after it), `ticks` the indices from a tick on by model; nothing is prefetched without them."""
    at_tick = np.full((12, len(blocks)), 1e-9, np.float32)
    for tick, of in ticks.items():
        for model, index in of.items():
            at_tick[tick:, model] = index
    ts, model, after_row = (np.array([row[i] for row in rows]) for i in range(3))
    return Log(ts, model.astype(np.int64), np.array(blocks), capacity, bool(ticks), at_tick, after_row.astype(np.float32), 1000.0, 1100.0)


def test_a_load_whose_victims_must_leave_first_still_goes_before_one_that_fits() -> None:
    old, first, following, busy = range(4)
    rows = [(1000.0, old, 0.0), (1090.0, busy, 0.0), *((1090.1 + i / 10, first, 0.0) for i in range(4)), (1090.5, following, 0.0)]
    log, replay, live, out = both(told([6, 7, 2, 1], 10, rows, {}))
    assert_alike(log, replay, live)
    assert not out
    assert live.wait_s == pytest.approx([6.0, 1.0, 7.9, 7.8, 7.7, 7.6, 9.5])


def test_what_demand_joins_while_it_pauses_is_queued_with_its_memory() -> None:
    guess, other, now = range(3)
    rows = [
        (1000.0, guess, 1e-3), (1020.0, other, 0.5), (1041.5, now, 1.0), *((at_s, guess, 0.02) for at_s in (1041.6, 1041.7, 1043.0, 1050.0))
    ]  # fmt: skip
    log, replay, live, out = both(replace(told([12, 10, 2], 20, rows, {4: {guess: 0.02}}), parts=False))
    assert_alike(log, replay, live)
    assert not out
    assert live.found == ["absent", "absent", "absent", "moving", "queued", "queued", "moving"]
    assert live.wait_s == pytest.approx([12.0, 10.0, 2.5, 12.4, 12.3, 11.0, 4.0])
    assert [outcome for _, _, outcome in live.orders] == ["late"]


def test_a_load_that_gives_way_goes_on_with_what_is_left_of_it() -> None:
    large, small, other = range(3)
    rows = [(1000.0, large, 0.0), (1003.5, small, 0.0), (1003.7, large, 0.0), (1004.5, large, 0.0), (1005.2, other, 0.0)]
    log, replay, live, out = both(told([20, 2, 3], 30, rows, {}))
    assert_alike(log, replay, live)
    assert not out
    # Of three rows for 16 blocks and one for 3, the one goes first.
    assert live.found == ["absent", "absent", "moving", "queued", "absent"]
    assert live.wait_s == pytest.approx([25.0, 2.5, 21.3, 20.5, 3.8])
    assert [(model, start, end) for model, start, end, _ in replay.segments] == [
        (large, 1000.0, 1004.0), (small, 1004.0, 1006.0), (other, 1006.0, 1009.0), (large, 1009.0, 1025.0)
    ]  # fmt: skip


def test_a_load_that_gave_way_has_what_moves_give_way_to_it_and_another_queue_behind_it_in_its_turn() -> None:
    large, small, more = range(3)
    rows = [(1000.0, large, 0.0), (1010.5, small, 0.0), *((1011.1 + i / 10, large, 0.0) for i in range(6)), (1011.8, more, 0.0)]
    log, replay, live, out = both(told([14, 3, 3], 30, rows, {}))
    assert_alike(log, replay, live)
    assert not out
    assert live.counts["yields"] == 2
    assert [(model, start, end) for model, start, end, _ in replay.segments] == [
        (large, 1000.0, 1011.0), (small, 1011.0, 1012.0), (large, 1012.0, 1015.0), (small, 1015.0, 1017.0), (more, 1017.0, 1020.0)
    ]  # fmt: skip

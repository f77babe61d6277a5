"""The node without bytes: what becomes of prefetches, who goes first on the link, and that pieces of a log give what the whole gives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from prefetcher.core.demand import Demand, new_demand
from prefetcher.core.node import (
    BLOCK_BYTES,
    HINTED,
    OUTCOMES,
    Caches,
    EventLog,
    Found,
    Hazard,
    Policy,
    PrefetchRule,
    Rank,
    World,
    new_caches,
    new_event_log,
)
from prefetcher.core.node_run import run_rows
from prefetcher.core.node_steps import close
from prefetcher.core.value import MOST_HOLDS

T0 = 0.0
LINK = 1e9
FETCH = Policy(Rank.HAZARD, load_aware=True, prefetch=PrefetchRule.INDEX, hold_s=600.0)
A, B, C = range(3)


@dataclass
class Node:
    """Caches over rows (ts, model); `rates[model]` = (from_s, h) are the hazard's rates of next use from a time on, 0 before it."""

    rows: list[tuple[float, int]]
    gb: list[float]
    capacity_gb: float
    rates: dict[int, tuple[float, float]] = field(default_factory=dict)
    policies: tuple[Policy, ...] = (FETCH,)
    t1_s: float = 7200.0

    def __post_init__(self) -> None:
        size = np.array(self.gb) * 1e9
        ts = np.array([t for t, _ in self.rows])
        model = np.array([m for _, m in self.rows], np.int32)
        unknown = np.full(len(ts), np.inf)
        never = np.full(len(size), np.inf)
        self.world = World(size, size / LINK, np.full(len(size), BLOCK_BYTES / LINK), ts, model, unknown, never, T0, self.t1_s, 60.0)
        ticks = T0 + 60.0 * np.arange(int(self.t1_s / 60.0) + 1)
        at_tick = np.zeros((1, len(ticks), len(size)), np.float32)
        for m, (from_s, rate) in self.rates.items():
            at_tick[0, ticks >= from_s, m] = rate
        self.hazard = Hazard(at_tick, np.zeros((1, len(ts)), np.float32), np.zeros((1, len(size)), np.float32), 0, 0)
        self.demand: Demand = new_demand(len(size), T0)
        self.caches: Caches = new_caches(list(self.policies), self.world, self.capacity_gb * 1e9)
        self.log: EventLog = new_event_log(len(self.policies), len(ts), list(range(len(self.policies))))

    def go(self, first: int, last: int, until_s: float) -> None:
        self.log = run_rows(first, last, until_s, self.world, self.demand, self.hazard, self.caches, self.log)

    def run(self) -> Node:
        rows = len(self.rows)
        self.go(0, rows, self.t1_s)
        self.go(rows, rows, np.inf)
        assert close(self.t1_s, self.world, self.demand, self.caches, self.log)
        return self

    def orders(self) -> list[tuple[int, str]]:
        return [(int(o["model"]), OUTCOMES[o["outcome"]]) for o in self.log.orders[: self.log.filled[2]]]

    def found(self) -> list[Found]:
        return [Found(f) for f in self.log.found[0]]

    def segments(self) -> list[tuple[int, float, float]]:
        return [(int(s["model"]), float(s["start_s"]), float(s["end_s"])) for s in self.log.transfers[: self.log.filled[1]]]


def test_a_prefetch_that_is_ready_in_time_is_timely() -> None:
    node = Node([(1.0, A), (5000.0, A)], [2.0], 3.0, {A: (4500.0, 0.01)}, (replace(FETCH, price_per_byte_s=1e-14),), t1_s=6000.0)
    node.go(0, 1, 600.0)
    assert node.log.filled[:2].tolist() == [0, 1], "worth less than its price, it is served without being kept"
    node.go(1, 2, 6000.0)
    assert node.orders() == [(A, "timely")]
    order = node.log.orders[0]
    assert (order["issued_s"], order["ready_s"], order["first_use_s"], order["first_row"]) == (4500.0, 4502.0, 5000.0, 1)
    assert node.found() == [Found.ABSENT, Found.READY]


def absent_again(rates: dict[int, tuple[float, float]], rows: list[tuple[float, int]], gb: list[float], capacity_gb: float) -> Node:
    """Every model is asked for once at the start and not kept for its price, then `rows` come."""
    early = [(1.0 + 100.0 * m, m) for m in range(len(gb))]
    return Node([*early, *rows], gb, capacity_gb, rates, (replace(FETCH, price_per_byte_s=1e-14),))


def test_a_row_joins_a_prefetch_under_way_and_makes_it_late() -> None:
    node = absent_again({A: (3000.0, 0.01)}, [(3001.5, A), (3001.75, A)], [4.0], 5.0).run()
    assert node.orders()[0] == (A, "late")
    assert node.found()[1:] == [Found.MOVING, Found.MOVING]
    assert node.log.wait_s[0, 1:] == pytest.approx([2.5, 2.25])
    assert node.segments()[1] == (A, 3000.0, 3004.0), "joined, it is not started again"


@pytest.mark.parametrize(("announced", "lead_s", "fetched"), [(0.95, 5.0, False), (0.95, 0.2, True), (0.1, 5.0, True), (0.0, 0.0, True)])
def test_what_hints_say_in_time_no_forecast_fetches(announced: float, lead_s: float, fetched: bool) -> None:
    """The load takes 4 s."""
    node = absent_again({A: (3000.0, 0.01)}, [], [4.0], 5.0)
    node.caches.policy["hints"] = True
    hinted = np.zeros(1, HINTED)
    hinted["announced"], hinted["lead_s"] = announced, lead_s
    node.hazard = node.hazard._replace(hinted=hinted)
    assert [model for model, _ in node.run().orders()][:1] == [A] * fetched


def test_demand_waits_for_a_block_of_a_prefetch_which_then_goes_on() -> None:
    node = absent_again({A: (3000.0, 0.01)}, [(3001.5, B)], [4.0, 1.0], 6.0).run()
    block_s = BLOCK_BYTES / LINK
    paused_s = 3000.0 + np.ceil(1.5 / block_s) * block_s
    first, demand, rest = node.segments()[2:5]
    assert first == (A, 3000.0, pytest.approx(paused_s))
    assert demand == (B, pytest.approx(paused_s), pytest.approx(paused_s + 1.0))
    assert rest == (A, pytest.approx(paused_s + 1.0), pytest.approx(3005.0))
    assert node.log.wait_s[0, 2] == pytest.approx(paused_s + 1.0 - 3001.5)


YIELDS = Policy(Rank.LFU, load_aware=True, yields=True, price_per_byte_s=0.0)
BLOCK_S = BLOCK_BYTES / LINK


def block_end_s(start_s: float, now_s: float) -> float:
    return start_s + float(np.ceil((now_s - start_s) / BLOCK_S)) * BLOCK_S


def test_a_demand_load_gives_way_to_one_that_goes_before_it_and_goes_on_after_it() -> None:
    node = Node([(10.0, A), (15.0, B)], [40.0, 1.0], 50.0, policies=(YIELDS,)).run()
    there_s = block_end_s(10.0, 15.0)
    assert node.segments() == [
        (A, 10.0, pytest.approx(there_s)),
        (B, pytest.approx(there_s), pytest.approx(there_s + 1.0)),
        (A, pytest.approx(there_s + 1.0), pytest.approx(51.0)),
    ]
    assert node.log.wait_s[0] == pytest.approx([41.0, there_s + 1.0 - 15.0])
    held = node.log.residency[: node.log.filled[0]]
    assert sorted((int(r["model"]), float(r["start_s"])) for r in held) == [(A, 10.0), (B, pytest.approx(there_s))], (
        "its memory stays its own"
    )


def test_rows_of_a_load_that_gave_way_count_when_the_link_is_free() -> None:
    """Two more rows for A, each as good as a second less to read, and it goes on before C."""
    rows = [(10.0, A), (15.0, B), (15.5, C), (15.6, A), (15.7, A)]
    node = Node(rows, [12.0, 1.0, 4.0], 50.0, policies=(YIELDS,)).run()
    assert [m for m, _, _ in node.segments()] == [A, B, A, C]
    assert node.found()[3:] == [Found.QUEUED, Found.QUEUED]


@pytest.mark.parametrize(
    ("rows", "capacity_gb", "policy"),
    [
        ([(10.0, A), (10.0, A), (15.0, B)], 50.0, replace(YIELDS, yields=False)),
        ([(10.0, A), (15.0, B)], 5.0, YIELDS),
        ([(10.0, A), (19.95, B)], 50.0, YIELDS),
        ([(10.0, A), (16.0, C)], 50.0, YIELDS),
        ([*[(10.0, A)] * 10, (15.0, B)], 50.0, YIELDS),
    ],
    ids=["another policy", "served uncached", "in its last block", "less left than the other has", "more wait for it"],
)
def test_a_demand_load_ends_first(rows: list[tuple[float, int]], capacity_gb: float, policy: Policy) -> None:
    node = Node(rows, [10.0, 1.0, 5.0], capacity_gb, policies=(policy,)).run()
    assert node.segments()[0] == (A, 10.0, 20.0)


def test_loads_give_way_as_in_a_plain_simulation() -> None:
    """Nothing is ever evicted, so every model is loaded once: block by block, the load with the most rows per second left."""
    rng = np.random.default_rng(5)
    gb = rng.choice([0.1, 1.0, 4.0, 20.0, 60.0], 40).tolist()
    rows = [(float(t), int(m)) for t, m in zip(np.sort(rng.uniform(0.0, 600.0, 150)), rng.integers(0, 40, 150), strict=True)]
    node = Node(rows, gb, 1e4, policies=(YIELDS,)).run()
    left_s, waiting = dict(enumerate(gb)), dict[int, list[int]]()
    order: list[int] = []
    expected = np.zeros(len(rows))
    now_s, moving, until_s, start_s, following = 0.0, -1, np.inf, 0.0, 0
    while following < len(rows) or waiting:
        if following < len(rows) and rows[following][0] < until_s:
            now_s, model = rows[following]
            if left_s[model] > 0.0:
                waiting.setdefault(model, []).append(following)
                gives_way = moving >= 0 and moving != model and until_s == start_s + left_s[moving]
                if gives_way and len(waiting[model]) * (until_s - now_s) > len(waiting[moving]) * left_s[model]:
                    until_s = min(until_s, block_end_s(start_s, now_s + 1e-9))
            following += 1
        else:
            now_s = until_s
            left_s[moving] = max(left_s[moving] - (now_s - start_s), 0.0)
            if left_s[moving] < 1e-9:
                left_s[moving] = 0.0
                for row in waiting.pop(moving):
                    expected[row] = now_s - rows[row][0]
            moving, until_s = -1, np.inf
        if moving < 0 and waiting:
            moving = max(waiting, key=lambda m: len(waiting[m]) / left_s[m])
            order.append(moving)
            start_s, until_s = now_s, now_s + left_s[moving]
    assert node.log.wait_s[0] == pytest.approx(expected, abs=1e-6)
    assert [m for m, _, _ in node.segments()] == order
    assert len(order) > len(set(order)), "some gave way"


PARTS = replace(YIELDS, parts=True)


def held(node: Node) -> list[tuple[int, float, float, float]]:
    """(model, from, until, GB) in the order of their beginnings."""
    events = node.log.residency[: node.log.filled[0]]
    return sorted(
        ((int(r["model"]), float(r["start_s"]), float(r["end_s"]), float(r["bytes"]) / 1e9) for r in events),
        key=lambda r: (r[1], r[2], r[0]),
    )


def in_blocks_gb(gb: float) -> float:
    return float(np.floor(gb * 1e9 / BLOCK_BYTES)) * BLOCK_BYTES / 1e9


def test_a_victim_keeps_what_its_room_is_not_needed_for_and_later_loads_the_rest() -> None:
    node = Node([(10.0, A), (100.0, B), (101.0, B), (300.0, A), (301.0, A)], [40.0, 10.0], 45.0, policies=(PARTS,)).run()
    a, b = in_blocks_gb(35.0), in_blocks_gb(5.0)
    assert held(node) == [
        (A, 10.0, 100.0, 40.0),
        (A, 100.0, 300.0, pytest.approx(a)),
        (B, 100.0, 300.0, 10.0),
        (A, 300.0, 7200.0, 40.0),
        (B, 300.0, 7200.0, pytest.approx(b)),
    ]
    rest_s = 40.0 - a
    assert node.segments() == [(A, 10.0, 50.0), (B, 100.0, 110.0), (A, 300.0, pytest.approx(300.0 + rest_s))]
    assert node.log.wait_s[0, 3:] == pytest.approx([rest_s, rest_s - 1.0])
    assert node.found()[3:] == [Found.ABSENT, Found.MOVING]


def test_a_part_stays_a_part_where_its_model_is_served_uncached() -> None:
    """A is not worth what it would displace: its rows wait for all of it, from below."""
    rows = [(10.0, A), *[(100.0 + i, B) for i in range(400)], (600.0, A)]
    node = Node(rows, [40.0, 10.0], 45.0, policies=(PARTS,)).run()
    assert node.log.wait_s[0, -1] == 40.0
    assert (A, 100.0, 7200.0, pytest.approx(in_blocks_gb(35.0))) in held(node)


def test_with_parts_no_byte_is_held_twice_nor_too_many() -> None:
    rng = np.random.default_rng(9)
    gb = rng.choice([0.05, 0.5, 3.0, 14.0, 40.0], 30).tolist()
    weights = rng.pareto(1.0, 30) + 0.1
    ts = np.sort(rng.uniform(0.0, 7000.0, 2000))
    rows = [(float(t), int(m)) for t, m in zip(ts, rng.choice(30, 2000, p=weights / weights.sum()), strict=True)]
    rates = {m: (60.0, float(weights[m] / weights.sum() * 0.3)) for m in range(30)}
    node = Node(rows, gb, 60.0, rates, (replace(FETCH, yields=True, parts=True, price_per_byte_s=0.0),)).run()
    spans = held(node)
    assert any(gb_held < gb[m] for m, _, _, gb_held in spans), "there were parts"
    edges = sorted([(start, g) for _, start, _, g in spans] + [(end, -g) for _, _, end, g in spans], key=lambda edge: (edge[0], edge[1]))
    assert max(np.cumsum([g for _, g in edges])) <= 60.0 + 1e-9
    for m in range(30):
        mine = [(start, end) for model, start, end, _ in spans if model == m]
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    assert np.isfinite(node.log.wait_s).all()
    assert (node.log.wait_s >= 0.0).all()


def test_a_paused_prefetch_goes_before_any_victim() -> None:
    rates = {A: (3000.0, 0.01), C: (2000.0, 0.01)}
    node = absent_again(rates, [(2500.0, C), (3001.5, B)], [4.0, 4.0, 1.0], 6.0)
    node.hazard.after_row[:] = 0.01
    node.go(0, 4, 2900.0)
    node.go(4, 5, 3010.0)
    outcome = {m: o for m, o in node.orders() if m != C}
    assert outcome[A] == "cancelled"
    ended = [(int(e["model"]), float(e["end_s"])) for e in node.log.residency[: node.log.filled[0]] if e["end_s"] > 2900.0]
    assert [m for m, _ in ended] == [A], "C stays"


def test_an_unused_prefetch_ends_at_its_hold_and_is_premature_when_asked_for_soon_after() -> None:
    rates = {A: (3000.0, 1e-4)}
    policies = (replace(FETCH, price_per_byte_s=1e-15),)
    for late_s, premature in ((500.0, True), (700.0, False)):
        asked_s = 3004.0 + 600.0 + late_s
        node = Node([(1.0, A), (asked_s, A)], [4.0], 5.0, rates, policies).run()
        assert node.orders()[0] == (A, "useless")
        order = node.log.orders[0]
        assert order["end_s"] == 3604.0
        assert bool(order["premature"]) is premature
        assert np.isnan(order["first_use_s"])
        assert order["first_row"] == -1


@pytest.mark.parametrize(
    ("falls_to", "asked_s", "end_s"),
    [(0.8e-4, 6500.0, None), (0.8e-4, 7000.0, 3004.0 + MOST_HOLDS * 600.0), (0.6e-4, 6500.0, 3604.0 + 27 * 60.0)],
    ids=["good", "too long", "falls"],
)
def test_an_unused_prefetch_stays_beyond_its_hold_while_its_score_is_good(falls_to: float, asked_s: float, end_s: float | None) -> None:
    policies = (replace(FETCH, price_per_byte_s=1e-15, stays_at=0.75),)
    node = Node([(1.0, A), (asked_s, A)], [4.0], 5.0, {A: (3000.0, 1e-4)}, policies)
    node.hazard.at_tick[0, 87:] = falls_to  # from 5220 s on
    node.run()
    assert node.orders()[0] == (A, "timely" if end_s is None else "useless")
    order = node.log.orders[0]
    assert order["ready_s"] == 3004.0
    if end_s is not None:
        assert order["end_s"] == end_s, "a tick's time from the last tick at which it was good, or after six holds"
    assert node.found()[1] == (Found.READY if end_s is None else Found.ABSENT)


def test_what_is_worth_less_than_its_price_goes_at_a_tick() -> None:
    rows = [(1.0, A), (700.0, B)]
    node = Node(rows, [4.0, 1.0], 6.0, {B: (0.0, 0.01)}, (replace(FETCH, prefetch=PrefetchRule.NONE, price_per_byte_s=1e-14),))
    node.hazard.after_row[:] = 0.01
    node.go(0, 2, 1200.0)
    (gone,) = node.log.residency[: node.log.filled[0]]
    assert (gone["model"], gone["start_s"], gone["ready_s"], gone["end_s"]) == (A, 1.0, 5.0, 60.0)


def test_pieces_of_a_log_give_what_the_whole_gives() -> None:
    rng = np.random.default_rng(0)
    ts = np.sort(np.round(rng.uniform(0, 20_000, 900), 1))
    rows = list(zip(ts.tolist(), rng.choice(8, 900, p=[0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05]).tolist(), strict=True))
    policies = (
        FETCH, replace(FETCH, prefetch=PrefetchRule.NONE, rank=Rank.LHD), Policy(Rank.SIEVE, as_set=False, bypass=False),
        Policy(Rank.LRU, as_set=False, bypass=False, idle_windows=True, prefetch=PrefetchRule.IDLE_WINDOW, price_per_byte_s=0.0),
    )  # fmt: skip
    gb = [3.0, 7.0, 12.0, 5.0, 9.0, 20.0, 2.0, 11.0]
    rates = {m: (float(rng.uniform(0, 9000)), float(rng.uniform(1e-4, 1e-2))) for m in range(8)}
    whole, pieces = (Node(rows, gb, 25.0, rates, policies, t1_s=float(ts[-1])) for _ in range(2))
    for node in (whole, pieces):
        node.hazard.after_row[:] = np.random.default_rng(1).uniform(0, 1e-2, node.hazard.after_row.shape)
    whole.go(0, 900, whole.t1_s)
    at = 0
    while at < 900:
        to = min(900, at + int(rng.integers(1, 40)))
        # Up to the last row's time, and half the time on to just before the next row.
        until_s = ts[to - 1] if to == 900 or rng.random() < 0.5 else (ts[to - 1] + ts[to]) / 2
        pieces.go(at, to, float(until_s))
        at = to
    assert whole.log.filled.tolist() == pieces.log.filled.tolist()
    assert whole.log.filled[2] > 10, "the log must make prefetches"
    for k, name in enumerate(("residency", "transfers", "orders")):
        one, two = (np.sort(getattr(n.log, name)[: n.log.filled[k]], order=["cache", "model"], kind="stable") for n in (whole, pieces))
        for column in one.dtype.names:
            if column != "order":  # a number in the log, whose caches are in another order when time is cut
                np.testing.assert_array_equal(one[column], two[column], err_msg=f"{name}.{column}")
    np.testing.assert_array_equal(whole.log.wait_s, pieces.log.wait_s)
    np.testing.assert_array_equal(whole.log.found, pieces.log.found)

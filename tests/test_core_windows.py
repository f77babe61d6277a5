"""Windows: what lead, horizon and hold mean for a prefetch, by hand; the book that says whose window is whose; segments from facts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from test_core_node import FETCH, Node

from prefetcher.core.experts import HORIZONS, VARIANT_OF_HORIZON, VARIANTS, rates_of_next_use
from prefetcher.core.node import set_windows
from prefetcher.core.segments import ALL_MODELS, facts_of_rows, find_segments, regularity
from prefetcher.core.types import HORIZONS_S, Window
from prefetcher.core.value import MOST_HOLDS
from prefetcher.core.window_caches import WindowCaches, apply_windows
from prefetcher.core.windows import (
    DEFAULT_WINDOW,
    NO_LEAD_LIMIT_S,
    OWN_HORIZON_S,
    WINDOW_HORIZONS_S,
    BookEntry,
    FactTable,
    ModelFacts,
    Segment,
    WindowBook,
    WindowTable,
    check_window,
    window_in_words,
)
from prefetcher.errors import InputError

A, B = range(2)
#: Not kept after its first use for its price, so that only a prefetch brings it back.
CHEAP = replace(FETCH, price_per_byte_s=1e-14)


def once_then(rate: float, from_s: float, later: list[float], gb: float = 2.0) -> Node:
    """A is used at 1 s, and again at `later`; from `from_s` on its rate of next use is `rate`."""
    return Node([(1.0, A), *((t, A) for t in later)], [gb], 3.0, {A: (from_s, rate)}, (CHEAP,))


def table(*windows: Window) -> WindowTable:
    return WindowTable(*np.array([(w.lead_s, w.horizon_s, w.hold_s) for w in windows]).T)


# --- lead ---


def test_a_lead_lets_a_prefetch_start_when_its_use_is_that_near() -> None:
    """1/h = 100 s; the load takes 2 s, so a lead of a little over 98 s is enough and one of a little less is not."""
    for lead_s, orders in ((98.01, 1), (97.99, 0), (0.0, 0), (np.inf, 1)):
        node = once_then(0.01, 4500.0, [])
        set_windows(node.caches, 0, lead_s, 600.0, -1)
        assert len(node.run().orders()) == orders, lead_s


def test_without_a_lead_a_prefetch_starts_when_the_load_takes_as_long_as_the_use_is_away() -> None:
    """2 GB take 2 s, and a use is expected in 2 s at h = 0.5."""
    for rate, orders in ((0.5, 1), (0.49, 0)):
        node = once_then(rate, 4500.0, [])
        set_windows(node.caches, 0, 0.0, 600.0, -1)
        assert len(node.run().orders()) == orders, rate


def test_a_lead_counts_half_of_the_recent_wait_for_the_link() -> None:
    node = once_then(0.01, 4500.0, [])
    node.caches.cache["recent_wait_s"] = 20.0  # 100 s = 2 s + 10 s (a little less after the first load) + 89 s
    set_windows(node.caches, 0, 89.0, 600.0, -1)
    assert len(node.run().orders()) == 1
    node = once_then(0.01, 4500.0, [])
    set_windows(node.caches, 0, 89.0, 600.0, -1)
    assert len(node.run().orders()) == 0


def test_each_model_has_its_own_window() -> None:
    rows = [(1.0, A), (2.0, B)]
    node = Node(rows, [1.0, 1.0], 3.0, {A: (4500.0, 0.01), B: (4500.0, 0.01)}, (CHEAP,))
    apply_windows(node.caches, 0, table(Window(10.0, OWN_HORIZON_S, 600.0), DEFAULT_WINDOW))
    assert node.run().orders()[0][0] == B
    assert {m for m, _ in node.orders()} == {B}


# --- horizon ---


def two_rates(window: Window) -> list[tuple[int, str]]:
    """A is likely within the hour, and not within 5 min: only a window that looks an hour ahead fetches it."""
    node = once_then(0.0, 0.0, [])
    ticks = node.hazard.at_tick.shape[1]
    rates = np.zeros((VARIANTS, ticks, 1), np.float32)
    rates[VARIANT_OF_HORIZON[3600.0], 75:] = 0.01
    node.hazard = node.hazard._replace(
        at_tick=rates, after_row=np.zeros((VARIANTS, 1), np.float32), latest=np.zeros((VARIANTS, 1), np.float32)
    )
    apply_windows(node.caches, 0, table(window))
    return node.run().orders()


def test_a_horizon_chooses_the_rate_that_ranks() -> None:
    assert len(two_rates(Window(NO_LEAD_LIMIT_S, 3600.0, 7200.0))) == 1
    assert two_rates(Window(NO_LEAD_LIMIT_S, 300.0, 600.0)) == []
    assert two_rates(DEFAULT_WINDOW) == [], "the expert's own is the first rate here"


def test_every_horizon_of_a_window_has_a_rate() -> None:
    assert set(VARIANT_OF_HORIZON) == set(WINDOW_HORIZONS_S)
    hazard_s = 0.002  # a constant hazard: the chance within W is 1 − exp(−W·0.002), and h is 0.002 at every horizon
    p = np.array([[1.0 - np.exp(-HORIZONS_S[j] * hazard_s) for j in HORIZONS]] * 2, np.float32)
    rates = rates_of_next_use(p)
    assert rates.shape == (VARIANTS, 2)
    for horizon_s in (300.0, 900.0):
        assert rates[VARIANT_OF_HORIZON[horizon_s]] == pytest.approx(hazard_s, rel=0.01)
    rising = p.copy()
    rising[:, :-1] = 0.0  # all of its chance lies after 10 min
    assert rates_of_next_use(rising)[VARIANT_OF_HORIZON[300.0], 0] < 1e-8
    late = rates_of_next_use(rising)[VARIANT_OF_HORIZON[900.0], 0]
    assert 0.0 < late < rates_of_next_use(rising)[VARIANT_OF_HORIZON[3600.0], 0]
    assert np.isnan(rates_of_next_use(np.full((1, len(HORIZONS)), np.nan, np.float32))).all()


# --- hold ---


def test_a_hold_ends_an_unused_prefetch() -> None:
    for hold_s in (60.0, 600.0):
        node = once_then(0.01, 4500.0, [])
        set_windows(node.caches, 0, np.inf, hold_s, -1)
        node.run()
        order = node.log.orders[0]
        assert order["ready_s"] == 4502.0
        assert order["end_s"] == 4502.0 + hold_s


def test_what_is_still_likely_stays_for_six_of_its_windows_holds() -> None:
    node = Node([(1.0, A)], [2.0], 3.0, {A: (4500.0, 0.01)}, (replace(CHEAP, stays_at=0.75),))
    set_windows(node.caches, 0, np.inf, 60.0, -1)
    node.run()
    assert node.log.orders[0]["end_s"] == 4502.0 + MOST_HOLDS * 60.0


def test_what_is_wasted_is_counted_as_it_ends() -> None:
    node = once_then(0.01, 4500.0, [])
    set_windows(node.caches, 0, np.inf, 60.0, -1)
    node.run()
    ended = [o for o in node.log.orders[: node.log.filled[2]] if np.isfinite(o["end_s"]) and o["end_s"] < node.t1_s]
    assert node.caches.cache["period_wasted_byte_s"][0] == pytest.approx(sum(2e9 * (o["end_s"] - o["issued_s"]) for o in ended))


# --- the default is as it was ---


def test_the_default_window_bounds_nothing_but_the_hold() -> None:
    rng = np.random.default_rng(7)
    rows = [(float(t), int(m)) for t, m in zip(np.sort(rng.uniform(0, 7000, 300)), rng.integers(0, 6, 300), strict=True)]
    gb = [1.0, 2.0, 0.5, 3.0, 1.5, 0.7]
    rates = {m: (float(rng.uniform(0, 6000)), float(rng.uniform(1e-4, 0.05))) for m in range(6)}
    policies = (replace(FETCH, price_per_byte_s=1e-14, stays_at=0.75),)
    plain, bounded = (Node(rows, gb, 4.0, rates, policies) for _ in range(2))
    apply_windows(bounded.caches, 0, table(*[DEFAULT_WINDOW] * 6))
    plain.run()
    bounded.run()
    assert len(plain.orders()) > 3
    assert plain.log.orders.tobytes() == bounded.log.orders.tobytes()
    assert plain.log.wait_s.tobytes() == bounded.log.wait_s.tobytes()
    assert Window() == DEFAULT_WINDOW


def test_caches_of_candidates_cost_what_a_node_with_that_window_costs() -> None:
    """Two segments with two candidates: each cache is a node of its own, and the costs are those of its log."""
    rng = np.random.default_rng(11)
    rows = [(float(t), int(m)) for t, m in zip(np.sort(rng.uniform(0, 7000, 200)), rng.integers(0, 4, 200), strict=True)]
    gb, rates = [1.0, 2.0, 0.5, 1.5], {m: (1000.0 * m, 0.01) for m in range(4)}
    policy = replace(CHEAP, prefetch_variant=0)
    number = np.array([0, 0, 1, -1])
    now, rest = Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 300.0), Window(50.0, OWN_HORIZON_S, 60.0)
    candidates = [[Window(0.0, OWN_HORIZON_S, 60.0), Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 1200.0)]] * 2

    def node_of(windows: list[Window]) -> Node:
        node = Node(rows, gb, 3.0, rates, (policy,))
        apply_windows(node.caches, 0, table(*windows))
        node.go(0, len(rows), node.t1_s)
        return node

    made = node_of([now, now, now, rest])
    caches = WindowCaches(made.world, 3e9, policy, 2, 2, extra=[now])
    caches.set_windows(number, [now, now, rest], candidates)
    variants = made.hazard._replace(
        at_tick=np.repeat(made.hazard.at_tick, VARIANTS, 0), after_row=np.zeros((VARIANTS, len(rows)), np.float32)
    )
    caches.see(variants)
    caches.go(len(rows), made.t1_s)
    in_force, costs, extra = caches.costs(made.t1_s)
    for got, windows in (
        (in_force, [now, now, now, rest]),
        (costs[0, 0], [candidates[0][0], candidates[0][0], now, rest]),
        (costs[0, 1], [candidates[0][1], candidates[0][1], now, rest]),
        (costs[1, 1], [now, now, candidates[1][1], rest]),
        (extra[0], [now] * 4),
    ):
        cache = node_of(windows).caches.cache[0]
        held = cache["period_byte_s"] + cache["used"] * (made.t1_s - cache["held_at_s"])
        assert got == pytest.approx([cache["period_wait_s"], held / 3.6e12, cache["period_wasted_byte_s"] / 3.6e12])
    assert caches.costs(made.t1_s)[0] == pytest.approx([0.0, 0.0, 0.0]), "what was told is not told again"


# --- the book ---


BOOK = WindowBook(
    (
        BookEntry(Segment("small", (("bytes", -np.inf, 2e9),)), Window(60.0, 300.0, 60.0), 5.0, "tried", True),
        BookEntry(Segment("large, hourly", (("bytes", 2e9, np.inf), ("rows_per_day", 24.0, np.inf)))),
    ),
    rest=Window(0.0, 3600.0, 30.0),
    version=7,
)


def test_a_book_comes_back_from_json_as_it_was() -> None:
    assert WindowBook.from_json(json.loads(json.dumps(BOOK.to_json()))) == BOOK
    assert WindowBook.from_json(WindowBook().to_json()) == WindowBook()


def test_a_model_has_the_window_of_the_first_segment_that_holds_it() -> None:
    assert BOOK.window_of(ModelFacts(1e9, 100.0)) == Window(60.0, 300.0, 60.0)
    assert BOOK.window_of(ModelFacts(2e9, 24.0)) == DEFAULT_WINDOW
    assert BOOK.window_of(ModelFacts(2e9, 23.9)) == BOOK.rest
    facts = FactTable.of([ModelFacts(1e9, 0.0), ModelFacts(9e9, 99.0), ModelFacts(9e9, np.nan)])
    assert BOOK.segment_numbers(facts).tolist() == [0, 1, -1]
    assert BOOK.windows_of(facts).hold_s.tolist() == [60.0, 600.0, 30.0]


def test_a_change_is_the_next_version_and_leaves_the_other_segments() -> None:
    changed = BOOK.changed("small", DEFAULT_WINDOW, 9.0, "better", pinned=False)
    assert (changed.version, changed.entries[1]) == (8, BOOK.entries[1])
    assert changed.entry("small") == BookEntry(BOOK.entries[0].segment, DEFAULT_WINDOW, 9.0, "better", False)
    assert BOOK.entry("small").pinned, "the old book stays as it is"
    with pytest.raises(KeyError, match="no segment is called 'big'; there are 'small', 'large, hourly'"):
        BOOK.changed("big", DEFAULT_WINDOW, 9.0, "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([], "a book of windows is a JSON object, found \\[\\]"),
        ({"version": "7"}, "version is a whole number from 0, found '7'"),
        ({"segments": {}}, "segments is a list"),
        ({"rest": {"lead_s": -1.0, "horizon_s": 300.0, "hold_s": 60.0}}, "lead_s is from 0 to 21,600 seconds, found -1"),
        ({"rest": {"lead_s": 0.0, "horizon_s": 301.0, "hold_s": 60.0}}, "horizon_s is one of 0, 120, 300, 600, 900, 3600"),
        ({"rest": {"lead_s": 0.0, "horizon_s": 300.0, "hold_s": float("nan")}}, "hold_s is a number, found nan"),
        ({"rest": {"lead_s": 0.0, "horizon_s": 300.0, "hold_s": 60.0, "depth": 1}}, "found \\['depth'\\] too"),
        ({"segments": [{"name": "a", "rule": {"colour": [None, 1.0]}}]}, "asks for 'colour'; the facts are bytes"),
        ({"segments": [{"name": "a", "rule": {"bytes": [1.0]}}]}, "bytes of 'a' is \\[at least, below\\]"),
        ({"segments": [BOOK.to_json()["segments"][0]] * 2}, "two segments have one name"),
    ],
)
def test_what_is_no_book_is_refused_with_what_was_expected(change: object, said: str) -> None:
    of = {**BOOK.to_json(), **change} if isinstance(change, dict) else change
    with pytest.raises(InputError, match=said) as refused:
        WindowBook.from_json(of, "w.json")
    assert refused.value.path == "w.json"


def test_windows_in_words() -> None:
    assert window_in_words(Window(300.0, 900.0, 30.0)) == "lead 5 min, horizon 15 min, hold 30 s"
    assert window_in_words(DEFAULT_WINDOW) == "at any time, the expert's horizon, hold 10 min"
    with pytest.raises(ValueError, match="hold_s is above 0"):
        check_window(Window(hold_s=0.0))


# --- segments ---


def test_regularity_tells_a_timer_from_random_arrivals() -> None:
    rng = np.random.default_rng(1)
    assert regularity(np.full(50, 3600.0)) == 1.0
    for mean_s in (40.0, 3600.0):
        assert regularity(rng.exponential(mean_s, 20_000)) == pytest.approx(0.17, abs=0.03), mean_s
    assert regularity(np.full(3, 3600.0)) == 0.0, "three pauses show no beat"


def test_segments_tell_models_apart_where_they_differ() -> None:
    """Ten small models on an hourly timer, and ten large ones a few times a day at random."""
    rng = np.random.default_rng(3)
    size = np.array([1e9] * 10 + [60e9] * 10)
    rows = [(m * 60.0 + 3600.0 * k, m) for m in range(10) for k in range(24 * 7)]
    rows += [(float(t), m) for m in range(10, 20) for t in rng.uniform(0, 7 * 86_400.0, 30)]
    rows.sort()
    ts, model = np.array([t for t, _ in rows]), np.array([m for _, m in rows])
    facts = facts_of_rows(ts, model, size, 7.0)
    found = find_segments(facts, most=2)
    assert [s.name for s in found] == ["small, hourly, regular", "large, a few a day, irregular"] or [s.name for s in found] == [
        "large, a few a day, irregular",
        "small, hourly, regular",
    ]
    numbers = WindowBook(tuple(BookEntry(s) for s in found)).segment_numbers(facts)
    assert len(set(numbers[:10])) == len(set(numbers[10:])) == 1
    assert numbers[0] != numbers[10]
    assert find_segments(facts, most=2) == found
    assert find_segments(FactTable(*(column[:10] for column in facts))) == (ALL_MODELS,), "ten alike are not told apart"


def test_segments_cover_models_that_come_later_and_have_names_of_their_own() -> None:
    rng = np.random.default_rng(5)
    n = 200
    facts = FactTable(10 ** rng.uniform(8, 11, n), 10 ** rng.uniform(-1, 4, n), rng.uniform(0, 1, n), np.zeros(n))
    found = find_segments(facts)
    assert 2 <= len(found) <= 4
    assert len({s.name for s in found}) == len(found)
    later = FactTable(10 ** rng.uniform(6, 13, n), 10 ** rng.uniform(-4, 6, n), rng.uniform(0, 1, n), rng.uniform(0, 1, n))
    assert (WindowBook(tuple(BookEntry(s) for s in found)).segment_numbers(later) >= 0).all()

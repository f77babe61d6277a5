"""The tuner of windows: what it chooses, what it leaves, that a budget is kept, and that its state goes on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from prefetcher.core.segments import ALL_MODELS
from prefetcher.core.tuner import CANDIDATES, TunerSettings, WindowTuner, book_of
from prefetcher.core.types import Window
from prefetcher.core.windows import DEFAULT_WINDOW, Segment, check_window
from prefetcher.errors import InputError

HOUR = 3600.0
EARLY, SHORT, LONG = Window(0.0, 300.0, 60.0), Window(300.0, 300.0, 300.0), Window(3600.0, 3600.0, 3600.0)
CHOICES = (EARLY, SHORT, LONG)
TWO = (Segment("beats", (("regularity", 0.5, np.inf),)), Segment("others", (("regularity", -np.inf, 0.5),)))
SETTINGS = TunerSettings(price_s_per_gb_h=0.0)


def learn(
    tuner: WindowTuner, waits: list[list[float]], hours: int, noise: float = 0.0, seed: int = 1, from_h: int = 0
) -> list[tuple[str, Window]]:
    """Tells `tuner` for some hours what each candidate of each segment would have waited (the start's is the last); what changes."""
    rng = np.random.default_rng(seed)
    changes: list[tuple[str, Window]] = []
    for hour in range(from_h, from_h + hours):
        costs = np.zeros((len(waits), len(waits[0]), 3))
        costs[:, :, 0] = np.array(waits) + noise * rng.standard_normal((len(waits), len(waits[0])))
        changes += [(d.segment, d.new) for d in tuner.learn(costs, costs[0, -1], HOUR, hour * HOUR)]
    return changes


def test_each_segment_gets_the_window_that_costs_least_for_it() -> None:
    tuner = WindowTuner(book_of(TWO, DEFAULT_WINDOW), SETTINGS, CHOICES)
    assert learn(tuner, [[100.0, 90.0, 110.0, 105.0], [100.0, 130.0, 95.0, 105.0]], 24) == [("beats", SHORT), ("others", LONG)]
    assert [entry.window for entry in tuner.book.entries] == [SHORT, LONG]
    assert tuner.book.version == 2
    assert tuner.book.rest == DEFAULT_WINDOW


def test_a_change_says_what_it_was_made_from() -> None:
    tuner = WindowTuner(book_of(TWO[:1], DEFAULT_WINDOW), replace(SETTINGS, half_life_s=1e12), CHOICES)
    costs = np.zeros((1, 4, 3))
    costs[0, :, 0], costs[0, 1, 1], costs[0, 1, 2] = [100.0, 90.0, 110.0, 105.0], 24.0, 2.0
    for hour in range(6):
        decisions = tuner.learn(costs, costs[0, -1], HOUR, hour * HOUR)
        assert len(decisions) == (hour == 5), "six hours pass before anything changes"
    (decision,) = decisions
    assert (decision.old, decision.new, decision.periods, decision.at_s) == (DEFAULT_WINDOW, SHORT, 6, 5 * HOUR)
    assert (decision.old_cost.wait_s, decision.new_cost.wait_s) == pytest.approx((630.0, 540.0))
    assert decision.why == (
        "against at any time, the expert's horizon, hold 10 min: -360.0 s of waiting, +576.0 GB·h held, +48.0 GB·h wasted a day"
    )
    entry = tuner.book.entry("beats")
    assert (entry.since_s, entry.why) == (5 * HOUR, decision.why)
    assert json.loads(json.dumps(decision.to_json()))["new"] == {"lead_s": 300.0, "horizon_s": 300.0, "hold_s": 300.0}


def test_what_is_gained_must_be_more_than_the_hysteresis() -> None:
    for least, changed in ((0.02, False), (0.005, True)):
        tuner = WindowTuner(book_of(TWO[:1], DEFAULT_WINDOW), replace(SETTINGS, hysteresis=least), CHOICES)
        assert bool(learn(tuner, [[99.0, 100.0, 100.0, 100.0]], 48)) is changed


def test_chance_changes_little() -> None:
    """Windows that cost the same but for noise: over 20 seeds of four days, one changes less than every other day, and half as often as one
    that follows every lucky hour; with an edge as large as the noise of an hour, the right one comes within a day and a half."""

    def changes(certainty: float) -> int:
        tuners = [WindowTuner(book_of(TWO[:1]), replace(SETTINGS, certainty=certainty), CHOICES) for _ in range(20)]
        return sum(len(learn(tuner, [[100.0] * 4], 96, 10.0, seed)) for seed, tuner in enumerate(tuners))

    assert changes(TunerSettings().certainty) <= min(40, changes(0.0) // 2)
    for seed in range(20):
        tuner = WindowTuner(book_of(TWO[:1]), SETTINGS, CHOICES)
        learn(tuner, [[100.0, 90.0, 100.0, 100.0]], 36, 10.0, seed)
        assert tuner.book.entries[0].window == SHORT


def test_a_windows_price_counts_what_it_holds() -> None:
    costs = np.zeros((1, 4, 3))
    costs[0, :, 0], costs[0, :, 1] = [100.0, 90.0, 100.0, 100.0], [10.0, 40.0, 10.0, 10.0]
    for price, chosen in ((0.1, SHORT), (1.0, DEFAULT_WINDOW)):
        tuner = WindowTuner(book_of(TWO[:1]), replace(SETTINGS, price_s_per_gb_h=price), CHOICES)
        for hour in range(24):
            tuner.learn(costs, costs[0, -1], HOUR, hour * HOUR)
        assert tuner.book.entries[0].window == chosen


def test_old_evidence_fades() -> None:
    tuner = WindowTuner(book_of(TWO[:1]), SETTINGS, CHOICES)
    learn(tuner, [[100.0, 90.0, 110.0, 105.0]], 72)
    assert tuner.book.entries[0].window == SHORT
    assert learn(tuner, [[100.0, 110.0, 90.0, 105.0]], 36, from_h=72) == [("beats", LONG)]


@pytest.mark.parametrize("restart", [False, True])
def test_what_was_changed_stands_for_a_day(restart: bool) -> None:
    tuner = WindowTuner(book_of(TWO[:1]), replace(SETTINGS, half_life_s=4 * HOUR), CHOICES)
    assert learn(tuner, [[100.0, 90.0, 110.0, 105.0]], 6) == [("beats", SHORT)], "in the fifth hour"
    if restart:
        again = WindowTuner(tuner.book, tuner.settings, CHOICES)
        again.restore(json.loads(json.dumps(tuner.snapshot())))
        tuner = again
    assert not learn(tuner, [[100.0, 110.0, 90.0, 105.0]], 23, from_h=6), "however much better another is"
    assert learn(tuner, [[100.0, 110.0, 90.0, 105.0]], 1, from_h=29) == [("beats", LONG)]


def test_all_segments_move_together_where_that_is_certain() -> None:
    """What each segment alone would change drowns in noise; all together it is as large as the noise of an hour. Pinned ones stay."""
    rng = np.random.default_rng(4)
    book = book_of((*TWO, ALL_MODELS)).changed(ALL_MODELS.name, LONG, 0.0, "by hand", pinned=True)
    tuner = WindowTuner(book, SETTINGS, CHOICES)
    changes = []
    for hour in range(48):
        costs = np.zeros((3, 4, 3))
        costs[:, :, 0] = 100.0 + 10.0 * rng.standard_normal((3, 4))
        in_force, together = np.zeros(3), np.zeros((3, 3))
        in_force[0], together[:, 0] = 100.0, np.array([105.0, 90.0, 105.0]) + 10.0 * rng.standard_normal(3)
        changes += tuner.learn(costs, in_force, HOUR, hour * HOUR, together)
        if changes:
            break
    assert [(d.segment, d.new) for d in changes] == [("beats", SHORT), ("others", SHORT)]
    assert all(d.why.startswith("all segments together, against at any time") for d in changes)
    assert changes[0].old_cost.wait_s > changes[0].new_cost.wait_s
    assert tuner.book.entry(ALL_MODELS.name).window == LONG
    with pytest.raises(ValueError, match=r"costs together of shape \(2, 3\), expected \(3, 3\)"):
        tuner.learn(costs, in_force, HOUR, 0.0, np.zeros((2, 3)))


def test_what_people_pinned_stays() -> None:
    book = book_of(TWO[:1]).changed("beats", LONG, 0.0, "by hand", pinned=True)
    tuner = WindowTuner(book, SETTINGS, CHOICES)
    assert learn(tuner, [[50.0, 50.0, 100.0, 100.0]], 48) == []
    assert tuner.book == book


# --- the budget ---


def with_budget(budget: float | None, hours: int = 96) -> tuple[WindowTuner, float]:
    """Two segments; what waits less wastes more, each candidate by so much an hour. Returns the tuner and the last day's GB·h wasted."""
    waits = np.array([[100.0, 95.0, 90.0, 100.0], [100.0, 99.0, 98.0, 100.0]])
    wastes = np.array([[0.0, 1.0, 4.0, 0.0], [0.0, 1.0, 4.0, 0.0]])
    tuner = WindowTuner(book_of(TWO, EARLY), TunerSettings(price_s_per_gb_h=0.0, waste_gb_h_per_day=budget, hysteresis=0.0), CHOICES)
    wasted = []
    for hour in range(hours):
        live = [tuner.windows[s].index(entry.window) for s, entry in enumerate(tuner.book.entries)]
        costs: npt.NDArray[np.float64] = np.zeros((2, 4, 3))
        for s in range(2):
            other = 1 - s
            costs[s, :, 0] = waits[s] + waits[other, live[other]] - 100.0
            costs[s, :, 2] = wastes[s] + wastes[other, live[other]]
        in_force = costs[0, live[0]]
        wasted.append(float(in_force[2]))
        tuner.learn(costs, in_force, HOUR, hour * HOUR)
    return tuner, sum(wasted[-24:])


def test_without_a_budget_what_waits_least_wins() -> None:
    tuner, wasted = with_budget(None)
    assert [entry.window for entry in tuner.book.entries] == [LONG, LONG]
    assert wasted == pytest.approx(24 * 8.0)
    assert tuner.dual_price == 0.0


@pytest.mark.parametrize(
    ("budget", "chosen"), [(24 * 5.2, {LONG, SHORT}), (24 * 4.2, {LONG, EARLY}), (24 * 1.2, {SHORT, EARLY}), (1.0, {EARLY})]
)
def test_a_waste_budget_is_met_where_waste_buys_most(budget: float, chosen: set[Window]) -> None:
    """A GB·h of waste saves 5, then 1.7 s for the first segment, and 1, then 0.3 s for the second."""
    tuner, wasted = with_budget(budget)
    assert wasted <= budget
    assert {entry.window for entry in tuner.book.entries} == chosen
    assert tuner.dual_price > 0.0


# --- state ---


def test_the_same_evidence_gives_the_same_book_also_from_a_snapshot() -> None:
    waits = [[100.0, 96.0, 103.0, 101.0], [100.0, 99.0, 95.0, 101.0]]
    whole, first = (WindowTuner(book_of(TWO), SETTINGS, CHOICES) for _ in range(2))
    learn(whole, waits, 40, 3.0)
    learn(whole, waits, 40, 3.0, seed=2, from_h=40)
    learn(first, waits, 40, 3.0)
    second = WindowTuner(book_of(()), SETTINGS, CHOICES)
    second.restore(json.loads(json.dumps(first.snapshot())))
    learn(second, waits, 40, 3.0, seed=2, from_h=40)
    assert second.book == whole.book
    assert second.snapshot() == whole.snapshot()


def test_other_segments_begin_with_the_window_that_was_and_without_evidence() -> None:
    tuner = WindowTuner(book_of(()), SETTINGS, CHOICES)
    assert learn(tuner, [[100.0, 90.0, 110.0, 105.0]], 24) == [(ALL_MODELS.name, SHORT)]
    tuner.split(TWO, 24 * HOUR)
    assert [entry.window for entry in tuner.book.entries] == [SHORT, SHORT]
    assert tuner.book.version == 2
    assert learn(tuner, [[90.0, 100.0, 100.0, 100.0]] * 2, 5, from_h=24) == []
    assert len(learn(tuner, [[90.0, 100.0, 100.0, 100.0]] * 2, 1, from_h=29)) == 2


def test_foreign_evidence_and_state_are_refused() -> None:
    tuner = WindowTuner(book_of(TWO), SETTINGS, CHOICES)
    with pytest.raises(ValueError, match=r"costs of shape \(1, 4, 3\), expected finite ones of \(2, 4, 3\)"):
        tuner.learn(np.zeros((1, 4, 3)), np.zeros(3), HOUR, 0.0)
    with pytest.raises(ValueError, match="expected finite"):
        tuner.learn(np.full((2, 4, 3), np.nan), np.zeros(3), HOUR, 0.0)
    state = tuner.snapshot()
    for change in ({"costs": []}, {"windows": [[[0.0, 300.0, 60.0]]] * 2}, {"book": 3}, {"periods": None}):
        with pytest.raises(InputError):
            WindowTuner(book_of(TWO), SETTINGS, CHOICES).restore({**state, **change})
    with pytest.raises(InputError, match="it had other candidates"):
        WindowTuner(book_of(TWO), SETTINGS, (LONG, SHORT, EARLY)).restore(state)
    with pytest.raises(ValueError, match="lead_s"):
        WindowTuner(book_of(TWO), SETTINGS, (Window(-1.0),))


def test_candidates_are_windows_that_can_be() -> None:
    for window in CANDIDATES:
        check_window(window)
    assert CANDIDATES[0] == DEFAULT_WINDOW
    assert len(set(CANDIDATES)) == len(CANDIDATES)

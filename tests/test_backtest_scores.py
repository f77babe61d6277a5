"""Scores of forecasts: against scikit-learn, against brute force, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, brier_score_loss

from prefetcher.backtest.scores import FEWEST_STARTS, average_precision, reliability, score_of, spread

forecasts = st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=60)


def split(given_: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([p for p, _ in given_]) / 8.0, np.array([used for _, used in given_])


@settings(deadline=None)
@given(forecasts)
def test_average_precision_is_that_of_scikit_learn_also_with_ties(given_: list[tuple[int, bool]]) -> None:
    p, used = split(given_)
    if used.any():
        assert average_precision(p, used) == pytest.approx(average_precision_score(used, p))
    else:
        assert math.isnan(average_precision(p, used))


def test_all_scores_of_a_large_sample() -> None:
    rng = np.random.default_rng(0)
    p = (rng.random(5000) ** 3).astype(np.float32)
    used = rng.random(5000) < p
    found = score_of(p, used, 1.0)
    assert (found.pairs, found.starts) == (5000, int(used.sum()))
    assert found.ap == pytest.approx(average_precision_score(used, p), abs=1e-9)
    assert found.brier == pytest.approx(brier_score_loss(used, p.astype(float)), abs=1e-9)
    assert found.ece is not None
    assert found.ece < 0.02
    # twice as sure as it may be
    sure = score_of(np.minimum(2.0 * p, 1.0), used, 1.0)
    assert sure.ece is not None
    assert sure.ece > 0.15


def test_the_calibration_error_by_hand() -> None:
    p = np.array([0.2] * 40 + [0.9] * 60)
    used = np.array([True] * 8 + [False] * 32 + [True] * 30 + [False] * 30)
    assert reliability(p, used) == [(pytest.approx(0.2), pytest.approx(0.2), 40), (pytest.approx(0.9), pytest.approx(0.5), 60)]
    assert score_of(p, used, 1.0).ece == pytest.approx(0.6 * 0.4)


@settings(deadline=None)
@given(forecasts)
def test_groups_of_the_reliability_diagram_hold_every_forecast_once_and_part_no_ties(given_: list[tuple[int, bool]]) -> None:
    p, used = split(given_)
    groups = reliability(p, used, bins=4)
    assert sum(n for _, _, n in groups) == len(p)
    assert sum(share * n for _, share, n in groups) == pytest.approx(used.sum())
    assert [said for said, _, _ in groups] == sorted(said for said, _, _ in groups)
    ordered = np.sort(p)
    edges = np.cumsum([n for _, _, n in groups])[:-1]
    assert all(ordered[edge - 1] < ordered[edge] for edge in edges)


def test_starts_found_within_a_budget_of_waste_by_hand() -> None:
    # 20 starts; by falling probability: 10 starts, then 10 wasted, 5 starts, 10 wasted, 5 starts
    kinds = [True] * 10 + [False] * 10 + [True] * 5 + [False] * 10 + [True] * 5
    p, used = np.linspace(0.9, 0.1, 40), np.array(kinds)
    for waste, share in ((0.25, 0.5), (0.5, 0.75), (0.75, 0.75), (1.0, 1.0)):
        assert score_of(p, used, waste).recall == pytest.approx(share)
    # One probability for all: what is taken is taken by lot, and half of all waste finds half of the starts.
    assert score_of(np.full(40, 0.5), used, 0.5).recall == pytest.approx(0.5)


def test_too_few_starts_say_nothing() -> None:
    used = np.zeros(1000, bool)
    used[: FEWEST_STARTS - 1] = True
    found = score_of(np.linspace(0, 1, 1000), used, 1.0)
    assert (found.starts, found.ap, found.brier, found.ece, found.recall) == (FEWEST_STARTS - 1, None, None, None, None)


def test_the_spread_over_origins_is_student_s() -> None:
    found = spread([0.1, 0.2, None, 0.3])
    assert found is not None
    # sd 0.1, standard error 0.1/√3, t(2) = 4.303
    assert (found.mean, found.n) == (pytest.approx(0.2), 3)
    assert found.high - found.mean == pytest.approx(4.303 * 0.1 / math.sqrt(3))
    assert found.mean - found.low == pytest.approx(found.high - found.mean)
    ratios = spread([0.5, 2.0], ratio=True)
    assert ratios is not None
    assert ratios.mean == pytest.approx(1.0)
    assert ratios.low * ratios.high == pytest.approx(1.0)
    one = spread([0.4])
    assert one is not None
    assert math.isnan(one.low)
    assert spread([None, float("nan")]) is None

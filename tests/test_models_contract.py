"""Every predictor keeps the contract, the contract catches those that don't, and the simple ones compute what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetcher.core.traffic import Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.baseline import Baseline
from prefetcher_models.check_predictor import (
    CHECKS,
    check_no_future,
    check_predictor,
    check_refuses_the_past,
)
from prefetcher_models.hazard import Hazard, HazardSettings
from prefetcher_models.hit_density import HitDensity
from prefetcher_models.idle_time import IdleTime
from prefetcher_models.predictor import Forecast
from prefetcher_models.seasonal_naive import SeasonalNaive
from prefetcher_models.survival import ends_within
from prefetcher_models.tsb import PERIOD_S, Tsb

START_S = 1_700_000_100.0  # the start of a five-minute period
DAY_S = 86400.0
BASELINES = (SeasonalNaive, IdleTime, Tsb, HitDensity)


def small_hazard() -> Hazard:
    return Hazard(HazardSettings(trees=5, samples=2_000, fewest_samples=100, horizons=(1, 3), growth=2.0))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("factory", [*BASELINES, small_hazard], ids=lambda factory: factory.__name__)
def test_every_predictor_keeps_the_contract(factory, check) -> None:
    check(factory)


class Rate(Baseline):
    """A sound predictor by rates alone, to be broken."""

    def __init__(self) -> None:
        super().__init__("rate", "always")

    def _own(self, traffic, now_s, which):
        return np.zeros((len(which), len(HORIZONS_S))), np.zeros(len(which), bool)


class SaysZero(Rate):
    def forecast(self, traffic, now_s, models=None):
        forecast = super().forecast(traffic, now_s, models)
        return Forecast(self.name, now_s, now_s, forecast.models, 0.0 * forecast.p, "gave up")


class Stale(Rate):
    def forecast(self, traffic, now_s, models=None):
        forecast = super().forecast(traffic, now_s, models)
        return Forecast(self.name, now_s - 60.0, now_s - 60.0, forecast.models, forecast.p)


class Falls(Rate):
    def forecast(self, traffic, now_s, models=None):
        forecast = super().forecast(traffic, now_s, models)
        return Forecast(self.name, now_s, now_s, forecast.models, forecast.p[:, ::-1])


class Uncounted(Rate):
    @property
    def fallbacks(self):
        return {}


class Random(Rate):
    def _own(self, traffic, now_s, which):
        p = np.sort(np.random.default_rng().random((len(which), len(HORIZONS_S))), axis=1)
        return p, np.ones(len(which), bool)


class Forgets(Rate):
    """Counts rows and leaves them out of its snapshot."""

    rows = 0

    def _take(self, traffic, block):
        self.rows += len(block.ts)

    def _own(self, traffic, now_s, which):
        p = np.full((len(which), len(HORIZONS_S)), 1.0 - 1.0 / (1.0 + self.rows))
        return p, np.full(len(which), self.rows > 0)


class Peeks(Rate):
    """What one instance sees of a log, the next one knows from the start."""

    seen = 1

    def _take(self, traffic, block):
        Peeks.seen += len(block.ts)

    def _own(self, traffic, now_s, which):
        return np.full((len(which), len(HORIZONS_S)), 1.0 - 1.0 / Peeks.seen), np.ones(len(which), bool)


class Trusting(Rate):
    def restore(self, snapshot):
        if "predictor" in snapshot:
            super().restore(snapshot)


def test_the_contract_passes_what_is_sound() -> None:
    check_predictor(Rate)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (SaysZero, "never to be used again"),
        (Stale, "issued at"),
        (Falls, "longer horizon is less likely"),
        (Uncounted, "not counted"),
        (Random, "differ"),
        (Forgets, "from a snapshot"),
        (Trusting, "cannot understand"),
    ],
)
def test_the_contract_catches(broken, found: str) -> None:
    with pytest.raises(PredictorError, match=found):
        check_predictor(broken)


def test_the_contract_catches_what_knows_the_future() -> None:
    with pytest.raises(PredictorError, match="changes its past forecasts"):
        check_no_future(Peeks)


def test_the_contract_catches_what_forecasts_for_the_past() -> None:
    class Late(Rate):
        def forecast(self, traffic, now_s, models=None):
            return super().forecast(traffic, traffic.newest_s, models)

    with pytest.raises(PredictorError, match="when rows until"):
        check_refuses_the_past(Late)


def learned(predictor, ts, model, n_models=1, blocks=1):
    traffic = Traffic(n_models)
    ts, model = np.asarray(ts, float), np.asarray(model)
    for part in np.array_split(np.arange(len(ts)), blocks):
        predictor.learn(traffic, traffic.advance(ts[part], model[part]))
    return traffic


def test_survival_is_the_conditional_share_of_longer_gaps() -> None:
    histogram = np.zeros((1, 36))
    histogram[0, 20] = 3.0  # 1024 to 1448 s
    histogram[0, 24] = 1.0  # 4096 to 5793 s
    young, between, old = (ends_within(histogram, np.array([age_s]), 0.5)[0] for age_s in (500.0, 2000.0, 9000.0))
    assert young[0] < 1e-3
    assert young[4] == pytest.approx(3.0 * 2.0 * np.log2(1400.0 / 1024.0) / 4.5, abs=5e-3)
    assert young[5] == pytest.approx(3.0 / 4.5, abs=5e-3)
    assert between[6] == pytest.approx((2.0 * np.log2(5600.0) - 24.0) / 1.5, abs=0.02)
    np.testing.assert_allclose(old, np.array(HORIZONS_S) / (95_400.0 + np.array(HORIZONS_S)))
    open_ended = np.zeros((1, 36))
    open_ended[0, 35] = 1.0
    assert 0.0 < ends_within(open_ended, np.array([3e5]), 0.5)[0, 7] < 0.2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.0, 1e6), min_size=32, max_size=32),
    st.floats(0.0, 1e9),
)
def test_survival_is_a_distribution(counts: list[float], age_s: float) -> None:
    p = ends_within(np.array([counts]), np.array([age_s]), 0.5)
    assert np.isfinite(p).all()
    assert (p >= -1e-12).all()
    assert (p <= 1.0).all()
    assert (np.diff(p, axis=1) >= -1e-12).all()


def test_seasonal_naive_repeats_yesterday_and_last_week() -> None:
    at_nine = START_S + np.arange(8) * DAY_S
    predictor = SeasonalNaive()
    traffic = learned(predictor, at_nine[:2], [0, 0])
    before, after = (predictor.forecast(traffic, now_s).p[0] for now_s in (at_nine[2] - 240.0, at_nine[2] + 240.0))
    assert before[1] < 0.05
    assert (before[2:] > 0.65).all()
    assert (after < 0.2).all()
    missed = learned(predictor, np.delete(at_nine, 6), np.zeros(7, int))
    half = predictor.forecast(missed, at_nine[7] + DAY_S - 240.0).p[0, 2]
    assert half > 0.75  # yesterday and last week were both seen
    week_only = learned(predictor, at_nine[:7], np.zeros(7, int))
    assert 0.35 < predictor.forecast(week_only, at_nine[0] + 8 * DAY_S - 240.0).p[0, 2] < 0.6


def test_seasonal_naive_falls_back_before_a_day_of_history_and_counts_it() -> None:
    predictor = SeasonalNaive()
    traffic = learned(predictor, START_S + np.array([0.0, 60.0]), [0, 1], n_models=3)
    forecast = predictor.forecast(traffic, START_S + 3600.0)
    assert forecast.fallback == "less than a day of history"
    assert predictor.fallbacks == {"less than a day of history": 2}
    assert (forecast.p[:2] > 0.0).all()
    assert (forecast.p[2] == 0.0).all()
    assert predictor.forecast(traffic, START_S + DAY_S + 30.0).fallback == ""
    assert predictor.fallbacks == {"less than a day of history": 3}


def test_idle_time_waits_for_the_gap_that_it_knows() -> None:
    ts = START_S + 1200.0 * np.arange(40)
    predictor = IdleTime()
    traffic = learned(predictor, ts, np.zeros(40, int))
    just_used, due = (predictor.forecast(traffic, ts[-1] + age_s).p[0] for age_s in (1.0, 1020.0))
    assert just_used[3] < 0.01
    assert just_used[5] > 0.9
    assert due[3] > 0.9


def test_idle_time_lends_a_new_model_the_gaps_of_the_others() -> None:
    ts = START_S + 120.0 * np.arange(40)
    predictor = IdleTime()
    traffic = learned(predictor, np.append(ts, ts[-1] + 1.0), np.append(np.zeros(40, int), 1), n_models=2)
    p = predictor.forecast(traffic, ts[-1] + 2.0).p
    assert p[1, 2] > 0.8
    assert p[1, 2] < p[0, 2]


def reference_tsb(rows_per_period: list[int], alpha: float, beta: float) -> tuple[float, float]:
    """Period by period, from the first that has rows."""
    p = size = 0.0
    demands = 0
    for n, rows in enumerate(rows_per_period):
        a = max(alpha, 1.0 / (n + 1.0))
        p += a * ((rows > 0) - p)
        if rows:
            demands += 1
            size += max(beta, 1.0 / demands) * (rows - size)
    return p, size


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=120), st.sampled_from([0.01, 0.05, 0.3]), st.integers(1, 7))
def test_tsb_is_the_method_period_by_period(tail: list[int], alpha: float, blocks: int) -> None:
    counts = [1, *tail]
    ts = np.concatenate([START_S + k * PERIOD_S + 10.0 * np.arange(rows) for k, rows in enumerate(counts)])
    predictor = Tsb(alpha=alpha)
    traffic = learned(predictor, ts, np.zeros(len(ts), int), blocks=blocks)
    p, size = reference_tsb(counts, alpha, 0.1)
    got = predictor.forecast(traffic, START_S + len(counts) * PERIOD_S).p[0]
    assert got[2] == pytest.approx(p, rel=1e-9)
    assert got[3] == pytest.approx(1.0 - (1.0 - p) ** 2, rel=1e-9)
    assert got[0] == pytest.approx(p * (1.0 - 0.8**size), rel=1e-9)


def test_tsb_fades_in_empty_periods() -> None:
    predictor = Tsb()
    traffic = learned(predictor, START_S + PERIOD_S * np.arange(300), np.zeros(300, int))
    end_s = START_S + 300 * PERIOD_S
    now, day, week = (predictor.forecast(traffic, end_s + wait_s).p[0, 2] for wait_s in (0.0, DAY_S, 7 * DAY_S))
    assert now > 0.99
    assert day == pytest.approx(now * 0.99**288)
    assert week < 1e-8


def test_hit_density_pools_a_class_and_tells_classes_apart() -> None:
    fast = START_S + 30.0 * np.arange(1021)
    slow = [START_S + lag_s + 7200.0 * np.arange(5) for lag_s in (5.0, 600.0, 1200.0, 1800.0)]
    ts = np.concatenate([fast, *slow])
    model = np.repeat(np.arange(5), [len(fast), *map(len, slow)])
    order = np.argsort(ts, kind="stable")
    predictor = HitDensity()
    traffic = learned(predictor, ts[order], model[order], n_models=5)
    p = predictor.forecast(traffic, float(ts.max()) + 10.0).p
    assert p[0, 0] > 0.9
    assert (p[1:, 3] < 0.2).all()
    assert (p[1:, 7] > 0.85).all()


@pytest.mark.parametrize("factory", BASELINES)
def test_blocks_do_not_change_what_is_learned(factory) -> None:
    rng = np.random.default_rng(5)
    ts = START_S + np.sort(rng.uniform(0.0, 2 * DAY_S, 400))
    ts[50:52] = ts[51:49:-1]  # a late row
    model = rng.integers(0, 5, 400)
    one, many = factory(), factory()
    traffic, other = learned(one, ts, model, 5), learned(many, ts, model, 5, blocks=37)
    now_s = float(ts.max()) + 100.0
    assert one.forecast(traffic, now_s).p.tobytes() == many.forecast(other, now_s).p.tobytes()


@pytest.mark.parametrize("factory", BASELINES)
def test_snapshots_of_others_are_refused_and_nothing_is_taken_over(factory) -> None:
    predictor = factory()
    learned(predictor, [START_S], [0])
    before = predictor.snapshot()
    for bad in ({}, {**before, "predictor": np.frombuffer(b"other", np.uint8)}, {**before, "learned_s": np.zeros((2, 2))}):
        with pytest.raises(PredictorError, match="a snapshot"):
            predictor.restore(bad)
    after = predictor.snapshot()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)

"""The pooled hazard: causal, the same for any blocks, monotone, calibrated, worth its cost; and its artifacts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prefetcher.core.traffic import Traffic
from prefetcher.core.traffic_state import FEATURE_NAMES
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.artifacts import about_hazard, hazard_of, hazard_parts
from prefetcher_models.calibration import calibration_line
from prefetcher_models.hazard import ALL_HORIZONS, Hazard, HazardSettings
from prefetcher_models.predictor import Predictor, checked
from prefetcher_models.samples import SampleStore
from prefetcher_models.stream import HazardStream
from prefetcher_models.trees import DEPTH, Forest

START_S = 1_700_000_123.4
DAY_S = 86400.0
SMALL = HazardSettings(trees=20, samples=8_000)


def timetable_log(days: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Models that beat (every 10, 30, 60 minutes), one that follows model 0 after a minute, and four at random."""
    rng = np.random.default_rng(seed)
    end = days * DAY_S
    parts = []
    for model, period in enumerate((600.0, 1800.0, 3600.0)):
        beats = np.arange(rng.uniform(0, period), end, period)
        parts.append((beats + rng.normal(0.0, 5.0, len(beats)), model))
        if model == 1:
            parts.append((beats + rng.uniform(50.0, 70.0, len(beats)), 3))
    parts.extend((rng.uniform(0.0, end, int(30 * days) + 1), model) for model in range(4, 8))
    ts = np.concatenate([t for t, _ in parts])
    model = np.concatenate([np.full(len(t), m) for t, m in parts])
    keep = (ts >= 0.0) & (ts < end)
    order = np.argsort(ts[keep], kind="stable")
    ts, model = START_S + ts[keep][order], model[keep][order].astype(np.int64)
    return ts, model, rng.integers(0, 20, len(ts))


def scored(ts, model, user, until_s, bounds, settings=SMALL, horizons=(1, 3, 6)):
    stream = HazardStream(8, float(ts[0]), tick_s=120.0, horizons=horizons, settings=settings)
    blocks, i = [], 0
    for bound in [*bounds, until_s]:
        j = int(np.searchsorted(ts, bound))
        blocks.append(stream.advance(ts[i:j], model[i:j], user[i:j], None, bound))
        i = j
    rows = np.concatenate([b.p_rows for b in blocks])
    return stream, rows, np.concatenate([b.ticks for b in blocks]), np.concatenate([b.p_ticks for b in blocks])


@pytest.fixture(scope="module")
def replayed():
    ts, model, user = timetable_log(2.0)
    return ts, model, user, *scored(ts, model, user, ts[-1] + 60.0, [])


def test_the_bounds_of_blocks_do_not_matter(replayed) -> None:
    ts, model, user, stream, rows, ticks, p_ticks = replayed
    rng = np.random.default_rng(1)
    bounds = np.sort(rng.uniform(ts[0], ts[-1], 25)).tolist()
    other, rows_2, ticks_2, p_ticks_2 = scored(ts, model, user, ts[-1] + 60.0, bounds)
    assert stream.hazard.fits > 5
    assert rows.tobytes() == rows_2.tobytes()
    assert ticks.tobytes() == ticks_2.tobytes()
    assert p_ticks.tobytes() == p_ticks_2.tobytes()
    assert stream.hazard.fit == other.hazard.fit


def test_the_future_does_not_enter(replayed) -> None:
    ts, model, user, _, rows, ticks, p_ticks = replayed
    cut_s = ts[0] + 1.3 * DAY_S
    past = ts < cut_s
    changed = np.where(past, model, (model + 3) % 8)
    later = np.where(past, ts, ts + 40.0)
    _, rows_2, ticks_2, p_ticks_2 = scored(later, changed, user, later[-1] + 60.0, [])
    assert rows[past].tobytes() == rows_2[past].tobytes()
    before = ticks < cut_s
    assert p_ticks[before].tobytes() == p_ticks_2[ticks_2 < cut_s].tobytes()
    assert rows[~past].tobytes() != rows_2[~past].tobytes()


def test_probabilities_are_probabilities_and_rise_with_the_horizon(replayed) -> None:
    ts, model, _, _, rows, ticks, p_ticks = replayed
    assert np.isfinite(rows).all()
    seen = np.array([ts[model == m][0] for m in range(8)])
    known = np.isfinite(p_ticks).all(axis=2)
    assert (known == (ticks[:, None] > seen[None, :])).all()
    for p in (rows, p_ticks[known]):
        assert p.min() >= 0.0
        assert p.max() <= 1.0
        assert (np.diff(p, axis=-1) >= 0.0).all()
    assert np.isnan(p_ticks[~known]).all()


def test_it_forecasts_beats_and_followers_better_than_rates_do(replayed) -> None:
    ts, model, user, stream, _, ticks, p_ticks = replayed
    day_2 = (ticks > ts[0] + DAY_S) & (ticks < ts[-1] - 3600.0)
    rates, at = Traffic(8), 0
    loss = {"hazard": 0.0, "rates": 0.0}
    for tick, p in zip(ticks[day_2], p_ticks[day_2].astype(float), strict=True):
        upto = int(np.searchsorted(ts, tick))
        rates.add(ts[at:upto], model[at:upto], user[at:upto])
        at = upto
        simple = -np.expm1(-rates.rates(tick)[:, [1, 3, 5, 6]].mean(axis=1)[:, None] * np.array([120.0, 600.0, 3600.0]))
        due = np.array([np.append(ts[(model == m) & (ts > tick)], np.inf)[0] - tick for m in range(8)])
        used = due[:, None] <= np.array([120.0, 600.0, 3600.0])
        for name, q in (("hazard", p), ("rates", simple)):
            q = np.clip(q, 1e-4, 1 - 1e-4)
            loss[name] -= np.where(used, np.log(q), np.log1p(-q)).sum()
    assert loss["hazard"] < 0.6 * loss["rates"]
    assert set(stream.hazard.fit.scores) == {"120", "600", "3600"}
    assert all(score["brier"] < 0.2 for score in stream.hazard.fit.scores.values())


def test_before_a_fit_it_says_that_it_falls_back_on_rates() -> None:
    ts, model, user = timetable_log(0.1)
    traffic, hazard = Traffic(9), Hazard()
    assert isinstance(hazard, Predictor)
    block = traffic.advance(ts, model, user, ticks=[ts[-1]])
    hazard.learn(traffic, block)
    forecast = checked(hazard.forecast(traffic, ts[-1]))
    assert forecast.fallback == "no fit yet"
    assert hazard.fallbacks["no fit yet"] > 0
    rates = traffic.rates(ts[-1])[:8][:, [1, 3, 5, 6]].mean(axis=1)
    np.testing.assert_allclose(forecast.p[:8], -np.expm1(-rates[:, None] * np.array(HORIZONS_S)), rtol=1e-3)
    assert (forecast.p[8] == 0.0).all()
    hazard.refit(hazard.next_fit_s)
    assert hazard.fits == 1
    assert not hazard.refit(hazard.next_fit_s - 1.0)


def test_a_horizon_without_trees_is_counted_and_never_below_a_shorter_one(replayed) -> None:
    ts, _, _, stream, *_ = replayed
    hazard, traffic = stream.hazard, stream.traffic
    before = hazard.fallbacks["horizon without a fit"]
    forecast = checked(hazard.forecast(traffic, ts[-1] + 60.0))
    assert forecast.fallback == ""
    assert hazard.fallbacks["horizon without a fit"] == before + 8 * (len(HORIZONS_S) - 3)


def live(ts, model, user, until_s, hazard=None, traffic=None, from_s=None):
    """A controller's way: rows as they come, a tick a minute."""
    traffic = traffic or Traffic(8)
    hazard = hazard or Hazard(replace(SMALL, horizons=(1, 3, 6)))
    tick = ts[0] if from_s is None else from_s
    while tick + 600.0 <= until_s:
        upto = tick + 600.0
        inside = slice(*np.searchsorted(ts, [tick, upto]))
        times = np.arange(tick, upto, 120.0)
        block = traffic.advance(ts[inside], model[inside], user[inside], ticks=times, from_s=tick, until_s=upto)
        hazard.learn(traffic, block)
        hazard.refit(upto)
        tick = upto
    return hazard, traffic, tick


def test_a_restart_from_snapshots_goes_on_as_if_nothing_had_happened() -> None:
    ts, model, user = timetable_log(0.8, seed=4)
    whole, traffic, end_s = live(ts, model, user, ts[-1])
    half, half_traffic, half_s = live(ts, model, user, ts[0] + 0.37 * DAY_S)
    again = Hazard(half.settings)
    again.restore({name: value.copy() for name, value in half.snapshot().items()})
    again, again_traffic, again_s = live(
        ts, model, user, ts[-1], again, Traffic.restore(half_traffic.snapshot()), half_s
    )
    assert whole.fits > half.fits > 0
    assert again_s == end_s
    ours, theirs = whole.snapshot(), again.snapshot()
    assert set(ours) == set(theirs)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert (whole.forecast(traffic, end_s).p == again.forecast(again_traffic, end_s).p).all()
    with pytest.raises(PredictorError, match="another predictor"):
        again.restore({**ours, "predictor": np.frombuffer(b"tsb", np.uint8)})
    with pytest.raises(PredictorError, match="does not understand"):
        again.restore({name: value for name, value in ours.items() if name != "lines"})


def test_samples_know_the_next_use_and_do_not_depend_on_blocks() -> None:
    ts, model, user = timetable_log(0.4, seed=2)
    ticks = np.arange(ts[0], ts[-1], 300.0)
    stores = []
    for size_s in (500.0, 20_000.0):
        traffic, store = Traffic(8), SampleStore(seed=3, most=1000)
        for from_s in np.arange(ts[0], ts[-1], size_s):
            rows = slice(*np.searchsorted(ts, [from_s, from_s + size_s]))
            mine = ticks[slice(*np.searchsorted(ticks, [from_s, from_s + size_s]))]
            block = traffic.advance(
                ts[rows], model[rows], user[rows], ticks=mine, from_s=from_s, until_s=min(from_s + size_s, ts[-1])
            )
            store.take(block, traffic.origin_s)
        stores.append(store.samples(ts[-1]))
    one, other = stores
    assert len(one.t) > 800
    assert (np.diff(one.t) >= 0.0).all()
    for name in ("x", "t", "model", "next_s"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    for t, m, next_s in zip(one.t, one.model, one.next_s, strict=True):
        later = ts[(model == m) & (ts > t)]
        assert next_s == (later[0] if len(later) else np.inf)


def test_the_store_stays_bounded_and_leans_to_the_recent() -> None:
    ts, model, user = timetable_log(3.0, seed=2)
    traffic, store = Traffic(8), SampleStore(seed=3, most=500)
    for from_s in np.arange(ts[0], ts[-1], 7200.0):
        rows = slice(*np.searchsorted(ts, [from_s, from_s + 7200.0]))
        ticks = np.arange(from_s, from_s + 7200.0, 60.0)
        block = traffic.advance(ts[rows], model[rows], user[rows], ticks=ticks, from_s=from_s, until_s=from_s + 7200.0)
        store.take(block, traffic.origin_s)
        samples = store.samples(from_s + 7200.0)
        assert len(samples.t) <= 2000
    last_day = (samples.t > ts[-1] - DAY_S).mean()
    assert last_day > 0.4


@pytest.fixture(scope="module")
def booster():
    import lightgbm

    rng = np.random.default_rng(0)
    x = np.round(rng.normal(size=(3000, len(FEATURE_NAMES))), 1).astype(np.float32)
    y = (x[:, 0] + x[:, 3] * x[:, 5] + rng.normal(size=3000) > 0.5).astype(float)
    words = {"objective": "binary", "max_depth": DEPTH, "num_leaves": 16, "verbose": -1, "num_threads": 1, "seed": 1}
    return lightgbm.train(words, lightgbm.Dataset(x, y), num_boost_round=30), x


def test_our_evaluation_is_lightgbms(booster) -> None:
    trained, x = booster
    forest = Forest.parse(trained.model_to_string(), x.shape[1])
    np.testing.assert_allclose(forest.predict(x), trained.predict(x, num_threads=1), rtol=1e-12)
    one_by_one = np.concatenate([forest.predict(x[i : i + 1]) for i in range(300)])
    assert one_by_one.tobytes() == forest.predict(x)[:300].tobytes()


def test_averages_and_lines_act_on_log_odds(booster) -> None:
    trained, x = booster
    text = trained.model_to_string()
    forest = Forest.parse(text, x.shape[1])
    fewer = Forest.parse(trained.model_to_string(num_iteration=10), x.shape[1])
    mean = Forest.average([forest, fewer]).log_odds(x)
    np.testing.assert_allclose(mean, (forest.log_odds(x) + fewer.log_odds(x)) / 2, atol=1e-12)
    np.testing.assert_allclose(forest.along(0.5, 1.0).log_odds(x), 0.5 * forest.log_odds(x) + 1.0, atol=1e-12)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Tree=", "Bush="),
        ("num_leaves=16", "num_leaves=15"),
        ("num_cat=0", "num_cat=1"),
        ("leaf_value=", "leaf_value=nan "),
        ("left_child=", "left_child=99 "),
        ("split_feature=", "split_feature=9999 "),
    ],
)
def test_a_text_that_is_no_such_model_is_refused(booster, old: str, new: str) -> None:
    text = booster[0].model_to_string()
    assert old in text
    with pytest.raises(PredictorError, match="no LightGBM model"):
        Forest.parse(text.replace(old, new), len(FEATURE_NAMES))


def test_a_deeper_tree_is_refused(booster) -> None:
    import lightgbm

    x = booster[1]
    deep = lightgbm.train(
        {"objective": "binary", "num_leaves": 64, "min_data_in_leaf": 5, "verbose": -1, "num_threads": 1},
        lightgbm.Dataset(x, (x[:, 0] * x[:, 1] > 0).astype(float)),
        num_boost_round=3,
    )
    with pytest.raises(PredictorError, match="deeper than 4"):
        Forest.parse(deep.model_to_string(), x.shape[1])


def test_the_calibration_line_is_found_and_little_evidence_moves_it_little() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(-1.0, 2.0, 20_000)
    used = (rng.random(20_000) < 1.0 / (1.0 + np.exp(-(0.6 * x - 0.8)))).astype(float)
    slope, offset = calibration_line(x, used)
    assert slope == pytest.approx(0.6, abs=0.03)
    assert offset == pytest.approx(-0.8, abs=0.05)
    assert calibration_line(np.zeros(0), np.zeros(0)) == (1.0, 0.0)
    slope, offset = calibration_line(x[:5], used[:5])
    assert abs(slope - 1.0) < 0.2
    assert abs(offset) < 0.2
    slope, _ = calibration_line(x, (x < 0).astype(float))
    assert slope > 0.0


def test_an_artifact_brings_the_same_forecasts_back(replayed) -> None:
    ts, _, _, stream, *_ = replayed
    parts = hazard_parts(stream.hazard)
    assert hazard_parts(stream.hazard) == parts
    again = hazard_of(parts)
    assert again.settings == stream.hazard.settings
    assert hazard_parts(again) == parts
    x = stream.traffic.features(ts[-1] + 60.0)
    ours = stream.hazard.probabilities(x, ALL_HORIZONS)
    assert ours.tobytes() == again.probabilities(x, ALL_HORIZONS).tobytes()
    about = about_hazard(stream.hazard)
    assert about["data"]["rows"] > 0
    assert about["data"]["from_s"] == ts[0]
    assert about["features"] == list(FEATURE_NAMES)


def test_damaged_and_foreign_artifacts_are_refused(replayed) -> None:
    (good,) = hazard_parts(replayed[3].hazard).values()
    cases = {
        "no JSON": good[: len(good) // 2],
        "lacks a part": good.replace(b"leaf_value=", b"leaf_values=", 1),
        "is no hazard": b'{"format": "something else"}',
        "of version 2": good.replace(b'"version": 1', b'"version": 2'),
        "other features": good.replace(b'"log_age"', b'"age"'),
        "is no JSON": b"\x80\x04pickled",
    }
    for found, part in cases.items():
        with pytest.raises(PredictorError, match=found):
            hazard_of({"hazard.json": part})
    with pytest.raises(PredictorError, match="other features"):
        hazard_of({"hazard.json": good}, names=("seasonal",))
    with pytest.raises(PredictorError, match="it has no hazard"):
        hazard_of({})


def test_a_stream_refuses_rows_that_are_not_its_own() -> None:
    stream = HazardStream(2, START_S)
    one = np.array([START_S + 10.0])
    for ts, model in ((one - 20.0, 0), (one + 100.0, 0), (one, 2)):
        with pytest.raises(ValueError, match="rows from"):
            stream.advance(ts, np.array([model]), None, None, START_S + 60.0)
    assert stream.advance(one, np.array([1]), None, None, START_S + 60.0).p_ticks.shape == (1, 2, 4)

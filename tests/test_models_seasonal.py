"""Seasonal forecasts: local time through changes of clock, holidays, drift, the choice against seasonal-naive, fallbacks by name."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest

import prefetcher_models.seasonal_fit as fitting_of_seasons
from prefetcher.core.traffic import Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import ArtifactError, PredictorError
from prefetcher_models.check_predictor import CHECKS
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.predictor import checked
from prefetcher_models.seasonal import (
    REASONS,
    HourCounts,
    SeasonalPredictor,
    SeasonalSettings,
    SeasonalSource,
    drift_of,
    refit_seasons,
)
from prefetcher_models.seasonal_artifact import NamedSeasons, about_seasons, seasons_of, seasons_parts
from prefetcher_models.seasonal_calendar import SLOTS, Calendar
from prefetcher_models.seasonal_fit import SeasonTask, deviance, fit_season, seasonal_naive
from prefetcher_models.seasonal_profile import Season, Seasons, seasons_from_arrays, seasons_to_arrays
from prefetcher_models.seasonal_words import explain

HOUR_S, DAY_S, WEEK_S = 3600.0, 86400.0, 604800.0
BERLIN = ZoneInfo("Europe/Berlin")
NEW_YORK = "America/New_York"


def utc(*when: int, zone: str = "UTC") -> float:
    return datetime(*when, tzinfo=ZoneInfo(zone)).timestamp()


def wall_hours(from_s: float, hours: int, zone: str) -> tuple[np.ndarray, np.ndarray]:
    """Local hour and weekday of each hour."""
    local = [datetime.fromtimestamp(from_s + h * HOUR_S, ZoneInfo(zone)) for h in range(hours)]
    return np.array([t.hour for t in local]), np.array([t.weekday() for t in local])


def office(from_s: float, days: int, zone: str, peak: int = 9, seed: int = 0, rows: float = 30.0) -> np.ndarray:
    """Rows by hour: a hump around `peak` on working days, a fifth of that on weekends."""
    hour, weekday = wall_hours(from_s, days * 24, zone)
    rate = 1.0 + rows * np.exp(-0.5 * ((hour - peak) / 2.0) ** 2) * np.where(weekday >= 5, 0.2, 1.0)
    return np.random.default_rng(seed).poisson(rate).astype(np.float32)


def whole(season: Season, calendar: Calendar) -> Seasons:
    return Seasons(calendar, {0: season})


def busiest_hour(season: Season, calendar: Calendar, from_s: float) -> float:
    """Start of the hour of the 24 from `from_s` on with most expected rows."""
    times = from_s + np.arange(24) * HOUR_S
    rows = whole(season, calendar).expected(np.zeros(24, np.int64), times, [HOUR_S])[:, 0]
    return float(times[np.argmax(rows)])


@pytest.mark.parametrize("change", [utc(2026, 11, 1, zone=NEW_YORK), utc(2027, 3, 14, zone=NEW_YORK)], ids=["autumn", "spring"])
def test_a_peak_stays_at_its_local_time_when_the_clocks_change(change: float) -> None:
    history_s = 21 * DAY_S
    counts = office(change - history_s, 21, NEW_YORK)
    season = fit_season(SeasonTask(counts, change - history_s, tz=NEW_YORK))
    assert season.used
    calendar = Calendar(NEW_YORK)
    for day in (-3, 2, 5):  # working days before and after
        begin = datetime.fromtimestamp(change, ZoneInfo(NEW_YORK)).replace(hour=0) + pd.Timedelta(days=day)
        at = busiest_hour(season, calendar, begin.timestamp())
        assert datetime.fromtimestamp(at, ZoneInfo(NEW_YORK)).hour in (8, 9)


def test_an_hour_that_comes_twice_and_one_that_never_comes_are_fitted() -> None:
    for change in (utc(2026, 10, 25, zone="Europe/Berlin"), utc(2026, 3, 29, zone="Europe/Berlin")):
        from_s = change - 10 * DAY_S
        season = fit_season(SeasonTask(office(from_s, 16, "Europe/Berlin"), from_s, tz="Europe/Berlin"))
        assert np.isfinite(season.ordinary).all()
        assert 8 <= np.argmax(season.ordinary[:144]) / 6 <= 10.5


def test_the_wall_clock_is_that_of_the_zone() -> None:
    calendar = Calendar("Asia/Kathmandu")  # +05:45
    assert calendar.wall_s(utc(2026, 1, 1)) - utc(2026, 1, 1) == 5.75 * HOUR_S
    times = utc(2026, 1, 1) + np.arange(0, 365 * DAY_S, 7777.0)
    expected = [datetime.fromtimestamp(t, BERLIN) for t in times]
    slots = [d.weekday() * 144 + d.hour * 6 + d.minute // 10 for d in expected]
    assert Calendar("Europe/Berlin").slots(times).tolist() == slots


@pytest.mark.parametrize(("tz", "country", "word"), [("Mars/Base", "", "time zone"), ("UTC", "XX", "country"), ("../etc", "", "time zone")])
def test_what_is_no_place_is_refused(tz: str, country: str, word: str) -> None:
    with pytest.raises(PredictorError, match=word):
        Calendar(tz, country)


def test_a_holiday_that_was_never_seen_looks_like_a_weekend() -> None:
    thanksgiving = utc(2026, 11, 26, zone=NEW_YORK)
    from_s = thanksgiving - 24 * DAY_S  # after the clocks changed; Veterans Day is in it, and as busy as any day
    counts = office(from_s, 22, NEW_YORK)
    known = fit_season(SeasonTask(counts, from_s, tz=NEW_YORK, country="US"))
    unknown = fit_season(SeasonTask(counts, from_s, tz=NEW_YORK))
    times = thanksgiving + np.arange(24) * HOUR_S
    rows = {
        name: whole(season, Calendar(NEW_YORK, country)).expected(np.zeros(24, np.int64), times, [HOUR_S]).sum()
        for name, season, country in (("holiday", known, "US"), ("plain", unknown, ""))
    }
    assert rows["holiday"] < 0.5 * rows["plain"]
    before = times - WEEK_S
    assert whole(known, Calendar(NEW_YORK, "US")).expected(np.zeros(24, np.int64), before, [HOUR_S]).sum() > 0.7 * rows["plain"]
    assert Calendar(NEW_YORK, "US").holidays(thanksgiving - DAY_S, thanksgiving + DAY_S) == [("2026-11-26", "Thanksgiving Day")]


def test_weekends_are_those_of_the_country() -> None:
    friday = utc(2026, 6, 12, 12)
    assert Calendar("UTC", "EG").free([friday]).tolist() == [True]
    assert Calendar("UTC", "DE").free([friday]).tolist() == [False]


def test_the_evaluation_is_prophets_own() -> None:
    prophet, pandas = fitting_of_seasons._prophet()
    model = prophet(growth="linear", daily_seasonality=False, weekly_seasonality=False, yearly_seasonality=False, uncertainty_samples=0)
    model.add_seasonality("working", 1.0, 4, condition_name="works")
    model.add_seasonality("free", 1.0, 3, condition_name="rests")
    model.add_seasonality("weekly", 7.0, 2)
    model.add_regressor("rest", standardize=False)
    wall = utc(2026, 3, 2) + np.arange(14 * 24) * HOUR_S
    rests = (np.arange(len(wall)) // 24) % 7 >= 5
    frame = pandas.DataFrame(
        {"ds": pandas.to_datetime(wall, unit="s"), "works": ~rests, "rests": rests, "rest": rests * 1.0, "y": office(wall[0], 14, "UTC")}
    )
    model.fit(frame)
    own = fitting_of_seasons._waves(model, wall, rests)
    np.testing.assert_allclose(own, model.predict(frame)["additive_terms"], atol=1e-8)
    model.stan_backend.cleanup()


def test_nothing_is_said_by_a_fit(capfd: pytest.CaptureFixture[str]) -> None:
    fit_season(SeasonTask(office(utc(2026, 3, 2), 8, "UTC"), utc(2026, 3, 2)))
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


def test_what_repeats_exactly_is_left_to_seasonal_naive() -> None:
    day = np.random.default_rng(3).poisson(5.0, 24) * (np.arange(24) % 3 == 0)
    season = fit_season(SeasonTask(np.tile(day, 14).astype(np.float32), utc(2026, 3, 2)))
    assert not season.used
    assert season.own_error > season.naive_error
    assert "not used" in explain(whole(season, Calendar()), 0, utc(2026, 3, 16)).text


@pytest.mark.parametrize("kind", ["zeros", "one", "spikes", "huge", "falling"])
def test_rates_are_never_negative_and_always_finite(kind: str) -> None:
    rng = np.random.default_rng(1)
    counts = {
        "zeros": np.zeros(10 * 24),
        "one": np.eye(1, 240, 100)[0],
        "spikes": 1000.0 * (rng.random(240) < 0.02),
        "huge": rng.poisson(1e6, 240) * 1.0,
        "falling": np.linspace(500, 0, 240).round(),
    }[kind]
    season = fit_season(SeasonTask(counts.astype(np.float32), utc(2026, 3, 2)))
    for week in (season.ordinary, season.free):
        assert np.isfinite(week).all()
        assert week.min() >= 0.0
    assert 0.0 < season.burst <= 1.0
    assert np.isfinite([season.own_error, season.naive_error, season.trend_a_week]).all()


def test_seasonal_naive_is_yesterday_and_last_week() -> None:
    counts = np.arange(24.0 * 9)
    first = 24 * 8
    day, week, mean = counts[first - 24], counts[first - 168], counts[first - 24 : first].mean()
    assert seasonal_naive(counts, first)[0] == pytest.approx((day + week + 0.5 * mean) / 2.5)
    assert deviance(np.array([3.0, 0.0]), np.array([3.0, 1.0])) == pytest.approx(1.0)


def test_expected_rows_add_up_over_spans_and_midnight() -> None:
    week = np.linspace(1.0, 7.0, SLOTS, dtype=np.float32)
    season = bare(week)
    seasons = whole(season, Calendar())
    at = np.array([utc(2026, 3, 2, 23, 30) + 123.0])
    place = np.zeros(1, np.int64)
    six = seasons.expected(place, at, [6 * HOUR_S])[0, 0]
    parts = sum(seasons.expected(place, at + k * HOUR_S, [HOUR_S])[0, 0] for k in range(6))
    assert six == pytest.approx(parts)
    fine = at[0] + np.arange(0.0, 6 * HOUR_S, 1.0) + 0.5
    assert six == pytest.approx(seasons.rates(0, fine).sum() / HOUR_S, rel=1e-4)


def bare(week: np.ndarray, **values: float) -> Season:
    numbers = {
        "burst": 1.0, "follow": 1.0,
        "used": True, "own_error": 1.0, "naive_error": 2.0, "held_out_s": DAY_S, "valid_from_s": 0.0, "until_s": 1e12,
        "rows": 1.0, "history_s": WEEK_S, "bin_s": HOUR_S, "trend_a_week": 1.0,
    }  # fmt: skip
    return Season(ordinary=week.astype(np.float32), free=week.astype(np.float32), **{**numbers, **values})


def test_a_season_holds_from_when_it_was_made_and_not_for_ever() -> None:
    seasons = whole(bare(np.ones(SLOTS), valid_from_s=1000.0, until_s=2000.0), Calendar())
    times = np.array([999.0, 1000.0, 1999.0, 2000.0])
    assert seasons.places(np.zeros(4, np.int64), times).tolist() == [-1, 0, 0, -1]
    assert seasons.places(np.array([5, -1]), times[:2]).tolist() == [-1, -1]


def test_seasons_as_arrays_come_back_and_foreign_ones_are_refused() -> None:
    seasons = {3: bare(np.arange(SLOTS)), 7: bare(np.ones(SLOTS), used=False)}
    arrays = seasons_to_arrays(seasons)
    back = seasons_from_arrays(arrays)
    assert list(back) == [3, 7]
    assert back[7].used is False
    np.testing.assert_array_equal(back[3].ordinary, seasons[3].ordinary)
    assert seasons_from_arrays(seasons_to_arrays({})) == {}
    for wrong in ({"keys": arrays["keys"][:1]}, {"ordinary": -arrays["ordinary"]}, {"free": arrays["free"] * np.nan}):
        with pytest.raises(PredictorError):
            seasons_from_arrays({**arrays, **wrong})
    with pytest.raises(PredictorError):
        seasons_from_arrays({"keys": arrays["keys"]})


def test_only_what_drifted_is_fitted_again() -> None:
    from_s = utc(2026, 3, 2)
    settings = SeasonalSettings(oldest_s=30 * DAY_S, fewest_rows=10)
    counts = np.stack([office(from_s, 17, "UTC", peak=9, seed=1), office(from_s, 17, "UTC", peak=9, seed=2)]).astype(np.int32)
    counts[1, 14 * 24 :] = office(from_s + 14 * DAY_S, 3, "UTC", peak=21, seed=2)
    first = refit_seasons([10, 20], counts[:, : 14 * 24], from_s, {}, settings)
    assert sorted(first.fitted) == [10, 20]
    assert not first.failed
    second = refit_seasons([10, 20], counts, from_s, first.seasons, settings)
    assert second.fitted == (20,)
    assert second.drifts[10] < 1.5 < second.drifts[20]
    assert second.seasons[10] is first.seasons[10]
    again = refit_seasons([10, 20], counts, from_s, second.seasons, settings)
    assert again.fitted == ()
    old = refit_seasons([10, 20], counts, from_s, first.seasons, SeasonalSettings(oldest_s=2 * DAY_S, fewest_rows=10))
    assert sorted(old.fitted) == [10, 20]
    assert drift_of(first.seasons[10], counts[0, : 14 * 24 + 3].astype(float), from_s, Calendar()) == 1.0  # too little to tell


def test_a_fit_that_fails_or_is_late_keeps_the_old_season_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from_s = utc(2026, 3, 2)
    counts = office(from_s, 10, "UTC")[None].astype(np.int32)
    settings = SeasonalSettings(oldest_s=DAY_S / 2, fewest_rows=10)
    first = refit_seasons([4], counts[:, : 9 * 24], from_s, {}, settings)
    monkeypatch.setattr(fitting_of_seasons, "_PATIENCE_S", 1e-4)
    late = refit_seasons([4], counts, from_s, first.seasons, settings)
    assert late.failed == {4: "fit late"}
    assert late.seasons[4] is first.seasons[4]
    monkeypatch.setattr(fitting_of_seasons, "_prophet", broken)
    failed = refit_seasons([4], counts, from_s, {}, settings)
    assert failed.failed == {4: "fit failed"}
    assert failed.seasons == {}


def broken() -> None:
    raise PredictorError("Prophet failed: on purpose", predictor="seasonal")


def test_counts_that_are_none_and_short_histories_are_refused() -> None:
    with pytest.raises(PredictorError, match="three days"):
        fit_season(SeasonTask(np.ones(48, np.float32), 0.0))
    counts = np.ones(240, np.float32)
    counts[5] = np.nan
    with pytest.raises(PredictorError, match="no numbers"):
        fit_season(SeasonTask(counts, 0.0))


def test_bursts_are_told_from_single_rows() -> None:
    from_s = utc(2026, 3, 2)
    rng = np.random.default_rng(5)
    hour, _ = wall_hours(from_s, 28 * 24, "UTC")
    bursts = rng.poisson(0.1 + 1.2 * np.exp(-0.5 * ((hour - 9) / 3.0) ** 2))
    counts = np.array([rng.geometric(0.2, n).sum() for n in bursts], np.float32)
    season = fit_season(SeasonTask(counts, from_s))
    assert 0.1 < season.burst < 0.4  # five rows a burst
    rate = whole(season, Calendar()).rates(0, from_s + (np.arange(28 * 24) + 0.5) * HOUR_S)
    said = -np.expm1(-season.burst * rate)
    assert said.mean() == pytest.approx((counts > 0).mean(), abs=0.07)
    assert np.mean((said - (counts > 0)) ** 2) < np.mean(((counts > 0).mean() - (counts > 0)) ** 2)


# --- predictor and source


def log_of(days: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two models with office hours, one at random, from a Monday on."""
    from_s = utc(2026, 3, 2)
    rng = np.random.default_rng(seed)
    ts, model = [], []
    for m, counts in enumerate(
        [office(from_s, days, "UTC", 9, seed, 12.0), office(from_s, days, "UTC", 20, seed + 1, 6.0), rng.poisson(0.02, days * 24)]
    ):
        times = from_s + np.repeat(np.arange(days * 24), counts.astype(int)) * HOUR_S
        ts.append(times + rng.uniform(0, HOUR_S, len(times)))
        model.append(np.full(len(times), m))
    order = np.argsort(np.concatenate(ts), kind="stable")
    return np.concatenate(ts)[order], np.concatenate(model)[order]


SMALL = SeasonalSettings(first_s=4 * DAY_S, fewest_rows=20, refit_s=2 * DAY_S)


class Drive:
    """A predictor and a source over a log, in blocks of `block_s`."""

    def __init__(self, block_s: float = 1800.0, settings: SeasonalSettings = SMALL) -> None:
        self.traffic = Traffic(3)
        self.predictor, self.source = SeasonalPredictor(settings), SeasonalSource(settings)
        self.block_s = block_s
        self.now_s = utc(2026, 3, 2)

    def over(self, log: tuple[np.ndarray, np.ndarray], until_s: float) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
        ts, model = log
        forecasts, rows, ticks = [], [], []
        while self.now_s < until_s:
            if self.now_s % 1800.0 == 0.0:
                self.predictor.refit(self.now_s)
                self.source.refit(self.now_s)
            end_s = self.now_s + self.block_s
            some = slice(*np.searchsorted(ts, [self.now_s, end_s]))
            block = self.traffic.advance(ts[some], model[some], ticks=np.arange(self.now_s, end_s, 600.0), from_s=self.now_s, until_s=end_s)
            self.predictor.learn(self.traffic, block)
            of_rows, of_ticks = self.source.columns(self.traffic, block)
            rows.append(of_rows)
            ticks.append(of_ticks)
            self.now_s = end_s
            if self.now_s % 21600.0 == 0.0:
                forecasts.append(checked(self.predictor.forecast(self.traffic, self.now_s)).p)
        return forecasts, np.concatenate(rows), np.concatenate(ticks)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_predictor_keeps_the_contract(check) -> None:
    check(SeasonalPredictor)


def test_a_week_of_forecasts_knows_the_past_only_and_goes_on_from_a_snapshot() -> None:
    begin = utc(2026, 3, 2)
    cut = begin + 5.25 * DAY_S
    log, other = log_of(7), log_of(7, seed=9)
    changed = tuple(np.concatenate([a[log[0] < cut], b[other[0] >= cut]]) for a, b in zip(log, other, strict=True))
    whole_run, half, fine = Drive(), Drive(), Drive(600.0)
    before = whole_run.over(log, cut)
    assert any(season.used for season in whole_run.predictor.seasons.seasons.values())
    after = whole_run.over(log, begin + 6.5 * DAY_S)

    first = half.over(changed, cut)
    for one, two in zip(before, first, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()

    resumed = Drive()
    resumed.traffic, resumed.now_s = half.traffic, half.now_s
    resumed.predictor.restore(half.predictor.snapshot())
    resumed.source.restore(half.source.snapshot())
    second = resumed.over(log, begin + 6.5 * DAY_S)
    for one, two in zip(after, second, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()

    blocks = fine.over(log, cut)
    for one, two in zip(before, blocks, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()

    for foreign in ({}, {"x": np.zeros(1)}):
        with pytest.raises(PredictorError):
            SeasonalSource(SMALL).restore(foreign)
        with pytest.raises(PredictorError):
            SeasonalPredictor(SMALL).restore(foreign)


def test_columns_say_when_rows_come_and_nothing_of_other_models() -> None:
    drive = Drive()
    assert isinstance(drive.source, FeatureSource)
    _, rows, ticks = drive.over(log_of(6), utc(2026, 3, 2) + 6 * DAY_S)
    assert np.isnan(rows[:100]).all()  # before the first fit
    last = ticks[-3 * 144 :].reshape(144, 3, 4)  # the last day: tick, model, column
    assert np.isnan(last[:, 2]).all()
    used = [m for m, season in drive.source.seasons.seasons.items() if season.used]
    assert used
    for m in used:
        assert np.isfinite(last[:, m]).all()
        level = last[:, m, 0].astype(float)
        assert level.max() - level.min() > 0.5
        assert np.array_equal(np.argsort(last[:, m, 0]), np.argsort(last[:, m, 2]))


def test_forecasts_follow_the_cycle_and_fallbacks_are_counted_by_reason() -> None:
    drive = Drive()
    drive.over(log_of(6), utc(2026, 3, 2) + 5.25 * DAY_S)
    predictor, traffic = drive.predictor, drive.traffic
    assert predictor.fallbacks["too little history"] > 0
    used = [m for m, season in predictor.seasons.seasons.items() if season.used]
    at = drive.now_s  # 06:00
    quiet = {m: predictor.forecast(traffic, at + 20 * HOUR_S).p[m] for m in used}
    busy = {m: predictor.forecast(traffic, at + (2.8 if m == 0 else 13.8) * HOUR_S).p[m] for m in used}
    for m in used:
        assert busy[m][0] > quiet[m][0]
    counted = dict(predictor.fallbacks)
    late = predictor.forecast(traffic, at + 20 * DAY_S, np.array(used))
    assert late.fallback == "season too old"
    assert predictor.fallbacks["season too old"] == counted["season too old"] + len(used)
    assert set(predictor.fallbacks) == set(REASONS)
    assert late.p.shape == (len(used), len(HORIZONS_S))
    with pytest.raises(PredictorError):
        predictor.forecast(traffic, traffic.newest_s - 1.0)


def test_hours_are_counted_as_rows_came_and_the_oldest_let_go() -> None:
    counts = HourCounts(days=2)
    start = 1_000_000 * HOUR_S
    counts.add(np.array([start, start + HOUR_S, start + 10.0]), np.array([0, 1, 0]), 2)
    np.testing.assert_array_equal(counts.until(start + 2 * HOUR_S), [[1, 1], [0, 1]])
    np.testing.assert_array_equal(counts.until(start + 1.5 * HOUR_S), [[1], [0]])
    counts.add(np.array([start + 60 * HOUR_S]), np.array([2]), 3)
    assert counts.from_s == start + 13 * HOUR_S
    assert counts.until(start + 61 * HOUR_S).sum() == 1
    back = HourCounts(days=2)
    back.put(counts.arrays())
    np.testing.assert_array_equal(back.until(start + 61 * HOUR_S), counts.until(start + 61 * HOUR_S))


def test_a_season_in_words() -> None:
    from_s = utc(2026, 11, 2, zone=NEW_YORK)
    season = fit_season(SeasonTask(office(from_s, 21, NEW_YORK, rows=60.0), from_s, tz=NEW_YORK, country="US"))
    told = explain(whole(season, Calendar(NEW_YORK, "US")), 0, from_s + 21 * DAY_S)
    assert told.used
    assert told.peaks[0].days == "working days"
    assert told.peaks[0].time[:2] in ("08", "09")
    assert told.peaks[0].times > 2.0
    assert ("2026-11-26", "Thanksgiving Day") in told.holidays
    assert told.next_peak_s is not None
    assert told.text.startswith(f"busiest working days {told.peaks[0].time} (")
    assert "America/New_York time" in told.text
    assert "\n" not in told.text
    with pytest.raises(PredictorError, match="no season"):
        explain(whole(season, Calendar()), 1, from_s)


def test_seasons_by_name_are_published_and_asked_without_prophet() -> None:
    named = NamedSeasons({"b": bare(np.arange(SLOTS)), "a": bare(np.ones(SLOTS), used=False)}, "Europe/Berlin", "DE", 5.0)
    parts = seasons_parts(named)
    assert parts == seasons_parts(NamedSeasons(dict(reversed(named.by_name.items())), "Europe/Berlin", "DE", 5.0))
    back = seasons_of(parts)
    assert (back.tz, back.country, back.made_s, set(back.by_name)) == ("Europe/Berlin", "DE", 5.0, {"a", "b"})
    np.testing.assert_array_equal(back.by_name["b"].ordinary, np.arange(SLOTS))
    about = about_seasons(back, SeasonalSettings())
    assert about["scores"] == {"3600": {"deviance": 1.0}}
    assert about["baseline_scores"] == {"3600": {"deviance": 2.0}}
    assert (about["models"], about["used"]) == (2, 1)
    assert about_seasons(NamedSeasons({}, "UTC", "", 0.0), SeasonalSettings())["scores"] == {}
    asked = (
        "import sys; from prefetcher_models.seasonal_artifact import seasons_of;"
        "named = seasons_of({'seasons.safetensors': open(sys.argv[1], 'rb').read(), 'seasons.json': open(sys.argv[2], 'rb').read()});"
        "print(named.explain('b', 1.8e9).text); assert not {'prophet', 'pandas', 'matplotlib'} & set(sys.modules)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts.items():
            (Path(folder) / name).write_bytes(part)
        paths = [str(Path(folder) / name) for name in ("seasons.safetensors", "seasons.json")]
        done = subprocess.run([sys.executable, "-c", asked, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("busiest Sundays 23:50")
    with pytest.raises(PredictorError, match="zebra has no season"):
        back.explain("zebra", 0.0)


@pytest.mark.parametrize(
    ("part", "value", "kind"),
    [
        ("seasons.json", b"[]", "foreign"),
        ("seasons.json", b"{", ""),
        ("seasons.json", b'{"format": "prefetcher seasons", "version": 9}', "incompatible"),
        ("seasons.json", b'{"format": "prefetcher seasons", "version": 1, "names": ["a"]}', "incompatible"),
        ("seasons.safetensors", b"x", ""),
        ("other", b"", "foreign"),
    ],
)
def test_a_foreign_or_broken_artifact_is_refused(part: str, value: bytes, kind: str) -> None:
    parts = {**seasons_parts(NamedSeasons({"a": bare(np.ones(SLOTS))}, "UTC", "", 0.0)), part: value}
    with pytest.raises(ArtifactError) as caught:
        seasons_of(parts)
    assert not kind or caught.value.kind == kind


def test_bins_of_five_minutes_tell_a_sharper_peak() -> None:
    from_s = utc(2026, 3, 2)
    minute = (np.arange(14 * 288) % 288) * 5
    rate = 0.2 + 20.0 * np.exp(-0.5 * ((minute - 530) / 20.0) ** 2)  # 08:50
    counts = np.random.default_rng(2).poisson(rate).astype(np.float32)
    fine = fit_season(SeasonTask(counts, from_s, bin_s=300.0))
    coarse = fit_season(SeasonTask(counts.reshape(-1, 12).sum(axis=1), from_s))
    slot = 8 * 6 + 5
    assert abs(int(np.argmax(fine.ordinary[:144])) - slot) <= 1
    assert fine.ordinary[:144].max() > 1.1 * coarse.ordinary[:144].max()
    assert fine.ordinary.mean() == pytest.approx(12 * rate.mean(), rel=0.05)
    assert "every day 08:" in explain(whole(fine, Calendar()), 0, from_s + 14 * DAY_S).text

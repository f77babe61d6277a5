"""One model's seasonal fit with Prophet, and whether it is worth anything: scored against seasonal-naive on last days that it didn't see.

Counts are fitted as square roots, on which noise is even and a forecast is never negative. Days are of two kinds, working and free
(weekends, holidays): each has a daily profile, so that a holiday looks like a weekend before the first one was seen; what days of the week
have of their own is a weekly wave beside them, once there are weeks enough. There is no trend: a forecast follows what the last 24 hours
had of what was expected of them. Prophet is imported by the first fit, says nothing, and has one thread. Covers no choice of models to fit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.errors import PredictorError
from prefetcher_models.seasonal_calendar import SLOT_S, SLOTS, SLOTS_A_DAY, Calendar, Floats
from prefetcher_models.seasonal_profile import Season, Seasons

__all__ = ["LEVEL_HOURS", "SeasonTask", "as_if_live", "deviance", "fit_season", "held_out_s", "level_ratio", "seasonal_naive"]

_HOUR_S, _DAY_S, _WEEK_S = 3600.0, 86400.0, 604800.0
#: How many waves a daily profile is made of, at an hour and at finer bins, and the weekly one.
_DAILY_WAVES, _FINE_WAVES, _WEEKLY_WAVES = 6, 12, 3
#: How long a history must be for the weekly one: each day of the week thrice, or it learns what one of them was like.
_WEEKLY_FROM_S = 3.0 * _WEEK_S
#: Prior scales: of all waves, and of what a free day is apart from its profile.
_WAVE_SCALE, _FREE_SCALE = 0.2, 10.0
#: The level follows what so many hours had over what was expected of them, drawn to 1 by so many rows.
LEVEL_HOURS = 24
_LEVEL_PRIOR = 3.0
#: Powers of that ratio, of which a model gets the best: levels that come and go by the day, and those that stay.
_FOLLOWS = (0.0, 0.5, 1.0)
#: Weight of the last day's mean beside yesterday and last week, as in `SeasonalNaive`.
_NAIVE_PRIOR = 0.5
#: A Monday, 00:00 of the wall: 1970-01-05.
_MONDAY_S = 4 * _DAY_S
#: A fit that takes longer is given up; one takes a fraction of a second.
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True)
class SeasonTask:
    """What one fit needs: `counts` float[n] rows by bin of `bin_s` (an hour, or a divisor of ten minutes) from `from_s` on, up to now, in
    the time of `tz` and the calendar of `country`. The season will hold for `hold_s`; `margin` is what it must be better by.
    """

    counts: npt.NDArray[np.float32]
    from_s: float
    bin_s: float = _HOUR_S
    tz: str = "UTC"
    country: str = ""
    hold_s: float = 8 * _DAY_S
    margin: float = 0.02


def held_out_s(history_s: float) -> float:
    """How much of a history is held out: a quarter in whole days, one at least and a week at most."""
    return float(np.clip(history_s * 0.25 // _DAY_S, 1, 7)) * _DAY_S


def deviance(rows: Floats, expected: Floats) -> float:
    """The mean Poisson deviance of counts `rows` from `expected` (> 0)."""
    told = np.where(rows > 0.0, rows * np.log(np.maximum(rows, 1e-12) / expected), 0.0)
    return float(2.0 * (told - rows + expected).mean())


def seasonal_naive(counts: Floats, first: int) -> Floats:
    """float64[len(counts) − first]: for each hour from `first` on, the mean of the same hour yesterday and a week ago, where there are
    such, drawn a little to the day before.
    """
    day, week = int(_DAY_S / _HOUR_S), int(_WEEK_S / _HOUR_S)
    sums = np.concatenate([[0.0], np.cumsum(counts)])
    hours = np.arange(first, len(counts))
    begin = np.maximum(0, hours - day)
    total = _NAIVE_PRIOR * (sums[hours] - sums[begin]) / np.maximum(hours - begin, 1)
    weight = np.full(len(hours), _NAIVE_PRIOR)
    for lag in (day, week):
        known = hours >= lag
        total[known] += counts[hours[known] - lag]
        weight += known
    out: Floats = total / weight
    return out


def level_ratio(rows: npt.ArrayLike, expected: npt.ArrayLike) -> Floats:
    """What to multiply a forecast by, from rows of the last `LEVEL_HOURS` and what was expected of them; near 1 where that is little."""
    ratio: Floats = (np.asarray(rows, dtype=np.float64) + _LEVEL_PRIOR) / (np.asarray(expected, dtype=np.float64) + _LEVEL_PRIOR)
    return ratio


def fit_season(task: SeasonTask) -> Season:
    """Fit, score on held-out time, and fit again on all of it if that was better than seasonal-naive.

    Raises `PredictorError` for too short a history, and for a fit that fails or takes too long.
    """
    calendar = _calendar(task.tz, task.country)
    counts = np.asarray(task.counts, dtype=np.float64)
    history_s = len(counts) * task.bin_s
    now_s = task.from_s + history_s
    kept_s = held_out_s(history_s)
    if history_s - kept_s < 2 * _DAY_S:
        raise PredictorError("less than three days of history", predictor="seasonal")
    if not np.isfinite(counts).all() or counts.min() < 0.0:
        raise PredictorError("counts that are negative or no numbers", predictor="seasonal")
    fitted = int((history_s - kept_s) / task.bin_s)
    season = _fitted(task, counts[:fitted], calendar)
    hours = counts[: len(counts) - len(counts) % int(_HOUR_S / task.bin_s)].reshape(-1, int(_HOUR_S / task.bin_s)).sum(axis=1)
    first = len(hours) - int(kept_s / _HOUR_S)
    floor = 0.3 / first
    tried = [np.maximum(as_if_live(replace(season, follow=power), task.from_s, hours, first, calendar), floor) for power in _FOLLOWS]
    errors = [deviance(hours[first:], one) for one in tried]
    best = int(np.argmin(errors))
    own = tried[best]
    naive = np.maximum(seasonal_naive(hours, first), floor)
    scores = {"own_error": errors[best], "naive_error": deviance(hours[first:], naive), "follow": _FOLLOWS[best]}
    used = scores["own_error"] < (1.0 - task.margin) * scores["naive_error"]
    burst = _burst(hours[first:], own)
    if used:
        season = _fitted(task, counts, calendar)
    return _with(season, task, used=used, burst=burst, held_out_s=kept_s, valid_from_s=now_s, until_s=now_s + task.hold_s, **scores)


def _with(season: Season, task: SeasonTask, **values: Any) -> Season:
    return replace(season, rows=float(task.counts.sum()), history_s=len(task.counts) * task.bin_s, bin_s=task.bin_s, **values)


def as_if_live(season: Season, from_s: float, hours: Floats, first: int, calendar: Calendar) -> Floats:
    """Rows expected in each hour from number `first` on, each as it would have been said at its beginning."""
    begin = first - LEVEL_HOURS
    slots = from_s + begin * _HOUR_S + (np.arange((len(hours) - begin) * 6) + 0.5) * SLOT_S
    plain = Seasons(calendar, {0: season}).rates(0, slots).reshape(-1, 6).mean(axis=1)
    came, said = (np.concatenate([[0.0], np.cumsum(part)]) for part in (hours[begin:], plain))
    n = len(hours) - first
    ratio = level_ratio(came[LEVEL_HOURS : LEVEL_HOURS + n] - came[:n], said[LEVEL_HOURS : LEVEL_HOURS + n] - said[:n])
    said_then: Floats = plain[LEVEL_HOURS:] * ratio**season.follow
    return said_then


def _burst(rows: Floats, expected: Floats) -> float:
    """The share c of rows that begin a burst, such that 1 − exp(−c·expected) is how often an hour sees any row.

    By how much counts vary more than a Poisson stream (φ = variance over mean: c = ln φ/(φ−1), a stream of bursts of logarithmic size),
    corrected by the hours that can tell. Source: Anscombe 1950, on the negative binomial as a compound Poisson distribution.
    """
    phi = max(1.0, float(((rows - expected) ** 2).sum() / max(expected.sum(), 1e-9)))
    prior = float(np.log(phi) / (phi - 1.0)) if phi > 1.001 else 1.0
    tried = np.exp(np.linspace(np.log(0.02), 0.0, 60))
    p = np.clip(-np.expm1(-tried[:, None] * expected), 1e-9, 1.0 - 1e-9)
    told = np.where(rows > 0.0, np.log(p), np.log1p(-p)).sum(axis=1)
    doubt = (np.log(tried / prior) / 0.5) ** 2 / 2.0
    return float(tried[np.argmax(told - doubt)])


def _fitted(task: SeasonTask, counts: Floats, calendar: Calendar) -> Season:
    """Prophet on `counts`, evaluated over the week: what `_with` will complete."""
    prophet, pandas = _prophet()
    middles = task.from_s + (np.arange(len(counts)) + 0.5) * task.bin_s
    free = calendar.free(middles)
    both = bool(free.any() and not free.all())
    history_s = len(counts) * task.bin_s
    waves = _DAILY_WAVES if task.bin_s >= _HOUR_S else _FINE_WAVES
    model = prophet(
        growth="flat",
        n_changepoints=0,
        daily_seasonality=False,
        weekly_seasonality=False,
        yearly_seasonality=False,
        uncertainty_samples=0,
    )
    if both:
        model.add_seasonality("working", 1.0, waves, prior_scale=_WAVE_SCALE, condition_name="works")
        model.add_seasonality("free", 1.0, waves, prior_scale=_WAVE_SCALE, condition_name="rests")
        model.add_regressor("rest", prior_scale=_FREE_SCALE, standardize=False)
    else:
        model.add_seasonality("daily", 1.0, waves, prior_scale=_WAVE_SCALE)
    if history_s >= _WEEKLY_FROM_S:
        model.add_seasonality("weekly", 7.0, _WEEKLY_WAVES, prior_scale=_WAVE_SCALE)

    def frame(wall_s: Floats, rests: npt.NDArray[np.bool_]) -> Any:
        # the wall's time as if it were UTC: Prophet knows no zones
        when = pandas.to_datetime(wall_s, unit="s")
        return pandas.DataFrame({"ds": when, "works": ~rests, "rests": rests, "rest": rests.astype(np.float64)})

    wall = calendar.wall_s(middles)
    history = frame(wall, free)
    history["y"] = np.sqrt(counts)
    try:
        model.fit(history, timeout=_PATIENCE_S)
    except TimeoutError as error:
        raise PredictorError(f"the fit took longer than {_PATIENCE_S:g} s", predictor="seasonal") from error
    except (RuntimeError, ValueError, OSError, np.linalg.LinAlgError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PredictorError(f"Prophet failed: {reason}", predictor="seasonal") from error
    finally:
        if model.stan_backend is not None:
            model.stan_backend.cleanup()
    trend = np.asarray(model.predict_trend(model.history), dtype=np.float64)
    # Prophet keeps rows in order of the wall's time, which an autumn's hour takes out of that of the counts
    fits = np.maximum(trend + _waves(model, np.sort(wall), free[np.argsort(wall, kind="stable")]), 0.0) ** 2
    # squares of means fall short of means of squares
    level = (counts.sum() + 1.0) / (fits.sum() + 1.0)
    week = _MONDAY_S + (np.arange(SLOTS) + 0.5) * SLOT_S
    weekend = np.array([calendar.is_weekend(day) for day in range(7)])[np.arange(SLOTS) // SLOTS_A_DAY]
    weeks = np.concatenate([_waves(model, week, rests) for rests in (weekend, np.ones(SLOTS, bool))]) + trend[-1]
    weeks = np.maximum(weeks, 0.0) ** 2 * (level * _HOUR_S / task.bin_s)
    if not np.isfinite(weeks).all():
        raise PredictorError("Prophet's fit is not finite", predictor="seasonal")
    return Season(
        ordinary=weeks[:SLOTS].astype(np.float32),
        free=weeks[SLOTS:].astype(np.float32),
        burst=1.0,
        follow=1.0,
        used=False,
        own_error=np.inf,
        naive_error=np.inf,
        held_out_s=0.0,
        valid_from_s=0.0,
        until_s=0.0,
        rows=0.0,
        history_s=0.0,
        bin_s=task.bin_s,
        trend_a_week=_over_last_week(counts, task.bin_s),
    )


def _waves(model: Any, wall_s: npt.NDArray[np.floating[Any]], rests: npt.NDArray[np.bool_]) -> Floats:
    """What Prophet's `predict` calls additive terms, from its coefficients: a tenth of the time."""
    betas = np.asarray(model.params["beta"], dtype=np.float64)[0] * float(model.y_scale)
    out = np.zeros(len(wall_s))
    at = 0
    for wave in model.seasonalities.values():
        turns = 2.0 * np.pi * (wall_s / _DAY_S)[:, None] * np.arange(1, wave["fourier_order"] + 1) / wave["period"]
        beta = betas[at : at + 2 * wave["fourier_order"]]
        part = np.sin(turns) @ beta[0::2] + np.cos(turns) @ beta[1::2]
        out += {"works": np.where(rests, 0.0, part), "rests": np.where(rests, part, 0.0)}.get(wave["condition_name"], part)
        at += 2 * wave["fourier_order"]
    if model.extra_regressors:
        out += betas[at] * rests
    return out


def _over_last_week(counts: Floats, bin_s: float) -> float:
    """Rows of the last week over those of the week before; 1 while there is no such."""
    week = int(_WEEK_S / bin_s)
    return float((counts[-week:].sum() + 1.0) / (counts[-2 * week : -week].sum() + 1.0)) if len(counts) >= 2 * week else 1.0


@lru_cache(maxsize=4)
def _calendar(tz: str, country: str) -> Calendar:
    return Calendar(tz, country)


@lru_cache(maxsize=1)
def _prophet() -> tuple[Any, Any]:
    try:
        import pandas
        from prophet import Prophet
    except ImportError as error:
        raise PredictorError(f"seasonal fits need Prophet ({error}); pip install prophet", predictor="seasonal") from error
    for name in ("prophet", "prophet.models", "cmdstanpy"):
        logging.getLogger(name).disabled = True
    return Prophet, pandas

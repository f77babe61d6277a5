"""A season in words that a person can look at: when a model is busy by the clock of its place, how much, and why that is believed.

Covers no forecasting (`seasonal_profile`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefetcher.errors import PredictorError
from prefetcher_models.seasonal_calendar import DAYS, SLOTS_A_DAY, Calendar, Floats
from prefetcher_models.seasonal_profile import Season, Seasons

__all__ = ["Explanation", "Peak", "explain"]

_DAY_S, _WEEK_S = 86400.0, 604800.0
#: A time of day counts as a peak from so many times the week's mean on; peaks of two days are one at most so many slots apart.
_PEAK = 1.25
_NEAR = 4
_MOST_PEAKS = 4
#: A change of level in a week that is worth a word.
_TREND = 1.2


@dataclass(frozen=True, slots=True)
class Peak:
    """`days` and `time` of the wall clock, as 'Mondays' and '08:50'; `times` the week's mean; rows an hour there."""

    days: str
    time: str
    times: float
    rows_an_hour: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a model is expected when it is. `text` says all of it in one line; scores are Poisson deviances an hour of held-out time."""

    used: bool
    tz: str
    peaks: tuple[Peak, ...]
    next_peak_s: float | None
    holidays: tuple[tuple[str, str], ...]
    trend_a_week: float
    own_error: float
    naive_error: float
    text: str


def explain(seasons: Seasons, key: int, at_s: float) -> Explanation:
    """The season of model `key` as seen at `at_s`: its peaks, the next of them within a day, the holidays of the week that follows.

    Raises `PredictorError` for a model without a season.
    """
    season = seasons.seasons.get(key)
    if season is None:
        raise PredictorError("it has no season: too little history, or not among the busiest models", predictor="seasonal")
    calendar = seasons.calendar
    peaks = _peaks(season.ordinary.astype(np.float64), calendar)
    holidays = tuple(calendar.holidays(at_s, at_s + _WEEK_S))
    return Explanation(
        used=season.used,
        tz=calendar.tz,
        peaks=peaks,
        next_peak_s=_next_peak(seasons, key, at_s) if peaks else None,
        holidays=holidays,
        trend_a_week=season.trend_a_week,
        own_error=season.own_error,
        naive_error=season.naive_error,
        text=_text(season, peaks, holidays, calendar),
    )


def _peaks(week: Floats, calendar: Calendar) -> tuple[Peak, ...]:
    mean = max(float(week.mean()), 1e-9)
    found: list[tuple[int, int, float]] = []
    for day in range(7):
        for slot in range(SLOTS_A_DAY):
            at = day * SLOTS_A_DAY + slot
            around = week[np.arange(at - 9, at + 10) % len(week)]
            if week[at] >= _PEAK * mean and week[at] == around.max() and week[at] > around.min() * 1.02:
                found.append((day, slot, float(week[at])))
    groups: list[list[tuple[int, int, float]]] = []
    for one in sorted(found, key=lambda peak: -peak[2]):
        near = next((group for group in groups if _alike(group, one)), None)
        if near is None:
            groups.append([one])
        else:
            near.append(one)
    peaks = []
    for group in groups[:_MOST_PEAKS]:
        slot = round(float(np.median([s for _, s, _ in group])))
        rows = float(np.mean([r for _, _, r in group]))
        minutes = slot * 10
        peaks.append(Peak(_days({d for d, _, _ in group}, calendar), f"{minutes // 60:02d}:{minutes % 60:02d}", rows / mean, rows))
    return tuple(peaks)


def _alike(group: list[tuple[int, int, float]], one: tuple[int, int, float]) -> bool:
    """Whether a peak is another day's of the same time and about the same height."""
    _, slot, rows = group[0]
    return abs(slot - one[1]) <= _NEAR and rows < 1.5 * one[2] and all(day != one[0] for day, _, _ in group)


def _days(days: set[int], calendar: Calendar) -> str:
    weekend = {day for day in range(7) if calendar.is_weekend(day)}
    if len(days) == 7:
        return "every day"
    if days == set(range(7)) - weekend:
        return "working days"
    if days == weekend:
        return "weekends"
    names = [DAYS[day] for day in sorted(days)]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _next_peak(seasons: Seasons, key: int, at_s: float) -> float:
    """When in the next 24 hours most rows are expected."""
    times = at_s + np.arange(SLOTS_A_DAY) * 600.0
    return float(times[int(np.argmax(seasons.rates(key, times)))])


def _text(season: Season, peaks: tuple[Peak, ...], holidays: tuple[tuple[str, str], ...], calendar: Calendar) -> str:
    parts = []
    if peaks:
        said = ", ".join(f"{p.days} {p.time} ({p.times:.1f} times its mean, {_number(p.rows_an_hour)} rows an hour)" for p in peaks)
        parts.append(f"busiest {said}, {calendar.tz} time")
    else:
        parts.append("no time of the week stands out")
    if season.trend_a_week > _TREND or season.trend_a_week < 1.0 / _TREND:
        parts.append(f"its last week had {season.trend_a_week:.1f} times the rows of the one before")
    if holidays:
        parts.append("free days ahead: " + ", ".join(f"{when} {name}" for when, name in holidays))
    days = season.history_s / _DAY_S
    error = f"an error of {_number(season.own_error)} against {_number(season.naive_error)} of yesterday and last week"
    held = f"on {season.held_out_s / _DAY_S:.0f} held-out days"
    use = "so it is used" if season.used else "so it is not used"
    parts.append(f"from {season.rows:,.0f} rows in {days:.0f} days; {error} {held}, {use}")
    return "; ".join(parts)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.1f}"

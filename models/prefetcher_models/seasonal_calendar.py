"""Local time for seasonal forecasts: what the clock on the wall says, which days are free, and what the holidays are called.

Habits follow the wall clock and the calendar of a place, so a cycle is kept in local time and stays where it is when the clocks change.
Covers one place at a time: a named time zone, and a country for holidays and weekends (`holidays` is imported when one is named).
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import numpy.typing as npt

from prefetcher.errors import PredictorError

__all__ = ["DAYS", "SLOTS", "SLOTS_A_DAY", "SLOT_S", "Calendar"]

#: A local week from Monday 00:00, in slots of ten minutes.
SLOT_S = 600.0
SLOTS_A_DAY = 144
SLOTS = 7 * SLOTS_A_DAY
DAYS = ("Mondays", "Tuesdays", "Wednesdays", "Thursdays", "Fridays", "Saturdays", "Sundays")

_DAY_S = 86400.0
#: Offsets from UTC change at whole quarters of an hour only.
_STEP_S = 900.0
#: 1970-01-01 was a Thursday.
_FIRST_WEEKDAY = 3

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Calendar:
    """The wall clock of `tz` (an IANA name) and the free days of `country` (ISO 3166: US, DE, …; '' none: free is Saturday and Sunday).

    Raises `PredictorError` for a zone or a country that is not known.
    """

    def __init__(self, tz: str = "UTC", country: str = "") -> None:
        try:
            self._zone = ZoneInfo(tz)
        except (ZoneInfoNotFoundError, ValueError, OSError) as error:
            raise PredictorError(f"{tz!r} is no time zone that is known here; name one as Europe/Berlin", predictor="seasonal") from error
        self.tz = tz
        self.country = country
        self._offsets: dict[int, float] = {}
        self._free: dict[int, bool] = {}
        self._holidays: Any = _holidays_of(country) if country else {}
        self._weekend: set[int] = set(getattr(self._holidays, "weekend", None) or (5, 6))

    def wall_s(self, t: npt.ArrayLike) -> Floats:
        """float64 as `t` (seconds since 1970 UTC): what the wall clock shows, as seconds since 1970-01-01 00:00 of the wall."""
        at = np.asarray(t, dtype=np.float64)
        steps = np.floor(at / _STEP_S).astype(np.int64)
        known, where = np.unique(steps, return_inverse=True)
        offsets = np.array([self._offset(int(step)) for step in known], dtype=np.float64)
        return at + offsets[where].reshape(at.shape)

    def slots(self, t: npt.ArrayLike) -> Ints:
        """int64 as `t`: the slot of the local week, 0 from Monday 00:00 on."""
        wall = self.wall_s(t)
        return np.floor((wall + _FIRST_WEEKDAY * _DAY_S) / SLOT_S).astype(np.int64) % SLOTS

    def free(self, t: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """bool as `t`: whether the local day is a weekend's or a holiday."""
        days = np.floor(self.wall_s(t) / _DAY_S).astype(np.int64)
        known, where = np.unique(days, return_inverse=True)
        return np.array([self._is_free(int(day)) for day in known], dtype=bool)[where].reshape(days.shape)

    def is_weekend(self, weekday: int) -> bool:
        """Whether `weekday` (0 is Monday) is free every week."""
        return weekday in self._weekend

    def holidays(self, from_s: float, until_s: float) -> list[tuple[str, str]]:
        """(date as 2026-12-25, name) of the holidays that begin in [from_s, until_s), in order."""
        found = []
        first, last = (int(np.floor(self.wall_s(t) / _DAY_S)) for t in (from_s, until_s))
        for day in range(first, last + 1):
            when = _date(day)
            name = self._name(when)
            if name and first <= day < max(last, first + 1):
                found.append((when.isoformat(), name))
        return found

    def _name(self, when: date) -> str:
        return str(self._holidays.get(when) or "") if self.country else ""

    def _offset(self, step: int) -> float:
        if step not in self._offsets:
            offset = datetime.fromtimestamp(step * _STEP_S, UTC).astimezone(self._zone).utcoffset()
            self._offsets[step] = (offset or timedelta(0)).total_seconds()
        return self._offsets[step]

    def _is_free(self, day: int) -> bool:
        if day not in self._free:
            when = _date(day)
            self._free[day] = when.weekday() in self._weekend or bool(self._name(when))
        return self._free[day]


def _date(day: int) -> date:
    return date(1970, 1, 1) + timedelta(days=day)


def _holidays_of(country: str) -> Any:
    import holidays

    try:
        return holidays.country_holidays(country)
    except NotImplementedError as error:
        raise PredictorError(
            f"{country!r} is no country whose holidays are known; write its code of two letters, as US or DE", predictor="seasonal"
        ) from error

"""What a seasonal fit leaves: the rows an hour that a model is expected to get, by local time of the week, evaluated and self-contained.

A `Season` needs no Prophet to be asked, is a few kilobytes, and says for which times it holds. Expected rows come from sums over slots of
ten minutes, in UTC, each with the rate of its local time. Covers no fitting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.errors import PredictorError
from prefetcher_models.seasonal_calendar import SLOT_S, SLOTS, Calendar, Floats, Ints

__all__ = ["Season", "Seasons", "seasons_from_arrays", "seasons_to_arrays"]

_DAY_S = 86400.0
_HOUR_S = 3600.0
#: The longest span that can be asked for.
MOST_SPAN_S = 21600.0
_SLOTS_A_WINDOW = int((_DAY_S + MOST_SPAN_S) / SLOT_S)


@dataclass(frozen=True, slots=True)
class Season:
    """One model's cycle.

    `ordinary` float32[SLOTS]: rows an hour by slot of an ordinary local week; `free`: the same, were every day of it free (holidays).
    `burst`: share of rows that begin a burst of their own; the others come with them. `follow`: which power of the last 24 hours' rows over
    those expected a forecast is multiplied by. `used` says whether it forecasts better than seasonal-naive: `own_error` and `naive_error`
    are the Poisson deviances an hour of both over `held_out_s` of held-out time. Holds for times in [valid_from_s, until_s). `rows` of
    `history_s` were fitted, in bins of `bin_s`; `trend_a_week`: rows of the last week over those of the one before.
    """

    ordinary: npt.NDArray[np.float32]
    free: npt.NDArray[np.float32]
    burst: float
    follow: float
    used: bool
    own_error: float
    naive_error: float
    held_out_s: float
    valid_from_s: float
    until_s: float
    rows: float
    history_s: float
    bin_s: float
    trend_a_week: float


_NUMBERS = tuple(field.name for field in fields(Season) if field.name not in ("ordinary", "free"))


class Seasons:
    """The seasons of some models, asked for any of them at once. `keys` are what the models are known by here."""

    def __init__(self, calendar: Calendar, seasons: Mapping[int, Season]) -> None:
        self.calendar = calendar
        self.seasons = dict(seasons)
        self._place = np.full(1 + max(self.seasons, default=-1), -1, np.int64)
        self._keys = [key for key, season in self.seasons.items() if season.used]
        self._place[self._keys] = np.arange(len(self._keys))
        chosen = [self.seasons[key] for key in self._keys]
        self._ordinary = _stack([season.ordinary for season in chosen])
        self._free = _stack([season.free for season in chosen])
        self._burst = np.array([season.burst for season in chosen])
        #: float64[used]: see `Season.follow`.
        self.follow = np.array([season.follow for season in chosen])
        self._from_s = np.array([season.valid_from_s for season in chosen])
        self._until_s = np.array([season.until_s for season in chosen])
        self._mean = self._ordinary.mean(axis=1)
        self._windows: dict[int, Floats] = {}

    def places(self, models: Ints, t: Floats) -> Ints:
        """int64[n]: where each model stands among the used ones; −1 for one that has no season, or one that does not hold at its t."""
        inside = (models >= 0) & (models < len(self._place))
        place = np.full(len(models), -1, np.int64)
        place[inside] = self._place[models[inside]]
        has = place >= 0
        place[has] = np.where((self._from_s[place[has]] <= t[has]) & (t[has] < self._until_s[place[has]]), place[has], -1)
        return place

    def expected(self, places: Ints, t: Floats, spans_s: Sequence[float]) -> Floats:
        """float64[n, len(spans_s)]: rows expected in [t, t + span), span up to six hours, for the used models at `places` (0 or more)."""
        out = np.zeros((len(places), len(spans_s)))
        days = np.floor(t / _DAY_S).astype(np.int64)
        for day in np.unique(days):
            rows = np.flatnonzero(days == day)
            sums = self._window(int(day))
            at = (t[rows] - day * _DAY_S) / SLOT_S
            begin = _read(sums, places[rows], at)
            for column, span_s in enumerate(spans_s):
                out[rows, column] = _read(sums, places[rows], at + span_s / SLOT_S) - begin
        return np.maximum(out, 0.0)

    def mean_rate(self, places: Ints) -> Floats:
        """float64[n]: rows an hour over an ordinary week."""
        mean: Floats = self._mean[places]
        return mean

    def burst(self, places: Ints) -> Floats:
        """float64[n]: see `Season.burst`."""
        return self._burst[places]

    def rates(self, key: int, t: npt.NDArray[np.floating[Any]]) -> Floats:
        """float64 as t: rows an hour that are expected of one model, whether it is used or not."""
        season = self.seasons[key]
        slots = self.calendar.slots(t)
        return np.where(self._as_free(t), season.free[slots], season.ordinary[slots]).astype(np.float64)

    def _as_free(self, t: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.bool_]:
        """Whether a day is free that an ordinary week's is not."""
        weekday = self.calendar.slots(t) // (SLOTS // 7)
        weekend = np.array([self.calendar.is_weekend(day) for day in range(7)])
        free: npt.NDArray[np.bool_] = self.calendar.free(t) & ~weekend[weekday]
        return free

    def _window(self, day: int) -> Floats:
        """float64[used, _SLOTS_A_WINDOW + 1]: rows expected from the UTC day's beginning up to each slot, and six hours on."""
        if day not in self._windows:
            while len(self._windows) >= 3:
                del self._windows[min(self._windows)]
            middles = day * _DAY_S + (np.arange(_SLOTS_A_WINDOW) + 0.5) * SLOT_S
            slots = self.calendar.slots(middles)
            rates = np.where(self._as_free(middles), self._free[:, slots], self._ordinary[:, slots])
            sums = np.zeros((len(rates), _SLOTS_A_WINDOW + 1))
            np.cumsum(rates * (SLOT_S / _HOUR_S), axis=1, out=sums[:, 1:])
            self._windows[day] = sums
        return self._windows[day]


def _stack(weeks: Iterable[npt.NDArray[np.float32]]) -> Floats:
    listed = list(weeks)
    return np.stack(listed).astype(np.float64) if listed else np.zeros((0, SLOTS))


def _read(sums: Floats, places: Ints, at: Floats) -> Floats:
    """`sums` between its slots, at places and slots `at`."""
    low = np.minimum(at.astype(np.int64), sums.shape[1] - 2)
    below = sums[places, low]
    between: Floats = below + (at - low) * (sums[places, low + 1] - below)
    return between


def seasons_to_arrays(seasons: Mapping[int, Season]) -> dict[str, np.ndarray]:
    """All of them as arrays: `keys` int64[n], `ordinary` and `free` float32[n, SLOTS], `numbers` float64[n, …]."""
    listed = list(seasons.values())
    return {
        "keys": np.array(list(seasons), dtype=np.int64),
        "ordinary": np.stack([s.ordinary for s in listed]) if listed else np.zeros((0, SLOTS), np.float32),
        "free": np.stack([s.free for s in listed]) if listed else np.zeros((0, SLOTS), np.float32),
        "numbers": np.array([[float(getattr(s, name)) for name in _NUMBERS] for s in listed]).reshape(len(listed), len(_NUMBERS)),
    }


def seasons_from_arrays(arrays: Mapping[str, np.ndarray]) -> dict[int, Season]:
    """What `seasons_to_arrays` gave. Raises `PredictorError` for arrays that don't fit each other or hold numbers that are none."""
    try:
        keys, ordinary, free, numbers = (np.asarray(arrays[name]) for name in ("keys", "ordinary", "free", "numbers"))
    except KeyError as error:
        raise PredictorError(f"seasons without {error}", predictor="seasonal") from error
    n = len(keys)
    if ordinary.shape != (n, SLOTS) or free.shape != (n, SLOTS) or numbers.shape != (n, len(_NUMBERS)) or keys.ndim != 1:
        raise PredictorError("seasons whose arrays don't fit each other", predictor="seasonal")
    if not all(np.isfinite(part).all() and (part >= 0.0).all() for part in (ordinary, free)) or (n and keys.min() < 0):
        raise PredictorError("seasons with rates that are none", predictor="seasonal")
    found: dict[int, Season] = {}
    for i in range(n):
        values: dict[str, Any] = dict(zip(_NUMBERS, (float(v) for v in numbers[i]), strict=True))
        values["used"] = bool(values["used"])
        found[int(keys[i])] = Season(ordinary=ordinary[i].astype(np.float32), free=free[i].astype(np.float32), **values)
    return found

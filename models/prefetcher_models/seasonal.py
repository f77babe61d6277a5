"""Seasonal forecasts of the busiest models: which to fit and when, as a predictor of its own and as columns beside the hazard's features.

Rows are counted by hour; once a day the busiest models that have no season, an old one, or one that what came since doesn't bear out are
fitted (`seasonal_fit`). A season is used only for a model whose held-out time it forecast better than seasonal-naive, and only while it
holds; every other model falls back, by a reason that is counted. Covers no cycles longer than a week.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.baseline import Baseline, BoolArray
from prefetcher_models.feature_source import Floats32
from prefetcher_models.fitting import Backend, fit_each
from prefetcher_models.predictor import FloatArray, Forecast, IntArray
from prefetcher_models.seasonal_calendar import Calendar
from prefetcher_models.seasonal_fit import LEVEL_HOURS, SeasonTask, as_if_live, deviance, fit_season, level_ratio
from prefetcher_models.seasonal_profile import Season, Seasons, seasons_from_arrays, seasons_to_arrays

__all__ = ["REASONS", "HourCounts", "Refitted", "SeasonalPredictor", "SeasonalSettings", "SeasonalSource", "drift_of", "refit_seasons"]

_HOUR_S, _DAY_S = 3600.0, 86400.0
#: Hours that drift is judged by, and the fewest.
_DRIFT_HOURS, _FEWEST_DRIFT_HOURS = 48, 12
#: Added to expected rows before their logarithm, and to chances: nothing is impossible.
_FAINT = 1e-3
_FAINT_RATE = 1e-7

#: Why a model has no seasonal forecast.
REASONS = (
    "too little history",
    "not among the busiest",
    "no better than seasonal-naive",
    "season too old",
    "fit failed",
    "fit late",
)
_SHORT, _QUIET, _NO_BETTER, _STALE, _FAILED, _LATE = REASONS


@dataclass(frozen=True, slots=True)
class SeasonalSettings:
    """`tz` and `country`: whose wall clock and holidays. `head`: how many models are fitted, the busiest. First at `first_s` of history, of
    which `history_days` are kept, then every `refit_s`: models without a season, with one older than `oldest_s`, or whose error since is
    `drift` times what it was when held out. `fewest_rows`: of a model that is fitted at all.
    """

    tz: str = "UTC"
    country: str = ""
    head: int = 300
    first_s: float = 3 * _DAY_S
    history_days: int = 28
    refit_s: float = _DAY_S
    oldest_s: float = 7 * _DAY_S
    drift: float = 1.5
    fewest_rows: int = 50


@dataclass(frozen=True, slots=True)
class Refitted:
    """Seasons after a refit, by key: those that were `fitted`, and those kept. `failed`: reason (one of `REASONS`) by key. `drifts`: of the
    used ones, the error since over that of held-out time."""

    seasons: dict[int, Season]
    failed: dict[int, str]
    fitted: tuple[int, ...]
    drifts: dict[int, float]


def drift_of(season: Season, counts: FloatArray, from_s: float, calendar: Calendar) -> float:
    """How many times its held-out error `season` has had lately: over the last two days of `counts` by hour from `from_s` on, without those
    that it was fitted on; 1 while there is too little to tell."""
    since = int(np.ceil((season.valid_from_s - from_s) / _HOUR_S))
    first = max(since, len(counts) - _DRIFT_HOURS, LEVEL_HOURS)
    if len(counts) - first < _FEWEST_DRIFT_HOURS:
        return 1.0
    said = np.maximum(as_if_live(season, from_s, counts, first, calendar), _FAINT)
    # an error near 0 is luck as much as skill: what a Poisson stream of some rows can't be better than
    return deviance(counts[first:], said) / max(season.own_error, 0.1)


def refit_seasons(
    keys: Sequence[int],
    counts: npt.NDArray[np.int32],
    from_s: float,
    old: Mapping[int, Season],
    settings: SeasonalSettings,
    backend: Backend | None = None,
    on_done: Callable[[int, int], None] | None = None,
) -> Refitted:
    """Seasons for the busiest of the models `keys`. `counts` int32[len(keys), H]: their rows by hour from `from_s` (a whole hour) to now.

    `old` are the seasons so far. `on_done(n, of)` is told how far it is. Raises `PredictorError` when the backend is not there.
    """
    hours = counts.shape[1]
    now_s = from_s + hours * _HOUR_S
    calendar = Calendar(settings.tz, settings.country)
    rows = counts.sum(axis=1)
    busiest = [int(i) for i in np.argsort(-rows, kind="stable")[: settings.head] if rows[i] >= settings.fewest_rows]
    seasons: dict[int, Season] = {}
    drifts: dict[int, float] = {}
    due: list[tuple[int, SeasonTask]] = []
    failed: dict[int, str] = {}
    for i in busiest:
        key = int(keys[i])
        season = old.get(key)
        if season is not None:
            drift = drift_of(season, counts[i].astype(np.float64), from_s, calendar) if season.used else 1.0
            drifts[key] = drift
            if now_s - season.valid_from_s < settings.oldest_s and drift <= settings.drift:
                seasons[key] = season
                continue
        first = int(np.argmax(counts[i] > 0))
        if (hours - first) * _HOUR_S < settings.first_s:
            failed[key] = _SHORT
            continue
        kept = counts[i, first:].astype(np.float32)
        due.append(
            (key, SeasonTask(kept, from_s + first * _HOUR_S, tz=settings.tz, country=settings.country, hold_s=settings.oldest_s + _DAY_S))
        )
    told = None if on_done is None else (lambda n: on_done(n, len(due)))
    for (key, _), answer in zip(due, fit_each(fit_season, [task for _, task in due], backend, told), strict=True):
        if answer.result is not None:
            seasons[key] = answer.result
            continue
        failed[key] = _LATE if "longer than" in answer.failure else _FAILED
        if key in old and now_s < old[key].until_s:
            seasons[key] = old[key]
    return Refitted(seasons, failed, tuple(key for key, _ in due), drifts)


class HourCounts:
    """Rows of every model by hour, of the last `days`; a row that comes late counts in the hour of the newest one."""

    def __init__(self, days: int) -> None:
        self._most = days * 24
        self._first = 0
        self._hour = -1
        self._cells = np.zeros((0, 0), np.int32)

    @property
    def from_s(self) -> float:
        return self._first * _HOUR_S

    def add(self, ts: FloatArray, model: IntArray, n_models: int) -> None:
        """Count rows in the order in which they came."""
        if not len(ts):
            return
        hours = np.floor(ts / _HOUR_S).astype(np.int64)
        if self._hour < 0:
            self._first = int(hours[0])
        hours = np.maximum.accumulate(np.maximum(hours, self._hour))
        self._hour = int(hours[-1])
        self._make_room(n_models)
        kept = hours >= self._first
        np.add.at(self._cells, (model[kept], hours[kept] - self._first), 1)

    def until(self, now_s: float) -> npt.NDArray[np.int32]:
        """int32[n, H]: the hours from `from_s` on that are over at `now_s`."""
        return self.window(self._first, max(self._first, int(now_s // _HOUR_S))) if self._hour >= 0 else self._cells[:, :0]

    def window(self, first: int, last: int) -> npt.NDArray[np.int32]:
        """int32[n, last − first]: the hours first … last − 1 since 1970; 0 where nothing was counted."""
        out = np.zeros((len(self._cells), last - first), np.int32)
        low, high = max(first, self._first), min(last, self._first + self._cells.shape[1])
        if high > low:
            out[:, low - first : high - first] = self._cells[:, low - self._first : high - self._first]
        return out

    def arrays(self) -> dict[str, np.ndarray]:
        model, hour = np.nonzero(self._cells)
        numbers = np.array([self._first, self._hour, *self._cells.shape], dtype=np.int64)
        return {
            "model": model.astype(np.int32),
            "hour": hour.astype(np.int16),
            "rows": self._cells[model, hour],
            "numbers": numbers,
        }

    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over `arrays`. Raises `PredictorError` for some that don't fit each other."""
        first, hour, models, hours = (int(v) for v in arrays["numbers"])
        cells = np.zeros((models, hours), np.int32)
        try:
            cells[arrays["model"], arrays["hour"]] = arrays["rows"]
        except (IndexError, ValueError) as error:
            raise PredictorError(f"counts that don't fit each other: {error}", predictor="seasonal") from error
        self._first, self._hour, self._cells = first, hour, cells

    def _make_room(self, n_models: int) -> None:
        models, hours = self._cells.shape
        gone = max(0, self._hour + 1 - self._first - self._most)
        if gone:
            self._cells = self._cells[:, min(gone, hours) :]
            self._first += gone
            hours = self._cells.shape[1]
        more = max(0, self._hour + 1 - self._first - hours)
        if more or n_models > models:
            # room for a day, so that an hour more is no copy of everything
            more = min(self._most - hours, max(24, more)) if more else 0
            self._cells = np.pad(self._cells, ((0, max(0, n_models - models)), (0, more)))


class _State:
    """What predictor and source share: counts, seasons, when the next fit is due."""

    def __init__(self, settings: SeasonalSettings, backend: Backend | None) -> None:
        self.settings = settings
        self.calendar = Calendar(settings.tz, settings.country)
        self._backend = backend
        self.counts = HourCounts(settings.history_days)
        self._next_s = np.inf
        self.failed: dict[int, str] = {}
        self._take_over({})

    def learn(self, traffic: Traffic, block: Block) -> None:
        if len(block.ts) and not np.isfinite(self._next_s):
            self._next_s = np.ceil((float(block.ts[0]) + self.settings.first_s) / _HOUR_S) * _HOUR_S
        self.counts.add(block.ts, block.model, traffic.n_models)

    def refit(self, now_s: float) -> bool:
        if now_s < self._next_s:
            return False
        self._next_s = (now_s // _HOUR_S) * _HOUR_S + self.settings.refit_s
        counts = self.counts.until(now_s)
        done = refit_seasons(range(len(counts)), counts, self.counts.from_s, self.seasons.seasons, self.settings, self._backend)
        # holds from when it was fitted on, not from the hour before
        seasons = {k: replace(s, valid_from_s=now_s) if k in done.fitted and k not in done.failed else s for k, s in done.seasons.items()}
        self.failed = done.failed
        self._take_over(seasons)
        return bool(done.fitted)

    def places(self, models: IntArray, t: FloatArray) -> IntArray:
        return self.seasons.places(models, t)

    def expected(self, places: IntArray, t: FloatArray, spans_s: Sequence[float]) -> FloatArray:
        """float64[n, len(spans_s)]: rows expected from t on, at the level of the last 24 hours."""
        rows = self.seasons.expected(places, t, spans_s)
        hours = np.floor(t / _HOUR_S).astype(np.int64)
        for hour in np.unique(hours):
            at = hours == hour
            rows[at] *= self._level(int(hour))[places[at], None]
        return rows

    def reason(self, model: int, history_s: float) -> str:
        """Why `model` has no forecast at a time when the log is `history_s` long."""
        season = self.seasons.seasons.get(model)
        if season is not None:
            return _STALE if season.used else _NO_BETTER
        if model in self.failed:
            return self.failed[model]
        return _SHORT if history_s < self.settings.first_s else _QUIET

    def arrays(self) -> dict[str, np.ndarray]:
        failed = np.array([[key, REASONS.index(reason)] for key, reason in self.failed.items()], dtype=np.int64)
        return {
            **{f"counts_{name}": value for name, value in self.counts.arrays().items()},
            **{f"seasons_{name}": value for name, value in seasons_to_arrays(self.seasons.seasons).items()},
            "failed": failed.reshape(len(self.failed), 2),
            "next_s": np.array([self._next_s]),
        }

    def put(self, arrays: Mapping[str, np.ndarray]) -> None:
        seasons = seasons_from_arrays({name[8:]: value for name, value in arrays.items() if name.startswith("seasons_")})
        self.counts.put({name[7:]: value for name, value in arrays.items() if name.startswith("counts_")})
        self.failed = {int(key): REASONS[int(reason)] for key, reason in arrays["failed"]}
        self._next_s = float(arrays["next_s"][0])
        self._take_over(seasons)

    def _take_over(self, seasons: Mapping[int, Season]) -> None:
        self.seasons = Seasons(self.calendar, seasons)
        self._used = np.array([key for key, season in self.seasons.seasons.items() if season.used], dtype=np.int64)
        self._levels: dict[int, FloatArray] = {}

    def _level(self, hour: int) -> FloatArray:
        """float64[used]: what each used model's forecast is multiplied by in that hour."""
        if hour not in self._levels:
            while len(self._levels) >= 4:
                del self._levels[min(self._levels)]
            begin = hour - LEVEL_HOURS
            counts = self.counts.window(begin, hour)
            came = np.zeros(len(self._used))
            known = self._used < len(counts)
            came[known] = counts[self._used[known]].sum(axis=1)
            at = np.repeat(begin * _HOUR_S, len(self._used))
            said = sum(
                (self.seasons.expected(np.arange(len(self._used)), at + k * 21600.0, [21600.0])[:, 0] for k in range(LEVEL_HOURS // 6)),
                np.zeros(len(self._used)),
            )
            self._levels[hour] = level_ratio(came, said) ** self.seasons.follow
        return self._levels[hour]


class SeasonalPredictor(Baseline):
    """P(used within each horizon) of a stream of bursts at the expected rate: 1 − exp(−c·E), c the share of rows that begin a burst."""

    def __init__(self, settings: SeasonalSettings | None = None, backend: Backend | None = None) -> None:
        super().__init__("seasonal", _QUIET)
        self._state = _State(settings or SeasonalSettings(), backend)
        self._reasons = dict.fromkeys(REASONS, 0)
        self._last = _QUIET

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return self._reasons

    @property
    def seasons(self) -> Seasons:
        """What is fitted."""
        return self._state.seasons

    def refit(self, now_s: float) -> bool:
        return self._state.refit(now_s)

    def forecast(self, traffic: Traffic, now_s: float, models: IntArray | None = None) -> Forecast:
        forecast = super().forecast(traffic, now_s, models)
        return replace(forecast, fallback=self._last) if forecast.fallback else forecast

    def _take(self, traffic: Traffic, block: Block) -> None:
        self._state.learn(traffic, block)

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        at = np.full(len(which), now_s)
        places = self._state.places(which, at)
        able = places >= 0
        p = np.zeros((len(which), len(HORIZONS_S)))
        if able.any():
            rows = self._state.expected(places[able], at[able], HORIZONS_S)
            starts = self._state.seasons.burst(places[able])[:, None] * rows + _FAINT_RATE * np.array(HORIZONS_S)
            p[able] = -np.expm1(-starts)
        reasons = [self._state.reason(int(m), now_s - traffic.origin_s) for m in which[~able]]
        for reason in reasons:
            self._reasons[reason] += 1
        if reasons:
            self._last = max(sorted(set(reasons)), key=reasons.count)
        return p, able

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"reasons": np.array(list(self._reasons.values()), dtype=np.int64), **self._state.arrays()}

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        self._state.put(arrays)
        self._reasons = dict(zip(REASONS, (int(n) for n in arrays["reasons"]), strict=True))


class SeasonalSource:
    """Columns beside the hazard's features: what the seasonal forecast expects, NaN for a model that it isn't used for."""

    _SPANS_S = (600.0, 3600.0)

    def __init__(self, settings: SeasonalSettings | None = None, backend: Backend | None = None) -> None:
        self._state = _State(settings or SeasonalSettings(), backend)

    @property
    def names(self) -> tuple[str, ...]:
        return ("seasonal_log_10min", "seasonal_log_1h", "seasonal_10min_over_week", "seasonal_1h_over_10min")

    @property
    def seasons(self) -> Seasons:
        """What is fitted."""
        return self._state.seasons

    def columns(self, traffic: Traffic, block: Block) -> tuple[Floats32, Floats32]:
        self._state.learn(traffic, block)
        ticks = block.ticks[block.tick_of] if len(block.tick_of) else np.zeros(0)
        return self._of(block.model, block.ts), self._of(block.tick_model.astype(np.int64), ticks)

    def refit(self, now_s: float) -> bool:
        return self._state.refit(now_s)

    def snapshot(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in self._state.arrays().items()}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        if set(snapshot) != set(self._state.arrays()):
            raise PredictorError("a snapshot of another source", predictor="seasonal")
        self._state.put(snapshot)

    def _of(self, model: IntArray, t: FloatArray) -> Floats32:
        out = np.full((len(t), len(self.names)), np.nan, np.float32)
        places = self._state.places(model, t)
        has = np.flatnonzero(places >= 0)
        if len(has):
            rows = self._state.expected(places[has], t[has], self._SPANS_S)
            usual = self._state.seasons.mean_rate(places[has]) / 6.0
            out[has, 0] = np.log(rows[:, 0] + _FAINT)
            out[has, 1] = np.log(rows[:, 1] + _FAINT)
            out[has, 2] = np.log((rows[:, 0] + _FAINT) / (usual + _FAINT))
            out[has, 3] = np.log((rows[:, 1] + _FAINT) / (6.0 * rows[:, 0] + _FAINT))
        return out

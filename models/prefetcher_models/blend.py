"""The hazard under watch: it speaks as long as it is fresh and beats recent rates, and says which features a forecast is made of.

The hazard stays the one pooled learner: other sources are its features, not its rivals. What is watched is how its forecasts for idle
models did against those of recent rates on the same windows, as outcomes come in. Where it is stale or loses, recent rates speak in its
place, counted by reason; where it drifts, its next fit comes sooner. How policies are chosen by cost is `prefetcher.core.hedge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.hazard import Fit, Hazard, HazardSettings
from prefetcher_models.predictor import FloatArray, monotone, rate_probabilities, recent_rate
from prefetcher_models.samples import EPOCH_S

__all__ = ["BASELINE", "GROUPS", "Watch", "WatchedHazard", "contributions_of", "groups_of"]

#: What speaks where the hazard does not, and what it is measured against.
BASELINE = "recent rates"
LOSES, STALE = f"loses to {BASELINE}", "stale"
#: The horizon that is watched, and how often: its windows follow each other.
_WATCHED = HORIZONS_S.index(600.0)
_WINDOW_S = HORIZONS_S[_WATCHED]
#: Rows may come a little late: a window's outcome is looked up a minute after its end.
_LATE_S = _WINDOW_S + 60.0
#: Windows after which older ones count half: a day.
_HALF_LIFE = 144.0
#: Windows before anything is said: six hours of them.
_FEWEST = 36
#: Standard errors by which the hazard must lose before it falls back; it comes back once it wins on average.
_SURE = 2.0
#: A fit that is older than three times the longest pause between fits (a day, or a tenth of the log) is stale.
_STALE_PAUSES, _DAY_S = 3.0, 86400.0
#: Page-Hinkley on the difference of losses in its own standard deviations: what is no change, and what is one.
#: Of independent differences about one in 2,000 windows (two weeks) is a false alarm, which costs one fit.
_SLACK, _ALARM = 0.25, 12.0
_LEAST_P = 1e-6


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known of the hazard against its baseline: differences of log loss of finished windows, positive where it loses.

    `windows` counts them all; `weight`, `mean`, `square` are decayed sums' (weight, mean, mean square); `drift` and `least` are the
    Page-Hinkley sum and its least value since the last alarm.
    """

    windows: int = 0
    weight: float = 0.0
    mean: float = 0.0
    square: float = 0.0
    drift: float = 0.0
    least: float = 0.0
    alarms: int = 0
    losing: bool = False

    @property
    def error(self) -> float:
        """The standard error of `mean`."""
        variance = max(self.square - self.mean * self.mean, 0.0)
        return float(np.sqrt(variance / max(self.weight, 1.0)))

    def after(self, difference: float) -> Watch:
        """With one more window; an alarm begins the Page-Hinkley sum anew.

        Source: Page 1954; Hinkley 1971, for a rise of the mean.
        """
        spread = max(float(np.sqrt(max(self.square - self.mean * self.mean, 0.0))), 1e-12)
        known = self.windows >= _FEWEST
        drift = self.drift + (np.clip((difference - self.mean) / spread, -3.0, 3.0) - _SLACK) if known else 0.0
        least = min(self.least, drift)
        alarm = drift - least > _ALARM
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        weight = self.weight * keep + 1.0
        made = replace(
            self,
            windows=self.windows + 1,
            weight=weight,
            mean=self.mean + (difference - self.mean) / weight,
            square=self.square + (difference * difference - self.square) / weight,
            drift=0.0 if alarm else float(drift),
            least=0.0 if alarm else float(least),
            alarms=self.alarms + alarm,
        )
        losing = made.mean > _SURE * made.error if not self.losing else made.mean > 0.0
        return replace(made, losing=bool(losing and made.windows >= _FEWEST))


class WatchedHazard(Hazard):
    """A hazard that falls back to recent rates while it is stale or loses to them; see `hazard.Hazard`."""

    def __init__(self, settings: HazardSettings | None = None, fit: Fit | None = None, names: tuple[str, ...] = ()) -> None:
        self.watch = Watch()
        self._counted = {LOSES: 0, STALE: 0, "drifts: fitted sooner": 0}
        #: Windows whose outcome is not known yet: their begin, models, and what both said.
        self._open: list[tuple[float, npt.NDArray[np.int64], FloatArray, FloatArray]] = []
        self._now_s = -np.inf
        #: The half hour that was over last, and whether the hazard lost by then: what is said changes at whole half hours only.
        self._epoch, self._losing = -1, False
        super().__init__(settings, fit, names)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return {**super().fallbacks, **self._counted}

    @property
    def why_not(self) -> str:
        """'' while the hazard speaks, else why recent rates do."""
        if not any(self._forests):
            return "no fit yet"
        age_s = self._now_s - self.fit.until_s
        if age_s > _STALE_PAUSES * max(_DAY_S, 0.1 * (self._now_s - self.fit.from_s)):
            return STALE
        return LOSES if self._losing else ""

    def learn(self, traffic: Traffic, block: Block) -> None:
        super().learn(traffic, block)
        self._now_s = max(self._now_s, block.until_s)
        if any(self._forests):
            self._begin_windows(block)
        self._end_windows(traffic, block.until_s)

    def probabilities(self, x: npt.NDArray[np.float32], horizons: tuple[int, ...]) -> FloatArray:
        why_not = self.why_not
        if why_not not in (LOSES, STALE):
            return super().probabilities(x, horizons)
        self._counted[why_not] += len(x)
        return monotone(rate_probabilities(recent_rate(x), tuple(HORIZONS_S[h] for h in horizons)))

    def snapshot(self) -> dict[str, np.ndarray]:
        w = self.watch
        sums = [w.weight, w.mean, w.square, w.drift, w.least, self._now_s]
        counts = [w.windows, w.alarms, int(w.losing), self._epoch, int(self._losing), *self._counted.values()]
        rows = [np.stack([np.full(len(m), t), m, said, rates]) for t, m, said, rates in self._open]
        return {
            **super().snapshot(),
            "watch_sums": np.array(sums),
            "watch_counts": np.array(counts, dtype=np.int64),
            "watch_open": np.concatenate([np.zeros((4, 0)), *rows], axis=1),
        }

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Take over a snapshot, also one of a hazard that was not watched."""
        super().restore({name: value for name, value in snapshot.items() if not name.startswith("watch_")})
        self._open, self.watch, self._now_s, self._epoch, self._losing = [], Watch(), -np.inf, -1, False
        if "watch_sums" not in snapshot:
            return
        try:
            weight, mean, square, drift, least, now_s = (float(v) for v in snapshot["watch_sums"])
            windows, alarms, lost, epoch, losing, *counted = (int(v) for v in snapshot["watch_counts"])
            self._counted = dict(zip(self._counted, counted, strict=True))
            begins, models, said, rates = np.array(snapshot["watch_open"], dtype=np.float64)
        except (KeyError, ValueError) as error:
            raise PredictorError(f"a snapshot whose watch is not understood: {error}", predictor=self.name) from error
        self.watch = Watch(windows, weight, mean, square, drift, least, alarms, bool(lost))
        self._now_s, self._epoch, self._losing = now_s, epoch, bool(losing)
        for begin in np.unique(begins).tolist():
            at = begins == begin
            self._open.append((begin, models[at].astype(np.int64), said[at], rates[at]))

    def _begin_windows(self, block: Block) -> None:
        """A window from each tick at a whole ten minutes, for the models that were idle for as long."""
        for k in np.flatnonzero(block.ticks % _WINDOW_S == 0.0).tolist():
            at = np.flatnonzero(block.tick_of == k)
            idle = at[block.tick_features[at, 0] >= np.float32(np.log(_WINDOW_S))]
            if not len(idle):
                continue
            x = np.ascontiguousarray(block.tick_features[idle])
            said = super().probabilities(x, (_WATCHED,))[:, 0]
            rates = rate_probabilities(recent_rate(x), (_WINDOW_S,))[:, 0]
            self._open.append((float(block.ticks[k]), block.tick_model[idle].astype(np.int64), said, rates))

    def _end_windows(self, traffic: Traffic, until_s: float) -> None:
        """Outcomes of what is over at `until_s`, and at each whole half hour whether the hazard is heard: the same for any blocks."""
        if self._epoch < 0:
            self._epoch = int(until_s // EPOCH_S)
        while True:
            end_s = self._open[0][0] + _LATE_S if self._open else np.inf
            bound_s = (self._epoch + 1) * EPOCH_S
            if end_s <= min(until_s, bound_s):
                self._end_window(traffic, end_s)
            elif bound_s <= until_s:
                self._epoch = int(min(until_s, end_s) // EPOCH_S)
                self._losing = self.watch.losing
            else:
                return

    def _end_window(self, traffic: Traffic, end_s: float) -> None:
        from_s, models, said, rates = self._open.pop(0)
        used = traffic.counts(from_s, from_s + _WINDOW_S, models) > 0
        before = self.watch
        self.watch = before.after(float((_losses(said, used) - _losses(rates, used)).sum()))
        if self.watch.alarms > before.alarms and np.isfinite(self._next_fit_s):
            self._counted["drifts: fitted sooner"] += 1
            self._next_fit_s = min(self._next_fit_s, np.ceil(end_s / EPOCH_S) * EPOCH_S)


def _losses(p: FloatArray, used: npt.NDArray[np.bool_]) -> FloatArray:
    p = np.clip(p, _LEAST_P, 1.0 - _LEAST_P)
    losses: FloatArray = -np.where(used, np.log(p), np.log1p(-p))
    return losses


#: Columns of other sources by the first part of their names, in words.
_SOURCES = {"seasonal": "seasonal forecast", "next": "what follows what", "hint": "hints"}
#: Traffic features by what they tell, in words for people.
GROUPS: dict[str, tuple[str, ...]] = {
    "time since last use": ("log_age", "log_gap_", "gap_hazard_", "log_age_", "next_use_hour_ago"),
    "recent rates": ("log_rate_", "trend_", "hour_ago_", "log_total", "mean_log_count", "log_share_"),
    "time of day and week": (
        *("yesterday_", "last_week_", "days_", "weeks_", "next_use_yesterday"),
        *("second_of_hour", "hour_of_day", "day_of_week"),
    ),
    "other models": ("follower_", "all_"),
    "users": ("user_", "users_"),
}


def groups_of(names: tuple[str, ...]) -> list[str]:
    """The group of each feature: the traffic features, then the columns `names` of other sources."""
    found = []
    for feature in FEATURE_NAMES:
        fits = [(len(start), group) for group, starts in GROUPS.items() for start in starts if feature.startswith(start)]
        found.append(max(fits)[1] if fits else "other traffic")
    return found + [_SOURCES.get(name.split("_", 1)[0], name.split("_", 1)[0]) for name in names]


def contributions_of(
    hazard: Hazard, x: npt.NDArray[np.float32], usual: npt.NDArray[np.float32], horizon: int = _WATCHED
) -> tuple[tuple[str, float], ...]:
    """What raised a forecast, largest first, with shares that add up to 1; empty where nothing did.

    `x` float32[F] is the forecast's feature row, `usual` float32[F] one to compare with, as the medians over all models. A group counts by
    how much the log-odds fall when its features are the usual ones instead: all others stay, so that groups that say the same count little.
    """
    groups = groups_of(hazard.names)
    names = list(dict.fromkeys(groups))
    rows = np.repeat(x[None, :], len(names) + 1, axis=0)
    for i, name in enumerate(names):
        at = [k for k, group in enumerate(groups) if group == name]
        rows[i + 1, at] = usual[at]
    p = np.clip(Hazard.probabilities(hazard, np.ascontiguousarray(rows), (horizon,))[:, 0], _LEAST_P, 1.0 - _LEAST_P)
    log_odds = np.log(p) - np.log1p(-p)
    raised = np.maximum(log_odds[0] - log_odds[1:], 0.0)
    total = float(raised.sum())
    if total <= 0.0:
        return ()
    shares = sorted(zip(names, (raised / total).tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple((name, share) for name, share in shares if share >= 0.01)

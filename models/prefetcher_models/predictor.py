"""The one interface that every predictor shares, and the forecast that it gives.

A predictor learns from blocks of traffic (`prefetcher.core.traffic.Block`: rows in time order, the feature row right
after each of them, and the feature rows of every seen model at each tick) and answers, for any time after the last
block, with what probability each model is used within each of `HORIZONS_S`. It never reads a clock and never sees a
row before it is handed over, so whatever it learned at `now_s` comes from rows before `now_s`. Choosing between
predictors and acting on forecasts are not its business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import FEATURE_NAMES, Block, Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError

__all__ = ["Forecast", "Predictor", "checked", "monotone", "rate_probabilities", "recent_rate"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Decayed rates whose mean stands in for what was not learned yet: over 10 min, 1 h, 6 h and 1 d.
_RATE_COLUMNS = [FEATURE_NAMES.index(f"log_rate_{tau}s") for tau in (600, 3600, 21600, 86400)]


@dataclass(frozen=True, slots=True)
class Forecast:
    """P(used within each horizon), one row a model.

    `models`: int64[n], rows of the `Traffic`. `p`: float64[n, len(HORIZONS_S)], finite, within [0, 1], never falling
    with the horizon. `issued_s` is when it was made; horizons count from `valid_from_s`. `fallback` names why the
    predictor's own method was not used ('' if it was).
    """

    predictor: str
    issued_s: float
    valid_from_s: float
    models: IntArray
    p: FloatArray
    fallback: str = ""


@runtime_checkable
class Predictor(Protocol):
    """What learns from traffic and forecasts the next use of every model."""

    @property
    def name(self) -> str:
        """Short, stable, without spaces: names the predictor in logs, orders and artifacts."""
        ...

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """How many forecasts fell back, by reason."""
        ...

    def learn(self, traffic: Traffic, block: Block) -> None:
        """Take in one block, in time order; `traffic` is the state after it. What is costly waits for `refit`."""
        ...

    def refit(self, now_s: float) -> bool:
        """Fit again from what was learned, if that pays; whether it did. Uses only outcomes that were known before
        `now_s`.
        """
        ...

    def forecast(self, traffic: Traffic, now_s: float, models: IntArray | None = None) -> Forecast:
        """Forecast `models` (all that `traffic` knows if None) from `now_s` on; changes nothing but the count of
        fallbacks.

        A model never used so far gets a forecast too (a predictor without a prior for it says 0).
        """
        ...

    def snapshot(self) -> dict[str, np.ndarray]:
        """Everything that was learned, as arrays: a predictor restored from it goes on as if nothing had happened."""
        ...

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Take over a snapshot of the same predictor. Raises `PredictorError` for one that it does not understand."""
        ...


def monotone(p: FloatArray) -> FloatArray:
    """`p` within [0, 1] and never falling along the last axis: each horizon at least what the shorter ones say."""
    return np.maximum.accumulate(np.clip(p, 0.0, 1.0), axis=-1)


def rate_probabilities(rate_per_s: FloatArray, horizons_s: tuple[float, ...] = HORIZONS_S) -> FloatArray:
    """P(at least one row within each horizon) of a Poisson stream: 1 − exp(−r·W); float64[n, len(horizons_s)]."""
    return -np.expm1(-np.asarray(rate_per_s, dtype=np.float64)[:, None] * np.asarray(horizons_s, dtype=np.float64))


def recent_rate(x: npt.NDArray[np.float32]) -> FloatArray:
    """float64[n]: rows a second of late, from feature rows x float32[n, F]: the mean of the rates over 10 min, 1 h, 6 h and 1 d."""
    rate: FloatArray = np.exp(x[:, _RATE_COLUMNS].astype(np.float64)).mean(axis=1, dtype=np.float64)
    return rate


def checked(forecast: Forecast) -> Forecast:
    """`forecast` itself if it keeps the contract of `Forecast`. Raises `PredictorError` naming what is wrong."""
    p, name = forecast.p, forecast.predictor
    if p.shape != (len(forecast.models), len(HORIZONS_S)):
        expected = (len(forecast.models), len(HORIZONS_S))
        raise PredictorError(f"{name}: a forecast of shape {p.shape}, expected {expected}", predictor=name)
    if not np.isfinite(p).all():
        raise PredictorError(f"{name}: {int((~np.isfinite(p)).sum())} probabilities are not finite", predictor=name)
    if p.size and (p.min() < 0.0 or p.max() > 1.0):
        raise PredictorError(f"{name}: probabilities from {p.min()} to {p.max()}, expected 0 to 1", predictor=name)
    if (np.diff(p, axis=1) < 0.0).any():
        raise PredictorError(f"{name}: a longer horizon is less likely than a shorter one", predictor=name)
    return forecast

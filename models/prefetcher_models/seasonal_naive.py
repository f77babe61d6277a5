"""Seasonal-naive: what was used at this time yesterday and a week ago is used now."""

from __future__ import annotations

import numpy as np

from prefetcher.core.traffic import Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher_models.baseline import Baseline, BoolArray
from prefetcher_models.predictor import FloatArray, IntArray, rate_probabilities

__all__ = ["SeasonalNaive"]

_DAY_S = 86400.0
#: Yesterday and last week; both lie further back than the longest horizon, so that their windows are over.
_LAGS_S = (_DAY_S, 7.0 * _DAY_S)


class SeasonalNaive(Baseline):
    """The share of the past days (yesterday, last week) that saw the model within W of this time of day.

    Two days can only say 0, a half or 1: they are drawn, with the weight of `prior` days, to the model's rate over the
    last day. A day counts if the model had been seen by then; with none, the model falls back. Slots are UTC minutes; keeps no
    state of its own.
    """

    def __init__(self, prior: float = 0.5) -> None:
        super().__init__("seasonal-naive", "less than a day of history")
        self._prior = prior

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        used = np.zeros((len(which), len(HORIZONS_S)))
        days = np.zeros(len(which))
        for lag_s in _LAGS_S:
            known = traffic.first_s[which] <= now_s - lag_s
            if not known.any():
                continue
            days += known
            for column, horizon_s in enumerate(HORIZONS_S):
                rows = traffic.counts(now_s - lag_s, now_s - lag_s + horizon_s, which)
                used[:, column] += known & (rows > 0)
        elapsed_s = np.clip(now_s - traffic.first_s[which], 60.0, _DAY_S)
        lately = rate_probabilities(traffic.counts(now_s - _DAY_S, now_s + 60.0, which) / elapsed_s)
        return (used + self._prior * lately) / (days + self._prior)[:, None], days > 0.0

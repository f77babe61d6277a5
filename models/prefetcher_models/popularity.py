"""Popularity: what was used in many ten-minute windows of the last day is used next. What most people would try first."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefetcher.core.compiled import kernel
from prefetcher.core.traffic import Block, Traffic
from prefetcher.core.traffic_state import LATE_S
from prefetcher.errors import PredictorError
from prefetcher_models.baseline import Baseline, BoolArray
from prefetcher_models.predictor import FloatArray, IntArray, rate_probabilities

__all__ = ["Popularity"]

#: A window, and how many make a day.
WINDOW_S, WINDOWS = 600.0, 144


class Popularity(Baseline):
    """The share s of the last day's ten-minute windows (of UTC) with a row, as the rate −ln(1 − s) / 10 min of a Poisson stream.

    `prior` windows stand half for use and half against it, so that nothing is certain. A model whose rows it was not given falls back.
    """

    def __init__(self, prior: float = 1.0) -> None:
        super().__init__("popularity-24h", "no row learned yet")
        self._prior = prior
        #: the last window with a row of each model that has this place in the day, −1 for none
        self._used = np.full((0, WINDOWS), -1, np.int64)
        self._newest = np.array([-np.inf])

    def _take(self, traffic: Traffic, block: Block) -> None:
        missing = traffic.n_models - len(self._used)
        if missing > 0:
            self._used = np.concatenate([self._used, np.full((missing, WINDOWS), -1, np.int64)])
        _learn(self._used, self._newest, block.ts, block.model)

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        known = which < len(self._used)
        windows = np.zeros(len(which))
        window = int(now_s // WINDOW_S)
        windows[known] = (self._used[which[known]] > window - WINDOWS).sum(axis=1)
        share = (windows + self._prior / 2.0) / (WINDOWS + self._prior)
        return rate_probabilities(-np.log1p(-share) / WINDOW_S), known

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"used": self._used, "newest": self._newest}

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        if arrays["used"].shape[1:] != (WINDOWS,) or arrays["newest"].shape != (1,):
            raise PredictorError("popularity-24h: a snapshot with arrays of other shapes", predictor=self.name)
        self._used, self._newest = arrays["used"], arrays["newest"]


@kernel
def _learn(used: Any, newest: Any, ts: Any, model: Any) -> None:
    for i in range(len(ts)):
        if ts[i] < newest[0] - LATE_S:
            continue
        newest[0] = max(newest[0], ts[i])
        window = int(np.floor(ts[i] / WINDOW_S))
        used[model[i], window % WINDOWS] = max(used[model[i], window % WINDOWS], window)

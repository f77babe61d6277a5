"""TSB for sparse counts: the probability that a period sees any row, and how many rows such a period has.

Both are smoothed, the probability in empty periods too, so that a model that is no longer used fades.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prefetcher.core.compiled import kernel
from prefetcher.core.traffic import Block, Traffic
from prefetcher.core.traffic_state import LATE_S
from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import PredictorError
from prefetcher_models.baseline import Baseline, BoolArray
from prefetcher_models.predictor import FloatArray, IntArray

__all__ = ["PERIOD_S", "Tsb"]

#: A period. Every horizon is shorter or a whole multiple of it.
PERIOD_S = 300.0
#: Columns of the state: probability, size, periods with rows, the last period with a row (−1 none), rows in it so far.
_P, _SIZE, _DEMANDS, _PERIOD, _ROWS = range(5)


class Tsb(Baseline):
    """The method of Teunter, Syntetos and Babai over periods of five minutes, all models at once.

    `alpha` and `beta` smooth probability and size; until 1/alpha periods (1/beta demands) have passed, plain means stand in
    their place. W over k whole periods: P = 1 − (1 − p)^k; within one period, its z rows lie anywhere: P = p·(1 − (1 − W/period)^z).
    A model whose rows it was not given falls back.

    Source: Teunter, Syntetos, Babai, Intermittent demand: linking forecasting to inventory obsolescence (EJOR 2011), eq. 3.
    """

    def __init__(self, alpha: float = 0.01, beta: float = 0.1) -> None:
        super().__init__("tsb", "no row learned yet")
        self._alpha = alpha
        self._beta = beta
        self._state = np.zeros((0, 5))
        #: first period and time of the newest row
        self._times = np.array([np.inf, -np.inf])

    def _take(self, traffic: Traffic, block: Block) -> None:
        missing = traffic.n_models - len(self._state)
        if missing > 0:
            fresh = np.zeros((missing, 5))
            fresh[:, _PERIOD] = -1.0
            self._state = np.concatenate([self._state, fresh])
        _learn(self._state, self._times, block.ts, block.model, self._alpha, self._beta)

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        state = np.zeros((len(which), 5))
        known = which < len(self._state)
        state[known] = self._state[which[known]]
        able = known & (state[:, _ROWS] > 0.0)
        _close(state, self._times[0], now_s // PERIOD_S, self._alpha, self._beta)
        p, size = state[:, _P], np.maximum(state[:, _SIZE], 1.0)
        out = np.empty((len(which), len(HORIZONS_S)))
        for column, horizon_s in enumerate(HORIZONS_S):
            if horizon_s < PERIOD_S:
                out[:, column] = p * -np.expm1(size * np.log1p(-horizon_s / PERIOD_S))
            else:
                out[:, column] = 1.0 - (1.0 - p) ** (horizon_s / PERIOD_S)
        return out, able

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"state": self._state, "times": self._times}

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        if arrays["state"].shape[1:] != (5,) or arrays["times"].shape != (2,):
            raise PredictorError("tsb: a snapshot with arrays of other shapes", predictor=self.name)
        self._state, self._times = arrays["state"], arrays["times"]


@kernel
def _step(row: Any, first: float, until: float, alpha: float, beta: float) -> None:
    """Close the open period of `row` and the empty ones after it, up to, and without, period `until`."""
    age = row[_PERIOD] - first
    row[_DEMANDS] += 1.0
    row[_P] += max(alpha, 1.0 / (age + 1.0)) * (1.0 - row[_P])
    row[_SIZE] += max(beta, 1.0 / row[_DEMANDS]) * (row[_ROWS] - row[_SIZE])
    _fade(row, age + 1.0, until - first, alpha)


@kernel
def _fade(row: Any, age: float, until: float, alpha: float) -> None:
    """Empty periods age, age + 1, … until − 1: the plain mean over all periods first, then a decay by alpha each."""
    settled = max(np.ceil(1.0 / alpha) - 1.0, 0.0)
    mean_until = max(age, min(until, settled))
    if mean_until > age:
        row[_P] *= age / mean_until
    row[_P] *= (1.0 - alpha) ** (until - mean_until)


@kernel
def _close(state: Any, first: float, now: float, alpha: float, beta: float) -> None:
    """Bring rows of the state up to period `now`; one whose open period is `now` itself counts it as far as it went."""
    for i in range(len(state)):
        if state[i, _ROWS] > 0.0:
            _step(state[i], first, max(now, state[i, _PERIOD] + 1.0), alpha, beta)


@kernel
def _learn(state: Any, times: Any, ts: Any, model: Any, alpha: float, beta: float) -> None:
    """Rows in the order in which they came; late ones count in their model's open period, too late ones not at all."""
    for i in range(len(ts)):
        if ts[i] < times[1] - LATE_S:
            continue
        times[1] = max(times[1], ts[i])
        period = np.floor(ts[i] / PERIOD_S)
        times[0] = min(times[0], period)
        row = state[model[i]]
        if row[_ROWS] > 0.0 and period > row[_PERIOD]:
            _step(row, times[0], period, alpha, beta)
            row[_ROWS] = 0.0
        row[_PERIOD] = max(row[_PERIOD], period)
        row[_ROWS] += 1.0

"""Hit density by age and class, seen as a hazard: models that come back at like distances share one age distribution."""

from __future__ import annotations

from typing import Any

import numpy as np

from prefetcher.core.compiled import kernel
from prefetcher.core.traffic import Block, Traffic
from prefetcher.core.traffic_state import LATE_S
from prefetcher.errors import PredictorError
from prefetcher_models.baseline import Baseline, BoolArray
from prefetcher_models.predictor import FloatArray, IntArray
from prefetcher_models.survival import ends_within

__all__ = ["HitDensity"]

CLASSES = 8
BINS = 32
#: Where mean gaps start, what each new gap moves them by, and the lowest class's bound; seconds.
_FIRST_GAP_S, _MOVE, _CLASS_S = 3600.0, 0.3, 15.0
#: Kept of all counts at each hour, and the reuses unlike any seen that are added to each class.
_HOURLY, _UNSEEN = 0.98, 0.5
#: Reuses of a class below which all classes together stand in for it.
_FEWEST = 1.0


class HitDensity(Baseline):
    """P(used within W | age) from reuse ages pooled over the models of a class, clip(⌊log2(mean gap / 15 s)⌋, 0, 7).

    A reuse counts in the class that the model had while it waited. A class without reuses takes those of all classes; without any,
    models fall back.

    Source: Beckmann, Chen, Cidon, LHD (NSDI 2018), with classes and ageing of the `lhd` policy.
    """

    def __init__(self) -> None:
        super().__init__("hit-density", "no reuse yet")
        self._counts = np.zeros((CLASSES, BINS))
        #: last use and mean gap of each model; seconds
        self._state = np.zeros((0, 2))
        #: time of the newest row and the hour of the last ageing
        self._times = np.array([-np.inf, -np.inf])

    def _take(self, traffic: Traffic, block: Block) -> None:
        missing = traffic.n_models - len(self._state)
        if missing > 0:
            fresh = np.tile(np.array([-np.inf, _FIRST_GAP_S]), (missing, 1))
            self._state = np.concatenate([self._state, fresh])
        _learn(self._state, self._counts, self._times, block.ts, block.model)

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        known = which < len(self._state)
        gap_s = np.full(len(which), _FIRST_GAP_S)
        gap_s[known] = self._state[which[known], 1]
        classes = np.clip(np.floor(np.log2(np.maximum(gap_s, 1.0) / _CLASS_S)), 0, CLASSES - 1).astype(np.int64)
        pooled = self._counts.sum(axis=0)
        few = self._counts.sum(axis=1) < _FEWEST
        counts = np.where(few[:, None], pooled, self._counts)
        p = ends_within(counts[classes], now_s - traffic.last_s[which], _UNSEEN)
        return p, known & bool(pooled.sum() > 0.0)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {"counts": self._counts, "state": self._state, "times": self._times}

    def _put(self, arrays: dict[str, np.ndarray]) -> None:
        shapes = (arrays["counts"].shape, arrays["state"].shape[1:], arrays["times"].shape)
        if shapes != ((CLASSES, BINS), (2,), (2,)):
            raise PredictorError("hit-density: a snapshot with arrays of other shapes", predictor=self.name)
        self._counts, self._state, self._times = arrays["counts"], arrays["state"], arrays["times"]


@kernel
def _learn(state: Any, counts: Any, times: Any, ts: Any, model: Any) -> None:
    """Rows in the order in which they came; a late one counts with its model's last, a too late one not at all."""
    for i in range(len(ts)):
        if ts[i] < times[0] - LATE_S:
            continue
        times[0] = max(times[0], ts[i])
        hour = np.floor(times[0] / 3600.0)
        if hour > times[1]:
            if np.isfinite(times[1]):
                counts *= _HOURLY ** (hour - times[1])
            times[1] = hour
        row = state[model[i]]
        if np.isfinite(row[0]):
            gap_s = max(ts[i] - row[0], 0.0)
            level = min(max(int(np.floor(np.log2(max(row[1], 1.0) / _CLASS_S))), 0), CLASSES - 1)
            place = min(int(2.0 * np.log2(max(gap_s, 1.0))), BINS - 1)
            counts[level, place] += 1.0
            row[1] += _MOVE * (gap_s - row[1])
        row[0] = max(row[0], ts[i])

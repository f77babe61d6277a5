"""Survival from histograms of half-octave bins: how likely what has lasted to some age ends within each horizon.

Bin b holds durations of 2^(b/2) to 2^((b+1)/2) seconds, bin 0 shorter ones too; within a bin they lie evenly in log
time, and the open last bin reaches over four octaves. What is counted is the caller's business.
"""

from __future__ import annotations

import numpy as np

from prefetcher.core.types import HORIZONS_S
from prefetcher_models.predictor import FloatArray

__all__ = ["ends_within"]

#: Half-octaves that the open last bin spans: from 52 h, that is a little over a month.
_LAST_SPAN = 8.0
_DAY_S = 86400.0


def ends_within(histogram: FloatArray, age_s: FloatArray, unseen: float) -> FloatArray:
    """P(duration ≤ age + W | duration > age) for each of `HORIZONS_S`; float64[n, len(HORIZONS_S)].

    `histogram`: float64[n, B] counts, `age_s`: float64[n] ≥ 0, `unseen` > 0: the count
    added to each row of durations unlike all that were counted, which outlast t with probability 1 / (1 + t / day): nothing
    is ever certain not to end, and the older, the slower it is expected to.
    """
    bins = histogram.shape[1]
    beyond = np.zeros((len(histogram), bins + 1))
    beyond[:, :bins] = np.cumsum(histogram[:, ::-1], axis=1)[:, ::-1]
    until_s = age_s[:, None] + np.concatenate([[0.0], HORIZONS_S])
    place = 2.0 * np.log2(np.maximum(until_s, 1.0))
    b = np.minimum(place.astype(np.int64), bins - 1)
    into = place - b
    into = np.minimum(np.where(b == bins - 1, into / _LAST_SPAN, into), 1.0)
    row = np.arange(len(histogram))[:, None]
    alive = beyond[row, b] * (1.0 - into) + beyond[row, b + 1] * into + unseen / (1.0 + until_s / _DAY_S)
    p: FloatArray = 1.0 - alive[:, 1:] / alive[:, :1]
    return p

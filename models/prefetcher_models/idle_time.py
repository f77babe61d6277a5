"""The idle-time histogram: how long this model's gaps were tells when, at its present age, it is used next."""

from __future__ import annotations

import numpy as np

from prefetcher.core.traffic import Traffic
from prefetcher_models.baseline import Baseline, BoolArray
from prefetcher_models.predictor import FloatArray, IntArray
from prefetcher_models.survival import ends_within

__all__ = ["IdleTime"]


class IdleTime(Baseline):
    """P(gap ≤ age + W | gap > age) from the model's decayed gap histogram, with `prior` gaps spread like all models'.

    Gaps unlike any seen have the weight `unseen`, so that a model older than all of them is given up slowly. Keeps no
    state of its own; falls back while no model has come back.

    Source: the histogram is that of Shahrad et al., Serverless in the Wild (ATC 2020), read as a conditional distribution.
    """

    def __init__(self, prior: float = 5.0, unseen: float = 0.5) -> None:
        super().__init__("idle-time", "no gap yet")
        self._prior = prior
        self._unseen = unseen

    def _own(self, traffic: Traffic, now_s: float, which: IntArray) -> tuple[FloatArray, BoolArray]:
        pooled = traffic.gap_histogram.sum(axis=0)
        total = float(pooled.sum())
        spread = pooled * (self._prior / total) if total > 0.0 else pooled
        p = ends_within(traffic.gap_histogram[which] + spread, now_s - traffic.last_s[which], self._unseen)
        return p, np.full(len(which), total > 0.0)

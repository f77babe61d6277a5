"""How good probabilities were, once it is known what happened: order, size, calibration, and what a budget of waste finds. Pure.

`p` is float[n] in [0, 1], `used` bool[n]. Which forecasts are compared is `outcomes`' matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FEWEST_STARTS", "Interval", "Scores", "average_precision", "reliability", "score_of", "spread"]

#: Of fewer starts than these a figure says more about luck than about a predictor.
FEWEST_STARTS = 10
#: Bins of equal numbers of forecasts for the calibration error and the reliability diagram.
BINS = 15
#: 97.5 % points of Student's t for 1, 2, … degrees of freedom; beyond the last one, the normal's.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_NORMAL = 1.96

Floats = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Scores:
    """Of `pairs` forecasts for idle models, `starts` of which came true.

    `ap`: average precision; `brier`: mean squared error; `ece`: mean distance of probability and share in `BINS` bins; `recall`: the share
    of starts found while wasted prefetches stay within the budget. None where there are fewer than `FEWEST_STARTS` starts, or nothing else.
    """

    pairs: int
    starts: int
    ap: float | None = None
    brier: float | None = None
    ece: float | None = None
    recall: float | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean over origins, and the 95 % interval of that mean; `n` origins had enough starts."""

    mean: float
    low: float
    high: float
    n: int


def score_of(p: Floats, used: Bools, waste: float) -> Scores:
    """All scores; `waste`: wasted prefetches allowed for each start."""
    pairs, starts = len(p), int(used.sum())
    if starts < FEWEST_STARTS or starts == pairs:
        return Scores(pairs, starts)
    p = p.astype(np.float64)
    found, asked = _curve(p, used)
    error = p - used
    bins = reliability(p, used)
    return Scores(
        pairs=pairs,
        starts=starts,
        ap=_ap(found, asked, starts),
        brier=float(error @ error) / pairs,
        ece=sum(n * abs(said - was) for said, was, n in bins) / pairs,
        recall=_recall(found, asked, starts, waste),
    )


def average_precision(p: Floats, used: Bools) -> float:
    """The mean precision at each start, with equal probabilities taken together; NaN without a start.

    Source: Σ (R_k − R_{k−1})·P_k over falling thresholds, as scikit-learn's `average_precision_score`.
    """
    starts = int(used.sum())
    return _ap(*_curve(p.astype(np.float64), used), starts) if starts else math.nan


def reliability(p: Floats, used: Bools, bins: int = BINS) -> list[tuple[float, float, int]]:
    """(mean probability, share that was used, how many) of up to `bins` groups of like size, from the least probable on.

    Equal probabilities stay together, so that a predictor that says one thing has one group.
    """
    if not len(p):
        return []
    order = np.argsort(p, kind="stable")
    said, was = p[order].astype(np.float64), used[order]
    # No edge within a run of equal probabilities: it moves to the run's end.
    wanted = np.linspace(0, len(p), min(bins, len(p)) + 1)[1:-1].round().astype(np.int64)
    ends = np.searchsorted(said, said[wanted - 1], side="right") if len(wanted) else wanted
    edges = np.unique(np.concatenate([[0], ends, [len(p)]]))
    return [(float(said[a:b].mean()), float(was[a:b].mean()), b - a) for a, b in pairwise(edges.tolist())]


def spread(values: Sequence[float | None], *, ratio: bool = False) -> Interval | None:
    """The mean of what each origin gave, with a 95 % interval by Student's t; None where no origin gave anything.

    With `ratio`, means and intervals are those of logarithms: 2 and ½ cancel out. One origin alone has no interval (NaN).
    """
    known = np.array([value for value in values if value is not None and math.isfinite(value) and (not ratio or value > 0.0)])
    if not len(known):
        return None
    logs = np.log(known) if ratio else known
    mean, n = float(logs.mean()), len(known)
    half = math.nan
    if n > 1:
        half = (_T[n - 2] if n - 2 < len(_T) else _NORMAL) * float(logs.std(ddof=1)) / math.sqrt(n)
    mean, low, high = (math.exp(end) if ratio else end for end in (mean, mean - half, mean + half))
    return Interval(mean, low, high, n)


def _curve(p: Floats, used: Bools) -> tuple[Floats, Floats]:
    """(starts found, forecasts taken) at each distinct threshold, from the highest on."""
    order = np.argsort(-p, kind="stable")
    said = p[order]
    last = np.flatnonzero(np.concatenate([said[1:] != said[:-1], [True]]))
    found = np.cumsum(used[order])[last].astype(np.float64)
    return found, last + 1.0


def _ap(found: Floats, asked: Floats, starts: int) -> float:
    return float((np.diff(found, prepend=0.0) * found / asked).sum() / starts)


def _recall(found: Floats, asked: Floats, starts: int, waste: float) -> float:
    """The largest share found at a threshold that wastes at most `waste`·starts; what lies between two thresholds is taken by lot."""
    wasted = asked - found
    most = waste * starts
    k = int(np.searchsorted(wasted, most, side="right"))
    before_found, before_wasted = (found[k - 1], wasted[k - 1]) if k else (0.0, 0.0)
    if k < len(found) and wasted[k] > before_wasted:
        before_found += (found[k] - before_found) * (most - before_wasted) / (wasted[k] - before_wasted)
    return float(before_found / starts)

"""What the simple experts know of each model's demand: recency, decayed counts, gaps, and hit density by age and class.

One `Demand` serves every cache of a node, since arrivals don't depend on what was cached. The learned predictors have richer features in
`core.traffic`; here is only what a policy without learning ranks by, exact to the row.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel_part

__all__ = ["AGE_BINS", "CLASSES", "STANDARD_TAUS_S", "Demand", "age_bin", "new_demand", "observe"]

Floats = npt.NDArray[np.float64]

#: Time constants of the decayed counts, seconds: 10 min, 1 h, 6 h, 1 d, 7 d.
STANDARD_TAUS_S: tuple[float, ...] = (600.0, 3600.0, 21600.0, 86400.0, 604800.0)
CLASSES = 8  #: classes of models by their mean gap, octaves from 15 s
AGE_BINS = 32  #: half-octave bins of age from 1 s
_FIRST_GAP_S = 3600.0
_GAP_WEIGHT = 0.3
_FADE = 0.98
_DENSITY_EVERY_S = 3600.0


class Demand(NamedTuple):
    """Struct of arrays, one column a model; all times seconds since the epoch, `-inf` where there is none."""

    taus_s: Floats  #: float64[T]
    decayed: Floats  #: float64[T, n], counts of rows decayed to `last_s`
    last_s: Floats  #: float64[n], last row
    rows: Floats  #: float64[n], rows ever
    mean_gap_s: Floats  #: float64[n], moving mean of gaps
    class_: npt.NDArray[np.int64]  #: int64[n]
    reuses: Floats  #: float64[CLASSES, AGE_BINS], faded counts of reuses by age
    density: Floats  #: float64[CLASSES, AGE_BINS], reuses a second held, the best over later edges
    due_s: Floats  #: float64[1], when the densities are computed next


def new_demand(models: int, t0_s: float, taus_s: tuple[float, ...] = STANDARD_TAUS_S) -> Demand:
    """Demand of `models` models before their first row; `t0_s` is the log's first time."""
    return Demand(
        taus_s=np.array(taus_s),
        decayed=np.zeros((len(taus_s), models)),
        last_s=np.full(models, -np.inf),
        rows=np.zeros(models),
        mean_gap_s=np.full(models, _FIRST_GAP_S),
        class_=np.full(models, _class_of_first_gap(), np.int64),
        reuses=np.zeros((CLASSES, AGE_BINS)),
        density=np.ones((CLASSES, AGE_BINS)),
        due_s=np.array([t0_s + _DENSITY_EVERY_S]),
    )


def _class_of_first_gap() -> int:
    return int(_class_of(_FIRST_GAP_S))


@kernel_part
def _class_of(gap_s: float) -> int:
    return min(CLASSES - 1, max(0, math.floor(math.log2(max(gap_s, 1e-9) / 15.0))))


@kernel_part
def age_bin(age_s: float) -> int:
    """The half-octave bin of an age: 0 for up to 1.41 s, AGE_BINS - 1 for what is older than all edges."""
    return min(AGE_BINS - 1, int(math.log2(max(age_s, 1.0)) * 2.0))


@kernel_part
def _update_density(reuses: Floats, density: Floats) -> None:
    for c in range(CLASSES):
        alive = np.zeros(AGE_BINS + 1)
        for b in range(AGE_BINS - 1, -1, -1):
            alive[b] = alive[b + 1] + reuses[c, b] + 1e-3
        for b in range(AGE_BINS):
            hits = 0.0
            held_s = 0.0
            best = 0.0
            for j in range(b, AGE_BINS):
                width_s = 2.0 ** ((j + 1) / 2.0) - (2.0 ** (j / 2.0) if j > 0 else 0.0)
                here = reuses[c, j] + 1e-3
                held_s += width_s * (alive[j] + 0.5 - here / 2.0)
                hits += here
                best = max(best, hits / max(held_s, 1e-9))
            density[c, b] = best
    reuses *= _FADE


@kernel_part
def observe(demand: Demand, model: int, ts: float) -> None:
    """Learns one row of `model` at `ts`; rows come in time order."""
    if demand.rows[model] > 0:
        gap_s = ts - demand.last_s[model]
        demand.reuses[demand.class_[model], age_bin(gap_s)] += 1.0
        demand.mean_gap_s[model] += _GAP_WEIGHT * (gap_s - demand.mean_gap_s[model])
        demand.class_[model] = _class_of(demand.mean_gap_s[model])
        for k in range(len(demand.taus_s)):
            demand.decayed[k, model] = demand.decayed[k, model] * math.exp(-gap_s / demand.taus_s[k]) + 1.0
    else:
        demand.decayed[:, model] = 1.0
    demand.last_s[model] = ts
    demand.rows[model] += 1.0
    if ts > demand.due_s[0]:
        demand.due_s[0] = ts + _DENSITY_EVERY_S
        _update_density(demand.reuses, demand.density)


@kernel_part
def decayed_rate(demand: Demand, k: int, model: int, now_s: float) -> float:
    """Rows a second at time constant `taus_s[k]`; 0 for a model without a row."""
    if demand.rows[model] == 0:
        return 0.0
    tau_s = demand.taus_s[k]
    return float(demand.decayed[k, model] * math.exp(-(now_s - demand.last_s[model]) / tau_s) / tau_s)


@kernel_part
def hit_density(demand: Demand, model: int, now_s: float) -> float:
    """Hits a second held, by the model's class and age; 0 for a model without a row. Source: after Beckmann et al., LHD, NSDI 2018."""
    if demand.rows[model] == 0:
        return 0.0
    return float(demand.density[demand.class_[model], age_bin(now_s - demand.last_s[model])])

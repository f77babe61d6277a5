"""What a cold start costs, what a held byte saves, what the future use of a model looks like as a rate.

Covers the scalar formulas of the decision. Ranking, victims and prefetch choice are in `core.planner`; where rates come from is in
`core.demand` (simple experts) and in the predictors (hazard).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel, kernel_part

__all__ = [
    "DEFAULT_PRICE_S_PER_GB_H",
    "LEAST_BEYOND_HINTS",
    "LEAST_CHANCE",
    "MOST_HOLDS",
    "beyond_hints",
    "head_start",
    "hinted_rate",
    "index_per_byte",
    "load_discount",
    "may_start",
    "mean_load_s",
    "mean_rate",
    "miss_cost_s",
    "next_use_rate",
    "price_per_byte_s",
]

#: Seconds of waiting that one GB held for one hour is worth, unless the operator says otherwise. On an ordinary node the host RAM is
#: bought with the GPU and idle beside it, so holding is nearly free: at 3.5 GB/s this keeps what is used about once in six days.
DEFAULT_PRICE_S_PER_GB_H = 0.002


#: However likely it still is, an unused prefetch stays no longer than this many holds: an hour by default, as far as ranks look ahead.
MOST_HOLDS = 6.0

#: What is hinted displaces others only when its use is at least this likely: at most every second byte moves for nothing. Less waits a
#: little less and moves much more.
LEAST_CHANCE = 0.5

#: What hints would bring in time is left to them: a forecast fetches only where so much of its value is beyond what hints bring.
LEAST_BEYOND_HINTS = 2.0 / 3.0


def price_per_byte_s(seconds_per_gb_h: float) -> float:
    """λ, seconds of waiting per byte-second held, from the one human number X: "a GB held for an hour is worth X seconds of waiting"."""
    return seconds_per_gb_h / 3.6e12


@kernel_part
def mean_load_s(link_s: float, recent_wait_s: float) -> float:
    """The mean time to load: the transfer and about half of the recent queue wait (its P90 sets the lead, not the cost). Seconds."""
    return link_s + 0.5 * recent_wait_s


@kernel_part
def miss_cost_s(link_s: float, recent_wait_s: float, rate_per_s: float, waiting_rows: float) -> float:
    """C = l·(1 + r·l/2) + μ·s/BW, in seconds of waiting.

    `link_s` is s/BW; the bracket counts those who arrive while it loads at `rate_per_s`; `waiting_rows` (μ) is the mean number of rows
    that wait for the link, whom each second of link time costs a second.
    """
    load_s = mean_load_s(link_s, recent_wait_s)
    return load_s * (1.0 + rate_per_s * load_s / 2.0) + waiting_rows * link_s


@kernel_part
def index_per_byte(next_use_per_s: float, cost_s: float, size_bytes: float) -> float:
    """h·C/s: the seconds of waiting that a held byte saves per second. Comparable with λ, the price of a byte-second."""
    return next_use_per_s * cost_s / size_bytes


@kernel_part
def load_discount(next_use_per_s: float, link_s: float) -> float:
    """exp(−3·h·s/BW): what will be asked for while it loads is hardly helped by a prefetch."""
    return math.exp(-3.0 * next_use_per_s * link_s)


@kernel_part
def may_start(next_use_per_s: float, link_s: float, recent_wait_s: float, lead_s: float) -> bool:
    """Whether a use that is expected 1/h from now is at most the mean time to load plus `lead_s` away."""
    return bool(next_use_per_s * (mean_load_s(link_s, recent_wait_s) + lead_s) >= 1.0) or bool(lead_s == np.inf)


@kernel_part
def hinted_rate(probability: float, at_s: float, end_s: float, now_s: float) -> float:
    """h = P(T ≤ W) / E[min(T, W)] of a use that was announced, W the time left to `end_s`; per second, 0 once that has come.

    It comes with `probability`, evenly between `at_s` and `end_s`, or not at all.
    """
    left_s = end_s - now_s
    if left_s <= 0.0 or probability <= 0.0:
        return 0.0
    mean_s = probability * (0.5 * (max(at_s, now_s) + end_s) - now_s) + (1.0 - probability) * left_s
    return probability / max(mean_s, 1e-3)


@kernel_part
def head_start(at_s: float, end_s: float, now_s: float, link_s: float) -> float:
    """The share of a load that is done when an announced use comes, if it starts now: what takes the place of `load_discount`."""
    return min(1.0, max(0.5 * (max(at_s, now_s) + end_s) - now_s, 0.0) / max(link_s, 1e-9))


@kernel_part
def beyond_hints(announced: float, lead_s: float, link_s: float) -> float:
    """The share of a forecast prefetch's value that is left where hints announce a share `announced` of the uses, `lead_s` seconds before;
    the rest is brought by the hint's own prefetch, as far as that is done by then. 0 where that is most of it."""
    left = 1.0 - announced * min(1.0, lead_s / max(link_s, 1e-9))
    return left if left >= LEAST_BEYOND_HINTS else 0.0


@kernel_part
def _next_use_rate(probability: npt.NDArray[np.float32], horizons_s: npt.NDArray[np.float64], last: int) -> float:
    survive = 1.0
    expected_s = 0.0
    start_s = 0.0
    for j in range(last + 1):
        p = min(max(float(probability[j]), 1.0 - survive), 0.998)
        after = 1.0 - p
        slope = max(math.log(survive / after), 1e-4)
        expected_s += (horizons_s[j] - start_s) * survive * (1.0 - math.exp(-slope)) / slope
        survive = after
        start_s = horizons_s[j]
    return (1.0 - survive + 1e-7) / max(expected_s, 1.0)


@kernel
def next_use_rate(probability: npt.NDArray[np.float32], horizons_s: npt.NDArray[np.float64], last: int) -> npt.NDArray[np.float32]:
    """h = P(T ≤ W) / E[min(T, W)] per row, W = `horizons_s[last]`; per second.

    `probability` is float32[rows, horizons], P(next use within the horizon); between horizons the hazard is taken as constant. NaN in a
    row's first horizon gives NaN. Probabilities that fall with the horizon are raised to the one before.
    """
    out = np.empty(len(probability), np.float32)
    for i in range(len(probability)):
        out[i] = np.nan if np.isnan(probability[i, 0]) else _next_use_rate(probability[i], horizons_s, last)
    return out


@kernel
def mean_rate(rates: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32[n]: the geometric mean of `rates` float32[k, n] over its rows; rates are above 0, NaN gives NaN."""
    out = np.empty(rates.shape[1], np.float32)
    for i in range(rates.shape[1]):
        log_rate = 0.0
        for j in range(len(rates)):
            log_rate += math.log(rates[j, i])
        out[i] = math.exp(log_rate / len(rates))
    return out

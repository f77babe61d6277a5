"""Counts of waits in log-spaced bins: small, added up over hours and nodes without losing anything, and good for quantiles.

Bin j counts what lies in (2^((j-1)/8), 2^(j/8)] seconds, so that powers of two, the usual limits of an objective, are edges of bins. The
lowest bins are no wait at all and up to about a millisecond. A quantile is its bin's upper edge, so the true value is never above it and at
most `RESOLUTION_RATIO` of it below. Counts are a plain dict of bin to count; the same value falls into the same bin in `bin_of` and
`bins_of`, to the last bit.

Source: Masson, Rim, Lee: DDSketch, VLDB 2019, for bins that grow by a constant ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["NO_WAIT", "RESOLUTION_RATIO", "add_up", "at_most", "bin_of", "bins_of", "count_of", "edge_above_s", "quantile", "upper_s"]

_STEPS = 8
#: The edges between 1 and 2: 2^(k/8).
_EDGES = [2.0 ** (k / _STEPS) for k in range(_STEPS)]
#: 2^-10 s: what is shorter is one bin.
_LOWEST = -10 * _STEPS
#: 2^25 s, a year: what is longer is one bin.
_HIGHEST = 25 * _STEPS
#: The bin of what did not wait.
NO_WAIT = _LOWEST - 1
#: How far the true value of a quantile may lie under what is said, as a share of that.
RESOLUTION_RATIO = 1.0 - 2.0 ** (-1.0 / _STEPS)


def bin_of(wait_s: float) -> int:
    """The bin of a wait; what is no number did not wait."""
    if not wait_s > 0.0:
        return NO_WAIT
    if math.isinf(wait_s):
        return _HIGHEST
    mantissa, exponent = math.frexp(wait_s)
    found = _STEPS * (exponent - 1) + bisect_left(_EDGES, 2.0 * mantissa)
    return min(max(found, _LOWEST), _HIGHEST)


def bins_of(waits_s: npt.NDArray[np.float64]) -> dict[int, int]:
    """Counts of float64[n] waits by bin."""
    waits = np.asarray(waits_s, np.float64)
    positive = waits > 0.0
    finite = np.where(positive & np.isfinite(waits), waits, 1.0)
    mantissa, exponent = np.frexp(finite)
    found = _STEPS * (exponent.astype(np.int64) - 1) + np.searchsorted(np.array(_EDGES), 2.0 * mantissa, side="left")
    found = np.where(np.isposinf(waits), _HIGHEST, np.clip(found, _LOWEST, _HIGHEST))
    values, counts = np.unique(np.where(positive, found, NO_WAIT), return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}


def upper_s(number: int) -> float:
    """The upper edge of a bin, in seconds."""
    if number <= NO_WAIT:
        return 0.0
    whole, step = divmod(number, _STEPS)
    return float(2.0**whole * _EDGES[step])


def count_of(bins: Mapping[int, int]) -> int:
    return sum(bins.values())


def add_up(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The counts of all parts together."""
    total: dict[int, int] = {}
    for part in parts:
        for number, count in part.items():
            total[number] = total.get(number, 0) + count
    return total


def quantile(bins: Mapping[int, int], share: float) -> float | None:
    """The wait that `share` (0 to 1) of all are at most, as its bin's upper edge; None where nobody waited or not."""
    total = count_of(bins)
    if total == 0:
        return None
    needed = max(1, math.ceil(share * total))
    seen = 0
    for number in sorted(bins):
        seen += bins[number]
        if seen >= needed:
            return upper_s(number)
    raise AssertionError("counts of bins are at least 0")


def at_most(bins: Mapping[int, int], limit_s: float) -> int:
    """How many waited at most `edge_above_s(limit_s)`."""
    last = bin_of(limit_s)
    return sum(count for number, count in bins.items() if number <= last)


def edge_above_s(limit_s: float) -> float:
    """The edge that a limit counts as: itself where it is one, as powers of two are, else the next one above."""
    return upper_s(bin_of(limit_s))

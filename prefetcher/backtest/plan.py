"""When forecasts are asked for, and what then happened: the windows of a backtest. Pure.

For a horizon W, time is cut into windows of W from the log's first row on (of at most half an hour: what lasts six hours is asked for
every half hour). At a window's end, every model without a row in the last W is a candidate; it starts if it has a row within the next W.
Rows before the window's end are known, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetcher.core.types import HORIZONS_S
from prefetcher.errors import InputError

__all__ = ["LONGEST_STEP_S", "MOST_PAIRS", "Plan", "Windows", "make_plan", "sampled_models"]

#: Longer horizons are asked for this often.
LONGEST_STEP_S = 1800.0
#: Of a horizon, at most so many (window, model) pairs are asked for; of more, windows are drawn.
MOST_PAIRS = 250_000
#: The fewest windows of the longest horizon in each origin's stretch.
_FEWEST_WINDOWS = 2

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Plan:
    """`origins` float64[K]: where stretches of scored time begin; the last one ends at `until_s`.

    `times`: for each of `HORIZONS_S`, the ends of windows that are scored, float64[T], rising. `drawn_ratio`: which share of all windows
    they are, by horizon. A horizon that the log is too short for has no times.
    """

    origins: Floats
    until_s: float
    times: tuple[Floats, ...]
    drawn_ratio: tuple[float, ...]

    @property
    def moments(self) -> Floats:
        """All times at which anything is asked, rising."""
        return np.unique(np.concatenate(self.times))

    def origin_of(self, times: Floats) -> npt.NDArray[np.int64]:
        """int64: the number of the origin before each time."""
        return np.searchsorted(self.origins, times, side="right") - 1


def make_plan(t0: float, t1: float, models: int, *, warmup_ratio: float, origins: int, seed: int, path: str = "") -> Plan:
    """The windows of a log from `t0` to `t1`. Raises `InputError` for one that is too short for any horizon."""
    from_s = t0 + warmup_ratio * (t1 - t0)
    starts = np.linspace(from_s, t1, origins + 1)
    times: list[Floats] = []
    ratios: list[float] = []
    for number, horizon_s in enumerate(HORIZONS_S):
        step_s = min(horizon_s, LONGEST_STEP_S)
        first = int(np.ceil(max(from_s - t0, horizon_s) / step_s))
        last = int(np.floor((t1 - horizon_s - t0) / step_s))
        ends = t0 + step_s * np.arange(first, last + 1)
        of_origin = np.searchsorted(starts, ends, side="right").clip(1, origins) - 1
        if int(np.bincount(of_origin, minlength=origins).min()) < _FEWEST_WINDOWS:
            times.append(np.zeros(0))
            ratios.append(0.0)
            continue
        most = max(origins * _FEWEST_WINDOWS, MOST_PAIRS // max(models, 1))
        if len(ends) > most:
            # One from each of `most` equal groups, by lot: evenly over time, and in step with no cycle.
            rng = np.random.default_rng([seed, number])
            edges = np.linspace(0, len(ends), most + 1)
            places = np.minimum((edges[:-1] + rng.random(most) * np.diff(edges)).astype(np.int64), len(ends) - 1)
            ratios.append(most / len(ends))
            ends = ends[np.unique(places)]
        else:
            ratios.append(1.0)
        times.append(ends.astype(np.float64))
    if not any(len(ends) for ends in times):
        need_s = HORIZONS_S[0] * _FEWEST_WINDOWS * origins / max(1.0 - warmup_ratio, 1e-9)
        raise InputError(
            f"spans {_span(t1 - t0)}, too short for a backtest with {origins} origins after a warm-up of {warmup_ratio:.0%}; "
            f"give a log of {_span(max(need_s, 3600.0))} or more, or fewer --origins",
            path=path,
        )
    return Plan(starts[:-1], t1, tuple(times), tuple(ratios))


class Windows:
    """What a log says of windows: which models were idle, which were used next. `ts` float64[N] rising, `model` int[N] below `models`."""

    def __init__(self, ts: Floats, model: npt.NDArray[np.integer], models: int) -> None:
        order = np.argsort(model, kind="stable")
        self._ts = ts[order]
        self._end = np.cumsum(np.bincount(model, minlength=models))
        self._models = models

    def next_rows(self, times: Floats) -> Floats:
        """float64[models, T]: the time of each model's first row at or after each of `times`; inf where there is none."""
        out = np.full((self._models, len(times)), np.inf)
        begin = 0
        for m, end in enumerate(self._end.tolist()):
            own = self._ts[begin:end]
            begin = end
            at = np.searchsorted(own, times, side="left")
            there = at < len(own)
            out[m, there] = own[at[there]]
        return out


def sampled_models(names: list[str], most: int, seed: int) -> npt.NDArray[np.bool_]:
    """bool[n]: which models are kept of more than `most`: those with the least hash of their names, so that more rows change nothing."""
    kept = np.ones(len(names), dtype=np.bool_)
    if len(names) <= most:
        return kept
    import hashlib

    ranks = [hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest() for name in names]
    kept[:] = False
    kept[sorted(range(len(names)), key=ranks.__getitem__)[:most]] = True
    return kept


def _span(seconds: float) -> str:
    if seconds < 7200.0:
        return f"{seconds / 60.0:,.0f} minutes"
    return f"{seconds / 3600.0:,.1f} hours" if seconds < 172800.0 else f"{seconds / 86400.0:,.1f} days"

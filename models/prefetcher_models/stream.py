"""The hazard over a log, block after block: what a replay asks for and what a controller does a tick at a time.

Features and forecasts don't depend on decisions, so a stretch of the log is scored at once: each row right after it
came, and every model at each tick. Fits happen at the whole half hours at which they are due, between what came
before and what comes after; those of the sources that add columns come before the hazard's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefetcher.core.traffic import Traffic
from prefetcher_models.feature_source import FeatureSource
from prefetcher_models.hazard import Hazard, HazardSettings
from prefetcher_models.samples import EPOCH_S
from prefetcher_models.sources import Sources

__all__ = ["HazardStream", "ScoredBlock"]


@dataclass(frozen=True, slots=True)
class ScoredBlock:
    """Probabilities of use within each of the stream's horizons (H of them), in [from_s, until_s).

    `p_rows` float32[N, H], after each row, for its model; `ticks` float64[T], seconds; `p_ticks` float32[T, n_models,
    H], NaN for a model that was not used before.
    """

    from_s: float
    until_s: float
    p_rows: npt.NDArray[np.float32]
    ticks: npt.NDArray[np.float64]
    p_ticks: npt.NDArray[np.float32]


class HazardStream:
    """One traffic state, the sources of further columns and one hazard, moved through a log together. The blocks' bounds don't change
    the result.

    `horizons` are the indices of the `HORIZONS_S` that are wanted; only these are fitted. Ticks are at origin_s +
    k·tick_s, k = 0, 1, …
    """

    def __init__(
        self,
        n_models: int,
        origin_s: float,
        *,
        tick_s: float = 60.0,
        horizons: tuple[int, ...] = (1, 3, 6, 7),
        settings: HazardSettings | None = None,
        sources: Sequence[FeatureSource] = (),
    ) -> None:
        self.traffic = Traffic(n_models)
        self.sources = Sources(sources)
        self.hazard = Hazard(replace(settings or HazardSettings(), horizons=horizons), names=self.sources.names)
        self.horizons = horizons
        self._origin_s = origin_s
        self._tick_s = tick_s
        self._at_s = origin_s
        self._tick = 0

    @property
    def at_s(self) -> float:
        """Where the last block ended."""
        return self._at_s

    def advance(
        self,
        ts: npt.NDArray[np.float64],
        model: npt.NDArray[np.int64],
        user: npt.NDArray[np.int64] | None,
        count: npt.NDArray[np.int64] | None,
        until_s: float,
    ) -> ScoredBlock:
        """Take in the rows of [the last block's end, until_s), sorted by time, and score them and the ticks in it.

        Raises `ValueError` for rows outside of it, or of models that the stream was not made for.
        """
        from_s, n = self._at_s, self.traffic.n_models
        if len(ts) and not (from_s <= ts[0] and ts[-1] < until_s and model.max() < n):
            raise ValueError(
                f"rows from {ts[0]} to {ts[-1]} of models up to {model.max()}, expected them in [{from_s}, {until_s}) "
                f"and below {n}"
            )
        last = self._tick + max(0, int(np.ceil((until_s - self._tick_time(self._tick)) / self._tick_s)))
        while self._tick_time(last) < until_s:
            last += 1
        while last > self._tick and self._tick_time(last - 1) >= until_s:
            last -= 1
        ticks = self._tick_time(np.arange(self._tick, last))
        p_rows = np.empty((len(ts), len(self.horizons)), np.float32)
        p_ticks = np.full((len(ticks), n, len(self.horizons)), np.nan, np.float32)
        i = k = 0
        while self._at_s < until_s:
            if self._at_s % EPOCH_S == 0.0:
                self.sources.refit(self._at_s)
            if self.hazard.next_fit_s <= self._at_s:
                self.hazard.refit(self._at_s)
            end_s = min(until_s, (self._at_s // EPOCH_S + 1.0) * EPOCH_S)
            j, z = int(np.searchsorted(ts, end_s)), int(np.searchsorted(ticks, end_s))
            block = self.traffic.advance(
                ts[i:j],
                model[i:j],
                None if user is None else user[i:j],
                None if count is None else count[i:j],
                ticks=ticks[k:z],
                from_s=self._at_s,
                until_s=end_s,
            )
            block = self.sources.widened(self.traffic, block)
            p_rows[i:j] = self.hazard.probabilities(block.row_features, self.horizons)
            p_ticks[k + block.tick_of, block.tick_model] = self.hazard.probabilities(block.tick_features, self.horizons)
            self.hazard.learn(self.traffic, block)
            i, k, self._at_s = j, z, end_s
        self._tick = last
        return ScoredBlock(from_s, until_s, p_rows, ticks, p_ticks)

    def _tick_time(self, k: npt.NDArray[np.int64] | int) -> npt.NDArray[np.float64]:
        return self._origin_s + np.asarray(k) * self._tick_s

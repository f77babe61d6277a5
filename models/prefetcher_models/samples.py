"""A bounded, unbiased sample of feature rows with the time of each one's next use: what the hazard is fitted on.

Candidates are all rows of the log and all (model, tick) pairs. Each gets a pseudo-random rank from the seed and its
own identity, and every half hour keeps those of lowest rank, so that the sample does not depend on how the log was
cut into blocks. The store forgets the old at random once it is full. Outcomes come from arrivals only, never from
what a policy did with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.compiled import kernel
from prefetcher.core.traffic import FEATURE_NAMES, Block

__all__ = ["EPOCH_S", "SampleStore", "Samples"]

#: Time over which a quota of samples is drawn: half hours of UTC, so that their bounds are exact.
EPOCH_S = 1800.0
#: Samples a day of rows, and as many of ticks; four times as many in the first hours, when every sample counts.
PER_DAY = 25_000
_EARLY_S = 6 * 3600.0
#: Arrivals buffered until their outcomes are looked up.
_MOST_ARRIVALS = 500_000
#: A model idle for long is forecast alike at every tick: such ticks are drawn less often. (idle seconds, factor)
_IDLE_WEIGHTS = ((21600.0, 0.5), (172800.0, 0.2))
_FIELDS = ("x", "t", "model", "rank", "next_s")

_TICKS = 0x5DEECE66D
_MIX_1, _MIX_2, _MIX_3 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _ranks(seed: int, *parts: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Pseudo-random numbers in (0, 1], one for each combination of parts (SplitMix64's mixing, Steele et al. 2014)."""
    z = np.full(len(parts[0]), seed, dtype=np.uint64)
    for part in parts:
        z = (z ^ part) + _MIX_1
        z = (z ^ (z >> np.uint64(30))) * _MIX_2
        z = (z ^ (z >> np.uint64(27))) * _MIX_3
        z ^= z >> np.uint64(31)
    return ((z >> np.uint64(11)).astype(np.float64) + 1.0) / 2.0**53


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples in order of time: `x` float32[n, F], `t` float64[n], `model` int64[n], `rank` and `next_s` float64[n]
    (inf while unknown).
    """

    x: npt.NDArray[np.float32]
    t: npt.NDArray[np.float64]
    model: npt.NDArray[np.int64]
    rank: npt.NDArray[np.float64]
    next_s: npt.NDArray[np.float64]

    @classmethod
    def of(cls, x: Any, t: Any, model: Any, rank: Any) -> Samples:
        """Samples whose next use is not known yet."""
        return cls(x, t, model, rank, np.full(len(t), np.inf))

    def at(self, which: npt.NDArray[Any]) -> Samples:
        """The samples at `which` (indices or a mask)."""
        return Samples(*(getattr(self, field)[which] for field in _FIELDS))

    def lowest(self, quota: int) -> Samples:
        """The `quota` samples of lowest rank."""
        if len(self.t) <= quota:
            return self
        return self.at(np.sort(np.argpartition(self.rank, quota)[:quota]))


class SampleStore:
    """At most four times `most` samples of the half hours that are over, and the candidates of the current one; `width` features each."""

    def __init__(self, seed: int, most: int, width: int = len(FEATURE_NAMES)) -> None:
        self._seed = seed
        self._most = most
        self._width = width
        self._origin_s = np.inf
        self._epoch = 0
        self._rows = 0
        self._folds = 0
        self._kept = _nothing(width)
        self._open = [_nothing(width), _nothing(width)]
        self._closed: list[Samples] = []
        self._arrivals: list[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]] = []

    @property
    def rows(self) -> int:
        """Rows of the log that were drawn from."""
        return self._rows

    def take(self, block: Block, origin_s: float) -> None:
        """Draw from the block that follows the last one; `origin_s` is the time of the log's first row."""
        if not np.isfinite(origin_s):
            return
        if not np.isfinite(self._origin_s):
            self._origin_s = origin_s
            self._epoch = int(origin_s // EPOCH_S)
        n = len(block.ts)
        if n:
            self._arrivals.append((block.ts, block.model))
        numbers = np.arange(self._rows, self._rows + n, dtype=np.uint64)
        self._rows += n
        drawn: list[tuple[int, Samples]] = []
        if len(block.row_features):
            came = np.flatnonzero(np.isfinite(block.row_features[:, 0]))
            ranks = _ranks(self._seed, numbers[came])
            drawn.append((0, Samples.of(block.row_features[came], block.ts[came], block.model[came], ranks)))
        if len(block.tick_of):
            t, model = block.ticks[block.tick_of], block.tick_model.astype(np.int64)
            ranks = _ranks(self._seed ^ _TICKS, t.view(np.uint64), model.astype(np.uint64))
            log_idle = block.tick_features[:, 0]
            for seconds, weight in _IDLE_WEIGHTS:
                ranks[log_idle >= np.log(seconds)] /= weight
            drawn.append((1, Samples.of(block.tick_features, t, model, ranks)))
        for epoch in range(self._epoch_of(block.from_s), self._epoch_of(block.until_s) + 1):
            self._close_before(epoch)
            begin_s = epoch * EPOCH_S
            for kind, samples in drawn:
                inside = (samples.t >= begin_s) & (samples.t < begin_s + EPOCH_S)
                self._open[kind] = _join([self._open[kind], samples.at(inside)]).lowest(self._quota())
        if sum(len(ts) for ts, _ in self._arrivals) > _MOST_ARRIVALS:
            self.samples(block.until_s)

    def samples(self, now_s: float) -> Samples:
        """The samples of the half hours that are over at `now_s`, in order of time, with the known outcomes."""
        self._close_before(self._epoch_of(now_s))
        if self._closed:
            self._kept = _join([self._kept, *self._closed])
            self._closed = []
        self._resolve()
        while len(self._kept.t) > 4 * self._most:
            rng = np.random.default_rng([self._seed & 0xFFFFFFFF, self._folds])
            self._folds += 1
            self._kept = self._kept.at(rng.random(len(self._kept.t)) < np.linspace(0.4, 1.0, len(self._kept.t)))
        return self._kept

    def snapshot(self) -> dict[str, np.ndarray]:
        """All of it, as arrays."""
        samples = {"kept": _join([self._kept, *self._closed]), "open_rows": self._open[0], "open_ticks": self._open[1]}
        ts, model = self._buffered()
        return {
            **{f"{name}_{field}": getattr(part, field) for name, part in samples.items() for field in _FIELDS},
            "arrivals_ts": ts,
            "arrivals_model": model,
            "numbers": np.array([self._epoch, self._rows, self._folds], dtype=np.int64),
            "origin_s": np.array(self._origin_s),
        }

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Take over a snapshot. Raises `KeyError` if it lacks a part, `ValueError` if it has other features."""
        kept, *opened = (
            Samples(*(np.array(snapshot[f"{name}_{field}"]) for field in _FIELDS)) for name in ("kept", "open_rows", "open_ticks")
        )
        if any(part.x.shape != (len(part.t), self._width) for part in (kept, *opened)):
            raise ValueError(f"samples of shape {kept.x.shape}, expected {self._width} features")
        self._kept, self._open = kept, opened
        self._closed = []
        self._arrivals = [(np.array(snapshot["arrivals_ts"]), np.array(snapshot["arrivals_model"]))]
        self._epoch, self._rows, self._folds = (int(v) for v in snapshot["numbers"])
        self._origin_s = float(snapshot["origin_s"])

    def _epoch_of(self, t: float) -> int:
        return max(self._epoch, int(t // EPOCH_S))

    def _quota(self) -> int:
        age_s = (self._epoch + 1) * EPOCH_S - self._origin_s
        early = 4.0 if age_s <= _EARLY_S else 1.0
        return int(early * PER_DAY * EPOCH_S / max(86400.0, 0.04 * age_s))

    def _close_before(self, epoch: int) -> None:
        if epoch <= self._epoch:
            return
        both = _join(self._open)
        self._closed.append(both.at(np.argsort(both.t, kind="stable")))
        self._open = [_nothing(self._width), _nothing(self._width)]
        self._epoch = epoch

    def _buffered(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        if not self._arrivals:
            return np.zeros(0), np.zeros(0, np.int64)
        return np.concatenate([ts for ts, _ in self._arrivals]), np.concatenate([m for _, m in self._arrivals])

    def _resolve(self) -> None:
        """Fill in the next uses that the arrivals since the last time tell; keep those of the current half hour for
        its samples.
        """
        ts, model = self._buffered()
        order = np.lexsort((ts, model))
        kept = self._kept
        n = int(max(model.max(initial=-1), kept.model.max(initial=-1))) + 1
        ends = np.cumsum(np.bincount(model, minlength=n))
        _next_uses(ts[order], ends, kept.t, kept.model, kept.next_s)
        inside = ts >= self._epoch * EPOCH_S
        self._arrivals = [(ts[inside], model[inside])]


def _nothing(width: int) -> Samples:
    return Samples.of(np.zeros((0, width), np.float32), np.zeros(0), np.zeros(0, np.int64), np.zeros(0))


def _join(parts: list[Samples]) -> Samples:
    return Samples(*(np.concatenate([getattr(part, field) for part in parts]) for field in _FIELDS))


@kernel
def _next_uses(ts: Any, ends: Any, t: Any, model: Any, next_s: Any) -> None:
    """The first of each model's times ts[ends[m - 1] : ends[m]] after t, into `next_s` where it is still inf."""
    for i in range(len(t)):
        if next_s[i] != np.inf:
            continue
        m = model[i]
        low, end = ends[m - 1] if m > 0 else 0, ends[m]
        high = end
        while low < high:
            middle = (low + high) // 2
            if ts[middle] <= t[i]:
                low = middle + 1
            else:
                high = middle
        if low < end:
            next_s[i] = ts[low]

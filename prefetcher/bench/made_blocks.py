"""Made-up cold seconds of node-blocks, with and without prefetching: what the control group's analysis is tried on (`bench ab`).

No public log has sixteen nodes for two weeks, so blocks are made from what logs show, and harder rather than easier than those:

- nodes differ, a few have most of the waiting: cold starts in a measured block are lognormal over nodes, median 6, sigma 0.9;
- hours differ: a daily wave of each node's own height (0.3 to 0.9) and peak (14 h, give or take 2), weekends at 0.4 to 1;
- neighbours are alike: log-rates follow AR(1), of all nodes together (0.8 an hour, sigma 0.3) and of each (0.7, sigma 0.6);
- cascades: in one block of a hundred, three times Pareto(1.5) as many cold starts (60 times at most), half as many more in the next;
- cold starts are counted: Poisson, given the rate;
- heavy tails: seconds of one are lognormal, median 4, sigma 1.3 (50 MB to 140 GB), times 1 to 200 who wait for it, Pareto(1.8);
- prefetching saves four fifths of a cold start, with a chance that differs by node (0.5 to 1.5 of the mean) and by block, and makes new;
- shadow caches see nine of ten cold starts, each wrong by a factor (sigma 0.4), and a tenth that were none;
- carry-over: what the other side left wears off with 600 s. The first 600 s are the wash-out; 7 % of a block's effect remain after it.

Covers no analysis. Deterministic in its generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["MadeBlocks", "make_blocks", "observed"]

Floats = npt.NDArray[np.float64]

#: Monday, 1 January 2024, as a number of hours since 1970.
FIRST_BLOCK = 473_352
_LEFT = 0.2  #: of a cold start that prefetching was in time for
_NEW = 0.03  #: cold seconds that prefetching causes, over those without it
_CARRIED = 600.0 * (math.exp(-1.0) - math.exp(-6.0)) / 3000.0


@dataclass(frozen=True, slots=True)
class MadeBlocks:
    """float64[nodes, blocks] each: seconds waited without and with prefetching, what the shadow says, and requests."""

    without_s: Floats
    with_s: Floats
    shadow_s: Floats
    rows: Floats

    @property
    def saving(self) -> float:
        """The true saving over all these blocks."""
        return 1.0 - float(self.with_s.sum()) / float(self.without_s.sum())


def make_blocks(rng: np.random.Generator, nodes: int = 16, days: int = 14, saving: float = 0.2) -> MadeBlocks:
    """Blocks of an hour for which prefetching saves `saving` in the mean over experiments."""
    blocks = days * 24
    rate = _rates(rng, nodes, blocks)
    counts = rng.poisson(rate)
    where = np.repeat(np.arange(counts.size), counts.ravel())
    without = _seconds(rng, len(where))
    skill = rng.uniform(0.5, 1.5, nodes)[:, None] * rng.beta(4.0, 4.0, (nodes, blocks)) * 2.0
    chance = np.clip((saving + _NEW) / (1.0 - _LEFT) * skill, 0.0, 1.0).ravel()[where]
    helped = rng.random(len(where)) < chance
    fewer = np.where(helped, without * _LEFT, without)
    new = rng.poisson(rate * _NEW)
    shape = (nodes, blocks)
    return MadeBlocks(
        without_s=_sums(where, without, shape),
        with_s=_sums(where, fewer, shape) + _sums(*_more(rng, new), shape),
        shadow_s=_seen(rng, where, without, shape) + _sums(*_more(rng, rng.poisson(rate * 0.1)), shape),
        rows=(counts * 50.0 + rng.poisson(200.0, shape)).astype(np.float64),
    )


def observed(made: MadeBlocks, control: npt.NDArray[np.bool_]) -> Floats:
    """float64[nodes, blocks]: what is measured where `control` bool[nodes, blocks] does without prefetching, with what is carried over."""
    before = np.concatenate([control[:, :1], control[:, :-1]], axis=1)
    side = np.where(control, made.without_s, made.with_s)
    other = np.where(control, made.with_s, made.without_s)
    return np.where(control == before, side, side + _CARRIED * (other - side))


def _rates(rng: np.random.Generator, nodes: int, blocks: int) -> Floats:
    hour = np.arange(blocks) + FIRST_BLOCK
    usual = np.exp(rng.normal(math.log(6.0), 0.9, (nodes, 1)))
    height, peak = rng.uniform(0.3, 0.9, (nodes, 1)), rng.normal(14.0, 2.0, (nodes, 1))
    wave = 1.0 + height * np.cos((hour - peak) * 2.0 * np.pi / 24.0)
    weekend = np.where((hour // 24 + 3) % 7 >= 5, rng.uniform(0.4, 1.0, (nodes, 1)), 1.0)
    noise = _autoregressive(rng, 1, blocks, 0.8, 0.3) + _autoregressive(rng, nodes, blocks, 0.7, 0.6)
    storm = np.where(rng.random((nodes, blocks)) < 0.01, np.minimum(60.0, 3.0 * (1.0 - rng.random((nodes, blocks))) ** (-1.0 / 1.5)), 0.0)
    storm[:, 1:] += 0.5 * storm[:, :-1]
    return usual * wave * weekend * np.exp(noise) * (1.0 + storm)


def _autoregressive(rng: np.random.Generator, series: int, steps: int, keeps: float, sigma: float) -> Floats:
    """float64[series, steps] of AR(1) with this standard deviation, as it is in the long run."""
    noise = rng.normal(0.0, sigma, (series, steps))
    noise[:, 1:] *= math.sqrt(1.0 - keeps**2)
    for k in range(1, steps):
        noise[:, k] += keeps * noise[:, k - 1]
    return noise


def _seconds(rng: np.random.Generator, count: int) -> Floats:
    waiting = np.minimum(200.0, np.floor((1.0 - rng.random(count)) ** (-1.0 / 1.8)))
    return np.exp(rng.normal(math.log(4.0), 1.3, count)) * waiting


def _more(rng: np.random.Generator, counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Floats]:
    where = np.repeat(np.arange(counts.size), counts.ravel())
    return where, _seconds(rng, len(where))


def _seen(rng: np.random.Generator, where: npt.NDArray[np.int64], seconds: Floats, shape: tuple[int, int]) -> Floats:
    seen = rng.random(len(where)) < 0.9
    return _sums(where[seen], seconds[seen] * np.exp(rng.normal(0.0, 0.4, int(seen.sum()))), shape)


def _sums(where: npt.NDArray[np.int64], seconds: Floats, shape: tuple[int, int]) -> Floats:
    return np.bincount(where, seconds, shape[0] * shape[1]).reshape(shape).astype(np.float64)

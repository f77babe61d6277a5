"""The demo's traffic: days with peaks, a bursty tail, and models that follow each other. Pure and seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["DAY_S", "Arrival", "make_traffic"]

DAY_S = 86_400.0
#: Asked for around a peak hour: (model, requests a day, peak hour, width in hours).
_DAILY = (
    ("chat-large", 70, 14.0, 3.0),
    ("chat-small", 80, 13.0, 4.0),
    ("code-large", 50, 10.0, 2.0),
    ("embed", 70, 2.0, 1.5),
    ("summarize", 35, 8.0, 1.0),
)
#: A batch that comes at a fixed beat: (model, period in seconds, jitter in seconds).
_BEATS = (("moderate", 1800.0, 30.0), ("rerank", 3600.0, 60.0))
#: Bursts a day, and requests in one.
_TAIL = (("vision", 8, 6), ("translate", 8, 5), ("adapter-legal", 4, 4))
#: (first, then, chance, mean seconds between): who follows whom.
_FOLLOWS = (("vision", "ocr", 0.9, 150.0), ("translate", "speech", 0.9, 150.0), ("code-large", "rerank", 0.3, 600.0))


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """A request for `model`, `at_s` seconds after the first midnight."""

    at_s: float
    model: str


def make_traffic(days: int = 2, seed: int = 0) -> list[Arrival]:
    """All arrivals of `days` days, sorted; the same seed gives the same."""
    rng = np.random.default_rng(seed)
    found: list[Arrival] = []
    for day in range(days):
        start = day * DAY_S
        for model, mean, hour, width in _DAILY:
            at = rng.normal(hour * 3600.0, width * 3600.0, rng.poisson(mean)) % DAY_S
            found += [Arrival(start + float(t), model) for t in at]
        for model, bursts, size in _TAIL:
            for first in rng.uniform(7 * 3600.0, 22 * 3600.0, rng.poisson(bursts)):
                gaps = np.cumsum(rng.exponential(240.0, 1 + rng.poisson(size - 1)))
                found += [Arrival(start + float(first + gap), model) for gap in gaps]
        for model, period, jitter in _BEATS:
            beats = np.arange(period / 2, DAY_S, period)
            found += [Arrival(start + float(t + rng.normal(0.0, jitter)), model) for t in beats]
    followers = [
        Arrival(a.at_s + float(rng.exponential(wait_s)), then)
        for a in sorted(found)
        for first, then, chance, wait_s in _FOLLOWS
        if a.model == first and rng.random() < chance
    ]
    return sorted(a for a in found + followers if 0.0 <= a.at_s < days * DAY_S)

"""The walk over a log: what every contender said at every moment of the plan, beside what then happened.

Rows are handed over up to each moment, then all are asked, then the rest follows: nothing can look ahead. Fits happen at whole half hours,
as they do live. What is kept is bounded by the plan, not by the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.backtest.contenders import Contender
from prefetcher.backtest.plan import Plan, Windows
from prefetcher.backtest.segments import segments_of
from prefetcher.core.traffic import Traffic
from prefetcher.core.types import HORIZONS_S
from prefetcher_models.samples import EPOCH_S

__all__ = ["TICK_S", "Outcomes", "Rows", "walk"]

#: Ticks between moments, from which predictors learn: those of a controller.
TICK_S = 60.0

Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """A log for predictors: `ts` float64[N] rising, `model`, `user` (−1 for none), `count` int64[N]; n `models`."""

    ts: npt.NDArray[np.float64]
    model: npt.NDArray[np.int64]
    user: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    models: int


@dataclass(slots=True)
class Outcomes:
    """Of one horizon, all candidates of all its windows, in order of time: P pairs.

    `used` bool[P]; `segment` int8[P]; `origin` int8[P]; `p`: float32[P] by contender, NaN where it failed.
    """

    used: npt.NDArray[np.bool_]
    segment: npt.NDArray[np.int8]
    origin: npt.NDArray[np.int8]
    p: dict[str, npt.NDArray[np.float32]]


@dataclass(slots=True)
class _Growing:
    used: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    segment: list[npt.NDArray[np.int8]] = field(default_factory=list)
    origin: list[npt.NDArray[np.int8]] = field(default_factory=list)
    p: dict[str, list[npt.NDArray[np.float32]]] = field(default_factory=dict)

    def closed(self, names: Sequence[str]) -> Outcomes:
        def of(parts: list[npt.NDArray[Any]], kind: type) -> npt.NDArray[Any]:
            return np.concatenate(parts) if parts else np.zeros(0, kind)

        p = {name: of(self.p.get(name, []), np.float32) for name in names}
        return Outcomes(of(self.used, np.bool_), of(self.segment, np.int8), of(self.origin, np.int8), p)


def walk(rows: Rows, plan: Plan, contenders: Sequence[Contender], progress: Progress = lambda _done, _what: None) -> list[Outcomes]:
    """What came of every window, for each of `HORIZONS_S`."""
    t0 = float(rows.ts[0])
    moments = plan.moments
    windows = Windows(rows.ts, rows.model, rows.models)
    next_s = [windows.next_rows(times) for times in plan.times]
    place = [0] * len(HORIZONS_S)
    growing = [_Growing() for _ in HORIZONS_S]
    traffic = Traffic(rows.models)
    half_hours = np.arange(np.ceil(t0 / EPOCH_S), np.floor(plan.until_s / EPOCH_S) + 1.0) * EPOCH_S
    # Nothing is asked after the last moment; its block ends where the log does.
    edges = np.unique(np.concatenate([[t0], moments, half_hours[half_hours < moments[-1]], [np.nextafter(plan.until_s, np.inf)]]))
    asked_at = np.isin(edges[:-1], moments)
    bounds = np.searchsorted(rows.ts, edges)
    for step, (from_s, until_s) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        asked = bool(asked_at[step])
        if from_s % EPOCH_S == 0.0:
            for contender in contenders:
                contender.refit(from_s)
        said = [contender.before(traffic, from_s) if asked else None for contender in contenders]
        # What is known at the moment, for the rows of the block change it.
        last_s, first_s, total = traffic.last_s.copy(), traffic.first_s.copy(), traffic.total.copy()
        part = slice(bounds[step], bounds[step + 1])
        first_tick, end_tick = (int(np.ceil((edge - t0) / TICK_S - 1e-9)) for edge in (from_s, until_s))
        ticks = t0 + TICK_S * np.arange(first_tick, end_tick)
        block = traffic.advance(
            rows.ts[part], rows.model[part], rows.user[part], rows.count[part],
            ticks=ticks[(ticks >= from_s) & (ticks < until_s)], from_s=from_s, until_s=until_s,
        )  # fmt: skip
        answers = {c.name: c.at(traffic, block, asked, s) for c, s in zip(contenders, said, strict=True)}
        if asked:
            segment = segments_of(traffic, block, from_s, first_s, total)
            for h, horizon_s in enumerate(HORIZONS_S):
                k = place[h]
                if k >= len(plan.times[h]) or plan.times[h][k] != from_s:
                    continue
                place[h] += 1
                idle = last_s < from_s - horizon_s
                kept = growing[h]
                kept.used.append(next_s[h][idle, k] < from_s + horizon_s)
                kept.segment.append(segment[idle])
                kept.origin.append(np.full(int(idle.sum()), plan.origin_of(np.array([from_s]))[0], np.int8))
                for name, p in answers.items():
                    kept.p.setdefault(name, []).append(p[idle, h])
        progress((from_s - t0) / max(plan.until_s - t0, 1e-9), "asking predictors")
    return [kept.closed([c.name for c in contenders]) for kept in growing]

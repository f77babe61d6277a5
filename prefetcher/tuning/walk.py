"""The tuner of windows over a log: shadow caches of every candidate go through its rows, and each hour the tuner looks at what they cost.

The same walk serves `prefetcher tune`, the benchmarks and whoever tunes over recent history. Models are sorted into segments by the last
week of rows, anew each day; the segments themselves are found once, after the first day, unless the book that it begins with has some. All
nodes of a log share one book: what they cost is added up. Covers neither forecasts (rates come in block by block) nor what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetcher.core.experts import EXPERTS, PERIOD_S, expert_policies
from prefetcher.core.node import Hazard, Policy
from prefetcher.core.segments import MOST_SEGMENTS, SORTED_S, facts_before, find_segments
from prefetcher.core.tuner import CANDIDATES, Decision, TunerSettings, WindowTuner, book_of
from prefetcher.core.types import Window
from prefetcher.core.window_caches import COSTS, WindowCaches
from prefetcher.core.windows import DEFAULT_WINDOW, FactTable, WindowBook
from prefetcher.replay.engine import NodeLog
from prefetcher.replay.ours import RateBlock

__all__ = ["Day", "TuningWalk"]

Floats = npt.NDArray[np.float64]

_DAY_S = SORTED_S
#: Segments are found after a day: before, a daily cycle looks like two kinds of models.
_FOUND_AFTER_S = _DAY_S


@dataclass(frozen=True, slots=True)
class Day:
    """A day of the log: what the tuned windows cost, float64[COSTS], each candidate as the window of all, float64[candidates, COSTS], and
    each fixed one, float64[fixed, COSTS]; the book at its end."""

    from_s: float
    tuned: Floats
    together: Floats
    fixed: Floats
    book: WindowBook


class TuningWalk:
    """Goes through a log with the tuner, from `start` (a window for all, or a book with segments). `parts` are the log's nodes, each of
    `capacity_bytes`. `fixed` windows run beside it for comparison, each for all models and never changed.

    `days` is what every day cost, `decisions` what was changed, `in_force` the book now.
    """

    def __init__(
        self,
        parts: Sequence[NodeLog],
        capacity_bytes: float,
        *,
        settings: TunerSettings | None = None,
        start: Window | WindowBook = DEFAULT_WINDOW,
        fixed: Sequence[Window] = (),
        candidates: Sequence[Window] = CANDIDATES,
        policy: Policy | None = None,
        most_segments: int = MOST_SEGMENTS,
    ) -> None:
        self.days: list[Day] = []
        self.decisions: list[Decision] = []
        settings = settings or TunerSettings()
        self._parts = parts
        self._finds = isinstance(start, Window) or not start.entries
        book = start if isinstance(start, WindowBook) and start.entries else book_of((), start if isinstance(start, Window) else start.rest)
        self._tuner = WindowTuner(book, settings, candidates)
        self._most = most_segments if self._finds else len(book.entries)
        self._of_all = (*self._tuner.candidates, *fixed)
        self._together = len(self._tuner.candidates)
        expert = policy or expert_policies(settings.price_s_per_gb_h, DEFAULT_WINDOW.hold_s)[list(EXPERTS).index("hazard-prefetch")]
        self._caches = [
            WindowCaches(part.world, capacity_bytes, expert, self._most, self._together + 1, extra=self._of_all) for part in parts
        ]
        world = parts[0].world
        self._t0_s, self._t1_s = world.t0_s, world.t1_s
        self._size = world.size_bytes
        self._ts = np.concatenate([part.world.ts for part in parts])
        order = np.argsort(self._ts, kind="stable")
        self._ts, self._model = self._ts[order], np.concatenate([part.world.model for part in parts])[order]
        self._number = np.zeros(len(self._size), np.int64)
        self._day = self._new_day()
        self._sort(self._t0_s)

    @property
    def in_force(self) -> WindowBook:
        """The book that is in force now."""
        return self._tuner.book

    @property
    def tuner(self) -> WindowTuner:
        """The tuner, with its evidence."""
        return self._tuner

    def facts(self, now_s: float) -> FactTable:
        """The facts of all models, by the rows of the last week before `now_s`."""
        return facts_before(self._ts, self._model, self._size, self._t0_s, now_s)

    def take(self, block: RateBlock) -> None:
        """Goes through a block of rates, period by period."""
        for part, caches in zip(self._parts, self._caches, strict=True):
            first, last = np.searchsorted(part.rows, (block.first_row, block.last_row))
            after_row = np.ascontiguousarray(block.after_row[:, part.rows[first:last] - block.first_row])
            caches.see(Hazard(block.at_tick, after_row, block.at_tick[:, 0], block.first_tick, 0))
        for end_s, until_s in block.periods(self._t1_s):
            self._period(end_s, until_s)

    def close(self) -> None:
        """Ends a day that is not over."""
        if self._day[0] is not None:
            self._end_day()

    def _period(self, end_s: float, until_s: float) -> None:
        in_force, of_all = np.zeros(COSTS), np.zeros((len(self._of_all), COSTS))
        costs = np.zeros((self._rows, self._together + 1, COSTS))
        for part, caches in zip(self._parts, self._caches, strict=True):
            caches.go(int(np.searchsorted(part.world.ts, end_s)), until_s)
            for total, more in zip((in_force, costs, of_all), caches.costs(until_s), strict=True):
                total += more
        if self._day[0] is None:
            self._day = (end_s - PERIOD_S, *self._day[1:])
        self._day[1][:] += in_force
        self._day[2][:] += of_all
        known = len(self.in_force.entries)
        decisions = self._tuner.learn(costs[:known], in_force, PERIOD_S, end_s, of_all[: self._together])
        self.decisions += decisions
        if round((end_s - self._t0_s) / PERIOD_S) % round(_DAY_S / PERIOD_S) == 0:
            self._end_day()
            self._sort(end_s)
        elif decisions:
            self._set_windows()

    def _new_day(self) -> tuple[float | None, Floats, Floats]:
        return None, np.zeros(COSTS), np.zeros((len(self._of_all), COSTS))

    def _end_day(self) -> None:
        from_s, tuned, of_all = self._day
        begun_s = self._t0_s if from_s is None else from_s
        self.days.append(Day(begun_s, tuned, of_all[: self._together], of_all[self._together :], self.in_force))
        self._day = self._new_day()

    def _sort(self, now_s: float) -> None:
        """Sorts models into segments by what is known of them now; finds the segments, if it is time."""
        facts = self.facts(now_s)
        if self._finds and now_s >= self._t0_s + _FOUND_AFTER_S:
            found = find_segments(facts, self._most)
            self._finds = False
            if len(found) > 1:
                self._tuner.split(found, now_s)
        self._number = self.in_force.segment_numbers(facts)
        self._set_windows()

    def _set_windows(self) -> None:
        entries = self.in_force.entries
        windows = [*(entry.window for entry in entries), self.in_force.rest]
        # Until segments are found, the caches of those to come run along with what is in force: no model is theirs.
        self._rows = self._most if self._finds else len(entries)
        candidates = [*self._tuner.windows, *[self._tuner.windows[0]] * (self._rows - len(entries))]
        number = np.where(self._number < 0, len(entries), self._number)
        for caches in self._caches:
            caches.set_windows(number, windows, candidates)

"""Which windows are in force: a discounted Hedge for each segment over what candidate windows would have cost. Pure.

Evidence comes in period by period (`learn`): what the node would have cost with each candidate window of each segment, all else as in
force (`core.window_caches`). Decisions go out: changes of the book, each with its evidence. A window changes when another one would have
cost less lately by more than `hysteresis` of the whole, and by more than chance: by `certainty` times the root of the summed squares of the
periods' differences. What one segment changes is small beside the noise of a node, so the tuner is also told what each candidate would have
cost as the window of all segments together: all move there when that is certain, and one segment alone only when it is certain enough by
itself.

Seconds of waiting and GB·h held are made one by the price of a GB·h. With a waste budget, a GB·h of prefetches that nobody used costs more,
as much as it takes to keep the budget: the dual price, found anew in every period from the same evidence, under a budget that shrinks while
more is wasted than it allows (the subgradient's step) and grows back to what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.core.segments import ALL_MODELS
from prefetcher.core.types import Window
from prefetcher.core.value import DEFAULT_PRICE_S_PER_GB_H
from prefetcher.core.windows import (
    DEFAULT_WINDOW,
    NO_LEAD_LIMIT_S,
    OWN_HORIZON_S,
    BookEntry,
    Segment,
    WindowBook,
    check_window,
    window_in_words,
)
from prefetcher.errors import InputError

__all__ = ["CANDIDATES", "Cost", "Decision", "TunerSettings", "WindowTuner", "book_of"]

Floats = npt.NDArray[np.float64]

#: The windows that compete: that of today, others that bound less or more, and one that fetches next to nothing.
CANDIDATES: tuple[Window, ...] = (
    DEFAULT_WINDOW,
    Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 3600.0),
    Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 120.0),
    Window(NO_LEAD_LIMIT_S, 300.0, 600.0),
    Window(NO_LEAD_LIMIT_S, 3600.0, 1800.0),
    Window(1800.0, OWN_HORIZON_S, 600.0),
    Window(900.0, 300.0, 600.0),
    Window(900.0, 3600.0, 1800.0),
    Window(300.0, 300.0, 600.0),
    Window(300.0, 900.0, 600.0),
    Window(60.0, 300.0, 300.0),
    Window(0.0, 300.0, 60.0),
)
#: The dual price is looked for between these, seconds per GB·h of waste, in steps of a tenth.
_DUAL_PRICES = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 194)])
#: How fast the budget inside follows what was really wasted, and how small it may get.
_STEP = 0.1
_TIGHTEST = 0.2
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TunerSettings:
    """`price_s_per_gb_h`: seconds of waiting that a GB held for an hour is worth; `waste_gb_h_per_day` bounds what is wasted, if given.

    `half_life_s` of the evidence; `hysteresis`, as a share of the whole cost; `certainty`, how many times the root of the summed squares
    a gain must be, for all segments together and for one `alone`; `settle_periods` pass before anything changes, and what was changed
    stands for `stands_s`: of a dozen candidates one is always lucky, and hour by hour windows would follow luck. Half-life, hysteresis and
    certainty did best on the first weeks of three logs: twice the certainty misses changes that pay, none follows every lucky hour.
    """

    price_s_per_gb_h: float = DEFAULT_PRICE_S_PER_GB_H
    waste_gb_h_per_day: float | None = None
    half_life_s: float = 86_400.0
    hysteresis: float = 0.002
    settle_periods: int = 6
    stands_s: float = 86_400.0
    certainty: float = 1.0
    certainty_alone: float = 3.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a window costs the node: `wait_s` cold seconds and `held_gb_h` GB·h, and of these `wasted_gb_h` of prefetches unused."""

    wait_s: float
    held_gb_h: float
    wasted_gb_h: float

    def seconds(self, price_s_per_gb_h: float, dual_price: float = 0.0) -> float:
        """Seconds of waiting, plus the price of what was held and of what was wasted."""
        return self.wait_s + price_s_per_gb_h * self.held_gb_h + dual_price * self.wasted_gb_h


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of one segment's window, with its evidence: what the node would have cost, lately and discounted, with the `old` window and
    with the `new` one, over `periods` periods. `dual_price` is that of a wasted GB·h, 0 without a budget."""

    segment: str
    old: Window
    new: Window
    at_s: float
    old_cost: Cost
    new_cost: Cost
    periods: int
    dual_price: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        windows = {name: {"lead_s": w.lead_s, "horizon_s": w.horizon_s, "hold_s": w.hold_s} for name, w in self._windows()}
        costs = {f"{name}_cost": {"wait_s": c.wait_s, "held_gb_h": c.held_gb_h, "wasted_gb_h": c.wasted_gb_h} for name, c in self._costs()}
        rest = {"at_s": self.at_s, "periods": self.periods, "dual_price": self.dual_price, "why": self.why}
        return {"segment": self.segment, **windows, **costs, **rest}

    def _windows(self) -> tuple[tuple[str, Window], ...]:
        return ("old", self.old), ("new", self.new)

    def _costs(self) -> tuple[tuple[str, Cost], ...]:
        return ("old", self.old_cost), ("new", self.new_cost)


def book_of(segments: Sequence[Segment], window: Window = DEFAULT_WINDOW, now_s: float = 0.0, why: str = "") -> WindowBook:
    """A book in which every segment, and the rest, has the same window."""
    return WindowBook(tuple(BookEntry(segment, window, now_s, why) for segment in segments or (ALL_MODELS,)), rest=window)


class WindowTuner:
    """Tunes the windows of `book`, segment by segment; `book` is what is in force.

    `windows[s]` are what segment s chooses from: `candidates`, and last the window that it had when the tuner began.
    """

    def __init__(self, book: WindowBook, settings: TunerSettings | None = None, candidates: Sequence[Window] = CANDIDATES) -> None:
        self.settings = settings or TunerSettings()
        for window in candidates:
            check_window(window)
        self._candidates = tuple(candidates)
        self.dual_price = 0.0
        self._tightness = 1.0
        self._changed_s = -math.inf
        #: What each candidate would have cost as the window of all, and squares of differences between each two: float64[candidates, 3] and
        #: float64[candidates, candidates], whatever the segments are.
        self._of_all = np.zeros((len(self._candidates), 3))
        self._of_all_squares = np.zeros((len(self._candidates), len(self._candidates)))
        self._of_all_s = 0.0
        self._of_all_periods = 0
        self._begin(book)

    def _begin(self, book: WindowBook) -> None:
        self.book = book
        self.windows = [(*self._candidates, entry.window) for entry in book.entries]
        segments, count = len(book.entries), len(self._candidates) + 1
        #: What the node would have cost: float64[segments, candidates, 3], discounted.
        self._costs = np.zeros((segments, count, 3))
        #: Squares of the periods' differences between each two candidates, discounted twice.
        self._squares = np.zeros((segments, count, count))
        self._weight_s = 0.0
        self._periods = 0
        self._begin_together()

    def _begin_together(self) -> None:
        """Since the book last changed: what each candidate would have cost for all, and last what was in force; and the squares."""
        self._together = np.zeros((len(self._candidates) + 1, 3))
        self._together_squares = np.zeros(len(self._candidates))
        self._together_s = 0.0
        self._together_periods = 0

    def split(self, segments: Sequence[Segment], now_s: float) -> None:
        """Other segments from here on. Each begins with the window of the only segment that there was, else with that of the rest; evidence
        begins anew."""
        window = self.book.entries[0].window if len(self.book.entries) == 1 else self.book.rest
        said = self.book.entries[0].why if len(self.book.entries) == 1 else ""
        why = "as before the models were told apart" + (f": {said}" if said else "")
        entries = tuple(BookEntry(segment, window, now_s, why) for segment in segments)
        self._begin(replace(self.book, entries=entries, rest=window, version=self.book.version + 1))

    def learn(self, costs: Floats, in_force: Floats, period_s: float, now_s: float, together: Floats | None = None) -> list[Decision]:
        """Takes a period's costs and returns what changes, in the order of the segments.

        `costs` float64[segments, candidates, 3] in the order of `windows`: seconds of waiting, GB·h held, GB·h wasted of the whole node;
        `in_force` float64[3], the same of what was in force; `together` float64[candidates, 3], of each of the candidates that the tuner
        was made with as the window of all models. Raises ValueError for another shape.
        """
        if together is not None and together.shape != (len(self._candidates), 3):
            raise ValueError(f"costs together of shape {together.shape}, expected {(len(self._candidates), 3)}")
        if costs.shape != self._costs.shape or not np.isfinite(costs).all():
            raise ValueError(f"costs of shape {costs.shape}, expected finite ones of {self._costs.shape}")
        fade = math.exp(-math.log(2.0) * period_s / self.settings.half_life_s)
        seconds = self._seconds(costs)
        differences = seconds[:, :, np.newaxis] - seconds[:, np.newaxis, :]
        self._costs = fade * self._costs + costs
        self._squares = fade**2 * self._squares + differences**2
        self._weight_s = fade * self._weight_s + period_s
        self._periods += 1
        self._keep_budget(in_force, period_s)
        if together is not None:
            self._learn_together(together, in_force, fade, period_s)
        if self._periods < self.settings.settle_periods or now_s - self._changed_s < self.settings.stands_s:
            return []
        decisions = self._decide_together(now_s)
        if not decisions:
            alone = self.settings.certainty if together is None or len(self.book.entries) == 1 else self.settings.certainty_alone
            decisions = [d for s in range(len(self.book.entries)) if (d := self._decide(s, now_s, alone)) is not None]
        for decision in decisions:
            self.book = self.book.changed(decision.segment, decision.new, now_s, decision.why)
        if decisions:
            self._changed_s = now_s
            self._begin_together()
        return decisions

    def _learn_together(self, together: Floats, in_force: Floats, fade: float, period_s: float) -> None:
        every = np.concatenate([together, in_force[np.newaxis]])
        seconds = self._seconds(every)
        self._together = fade * self._together + every
        self._together_squares = fade**2 * self._together_squares + (seconds[-1] - seconds[:-1]) ** 2
        self._together_s = fade * self._together_s + period_s
        self._together_periods += 1
        self._of_all = fade * self._of_all + together
        self._of_all_squares = fade**2 * self._of_all_squares + (seconds[:-1, np.newaxis] - seconds[np.newaxis, :-1]) ** 2
        self._of_all_s = fade * self._of_all_s + period_s
        self._of_all_periods += 1

    # --- the choice ---

    def _seconds(self, costs: Floats) -> Floats:
        """float64[...] of float64[..., 3]."""
        seconds: Floats = costs @ np.array([1.0, self.settings.price_s_per_gb_h, self.dual_price])
        return seconds

    def _live(self, s: int) -> int:
        return self.windows[s].index(self.book.entries[s].window)

    def _decide_together(self, now_s: float) -> list[Decision]:
        """The moves of all segments to one window. If all have one of the candidates now, its cost is known for as long as the others' are;
        else that of what is in force, since it last changed."""
        costs, squares, weight_s, periods = self._together[:-1], self._together_squares, self._together_s, self._together_periods
        in_force, windows = self._together[-1], {entry.window for entry in self.book.entries}
        if len(windows) == 1 and (window := next(iter(windows))) in self._candidates:
            live = self._candidates.index(window)
            costs, squares, weight_s, periods = self._of_all, self._of_all_squares[live], self._of_all_s, self._of_all_periods
            in_force = costs[live]
        if periods < self.settings.settle_periods:
            return []
        seconds, now_costs_s = self._seconds(costs), float(self._seconds(in_force))
        best = int(np.argmin(seconds))
        gain, chance = now_costs_s - float(seconds[best]), self.settings.certainty * math.sqrt(float(squares[best]))
        if gain <= max(self.settings.hysteresis * now_costs_s, chance):
            return []
        old, new = (Cost(*(float(v) for v in of)) for of in (in_force, costs[best]))
        window, together = self._candidates[best], "all segments together, " if len(self.book.entries) > 1 else ""
        return [
            Decision(
                segment=entry.segment.name,
                old=entry.window,
                new=window,
                at_s=now_s,
                old_cost=old,
                new_cost=new,
                periods=periods,
                dual_price=self.dual_price,
                why=together + _why(entry.window, old, new, weight_s, self.dual_price),
            )
            for entry in self.book.entries
            if not entry.pinned and entry.window != window
        ]

    def _decide(self, s: int, now_s: float, certainty: float) -> Decision | None:
        entry = self.book.entries[s]
        if entry.pinned:
            return None
        seconds, live = self._seconds(self._costs[s]), self._live(s)
        best = int(np.argmin(seconds))
        gain = float(seconds[live] - seconds[best])
        chance = certainty * math.sqrt(float(self._squares[s, live, best]))
        if gain <= max(self.settings.hysteresis * float(seconds[live]), chance):
            return None
        old, new = (Cost(*(float(v) for v in self._costs[s, k])) for k in (live, best))
        return Decision(
            segment=entry.segment.name,
            old=entry.window,
            new=self.windows[s][best],
            at_s=now_s,
            old_cost=old,
            new_cost=new,
            periods=self._periods,
            dual_price=self.dual_price,
            why=_why(entry.window, old, new, self._weight_s, self.dual_price),
        )

    # --- the budget ---

    def _keep_budget(self, in_force: Floats, period_s: float) -> None:
        """Moves the dual price to where the windows that it chooses keep the budget, as far as the evidence says."""
        budget = self.settings.waste_gb_h_per_day
        if budget is None:
            return
        wasted = float(in_force[2]) * _DAY_S / period_s
        over = min(wasted / budget - 1.0, 1.0) if budget > 0.0 else 1.0
        self._tightness = min(max(self._tightness * math.exp(-_STEP * over), _TIGHTEST), 1.0)
        days = self._weight_s / _DAY_S
        least = self._tightness * budget
        for price in _DUAL_PRICES:
            self.dual_price = float(price)
            if self._predicted_waste() / days <= least:
                return

    def _predicted_waste(self) -> float:
        """GB·h that the windows chosen at the dual price would have wasted together: what is wasted now, and what each segment changes."""
        if not len(self._costs):
            return 0.0
        now, changes = [], 0.0
        for s in range(len(self._costs)):
            live = self._live(s)
            chosen = live if self.book.entries[s].pinned else int(np.argmin(self._seconds(self._costs[s])))
            now.append(float(self._costs[s, live, 2]))
            changes += float(self._costs[s, chosen, 2]) - now[-1]
        return max(sum(now) / len(now) + changes, 0.0)

    # --- the whole state ---

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state; `restore` goes on from it."""
        return {
            "book": self.book.to_json(),
            "windows": [[(w.lead_s, w.horizon_s, w.hold_s) for w in row] for row in self.windows],
            "costs": self._costs.tolist(),
            "squares": self._squares.tolist(),
            "weight_s": self._weight_s,
            "periods": self._periods,
            "dual_price": self.dual_price,
            "tightness": self._tightness,
            "changed_s": self._changed_s if math.isfinite(self._changed_s) else None,
            "together": self._together.tolist(),
            "together_squares": self._together_squares.tolist(),
            "together_s": self._together_s,
            "together_periods": self._together_periods,
            "of_all": self._of_all.tolist(),
            "of_all_squares": self._of_all_squares.tolist(),
            "of_all_s": self._of_all_s,
            "of_all_periods": self._of_all_periods,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a snapshot. Raises InputError for one of other candidates, or for what is none."""
        try:
            self._begin(WindowBook.from_json(state["book"]))
            windows = [tuple(Window(*of) for of in row) for row in state["windows"]]
            if any(row[:-1] != self._candidates for row in windows) or len(windows) != len(self.windows):
                raise ValueError("it had other candidates")
            costs, squares = np.array(state["costs"], np.float64), np.array(state["squares"], np.float64)
            if costs.shape != self._costs.shape or squares.shape != self._squares.shape:
                raise ValueError(f"costs of shape {costs.shape}, expected {self._costs.shape}")
            together, together_squares = (np.array(state[name], np.float64) for name in ("together", "together_squares"))
            of_all, of_all_squares = (np.array(state[name], np.float64) for name in ("of_all", "of_all_squares"))
            if of_all.shape != self._of_all.shape or of_all_squares.shape != self._of_all_squares.shape:
                raise ValueError(f"costs of all of shape {of_all.shape}, expected {self._of_all.shape}")
            if together.shape != self._together.shape or together_squares.shape != self._together_squares.shape:
                raise ValueError(f"costs together of shape {together.shape}, expected {self._together.shape}")
            if any(self.book.entries[s].window not in row for s, row in enumerate(windows)):
                raise ValueError("a window is in force that is no candidate")
            self.windows, self._costs, self._squares = windows, costs, squares
            self._weight_s, self._periods = float(state["weight_s"]), int(state["periods"])
            self.dual_price, self._tightness = float(state["dual_price"]), float(state["tightness"])
            self._changed_s = -math.inf if state["changed_s"] is None else float(state["changed_s"])
            self._together, self._together_squares = together, together_squares
            self._of_all, self._of_all_squares = of_all, of_all_squares
            self._of_all_s, self._of_all_periods = float(state["of_all_s"]), int(state["of_all_periods"])
            self._together_s, self._together_periods = float(state["together_s"]), int(state["together_periods"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"is no state of the tuner of windows: {error}; let it begin anew") from error


def _why(window: Window, old: Cost, new: Cost, weight_s: float, dual_price: float) -> str:
    """The evidence in words."""
    days = weight_s / _DAY_S
    waits, held, wasted = ((b - a) / days for a, b in zip(*((c.wait_s, c.held_gb_h, c.wasted_gb_h) for c in (old, new)), strict=True))
    said = f"against {window_in_words(window)}: {waits:+,.1f} s of waiting, {held:+,.1f} GB·h held, {wasted:+,.1f} GB·h wasted a day"
    return said if dual_price == 0.0 else f"{said}; a wasted GB·h costs {dual_price:.2g} s to keep the budget"

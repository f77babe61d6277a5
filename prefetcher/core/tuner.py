"""Which windows are in force: the default one, unless another would surely have cost less. Pure.

Evidence comes in period by period (`learn`): what the node would have cost with each candidate window as that of all models, and with each
candidate for one segment, all else as in force (`core.window_caches`). Decisions go out: changes of the book, each with its evidence. A
window takes the place of the default where it would have cost less lately by more than `hysteresis` of the whole, and by more than chance:
by `certainty` times the root of the summed squares of the periods' differences. It stays while it is better than the default by the
hysteresis; else the default comes back, without certainty. All segments move together where that is certain, else one alone.

Seconds of waiting and GB·h held are made one by the price of a GB·h. With a waste budget, a GB·h of prefetches that nobody used costs more,
as much as it takes to keep the budget: the dual price, found anew in every period from the same evidence, under an allowance that shrinks
by what was wasted beyond the budget. Then all segments have one window: what a segment alone would waste and save is not known well enough
to add up.
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

#: The windows that compete: the default first, others that bound less or more, and one that fetches next to nothing.
CANDIDATES: tuple[Window, ...] = (
    DEFAULT_WINDOW,
    Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 3600.0),
    Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 120.0),
    Window(NO_LEAD_LIMIT_S, 300.0, 600.0),
    Window(NO_LEAD_LIMIT_S, 3600.0, 1800.0),
    Window(3600.0, OWN_HORIZON_S, 600.0),
    Window(1800.0, OWN_HORIZON_S, 600.0),
    Window(900.0, 300.0, 600.0),
    Window(900.0, 3600.0, 1800.0),
    Window(300.0, 300.0, 600.0),
    Window(300.0, 900.0, 600.0),
    Window(0.0, 300.0, 60.0),
)
#: The dual price is looked for between these, seconds per GB·h of waste, in steps of a tenth.
_DUAL_PRICES = np.concatenate([[0.0], np.geomspace(1e-4, 1e4, 194)])
#: The budget aimed at, as a share of what was asked for; what was wasted beyond it is saved again over so many days, what was saved may be
#: spent. With these nearly every budget was kept on the first halves of three logs.
_AIM = 0.9
_REPAID_DAYS = 2.0
#: What wastes too much stands for so long at least.
_TIGHTENS_S = 6 * 3600.0
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class TunerSettings:
    """`price_s_per_gb_h`: seconds of waiting that a GB held for an hour is worth; `waste_gb_h_per_day` bounds what is wasted, if given.

    `half_life_s` of the evidence; `hysteresis`, as a share of the whole cost; `certainty`, how many times the root of the summed squares
    a gain must be: the best of a dozen windows is that lucky twice over. `settle_periods` pass before anything changes, and what was
    changed stands for `stands_s`: hour by hour windows would follow luck.
    """

    price_s_per_gb_h: float = DEFAULT_PRICE_S_PER_GB_H
    waste_gb_h_per_day: float | None = None
    half_life_s: float = 3 * 86_400.0
    hysteresis: float = 0.005
    settle_periods: int = 6
    stands_s: float = 86_400.0
    certainty: float = 3.0


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


class _Evidence:
    """What each of some windows would have cost, discounted; the first is the one that all are measured against.

    `costs` float64[count, 3]; `moments` float64[count, 3, count, 3], sums of products of the periods' differences from the first, so that
    chance is known at any price. `weight_s` and `periods` of it.
    """

    def __init__(self, count: int) -> None:
        self.costs = np.zeros((count, 3))
        self.moments = np.zeros((count, 3, count, 3))
        self.weight_s = 0.0
        self.periods = 0

    def learn(self, costs: Floats, fade: float, period_s: float) -> None:
        """Takes a period, after all before it faded."""
        differences = (costs - costs[0]).ravel()
        self.costs = fade * self.costs + costs
        self.moments = fade**2 * self.moments + np.outer(differences, differences).reshape(self.moments.shape)
        self.weight_s = fade * self.weight_s + period_s
        self.periods += 1

    def seconds(self, price: Floats) -> Floats:
        """float64[count]: what each cost, at the prices of a second, of a GB·h held and of one wasted."""
        seconds: Floats = self.costs @ price
        return seconds

    def chance(self, price: Floats, of: int) -> Floats:
        """float64[count]: the root of the summed squares of the periods' differences between each window and the window `of`."""
        products = np.einsum("i,kilj,j->kl", price, self.moments, price)
        own = np.diag(products)
        chance: Floats = np.sqrt(np.maximum(own + own[of] - 2.0 * products[of], 0.0))
        return chance

    @property
    def wasted_gb_h_per_day(self) -> Floats:
        """float64[count]: what each wasted."""
        wasted: Floats = self.costs[:, 2] * _DAY_S / max(self.weight_s, 1.0)
        return wasted

    def cost(self, k: int) -> Cost:
        """What window `k` cost."""
        return Cost(*(float(v) for v in self.costs[k]))

    def to_json(self) -> dict[str, Any]:
        """JSON types."""
        return {"costs": self.costs.tolist(), "moments": self.moments.tolist(), "weight_s": self.weight_s, "periods": self.periods}

    def restored(self, state: Mapping[str, Any]) -> _Evidence:
        """The evidence that `to_json` gave. Raises KeyError, TypeError and ValueError for another one."""
        found = _Evidence(len(self.costs))
        found.costs, found.moments = np.array(state["costs"], np.float64), np.array(state["moments"], np.float64)
        if found.costs.shape != self.costs.shape or found.moments.shape != self.moments.shape:
            raise ValueError(f"costs of shape {found.costs.shape}, expected {self.costs.shape}")
        found.weight_s, found.periods = float(state["weight_s"]), int(state["periods"])
        return found


class WindowTuner:
    """Tunes the windows of `book`, segment by segment; `book` is what is in force.

    `windows[s]` are what segment s chooses from: the default window, the other `candidates`, and last the window that it had when the
    tuner began.
    """

    def __init__(self, book: WindowBook, settings: TunerSettings | None = None, candidates: Sequence[Window] = CANDIDATES) -> None:
        self.settings = settings or TunerSettings()
        for window in candidates:
            check_window(window)
        #: The default first: what stays unless another is better.
        self.candidates = (DEFAULT_WINDOW, *(window for window in candidates if window != DEFAULT_WINDOW))
        self.dual_price = 0.0
        self._left_gb_h = 0.0
        self._allowed = math.inf
        self._changed_s = -math.inf
        #: What each candidate would have cost as the window of all, whatever the segments are.
        self._of_all = _Evidence(len(self.candidates))
        self._begin(book)

    def _begin(self, book: WindowBook) -> None:
        self.book = book
        self.windows = [(*self.candidates, entry.window) for entry in book.entries]
        self._alone = [_Evidence(len(row)) for row in self.windows]
        self._begin_together()

    def _begin_together(self) -> None:
        """Since the book last changed: what each candidate would have cost for all, and last what was in force."""
        self._together = _Evidence(len(self.candidates) + 1)

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

        `costs` float64[segments, candidates + 1, 3] in the order of `windows`: seconds of waiting, GB·h held, GB·h wasted of the whole
        node; `in_force` float64[3], the same of what was in force; `together` float64[candidates, 3], of each of `candidates` as the
        window of all models. Raises ValueError for another shape.
        """
        if together is not None and together.shape != (len(self.candidates), 3):
            raise ValueError(f"costs together of shape {together.shape}, expected {(len(self.candidates), 3)}")
        expected = (len(self.book.entries), len(self.candidates) + 1, 3)
        if costs.shape != expected or not np.isfinite(costs).all():
            raise ValueError(f"costs of shape {costs.shape}, expected finite ones of {expected}")
        fade = math.exp(-math.log(2.0) * period_s / self.settings.half_life_s)
        for evidence, of in zip(self._alone, costs, strict=True):
            evidence.learn(of, fade, period_s)
        if together is not None:
            self._of_all.learn(together, fade, period_s)
            self._together.learn(np.concatenate([together, in_force[np.newaxis]]), fade, period_s)
        self._keep_budget(float(in_force[2]), period_s)
        decisions = self._decide(now_s)
        for decision in decisions:
            self.book = self.book.changed(decision.segment, decision.new, now_s, decision.why)
        if decisions:
            self._changed_s = now_s
            self._begin_together()
        return decisions

    def costs(self) -> dict[str, list[tuple[Window, Cost]]]:
        """By segment, every window that it chooses from, with what the node would have cost lately, discounted."""
        return {
            entry.segment.name: [(window, evidence.cost(k)) for k, window in enumerate(row)]
            for entry, row, evidence in zip(self.book.entries, self.windows, self._alone, strict=True)
        }

    # --- the choice ---

    def _prices(self, dual_price: float = 0.0) -> Floats:
        return np.array([1.0, self.settings.price_s_per_gb_h, dual_price])

    def _surely_better(self, evidence: _Evidence, than: int) -> npt.NDArray[np.bool_]:
        """bool[count]: which windows cost less than window `than` by more than the hysteresis and by more than chance."""
        seconds = evidence.seconds(self._prices())
        least = np.maximum(self.settings.hysteresis * seconds[than], self.settings.certainty * evidence.chance(self._prices(), than))
        better: npt.NDArray[np.bool_] = seconds[than] - seconds > least
        return better

    def _choose(self, evidence: _Evidence, live: int) -> int:
        """The window to have where `live` is in force: the default, or the best of those that are surely better. `live` stays while it is
        better than the default by the hysteresis, and the best not surely better than it."""
        seconds, sure = evidence.seconds(self._prices()), self._surely_better(evidence, 0)
        best = int(np.argmin(np.where(sure, seconds, np.inf))) if sure.any() else 0
        if live != 0 and seconds[0] - seconds[live] > self.settings.hysteresis * seconds[0]:
            return best if self._surely_better(evidence, live)[best] else live
        return best

    def _decide(self, now_s: float) -> list[Decision]:
        stood_s, settle = now_s - self._changed_s, self.settings.settle_periods
        evidence, live = self._in_force()
        if evidence.periods >= settle:
            if self.dual_price > 0.0:
                return self._all_to(self._within_budget(evidence, live, stood_s), evidence, live, now_s)
            if stood_s >= self.settings.stands_s and (decisions := self._all_to(self._together_to(evidence, live), evidence, live, now_s)):
                return decisions
        if self.dual_price > 0.0 or stood_s < self.settings.stands_s or self._alone[0].periods < settle:
            return []
        return [d for s in range(len(self._alone)) if (d := self._alone_to(s, now_s)) is not None]

    def _in_force(self) -> tuple[_Evidence, int]:
        """What is known of what is in force, and its number there. If all segments have one of the candidates its cost is known for as long
        as the others' are; else since the book last changed."""
        windows = {entry.window for entry in self.book.entries}
        if len(windows) == 1 and (window := next(iter(windows))) in self.candidates:
            return self._of_all, self.candidates.index(window)
        return self._together, len(self.candidates)

    def _together_to(self, evidence: _Evidence, live: int) -> int:
        """The window for all. Segments that were told apart stay so while no window is surely better for all."""
        if len({entry.window for entry in self.book.entries}) == 1:
            return self._choose(evidence, live)
        sure = self._surely_better(evidence, live)
        return int(np.argmin(np.where(sure, evidence.seconds(self._prices()), np.inf))) if sure.any() else live

    def _all_to(self, chosen: int, evidence: _Evidence, live: int, now_s: float) -> list[Decision]:
        """The moves of all segments to one candidate."""
        if chosen == live:
            return []
        window, together = self.candidates[chosen], "all segments together, " if len(self.book.entries) > 1 else ""
        return [
            self._decision(s, window, evidence, live, chosen, now_s, together)
            for s, entry in enumerate(self.book.entries)
            if not entry.pinned and entry.window != window
        ]

    def _alone_to(self, s: int, now_s: float) -> Decision | None:
        entry = self.book.entries[s]
        live = self.windows[s].index(entry.window)
        window = self.windows[s][chosen := self._choose(self._alone[s], live)]
        return None if entry.pinned or window == entry.window else self._decision(s, window, self._alone[s], live, chosen, now_s)

    def _decision(self, s: int, window: Window, evidence: _Evidence, live: int, chosen: int, now_s: float, word: str = "") -> Decision:
        entry, old, new = self.book.entries[s], evidence.cost(live), evidence.cost(chosen)
        return Decision(
            segment=entry.segment.name,
            old=entry.window,
            new=window,
            at_s=now_s,
            old_cost=old,
            new_cost=new,
            periods=evidence.periods,
            dual_price=self.dual_price,
            why=word + _why(entry.window, old, new, evidence.weight_s, self.dual_price),
        )

    # --- the budget ---

    def _keep_budget(self, wasted_gb_h: float, period_s: float) -> None:
        """Moves the dual price to the least at which what it chooses keeps what the budget allows, as far as the evidence says."""
        budget, known = self.settings.waste_gb_h_per_day, self._of_all
        if budget is None or not known.periods:
            return
        self._left_gb_h = min(self._left_gb_h + _AIM * budget * period_s / _DAY_S - wasted_gb_h, _AIM * budget)
        self._allowed = max(_AIM * budget + self._left_gb_h / _REPAID_DAYS, 0.0)
        chosen = np.argmin(self._believed_s(known) + _DUAL_PRICES[:, np.newaxis] * known.costs[:, 2], axis=1)
        kept = np.flatnonzero(known.wasted_gb_h_per_day[chosen] <= self._allowed)
        self.dual_price = float(_DUAL_PRICES[kept[0] if len(kept) else -1])

    def _believed_s(self, evidence: _Evidence) -> Floats:
        """float64[count] seconds: what costs less than the default, but not surely so, counts as costing the same."""
        seconds, sure = evidence.seconds(self._prices()), self._surely_better(evidence, 0)
        believed: Floats = np.where(sure, seconds, np.maximum(seconds, seconds[0]))
        return believed

    def _within_budget(self, evidence: _Evidence, live: int, stood_s: float) -> int:
        """The window for all at the dual price. What wastes too much gives way soon, without certainty; what keeps the budget stands for as
        long as any, and gives way to what costs less by the hysteresis."""
        over = float(evidence.wasted_gb_h_per_day[live]) > self._allowed
        seconds = self._believed_s(evidence) + self.dual_price * evidence.costs[:, 2]
        chosen = int(np.argmin(seconds[: len(self.candidates)]))
        better = seconds[live] - seconds[chosen] > self.settings.hysteresis * seconds[live]
        return chosen if stood_s >= (_TIGHTENS_S if over else self.settings.stands_s) and (over or better) else live

    # --- the whole state ---

    def snapshot(self) -> dict[str, Any]:
        """JSON-able state; `restore` goes on from it."""
        return {
            "book": self.book.to_json(),
            "windows": [[(w.lead_s, w.horizon_s, w.hold_s) for w in row] for row in self.windows],
            "alone": [evidence.to_json() for evidence in self._alone],
            "of_all": self._of_all.to_json(),
            "together": self._together.to_json(),
            "dual_price": self.dual_price,
            "left_gb_h": self._left_gb_h,
            "changed_s": self._changed_s if math.isfinite(self._changed_s) else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a snapshot. Raises InputError for one of other candidates, or for what is none."""
        try:
            self._begin(WindowBook.from_json(state["book"]))
            windows = [tuple(Window(*of) for of in row) for row in state["windows"]]
            if any(row[:-1] != self.candidates for row in windows) or len(windows) != len(self.windows):
                raise ValueError("it had other candidates")
            if any(self.book.entries[s].window not in row for s, row in enumerate(windows)):
                raise ValueError("a window is in force that is no candidate")
            alone = [evidence.restored(of) for evidence, of in zip(self._alone, state["alone"], strict=True)]
            of_all, together = self._of_all.restored(state["of_all"]), self._together.restored(state["together"])
            dual_price, left_gb_h = float(state["dual_price"]), float(state["left_gb_h"])
            changed_s = -math.inf if state["changed_s"] is None else float(state["changed_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"is no state of the tuner of windows: {error}; let it begin anew") from error
        self.windows, self._alone, self._of_all, self._together = windows, alone, of_all, together
        self.dual_price, self._left_gb_h, self._changed_s = dual_price, left_gb_h, changed_s


def _why(window: Window, old: Cost, new: Cost, weight_s: float, dual_price: float) -> str:
    """The evidence in words."""
    days = weight_s / _DAY_S
    waits, held, wasted = ((b - a) / days for a, b in zip(*((c.wait_s, c.held_gb_h, c.wasted_gb_h) for c in (old, new)), strict=True))
    said = f"against {window_in_words(window)}: {waits:+,.1f} s of waiting, {held:+,.1f} GB·h held, {wasted:+,.1f} GB·h wasted a day"
    return said if dual_price == 0.0 else f"{said}; a wasted GB·h costs {dual_price:.2g} s to keep the budget"

"""Windows by segment of models: which window bounds a model's prefetches, and the book that says so. Pure.

A window (`core.types.Window`) bounds what forecasts fetch; what is hinted, scheduled or asked for by hand has times of its own.
- **lead**: with h the rate of next use that ranks the prefetch, the use is expected 1/h from now. It may start only when that is at most
  the mean time to load plus `lead_s` away. 0: only when the use is as near as the load takes. `NO_LEAD_LIMIT_S`: at any time.
- **horizon**: how far ahead the forecast looks whose rate ranks the prefetch. `OWN_HORIZON_S`: as far as the deciding expert does.
- **hold**: how long it stays unused once it is ready; up to six times that while its use is still likely (`core.value.MOST_HOLDS`).

A `Segment` is a box in the facts of models, with a name in words; a `WindowBook` has one window for each segment and one for the rest.
Every process that knows a model's facts finds the same window. How segments are found is in `core.segments`, how windows are chosen in
`core.tuner`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from prefetcher.core.types import HORIZONS_S, Window
from prefetcher.errors import InputError, shortened

__all__ = [
    "DEFAULT_WINDOW",
    "FACTS",
    "NO_LEAD_LIMIT_S",
    "OWN_HORIZON_S",
    "WINDOW_HORIZONS_S",
    "BookEntry",
    "FactTable",
    "ModelFacts",
    "Segment",
    "WindowBook",
    "WindowTable",
    "check_window",
    "window_in_words",
]

Floats = npt.NDArray[np.float64]

#: An expected use is never said to be further away than forecasts look, so such a lead is none.
NO_LEAD_LIMIT_S = HORIZONS_S[-1]
#: A window's horizon that leaves it to the deciding expert.
OWN_HORIZON_S = 0.0
#: The horizons that a window may have: those whose rates are known (`core.experts`).
WINDOW_HORIZONS_S: tuple[float, ...] = (OWN_HORIZON_S, 120.0, 300.0, 600.0, 900.0, 3600.0)
#: No window: what is fetched when, and what ranks it, is the deciding expert's; an unused prefetch stays for the default hold.
DEFAULT_WINDOW = Window(NO_LEAD_LIMIT_S, OWN_HORIZON_S, 600.0)
#: A prefetch that nobody used is never held for longer than a week.
_MOST_HOLD_S = 7 * 86_400.0
#: The last time that is one, in the year 5138.
_LAST_S = 1e11
#: More segments than people can look through are a mistake.
_MOST_SEGMENTS = 64


class ModelFacts(NamedTuple):
    """What a model is sorted by: `bytes` of its weights, `rows_per_day` over the history looked at, `regularity` of its pauses from 0 to 1
    (`core.segments.regularity`), and `hinted`, the share of its uses that were hinted."""

    bytes: float
    rows_per_day: float
    regularity: float = 0.0
    hinted: float = 0.0


class FactTable(NamedTuple):
    """`ModelFacts` of many models: float64[n] each."""

    bytes: Floats
    rows_per_day: Floats
    regularity: Floats
    hinted: Floats

    @classmethod
    def of(cls, facts: Sequence[ModelFacts]) -> FactTable:
        """The table of `facts`, in their order."""
        return cls(*(np.array([f[k] for f in facts], np.float64) for k in range(len(FACTS))))


#: The names of the facts, in the order of `ModelFacts`.
FACTS: tuple[str, ...] = ModelFacts._fields


class WindowTable(NamedTuple):
    """Windows of many models: float64[n] each, seconds."""

    lead_s: Floats
    horizon_s: Floats
    hold_s: Floats


@dataclass(frozen=True, slots=True)
class Segment:
    """Models whose facts lie in a box. `rule` has (fact, at least, below) of the facts that count; ±inf where there is no limit."""

    name: str
    rule: tuple[tuple[str, float, float], ...] = ()

    def holds(self, table: FactTable) -> npt.NDArray[np.bool_]:
        """bool[n]: which models are in it. A fact that is not known (NaN) is in no box that asks for it."""
        inside = np.ones(len(table.bytes), np.bool_)
        for fact, low, high in self.rule:
            value = table[FACTS.index(fact)]
            inside &= (value >= low) & (value < high)
        return inside


@dataclass(frozen=True, slots=True)
class BookEntry:
    """A segment, its window, since when (`since_s`) and `why`. `pinned`: people chose it, and the tuner leaves it."""

    segment: Segment
    window: Window = DEFAULT_WINDOW
    since_s: float = 0.0
    why: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class WindowBook:
    """Windows by segment. A model belongs to the first segment that holds it; `rest` is the window of a model that none holds.

    `version` rises by one with every change. A book without entries is today's behaviour with `rest` for everybody.
    """

    entries: tuple[BookEntry, ...] = ()
    rest: Window = DEFAULT_WINDOW
    version: int = 0

    def segment_numbers(self, table: FactTable) -> npt.NDArray[np.int64]:
        """int64[n]: the number of each model's segment, −1 for none."""
        number = np.full(len(table.bytes), -1, np.int64)
        for k, entry in reversed(list(enumerate(self.entries))):
            number[entry.segment.holds(table)] = k
        return number

    def windows_of(self, table: FactTable) -> WindowTable:
        """The window of each model."""
        number = self.segment_numbers(table)
        windows = [*(entry.window for entry in self.entries), self.rest]
        columns = np.array([(w.lead_s, w.horizon_s, w.hold_s) for w in windows], np.float64)[number]
        return WindowTable(*np.ascontiguousarray(columns.T))

    def window_of(self, facts: ModelFacts) -> Window:
        """The window of one model."""
        number = int(self.segment_numbers(FactTable.of([facts]))[0])
        return self.rest if number < 0 else self.entries[number].window

    def entry(self, name: str) -> BookEntry:
        """The entry of the segment called `name`. Raises KeyError with the names there are."""
        for entry in self.entries:
            if entry.segment.name == name:
                return entry
        known = ", ".join(repr(e.segment.name) for e in self.entries) or "none"
        raise KeyError(f"no segment is called {shortened(name)!r}; there are {known}")

    def changed(self, name: str, window: Window, now_s: float, why: str, pinned: bool | None = None) -> WindowBook:
        """The next version of the book, with another window for one segment. Raises KeyError for an unknown segment."""
        old = self.entry(name)
        new = replace(old, window=window, since_s=now_s, why=why, pinned=old.pinned if pinned is None else pinned)
        return replace(self, entries=tuple(new if e is old else e for e in self.entries), version=self.version + 1)

    def to_json(self) -> dict[str, Any]:
        """JSON types; `from_json` gives the same book."""
        return {
            "version": self.version,
            "rest": _window_json(self.rest),
            "segments": [
                {
                    "name": e.segment.name,
                    "rule": {fact: [_limit(low), _limit(high)] for fact, low, high in e.segment.rule},
                    "window": _window_json(e.window),
                    "since_s": e.since_s,
                    "why": e.why,
                    "pinned": e.pinned,
                }
                for e in self.entries
            ],
        }

    @classmethod
    def from_json(cls, said: Any, path: str = "") -> WindowBook:
        """The book that `to_json` wrote. Raises InputError, which names what was expected and found, for anything else."""
        try:
            return _book(_mapping(said, "a book of windows"))
        except ValueError as error:
            raise InputError(f"is no book of windows: {error}; write one with prefetcher tune", path=path) from error


def check_window(window: Window) -> None:
    """Raises ValueError for a window that can't be: a lead below 0, an unknown horizon, a hold of nothing or of more than a week."""
    if not 0.0 <= window.lead_s <= NO_LEAD_LIMIT_S:
        raise ValueError(f"lead_s is from 0 to {NO_LEAD_LIMIT_S:,.0f} seconds, found {window.lead_s}")
    if window.horizon_s not in WINDOW_HORIZONS_S:
        known = ", ".join(f"{h:g}" for h in WINDOW_HORIZONS_S)
        raise ValueError(f"horizon_s is one of {known} seconds (0: as the deciding expert), found {window.horizon_s}")
    if not 0.0 < window.hold_s <= _MOST_HOLD_S:
        raise ValueError(f"hold_s is above 0 and at most {_MOST_HOLD_S:,.0f} seconds, found {window.hold_s}")


def window_in_words(window: Window) -> str:
    """A window as people read it: "lead 5 min, horizon 15 min, hold 10 min"."""
    lead = "at any time" if window.lead_s >= NO_LEAD_LIMIT_S else f"lead {_minutes(window.lead_s)}"
    horizon = "the expert's horizon" if window.horizon_s == OWN_HORIZON_S else f"horizon {_minutes(window.horizon_s)}"
    return f"{lead}, {horizon}, hold {_minutes(window.hold_s)}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60.0:g} min" if seconds >= 60.0 or seconds == 0.0 else f"{seconds:g} s"


# --- reading ---


def _book(said: Mapping[str, Any]) -> WindowBook:
    listed = said.get("segments")
    if not isinstance(listed, list) or len(listed) > _MOST_SEGMENTS:
        raise ValueError(f"segments is a list of at most {_MOST_SEGMENTS}, found {shortened(repr(listed))}")
    entries = tuple(_entry(_mapping(of, f"segment {k}")) for k, of in enumerate(listed))
    names = [e.segment.name for e in entries]
    if len(set(names)) < len(names):
        raise ValueError(f"two segments have one name in {shortened(repr(names))}")
    version = said.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise ValueError(f"version is a whole number from 0, found {shortened(repr(version))}")
    return WindowBook(entries, _window(said.get("rest")), version)


def _entry(said: Mapping[str, Any]) -> BookEntry:
    name, why, pinned = said.get("name"), said.get("why", ""), said.get("pinned", False)
    if not isinstance(name, str) or not name or not isinstance(why, str) or not isinstance(pinned, bool):
        raise ValueError(f"a segment has a name, why as text and pinned as true or false, found {shortened(repr(said))}")
    rule = []
    for fact, limits in _mapping(said.get("rule"), f"the rule of {name!r}").items():
        if fact not in FACTS:
            raise ValueError(f"the rule of {name!r} asks for {shortened(repr(fact))}; the facts are {', '.join(FACTS)}")
        if not isinstance(limits, list) or len(limits) != 2:
            raise ValueError(f"{fact} of {name!r} is [at least, below], found {shortened(repr(limits))}")
        low, high = (_number(v, fact, none) for v, none in zip(limits, (-math.inf, math.inf), strict=True))
        rule.append((fact, low, high))
    since_s = _number(said.get("since_s", 0.0), "since_s")
    if not 0.0 <= since_s <= _LAST_S:
        raise ValueError(f"since_s is in seconds since 1970, found {since_s:g}")
    return BookEntry(Segment(name, tuple(rule)), _window(said.get("window")), since_s, why, pinned)


def _window(said: Any) -> Window:
    of = _mapping(said, "a window")
    unknown = set(of) - {"lead_s", "horizon_s", "hold_s"}
    if unknown:
        raise ValueError(f"a window has lead_s, horizon_s and hold_s, found {shortened(repr(sorted(map(str, unknown))))} too")
    window = Window(*(_number(of.get(name), name) for name in ("lead_s", "horizon_s", "hold_s")))
    check_window(window)
    return window


def _window_json(window: Window) -> dict[str, float]:
    return {"lead_s": window.lead_s, "horizon_s": window.horizon_s, "hold_s": window.hold_s}


def _limit(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: Any, name: str, none: float | None = None) -> float:
    if value is None and none is not None:
        return none
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is a number, found {shortened(repr(value))}")
    return float(value)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a JSON object, found {shortened(repr(value))}")
    return value

"""What product-side hints say about models: how likely and how soon each is used, and how far each source is to be believed. Pure.

A hint is open from its time until `until_s`. It is settled once: kept, when a row of its model comes while it is open, or broken, when its
time is up. A source is believed by its settled hints, discounted, so that one whose hints don't convert loses its weight, and gets it back
when they do. Hints of the same source, session and model fold into one. Covers no transport (`wire`) and no planning.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Expected", "Hint", "HintBook"]

#: What a source that nothing is known of is believed: as if it had kept two of four hints.
_PRIOR_KEPT, _PRIOR_HINTS = 2.0, 4.0
#: A settled hint counts for half after this many later ones of its source.
_HALF_LIFE_HINTS = 200.0
_FADE = 0.5 ** (1.0 / _HALF_LIFE_HINTS)
#: Sources with a record, open hints, and ids remembered; past that the oldest go. 50,000 open hints are 400 a second for two minutes.
MOST_SOURCES = 10_000
MOST_OPEN = 50_000
MOST_IDS = 200_000
#: Ends of hints that are settled or were moved out, before they are sorted out.
_SPARE_ENDS = 10_000


@dataclass(frozen=True, slots=True)
class Hint:
    """Somebody expects `model` to be used at `at_s`, and not after `until_s`. `source` and `session` say who."""

    hint_id: str
    model: str
    source: str
    session: str | None
    given_s: float
    at_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What all open hints of a model say together.

    `probability` of a use until `until_s`; `at_s`, the earliest time that one of them names; `per_s`, the rate of next use that a held
    byte is ranked by (P(T ≤ W) / E[min(T, W)], W the time that is left).
    """

    probability: float
    at_s: float
    until_s: float
    per_s: float


@dataclass(slots=True)
class _Said:
    """What `expected` needs of a model's open hints, kept as they come and go: how many of each source, the earliest time that one names
    (None: not known since that one went), and the latest end."""

    sources: dict[str, int]
    at_s: float | None
    until_s: float

    @classmethod
    def of(cls, hints: Iterable[Hint]) -> _Said:
        found = list(hints)
        sources = dict(Counter(hint.source for hint in found))
        return cls(sources, min(hint.at_s for hint in found), max(hint.until_s for hint in found))


class HintBook:
    """All open hints, and the record of every source."""

    def __init__(self) -> None:
        self._open: dict[str, dict[tuple[str, str], Hint]] = {}
        #: (until_s, model, source, session or id) of every open hint, also of those that were moved since.
        self._ends: list[tuple[float, str, str, str]] = []
        #: By model; made when it is asked for.
        self._said: dict[str, _Said] = {}
        self._count = 0
        self._ids: OrderedDict[str, None] = OrderedDict()
        #: source -> [kept, settled], discounted.
        self._record: OrderedDict[str, list[float]] = OrderedDict()
        self.kept = self.broken = 0

    def __len__(self) -> int:
        return self._count

    def add(self, hint: Hint, now_s: float) -> str:
        """Takes a hint in and says what it was: `new`, `folded` into an open one, `repeated` (its id was seen), `past` its time, or
        `full`. Only `new` and `folded` change what is expected."""
        if hint.hint_id in self._ids:
            return "repeated"
        self._ids[hint.hint_id] = None
        if len(self._ids) > MOST_IDS:
            self._ids.popitem(last=False)
        if hint.until_s <= now_s:
            return "past"
        mine = self._open.setdefault(hint.model, {})
        who = (hint.source, hint.session or hint.hint_id)
        before = mine.get(who)
        if before is None and self._count >= MOST_OPEN:
            if not mine:
                del self._open[hint.model]
            return "full"
        if before is not None:
            earliest_s, latest_s = min(before.at_s, hint.at_s), max(before.until_s, hint.until_s)
            hint = Hint(before.hint_id, hint.model, hint.source, hint.session, before.given_s, earliest_s, latest_s)
        else:
            self._count += 1
        mine[who] = hint
        said = self._said.get(hint.model)
        if said is not None:
            said.sources[hint.source] = said.sources.get(hint.source, 0) + (before is None)
            said.at_s = None if said.at_s is None else min(said.at_s, hint.at_s)
            said.until_s = max(said.until_s, hint.until_s)
        heapq.heappush(self._ends, (hint.until_s, hint.model, *who))
        if len(self._ends) > 2 * self._count + _SPARE_ENDS:
            self._ends = [(h.until_s, model, *of) for model, theirs in self._open.items() for of, h in theirs.items()]
            heapq.heapify(self._ends)
        return "new" if before is None else "folded"

    def used(self, model: str, at_s: float) -> int:
        """A row of `model` at `at_s`: its open hints that were given before are kept. How many there were."""
        mine = self._open.get(model)
        if not mine:
            return 0
        kept = [who for who, hint in mine.items() if hint.given_s <= at_s]
        for who in kept:
            self._settle(mine.pop(who), kept=True)
        if kept:
            self._said.pop(model, None)
        if not mine:
            del self._open[model]
        return len(kept)

    def expire(self, now_s: float) -> int:
        """Settles what is over at `now_s` as broken. How many there were."""
        over = 0
        while self._ends and self._ends[0][0] <= now_s:
            _, model, source, session = heapq.heappop(self._ends)
            mine = self._open.get(model, {})
            hint = mine.get((source, session))
            if hint is None or hint.until_s > now_s:
                continue
            del mine[source, session]
            self._forget(hint)
            self._settle(hint, kept=False)
            over += 1
            if not mine:
                del self._open[model]
        return over

    def _forget(self, hint: Hint) -> None:
        said = self._said.get(hint.model)
        if said is None:
            return
        said.sources[hint.source] -= 1
        if not said.sources[hint.source]:
            del said.sources[hint.source]
        if not said.sources or hint.until_s >= said.until_s:
            del self._said[hint.model]
        elif said.at_s is not None and hint.at_s <= said.at_s:
            said.at_s = None

    def _settle(self, hint: Hint, kept: bool) -> None:
        self._count -= 1
        self.kept += kept
        self.broken += not kept
        record = self._record.setdefault(hint.source, [0.0, 0.0])
        self._record.move_to_end(hint.source)
        record[0] = record[0] * _FADE + (1.0 if kept else 0.0)
        record[1] = record[1] * _FADE + 1.0
        if len(self._record) > MOST_SOURCES:
            self._record.popitem(last=False)

    def belief(self, source: str) -> float:
        """The probability that a hint of `source` is kept, by its record so far."""
        kept, settled = self._record.get(source, (0.0, 0.0))
        return (kept + _PRIOR_KEPT) / (settled + _PRIOR_HINTS)

    def expected(self, model: str, now_s: float) -> Expected | None:
        """What the open hints of `model` say at `now_s`; None when there are none.

        Hints of one source are not independent (one page, one habit), so each source counts once, whatever number it sends.
        """
        mine = self._open.get(model)
        if not mine:
            return None
        if self._ends and self._ends[0][0] <= now_s:
            # Somebody asks about a time that `expire` was not told of yet.
            live = [hint for hint in mine.values() if hint.until_s > now_s]
            if not live:
                return None
            said = _Said.of(live)
        else:
            found = self._said.get(model)
            said = self._said[model] = _Said.of(mine.values()) if found is None else found
            if said.at_s is None:
                # A time that has come is as good as any other: it counts as now.
                come = next((hint.at_s for hint in mine.values() if hint.at_s <= now_s), None)
                said.at_s = min(hint.at_s for hint in mine.values()) if come is None else come
        assert said.at_s is not None
        missed = math.prod(1.0 - self.belief(source) for source in said.sources)
        probability = 1.0 - missed
        at_s = max(now_s, said.at_s)
        until_s = said.until_s
        left_s = until_s - now_s
        # A use comes evenly between the time that was named and the end, or not at all within the time left.
        mean_s = probability * (0.5 * (at_s + until_s) - now_s) + (1.0 - probability) * left_s
        return Expected(probability, at_s, until_s, probability / max(mean_s, 1e-3))

    def models(self) -> list[str]:
        """Models with open hints."""
        return list(self._open)

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        hints = [h for mine in self._open.values() for h in mine.values()]
        return {
            "open": [[h.hint_id, h.model, h.source, h.session, h.given_s, h.at_s, h.until_s] for h in hints],
            "ids": list(self._ids),
            "record": [[source, *record] for source, record in self._record.items()],
            "kept": self.kept,
            "broken": self.broken,
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> HintBook:
        """The book that `snapshot` was taken of. Raises KeyError, TypeError or ValueError for something else."""
        book = cls()
        for values in snapshot["open"]:
            book.add(Hint(*values), -math.inf)
        book._ids = OrderedDict.fromkeys(snapshot["ids"])
        book._record = OrderedDict((source, [kept, settled]) for source, kept, settled in snapshot["record"])
        book.kept, book.broken = int(snapshot["kept"]), int(snapshot["broken"])
        return book

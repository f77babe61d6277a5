"""What product-side hints say about models: how likely and how soon each is used, and how far each source is to be believed. Pure.

A hint is open from its time until `until_s`. It is settled once: kept, when a row of its model comes while it is open, or broken, when its
time is up. A source is believed by its settled hints, discounted, so that one whose hints don't convert loses its weight, and gets it back
when they do; how late after the time that they name its hints are kept is learned too. A hint may bring its own `chance`, by whoever knows
more of it than its source. Hints of the same source, session and model fold into one. Covers no transport (`wire`) and no planning.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from prefetcher.core.announced import Announced
from prefetcher.core.value import LEAST_CHANCE, hinted_rate

__all__ = ["Expected", "Hint", "HintBook", "SourceRecord"]

#: What a source that nothing is known of is believed: as if it had kept two of four hints.
_PRIOR_KEPT, _PRIOR_HINTS = 2.0, 4.0
#: A settled hint counts for half after this many later ones of its source.
_HALF_LIFE_HINTS = 200.0
_FADE = 0.5 ** (1.0 / _HALF_LIFE_HINTS)
#: Sources with a record, open hints, and ids remembered; past that the oldest go. 50,000 open hints are 400 a second for two minutes.
MOST_SOURCES = 10_000
MOST_OPEN = 50_000
MOST_IDS = 200_000
#: How late hints are kept: half-octave bins from one second to a day, so many kept hints before they say something, and the share of
#: those kept that the time in which a use is expected covers.
_LATE_BINS = 34
_LEAST_KEPT = 10.0
_COVERED = 0.95
#: Ends of hints that are settled or were moved out, before they are sorted out.
_SPARE_ENDS = 10_000


@dataclass(frozen=True, slots=True)
class Hint:
    """Somebody expects `model` to be used at `at_s`, and not after `until_s`. `source`, `session` and `user` say who, `surface` and `kind`
    where and why. `chance` is the probability that it is kept, None where nothing but its source's record says so.
    """

    hint_id: str
    model: str
    source: str
    session: str | None
    given_s: float
    at_s: float
    until_s: float
    user: str | None = None
    surface: str = ""
    kind: str = "load"
    chance: float | None = None


_FIELDS = tuple(field.name for field in fields(Hint))


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """How a source's hints turned out, and how far it is believed: the probability that its next one is kept."""

    source: str
    kept: int
    broken: int
    weight: float


@dataclass(frozen=True, slots=True)
class Expected:
    """What all open hints of a model say together.

    `probability` of a use until `until_s`; `at_s`, the earliest time that one of them names; `end_s`, by when it has come, if these hints
    are kept as late as others of their sources; `per_s`, the rate of next use that a held byte is ranked by (P(T ≤ W) / E[min(T, W)],
    W the time that is left until `end_s`). `source`: of those that gave them, the one that is believed most.
    """

    probability: float
    at_s: float
    until_s: float
    per_s: float
    end_s: float
    source: str = ""


@dataclass(slots=True)
class _Said:
    """What `expected` needs of a model's open hints, kept as they come and go: how many of each source, the largest chance that one of
    them brought, the earliest time that one names (None: not known since that one went), the latest, and the latest end."""

    sources: dict[str, int]
    chances: dict[str, float]
    at_s: float | None
    latest_s: float
    until_s: float

    @classmethod
    def of(cls, hints: Iterable[Hint]) -> _Said:
        found = list(hints)
        said = cls(dict(Counter(h.source for h in found)), {}, min(h.at_s for h in found), -math.inf, -math.inf)
        for hint in found:
            said.take(hint)
        return said

    def take(self, hint: Hint) -> None:
        """Moves all but the count."""
        if hint.chance is not None:
            self.chances[hint.source] = max(hint.chance, self.chances.get(hint.source, 0.0))
        self.at_s = None if self.at_s is None else min(self.at_s, hint.at_s)
        self.latest_s = max(self.latest_s, hint.at_s)
        self.until_s = max(self.until_s, hint.until_s)


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
        #: source -> [kept, settled], discounted, then kept and broken in all.
        self._record: OrderedDict[str, list[float]] = OrderedDict()
        #: source -> how late its hints were kept, discounted counts by bin; and what follows from it.
        self._late: dict[str, list[float]] = {}
        self._windows: dict[str, float] = {}
        #: Hears of every hint that is settled, whether it was kept, and when.
        self.on_settled: Callable[[Hint, bool, float], None] = lambda hint, kept, at_s: None
        self.kept = self.broken = 0
        #: How far models' uses are announced by hints that are believed enough to be acted on.
        self.announced = Announced()

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
            chances = [c for c in (before.chance, hint.chance) if c is not None]
            hint = replace(
                hint, hint_id=before.hint_id, given_s=before.given_s, at_s=earliest_s, until_s=latest_s, chance=max(chances, default=None)
            )
        else:
            self._count += 1
        mine[who] = hint
        said = self._said.get(hint.model)
        if said is not None:
            said.sources[hint.source] = said.sources.get(hint.source, 0) + (before is None)
            said.take(hint)
        heapq.heappush(self._ends, (hint.until_s, hint.model, *who))
        if len(self._ends) > 2 * self._count + _SPARE_ENDS:
            self._ends = [(h.until_s, model, *of) for model, theirs in self._open.items() for of, h in theirs.items()]
            heapq.heapify(self._ends)
        return "new" if before is None else "folded"

    def has_seen(self, hint_id: str) -> bool:
        """Whether a hint of this id came before."""
        return hint_id in self._ids

    def used(self, model: str, at_s: float) -> int:
        """A row of `model` at `at_s`: its open hints that were given before are kept. How many there were."""
        mine = self._open.get(model)
        kept = [] if not mine else [who for who, hint in mine.items() if hint.given_s <= at_s]
        given = [mine[who] for who in kept] if mine else []
        likely = bool(given) and self._probability(_Said.of(given)) >= LEAST_CHANCE
        self.announced.saw(model, at_s, min(hint.given_s for hint in given) if likely else None)
        if not mine:
            return 0
        for who in kept:
            self._settle(mine.pop(who), kept=True, at_s=at_s)
        if kept:
            self._said.pop(model, None)
        if not mine:
            del self._open[model]
        return len(kept)

    def expire(self, now_s: float) -> int:
        """Settles what is over at `now_s` as broken. How many there were."""
        over = 0
        while self._ends and self._ends[0][0] <= now_s:
            end_s, model, source, session = heapq.heappop(self._ends)
            mine = self._open.get(model, {})
            hint = mine.get((source, session))
            # One that was moved out has another entry, and its turn is then.
            if hint is None or hint.until_s > end_s:
                continue
            del mine[source, session]
            self._forget(hint)
            self._settle(hint, kept=False, at_s=hint.until_s)
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
        largest = hint.chance is not None and hint.chance >= said.chances.get(hint.source, 0.0)
        if not said.sources or hint.until_s >= said.until_s or hint.at_s >= said.latest_s or largest:
            del self._said[hint.model]
        elif said.at_s is not None and hint.at_s <= said.at_s:
            said.at_s = None

    def _settle(self, hint: Hint, kept: bool, at_s: float) -> None:
        self._count -= 1
        self.kept += kept
        self.broken += not kept
        record = self._record.setdefault(hint.source, [0.0, 0.0, 0.0, 0.0])
        self._record.move_to_end(hint.source)
        record[0] = record[0] * _FADE + (1.0 if kept else 0.0)
        record[1] = record[1] * _FADE + 1.0
        record[2 if kept else 3] += 1.0
        if kept:
            late = self._late.setdefault(hint.source, [0.0] * _LATE_BINS)
            for b in range(_LATE_BINS):
                late[b] *= _FADE
            late[_late_bin(at_s - hint.at_s)] += 1.0
            self._windows.pop(hint.source, None)
        if len(self._record) > MOST_SOURCES:
            gone, _ = self._record.popitem(last=False)
            self._late.pop(gone, None)
            self._windows.pop(gone, None)
        self.on_settled(hint, kept, at_s)

    def belief(self, source: str) -> float:
        """The probability that a hint of `source` is kept, by its record so far."""
        kept, settled = self._record.get(source, (0.0, 0.0))[:2]
        return (kept + _PRIOR_KEPT) / (settled + _PRIOR_HINTS)

    def window_s(self, source: str) -> float:
        """How long after the time that it names a use of `source` comes, nearly always, if it comes; inf where too few were kept."""
        found = self._windows.get(source)
        if found is None:
            late = self._late.get(source)
            if late is None:
                return math.inf
            total, so_far, found = sum(late), 0.0, math.inf
            if total >= _LEAST_KEPT:
                for b, count in enumerate(late):
                    so_far += count
                    if so_far >= _COVERED * total:
                        found = 2.0 ** (0.5 * b)
                        break
            self._windows[source] = found
        return found

    def sources(self) -> list[SourceRecord]:
        """The record of every source, the latest to be settled first."""
        found = [SourceRecord(name, int(kept), int(broken), self.belief(name)) for name, (_, _, kept, broken) in self._record.items()]
        return found[::-1]

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
        probability = self._probability(said)
        at_s = max(now_s, said.at_s)
        end_s = min(said.until_s, said.latest_s + max(self.window_s(source) for source in said.sources))
        if end_s <= now_s:
            # Nearly all that are kept are by now: what is left of the chance, over what is left of the time.
            probability *= (1.0 - _COVERED) / (1.0 - _COVERED * probability)
            end_s = said.until_s
        per_s = hinted_rate(probability, at_s, end_s, now_s)
        return Expected(probability, at_s, said.until_s, per_s, end_s, max(said.sources, key=lambda s: (self._chance(said, s), s)))

    def _chance(self, said: _Said, source: str) -> float:
        return said.chances.get(source, self.belief(source))

    def _probability(self, said: _Said) -> float:
        return 1.0 - math.prod(1.0 - self._chance(said, source) for source in said.sources)

    def models(self) -> list[str]:
        """Models with open hints."""
        return list(self._open)

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        hints = [h for mine in self._open.values() for h in mine.values()]
        return {
            "open": [[getattr(h, name) for name in _FIELDS] for h in hints],
            "ids": list(self._ids),
            "record": [[source, *record] for source, record in self._record.items()],
            "late": [[source, *late] for source, late in self._late.items()],
            "kept": self.kept,
            "broken": self.broken,
            "announced": self.announced.snapshot(),
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> HintBook:
        """The book that `snapshot` was taken of. Raises KeyError, TypeError or ValueError for something else."""
        book = cls()
        for values in snapshot["open"]:
            book.add(Hint(*values), -math.inf)
        book._ids = OrderedDict.fromkeys(snapshot["ids"])
        for source, kept, settled, *totals in snapshot["record"]:
            book._record[source] = [float(kept), float(settled), *(totals or (round(kept), round(settled - kept)))]
        for source, *late in snapshot.get("late", ()):
            if len(late) != _LATE_BINS:
                raise ValueError(f"hints with {len(late)} bins of lateness, expected {_LATE_BINS}")
            book._late[source] = [float(count) for count in late]
        if "announced" in snapshot:
            book.announced = Announced.restore(snapshot["announced"])
        book.kept, book.broken = int(snapshot["kept"]), int(snapshot["broken"])
        return book


def _late_bin(late_s: float) -> int:
    return 0 if late_s <= 1.0 else min(_LATE_BINS - 1, math.ceil(2.0 * math.log2(late_s)))

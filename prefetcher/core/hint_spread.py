"""Hints that name no model: which models such hints led to before, and so how likely each is meant. Pure.

Three tables of decayed counts stand behind one another: what this user or session asks for, what hints of this place (source and surface)
led to, and what is asked for at all; the narrower counts as far as it has seen something. All are bounded. Covers neither how likely a hint
is kept at all nor what is done about it (`core.hints`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

__all__ = ["LEAST_LIKELY", "MOST_LIKELY", "HintSpread"]

#: So many models are named for a hint at most, each at least this likely.
MOST_LIKELY = 5
LEAST_LIKELY = 0.05
#: Pseudo-counts with which the wider table stands behind a narrower one.
_PRIOR_OF_PLACE, _PRIOR_OF_PERSON = 8.0, 3.0
#: A count fades by this with every later one of its table; what is below the least is forgotten.
_FADE, _LEAST_COUNT = 0.98, 0.02
#: All rows' counts are halved after so many.
_HALVED_AFTER = 1_000
#: Of them only the largest are looked at, after so many rows again.
_MOST_OF_ALL, _TOP_EVERY = 20, 100
#: Places that are told to others, the latest.
_MOST_PLACES = 200
_MOST_TABLES = 10_000
_MOST_MODELS = 64
_MOST_OPEN = 10_000

Counts = dict[str, float]


class HintSpread:
    """Learns from rows and from what hints without a model led to. Times are seconds since the epoch."""

    def __init__(self) -> None:
        self._all: Counts = {}
        self._rows = self._top_due = 0
        self._top: Counts = {}
        self._places: OrderedDict[str, Counts] = OrderedDict()
        self._people: OrderedDict[str, Counts] = OrderedDict()
        #: Hints without a model: id -> (place, who, given_s, until_s); and those of each user, and of nobody.
        self._open: OrderedDict[str, tuple[str, str | None, float, float]] = OrderedDict()
        self._of: dict[str | None, list[str]] = {}

    def hinted(self, hint_id: str, source: str, surface: str, who: str | None, given_s: float, until_s: float) -> list[tuple[str, float]]:
        """Somebody will use some model: the likely ones, the likeliest first, with the probability that each is meant; at most 1 in all."""
        if hint_id not in self._open:
            self._open[hint_id] = (_place(source, surface), who, given_s, until_s)
            self._of.setdefault(who, []).append(hint_id)
        if len(self._open) > _MOST_OPEN:
            self._close(next(iter(self._open)))
        return self.likely(source, surface, who)

    def likely(self, source: str, surface: str = "", who: str | None = None) -> list[tuple[str, float]]:
        """The models that hints of this place and user lead to, as of what was learned."""
        chance = self._chance_of_all()
        place, person = self._places.get(_place(source, surface)), self._people.get(who or "")
        for counts, prior in ((place, _PRIOR_OF_PLACE), (person, _PRIOR_OF_PERSON)):
            if counts:
                total = sum(counts.values()) + prior
                chance = {m: (counts.get(m, 0.0) + prior * chance.get(m, 0.0)) / total for m in {*chance, *counts}}
        best = sorted(chance.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_LIKELY]
        return [(model, p) for model, p in best if p >= LEAST_LIKELY]

    def _chance_of_all(self) -> Counts:
        """Of what is asked for most, looked at again now and then."""
        if self._rows >= self._top_due:
            self._top_due = self._rows + (1 if self._rows < _TOP_EVERY else _TOP_EVERY)
            shares = _shares(self._all)
            self._top = {model: shares[model] for model in sorted(shares, key=lambda m: (-shares[m], m))[:_MOST_OF_ALL]}
        return self._top

    def saw(self, model: str, who: str | None, ts: float) -> None:
        """A row: open hints of its user, and those of nobody, led to it."""
        self._all[model] = self._all.get(model, 0.0) + 1.0
        self._rows += 1
        if self._rows % _HALVED_AFTER == 0:
            self._all = {m: 0.5 * count for m, count in self._all.items() if count >= 2.0 * _LEAST_COUNT}
        if who is not None:
            _count(_table(self._people, who), model, _FADE)
        for of in {who, None}:
            for hint_id in self._of.get(of, ())[:]:
                place, _, given_s, until_s = self._open[hint_id]
                if given_s > ts:
                    continue
                self._close(hint_id)
                if ts <= until_s:
                    _count(_table(self._places, place), model, _FADE)

    def _close(self, hint_id: str) -> None:
        _, who, _, _ = self._open.pop(hint_id)
        mine = self._of[who]
        mine.remove(hint_id)
        if not mine:
            del self._of[who]

    def places(self) -> dict[str, list[tuple[str, float]]]:
        """The likely models by place, of the places learned from last, and under "" those of any other."""
        found = {"": self.likely("", "\0")}
        for place in list(reversed(self._places))[:_MOST_PLACES]:
            source, _, surface = place.partition("\0")
            found[place] = self.likely(source, surface)
        return found

    def snapshot(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        return {
            "all": self._all,
            "rows": self._rows,
            "places": list(self._places.items()),
            "people": list(self._people.items()),
            "open": [[hint_id, *about] for hint_id, about in self._open.items()],
        }

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any]) -> HintSpread:
        """Raises KeyError, TypeError or ValueError for what is no snapshot."""
        made = cls()
        made._all, made._rows = dict(snapshot["all"]), int(snapshot["rows"])
        made._places = OrderedDict((place, dict(counts)) for place, counts in snapshot["places"])
        made._people = OrderedDict((who, dict(counts)) for who, counts in snapshot["people"])
        for hint_id, place, who, given_s, until_s in snapshot["open"]:
            made._open[hint_id] = (place, who, given_s, until_s)
            made._of.setdefault(who, []).append(hint_id)
        return made


def _place(source: str, surface: str) -> str:
    return f"{source}\0{surface}"


def _table(tables: OrderedDict[str, Counts], name: str) -> Counts:
    found = tables.setdefault(name, {})
    tables.move_to_end(name)
    if len(tables) > _MOST_TABLES:
        tables.popitem(last=False)
    return found


def _count(counts: Counts, model: str, fade: float) -> None:
    for other in list(counts):
        counts[other] *= fade
        if counts[other] < _LEAST_COUNT:
            del counts[other]
    counts[model] = counts.get(model, 0.0) + 1.0
    if len(counts) > _MOST_MODELS:
        del counts[min(counts, key=lambda m: (counts[m], m))]


def _shares(counts: Counts) -> Counts:
    total = sum(counts.values())
    return {model: count / total for model, count in counts.items()} if total > 0.0 else {}

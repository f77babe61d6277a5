"""Segments of models, found from their facts: what a model's rows say of it, and the few boxes that tell models apart. Pure.

Facts are sizes, rates, regularity and how often uses were hinted (`core.windows.ModelFacts`). The boxes are the leaves of a small tree,
each cut the one that leaves the least spread; so rules are plain thresholds, hold for models that come later, and cover everything.
Regularity and hints are cut at a half only: regular or not, hinted or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefetcher.core.windows import FACTS, FactTable, Segment

__all__ = ["ALL_MODELS", "MOST_SEGMENTS", "SORTED_S", "facts_before", "facts_of_rows", "find_segments", "regularity"]

Floats = npt.NDArray[np.float64]

#: Models are sorted into segments anew each day, by their facts of the last week.
SORTED_S = 86_400.0
_FACTS_S = 7 * SORTED_S
#: A first hour is taken for an hour, however few seconds of it have passed.
_LEAST_S = 3600.0
#: More are hard to look through, and each costs a set of shadow caches.
MOST_SEGMENTS = 4
#: The one segment of a book whose models are not told apart.
ALL_MODELS = Segment("all models")
#: Rows that follow sooner belong to one use: no pause.
_PAUSE_S = 60.0
#: Fewer pauses show no beat.
_LEAST_PAUSES = 4
#: A pause keeps the beat when it is that near to the median pause.
_BEAT = 0.25
#: A cut must leave so much less spread, as a share of the whole, and this share of the models on both sides.
_LEAST_GAIN = 0.08
_LEAST_SHARE = 0.05
_LEAST_MODELS = 3
#: Facts that are shares: on this side of a half or on that.
_SHARES = (2, 3)
_LEAST_ROWS_PER_DAY = 0.01
#: How limits are said.
_UNITS = ((1e-9, "GB"), (1.0, "a day"), (100.0, "% regular"), (100.0, "% hinted"))
#: Below each: that word. Bytes and rows a day.
_SIZE_WORDS = ((5e9, "small"), (40e9, "mid-sized"), (math.inf, "large"))
_RATE_WORDS = ((2.0, "rare"), (24.0, "a few a day"), (240.0, "hourly"), (math.inf, "busy"))
_HALF = 0.5


def regularity(pauses_s: Floats) -> float:
    """How much a model keeps a beat, 0 to 1: of its pauses over a minute, what is over the minute is within a quarter of its median for
    this share; 0 for under four of them. Random arrivals come to about 0.17, however often; a timer comes to 1.
    """
    over_s = pauses_s[pauses_s > _PAUSE_S] - _PAUSE_S
    if len(over_s) < _LEAST_PAUSES:
        return 0.0
    median = float(np.median(over_s))
    return float(np.mean(np.abs(over_s - median) <= _BEAT * median))


def facts_of_rows(ts: Floats, model: npt.NDArray[np.integer], size_bytes: Floats, days: float, hinted: Floats | None = None) -> FactTable:
    """The facts of all n models after `days` of history: rows at `ts` float64[N], sorted, of models `model` int[N], sizes float64[n].

    `hinted` float64[n] is the share of each model's uses that were hinted; none unless given.
    """
    n = len(size_bytes)
    rows = np.bincount(model, minlength=n)
    order = np.argsort(model, kind="stable")
    sorted_ts, ends = ts[order], np.cumsum(rows)
    beat = np.zeros(n)
    for m in np.flatnonzero(rows > _LEAST_PAUSES):
        beat[m] = regularity(np.diff(sorted_ts[ends[m] - rows[m] : ends[m]]))
    return FactTable(size_bytes.astype(np.float64), rows / max(days, 1e-9), beat, np.zeros(n) if hinted is None else hinted)


def facts_before(ts: Floats, model: npt.NDArray[np.integer], size_bytes: Floats, from_s: float, now_s: float) -> FactTable:
    """The facts of all models by the rows of the last week before `now_s`, of a history that began at `from_s`; `ts` is sorted."""
    from_s = max(from_s, now_s - _FACTS_S)
    first, last = np.searchsorted(ts, (from_s, now_s))
    return facts_of_rows(ts[first:last], model[first:last], size_bytes, max(now_s - from_s, _LEAST_S) / 86_400.0)


@dataclass(frozen=True, slots=True)
class _Box:
    members: npt.NDArray[np.int64]
    limits: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    gain: float
    fact: int
    at: float


def find_segments(table: FactTable, most: int = MOST_SEGMENTS) -> tuple[Segment, ...]:
    """At most `most` boxes that hold all models, told apart where they differ; `ALL_MODELS` alone where they don't. Models without a row
    are not looked at. The same table gives the same segments.
    """
    used = np.flatnonzero(table.rows_per_day > 0.0)
    spread = _scaled(table)
    boxes = [_Box(used, ((-math.inf, math.inf),) * len(FACTS))]
    whole = _spread_of(spread[used]) if len(used) else 0.0
    least = max(_LEAST_MODELS, math.ceil(_LEAST_SHARE * len(used)))
    while len(boxes) < most and whole > 0.0:
        cuts = [_best_cut(table, spread, box.members, least) for box in boxes]
        place = max(range(len(boxes)), key=lambda k: cuts[k].gain)
        cut, box = cuts[place], boxes[place]
        if cut.gain < _LEAST_GAIN * whole:
            break
        below = table[cut.fact][box.members] < cut.at
        low, high = box.limits[cut.fact]
        parts = ((box.members[below], (low, cut.at)), (box.members[~below], (cut.at, high)))
        boxes[place : place + 1] = [
            _Box(members, (*box.limits[: cut.fact], limits, *box.limits[cut.fact + 1 :])) for members, limits in parts
        ]
    if len(boxes) == 1:
        return (ALL_MODELS,)
    return tuple(_named(table, boxes))


def _scaled(table: FactTable) -> Floats:
    """float64[n, facts], in units that can be compared: a factor of ten, or regular or not."""
    rows = np.maximum(table.rows_per_day, _LEAST_ROWS_PER_DAY)
    columns = (np.log10(np.maximum(table.bytes, 1.0)), np.log10(rows), table.regularity >= _HALF, table.hinted >= _HALF)
    return np.stack(columns, axis=1)


def _spread_of(points: Floats) -> float:
    return float(((points - points.mean(axis=0)) ** 2).sum())


def _best_cut(table: FactTable, spread: Floats, members: npt.NDArray[np.int64], least: int) -> _Cut:
    """The cut of a box that leaves the least spread."""
    best = _Cut(0.0, 0, 0.0)
    k = len(members)
    if k < 2 * least:
        return best
    before = _spread_of(spread[members])
    for fact in range(len(FACTS)):
        value = table[fact][members] if fact not in _SHARES else spread[members, fact]
        order = np.argsort(value, kind="stable")
        points, value = spread[members][order], value[order]
        sums, squares = np.cumsum(points, axis=0), np.cumsum(points**2, axis=0)
        left = np.arange(1, k)[:, np.newaxis]
        after = (squares[:-1] - sums[:-1] ** 2 / left) + (squares[-1] - squares[:-1] - (sums[-1] - sums[:-1]) ** 2 / (k - left))
        gain = before - after.sum(axis=1)
        allowed = (value[1:] > value[:-1]) & (left[:, 0] >= least) & (k - left[:, 0] >= least)
        if not allowed.any():
            continue
        place = int(np.argmax(np.where(allowed, gain, -np.inf)))
        if gain[place] > best.gain:
            at = _HALF if fact in _SHARES else _round_between(float(value[place]), float(value[place + 1]))
            best = _Cut(float(gain[place]), fact, at)
    return best


def _round_between(low: float, high: float) -> float:
    """The roundest number above `low` and up to `high`: one digit if there is one, else two, and so on."""
    middle = math.sqrt(low * high) if low > 0.0 else (low + high) / 2.0
    for digits in range(1, 16):
        rounded = float(f"{middle:.{digits - 1}e}")
        if low < rounded <= high:
            return rounded
    return high


def _named(table: FactTable, boxes: Sequence[_Box]) -> list[Segment]:
    words = [_words(table, box.members) for box in boxes]
    out = []
    for box, said in zip(boxes, words, strict=True):
        rule = tuple((FACTS[f], low, high) for f, (low, high) in enumerate(box.limits) if (low, high) != (-math.inf, math.inf))
        alike = [of for of, other in zip(boxes, words, strict=True) if other == said and of is not box]
        out.append(Segment(said if not alike else f"{said} ({_limits_in_words(box, alike)})", rule))
    return out


def _words(table: FactTable, members: npt.NDArray[np.int64]) -> str:
    middle = [float(np.median(column[members])) for column in table]
    size = next(word for below, word in _SIZE_WORDS if middle[0] < below)
    rate = next(word for below, word in _RATE_WORDS if middle[1] < below)
    beat = "regular" if middle[2] >= _HALF else "irregular"
    return ", ".join([size, rate, beat, *(["hinted"] if middle[3] >= _HALF else [])])


def _limits_in_words(box: _Box, alike: Sequence[_Box]) -> str:
    """What tells a box from others whose words are the same."""
    said = []
    for fact, (low, high) in enumerate(box.limits):
        if all(other.limits[fact] == (low, high) for other in alike):
            continue
        per_unit, unit = _UNITS[fact]
        said += [f"from {low * per_unit:g} {unit}"] if math.isfinite(low) else []
        said += [f"under {high * per_unit:g} {unit}"] if math.isfinite(high) else []
    return ", ".join(said)

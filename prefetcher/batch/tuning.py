"""Windows tuned over recent history, every day, and a change that turns out bad undone: the live side of the tuner.

`tune_windows` takes the rows of the last week through the same walk as `prefetcher tune`, with the windows that are in force, decides
once, at its end, and writes what it decides, with the evidence, as a new version (`controller.windows`). Where there are many models a hash
sample of them goes through, with as much memory as their share of all bytes. `watch_windows` looks at the last change every hour: against
the control group where one runs, and against what the windows before would have cost over the rows that came since. Covers no statistics
(`core.tuner`, `core.effect`).

Source of the sampling: Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS", FAST 2015.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefetcher.batch.scheduler import Did, Run
from prefetcher.batch.training import rows_of_history
from prefetcher.controller import records
from prefetcher.controller.effects import EffectReader
from prefetcher.controller.windows import WINDOW_FACTS, BooksRecord, WindowEvent, WindowShelf, window_json
from prefetcher.core.effect import Basis
from prefetcher.core.experts import EXPERTS, PERIOD_S, expert_policies
from prefetcher.core.node import Hazard
from prefetcher.core.segments import facts_of_rows
from prefetcher.core.tuner import TunerSettings, WindowTuner
from prefetcher.core.types import NodeName, RequestSeen, Window
from prefetcher.core.window_caches import COSTS, WindowCaches
from prefetcher.core.windows import BookEntry, FactTable, ModelFacts, WindowBook, window_in_words
from prefetcher.ports import StateStore
from prefetcher.replay.engine import NodeLog, split_by_node
from prefetcher.replay.ours import RateBlock, score_blocks
from prefetcher.replay.trace import Problems, Trace
from prefetcher.tuning.walk import TuningWalk

__all__ = ["History", "history_of", "tune_windows", "watch_windows"]

Floats = npt.NDArray[np.float64]

TUNER = "tune-windows"
WATCH = "watch-windows"
#: A week has every day; the hazard learns on its first days, and the evidence's half-life is one.
LOOK_BACK_S = 7 * 86_400.0
#: Less than this says nothing of a day.
_LEAST_S = 2 * 86_400.0
#: More models are sampled; a walk over so many takes minutes.
_MOST_MODELS = 400
#: A change is looked at for so long, and not before so many whole hours came after it.
WATCHED_S = 7 * 86_400.0
_LEAST_HOURS = 6
_MOST_NODES = 8
#: A change is bad when it costs so many times the root of the summed squares more: going back asks for less certainty than changing.
_BAD_CERTAINTY = 1.0
#: After a change was undone nothing is changed for three days, after two in a month for six, and so on.
_RESTS_S, _REMEMBERED_S = 3 * 86_400.0, 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class History:
    """Rows of history as nodes would serve them: `trace`, its `parts` by node, `capacity_bytes` of each, and facts of all models, not
    only of those sampled. `sampled`: the share of models that the trace has."""

    trace: Trace
    parts: list[NodeLog]
    capacity_bytes: float
    facts: dict[str, tuple[float, float, float]]
    sampled: float


def history_of(
    rows: Iterable[Sequence[RequestSeen]], reports: Sequence[records.NodeReport], most_models: int = _MOST_MODELS
) -> History | None:
    """The history of `rows`, on the nodes of `reports`; None where there are too few of either."""
    known = {k.model: k for report in reports for k in report.known}
    seen = [row for hour in rows for row in hour if row.model in known]
    if len(seen) < 2 or not reports or seen[-1].ts - seen[0].ts < _LEAST_S:
        return None
    names = sorted(known)
    number = {name: k for k, name in enumerate(names)}
    ts, model = np.array([row.ts for row in seen]), np.array([number[row.model] for row in seen], np.int32)
    size = np.array([known[name].bytes for name in names], np.int64)
    table = facts_of_rows(ts, model, size.astype(np.float64), float(ts[-1] - ts[0]) / 86_400.0)
    facts = {
        name: (round(float(table.rows_per_day[k]), 4), round(float(table.regularity[k]), 4), 0.0)
        for k, name in enumerate(names)
        if table.rows_per_day[k] > 0.0
    }
    asked = table.rows_per_day > 0.0
    kept = _sample(names, asked, most_models)
    # What nobody asks for takes no room.
    share = float(size[kept].sum()) / float(size[asked].sum())
    of = np.flatnonzero(kept[model])
    renumbered = np.cumsum(kept) - 1
    nodes = sorted(report.node for report in reports)[:_MOST_NODES]
    trace = Trace(
        path="history",
        ts=ts[of],
        model=renumbered[model[of]].astype(np.int32),
        models=[name for name, stays in zip(names, kept, strict=True) if stays],
        bytes_=np.maximum(size[kept], 1),
        user=np.full(len(of), -1, np.int32),
        users=0,
        node=np.full(len(of), -1, np.int32),
        node_names=nodes,
        version=np.zeros(len(of), np.int32),
        version_names=[""],
        count=np.array([seen[k].count for k in of], np.int32),
        problems=Problems({}, ()),
        rows_read=len(seen),
        tz="UTC",
    )
    load_s = np.array([max(known[name].load_s, 1e-6) for name in trace.models])
    link_bytes_per_s = float(np.mean([report.link_bytes_per_s for report in reports]))
    capacity = share * float(np.mean([report.memory.budget_bytes for report in reports])) * len(reports) / len(nodes)
    parts = split_by_node(trace, len(nodes), link_bytes_per_s, load_s)
    return History(trace, parts, capacity, facts, float(kept.sum()) / float(asked.sum()))


def _sample(names: Sequence[str], asked: npt.NDArray[np.bool_], most: int) -> npt.NDArray[np.bool_]:
    """bool[n]: the models of least hash among those that are asked for, `most` at most; the same ones from day to day."""
    hashed = np.array([int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") for name in names], np.uint64)
    kept = np.zeros(len(names), np.bool_)
    candidates = np.flatnonzero(asked)
    kept[candidates[np.argsort(hashed[candidates], kind="stable")[:most]]] = True
    return kept


def _history(state: StateStore, folder: Path, now_s: float) -> History | None:
    names = state.members(records.NODES, now_s - 86_400.0)
    reports = []
    for name, raw in zip(names, state.read_many([records.node_key(NodeName(name), "report") for name in names]), strict=True):
        if raw is not None:
            try:
                reports.append(records.decode_report(raw, name))
            except ValueError:
                continue
    return history_of(rows_of_history(folder, now_s - LOOK_BACK_S), reports)


# --- tuning ---


def tune_windows(run: Run, state: StateStore, folder: Path, settings: TunerSettings, now_s: float, seed: int = 0) -> Did:
    """Takes recent history through the tuner, and writes what it changes. `folder`: hours of history.

    Raises:
        UnavailableError: the state store does not answer.
    """
    run.at(0.0, 1.0, "reading history")
    history = _history(state, folder, now_s)
    if history is None:
        return Did(0, f"under {_LEAST_S / 86_400:.0f} days of history of models that nodes know: the windows stay")
    shelf = WindowShelf(state)
    book, _ = shelf.read()
    rests_until_s = _rests_until(shelf, now_s)
    if rests_until_s > now_s:
        state.write({WINDOW_FACTS: records.encode(history.facts)})
        return Did(0, f"a change was undone lately: the windows stay for {(rests_until_s - now_s) / 3600.0:.0f} h more")
    # What is in force stays so to the end of the walk: all of it is evidence for one decision.
    whole = int((history.trace.t1 - history.trace.t0) // PERIOD_S)
    walk = TuningWalk(history.parts, history.capacity_bytes, settings=replace(settings, settle_periods=whole), start=book)
    for block in score_blocks(history.trace, seed, lambda done, _what: run.at(0.05 + 0.9 * done, 1.0, "going through history")):
        walk.take(block)
        run.check()
    walk.close()
    run.check()
    state.write({WINDOW_FACTS: records.encode(history.facts)})
    events = _write(shelf, walk, book, history, settings, now_s)
    said = "; ".join(f"{event.segment or 'segments'}: {event.why}" for event in events) or "the windows stay"
    return Did(len(history.trace), said)


def _rests_until(shelf: WindowShelf, now_s: float) -> float:
    """Until when nothing is changed, because changes turned out bad."""
    undone = sorted({event.at_s for event in shelf.events() if event.act == "undone" and event.at_s > now_s - _REMEMBERED_S})
    return undone[-1] + len(undone) * _RESTS_S if undone else -math.inf


def _write(
    shelf: WindowShelf, walk: TuningWalk, start: WindowBook, history: History, settings: TunerSettings, now_s: float
) -> list[WindowEvent]:
    """Puts the walk's windows in force where nobody changed them meanwhile; the events of it."""
    found = walk.in_force
    written: list[WindowEvent] = []

    def make(book: WindowBook, record: BooksRecord) -> tuple[WindowBook, list[WindowEvent], float | None] | None:
        written.clear()
        if [e.segment for e in book.entries] != [e.segment for e in start.entries]:
            # Others went back, or on, while history was gone through: the next run begins from there.
            return None
        evidence = _evidence(walk.tuner, history, settings)
        pinned = {entry.segment for entry in book.entries if entry.pinned}
        if [e.segment for e in found.entries] != [e.segment for e in book.entries]:
            if not any(entry.segment.rule for entry in found.entries) and not walk.decisions:
                return None
            why = f"{len(found.entries)} segments of models found: " + ", ".join(entry.segment.name for entry in found.entries)
            written.append(WindowEvent(now_s, "segments", TUNER, 0, why=why, evidence=evidence))
            changed = {entry.segment.name: book.rest for entry in found.entries}
            after = replace(found, entries=tuple(replace(entry, since_s=now_s) for entry in found.entries))
        else:
            changed = {entry.segment.name: entry.window for entry in book.entries}
            after = book
        for entry in found.entries:
            old = changed[entry.segment.name]
            if entry.window == old or entry.segment in pinned:
                continue
            why = _why(walk, entry, old, settings)
            after = after.changed(entry.segment.name, entry.window, now_s, why)
            written.append(
                WindowEvent(now_s, "tuned", TUNER, 0, entry.segment.name, window_json(old), window_json(entry.window), why, evidence)
            )
        return (after, list(written), now_s) if written else None

    shelf.change(make)
    return written


def _why(walk: TuningWalk, entry: BookEntry, old: Window, settings: TunerSettings) -> str:
    """Why a window takes the place of the old one, by the decision that it comes from."""
    decision = next((d for d in reversed(walk.decisions) if d.new == entry.window and d.old == old), None)
    if decision is None:
        return entry.why
    before, after = (cost.seconds(settings.price_s_per_gb_h, decision.dual_price) for cost in (decision.old_cost, decision.new_cost))
    percent = 100.0 * (before - after) / max(before, 1e-9)
    if percent > 0.0:
        return f"{percent:.1f} % less cost over the last days than with {window_in_words(old)}"
    return f"{window_in_words(old)} is not surely better over the last days: {-percent:.1f} % less cost"


def _evidence(tuner: WindowTuner, history: History, settings: TunerSettings) -> dict[str, Any]:
    """Everything that the decision was made from, as JSON types."""
    trace = history.trace
    alternatives = {
        segment: [
            {
                **window_json(window),
                "wait_s": round(cost.wait_s, 3),
                "held_gb_h": round(cost.held_gb_h, 4),
                "wasted_gb_h": round(cost.wasted_gb_h, 4),
            }
            for window, cost in costs
        ]
        for segment, costs in tuner.costs().items()
    }
    return {
        "from_s": trace.t0,
        "until_s": trace.t1,
        "rows": len(trace),
        "models": len(trace.models),
        "sampled": round(history.sampled, 4),
        "nodes": len(history.parts),
        "capacity_bytes": round(history.capacity_bytes),
        "price_s_per_gb_h": settings.price_s_per_gb_h,
        "dual_price": tuner.dual_price,
        "half_life_s": settings.half_life_s,
        "costs": alternatives,
    }


# --- watching ---


def watch_windows(run: Run, state: StateStore, folder: Path, settings: TunerSettings, now_s: float, seed: int = 0) -> Did:
    """Looks at the last change of the tuner, and undoes what turned out bad.

    Raises:
        UnavailableError: the state store does not answer.
    """
    shelf = WindowShelf(state)
    book, record = shelf.read()
    since_s = record.watched_from_s
    if since_s is None or not record.before:
        return Did(0, "no change of windows is being watched")
    if now_s - since_s < (_LEAST_HOURS + 1) * PERIOD_S:
        return Did(0, "the change is too young")
    before = _book_before(record, since_s)
    changed = _changed(book, before)
    verdict = _by_control(state, since_s, now_s)
    if verdict is None or not verdict[0]:
        run.at(0.1, 1.0, "reading history")
        history = _history(state, folder, now_s)
        counted = None if history is None else _by_shadows(run, history, book, before, changed, since_s, settings, seed)
        verdict = counted if counted is not None and (verdict is None or counted[0]) else verdict
    if verdict is not None and verdict[0]:
        run.check()
        shelf.roll_back(before.version, WATCH, now_s, why=f"undone: {verdict[1]}", act="undone", evidence=verdict[2])
        return Did(0, f"undone: {verdict[1]}")
    if now_s - since_s >= WATCHED_S:
        shelf.stop_watching(since_s)
        return Did(0, "the change stood for a week: it is watched no more")
    return Did(0, "too little is known of the change" if verdict is None else f"the change stands: {verdict[1]}")


def _book_before(record: BooksRecord, since_s: float) -> WindowBook:
    """The last book of before the change that is watched."""
    for each in reversed(record.before):
        book = WindowBook.from_json(each)
        if all(entry.since_s < since_s for entry in book.entries):
            return book
    return WindowBook.from_json(record.before[0])


def _changed(book: WindowBook, before: WindowBook) -> list[tuple[int, Window]]:
    """(number of a segment, the window that its models had) where those differ and nobody pinned it."""
    old = {entry.segment: entry.window for entry in before.entries}
    return [
        (number, old.get(entry.segment, before.rest))
        for number, entry in enumerate(book.entries)
        if entry.window != old.get(entry.segment, before.rest) and not entry.pinned
    ]


def _by_control(state: StateStore, since_s: float, now_s: float) -> tuple[bool, str, dict[str, Any]] | None:
    """(bad, in words, evidence) by the control group: what prefetching saved before and after; None where it can't tell."""
    reader = EffectReader(state)
    length_s = min(now_s - since_s, WATCHED_S)
    after = reader.read(now_s, from_s=since_s + PERIOD_S)
    before = reader.read(now_s, from_s=since_s - length_s, until_s=since_s)
    if not (after["basis"] == before["basis"] == Basis.CONTROL.value):
        return None
    bad = after["high"] < before["low"]
    now, then = 100.0 * after["saving_ratio"], 100.0 * before["saving_ratio"]
    said = f"against the control group prefetching saves {now:.0f} %, and before it {then:.0f} %"
    return bad, said, {"by": "control", "before": before, "after": after}


def _by_shadows(
    run: Run, history: History, book: WindowBook, before: WindowBook, changed: Sequence[tuple[int, Window]], since_s: float,
    settings: TunerSettings, seed: int,
) -> tuple[bool, str, dict[str, Any]] | None:  # fmt: skip
    """(bad, in words, evidence) over the rows that came since: what each changed segment's window of before would have cost."""
    if not changed:
        return None
    rival = _Rival(history, book, changed, settings)
    for block in score_blocks(history.trace, seed, lambda done, _what: run.at(0.1 + 0.8 * done, 1.0, "going through what came since")):
        rival.take(block)
        run.check()
    gains = np.array([gain for at_s, gain in rival.gains if at_s > since_s + PERIOD_S])
    if len(gains) < _LEAST_HOURS:
        return None
    total, chance = float(gains.sum()), _BAD_CERTAINTY * math.sqrt(float((gains**2).sum()))
    cost = max(sum(cost for at_s, cost in rival.costs if at_s > since_s + PERIOD_S), 1e-9)
    bad = total < -max(settings.hysteresis * cost, chance)
    word = "more" if total < 0.0 else "less"
    percent = abs(100.0 * total / max(cost + total, 1e-9))
    said = f"over {len(gains)} hours it cost {percent:.1f} % {word} than the windows before would have"
    evidence = {
        "by": "shadow",
        "hours": len(gains),
        "gained_s": round(total, 3),
        "chance_s": round(chance, 3),
        "cost_s": round(cost, 3),
        "rows": len(history.trace),
        "from_s": since_s + PERIOD_S,
        "until_s": history.trace.t1,
    }
    return bad, said, evidence


class _Rival:
    """The windows in force against those of before, segment by segment, over history. `gains`: (end of the hour, seconds that the new
    windows saved in it); `costs`: (the same, what it cost in all)."""

    def __init__(self, history: History, book: WindowBook, changed: Sequence[tuple[int, Window]], settings: TunerSettings) -> None:
        self._history = history
        self._price = np.array([1.0, settings.price_s_per_gb_h, 0.0])
        policy = expert_policies(settings.price_s_per_gb_h, book.rest.hold_s)[list(EXPERTS).index("hazard-prefetch")]
        table = FactTable.of(
            [_facts_of(history, name, size) for name, size in zip(history.trace.models, history.trace.bytes_, strict=True)]
        )
        number = book.segment_numbers(table)
        windows = [*(entry.window for entry in book.entries), book.rest]
        place = {s: k for k, (s, _) in enumerate(changed)}
        in_force = np.array([len(changed) + (s if s >= 0 else len(book.entries)) for s in number.tolist()])
        for s, k in place.items():
            in_force[number == s] = k
        # First the segments that changed, each with its window of before as the one candidate; then all others.
        self._caches = []
        for part in history.parts:
            caches = WindowCaches(part.world, history.capacity_bytes, policy, len(changed), 1)
            caches.set_windows(in_force, [*(windows[s] for s, _ in changed), *windows], [[old] for _, old in changed])
            self._caches.append(caches)
        self.gains: list[tuple[float, float]] = []
        self.costs: list[tuple[float, float]] = []

    def take(self, block: RateBlock) -> None:
        """Goes through a block of rates, hour by hour."""
        for part, caches in zip(self._history.parts, self._caches, strict=True):
            first, last = np.searchsorted(part.rows, (block.first_row, block.last_row))
            after_row = np.ascontiguousarray(block.after_row[:, part.rows[first:last] - block.first_row])
            caches.see(Hazard(block.at_tick, after_row, block.at_tick[:, 0], block.first_tick, 0))
        for end_s, until_s in block.periods(self._history.trace.t1):
            now, gain = np.zeros(COSTS), 0.0
            for part, caches in zip(self._history.parts, self._caches, strict=True):
                caches.go(int(np.searchsorted(part.world.ts, end_s)), until_s)
                mine, others, _ = caches.costs(until_s)
                now += mine
                gain += float(((others[:, 0] - mine) @ self._price).sum())
            self.gains.append((end_s, gain))
            self.costs.append((end_s, float(now @ self._price)))


def _facts_of(history: History, name: str, size: int) -> ModelFacts:
    return ModelFacts(float(size), *history.facts.get(name, (0.0, 0.0, 0.0)))

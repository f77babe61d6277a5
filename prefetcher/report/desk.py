"""Reports on demand, for whoever answers: reads what there is, and builds.

What was read is kept for a second, and an answer for a second, or twenty times as long as it took to make, five minutes at most: a page
that is open in many windows asks once, and reports of many nodes take little of a process. Safe for threads. Covers no routes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from prefetcher.clock import Clock
from prefetcher.config import ReportSettings
from prefetcher.controller.effects import EffectReader
from prefetcher.core.histogram import RESOLUTION_RATIO
from prefetcher.core.totals import Totals
from prefetcher.errors import ModelNotFoundError, UsageError, shortened
from prefetcher.ports import StateStore
from prefetcher.report.build import Besides, Question, build_report, hours_of, stages_of
from prefetcher.report.messages import BY, ColdStart, IdlePin, Report
from prefetcher.report.reading import Found, read_nodes
from prefetcher.report.shadows import read_shadows

__all__ = ["ReportDesk", "time_of"]

#: Real seconds.
_FRESH_S = 1.0
_SHARE = 20.0
_LONGEST_S = 300.0
_MOST_ANSWERS = 32
_SPAN = re.compile(r"^(\d+(?:\.\d+)?)(s|min|m|h|d|w)$")
_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}


def time_of(text: str, now_s: float, what: str) -> float:
    """A time as people say it: `24h` or `7d` ago, seconds since 1970, or ISO 8601 (UTC where it names no zone).

    Raises UsageError for something else.
    """
    span = _SPAN.match(text.strip())
    if span is not None:
        # Nothing was there before 1970, however large the span.
        return max(0.0, now_s - float(span[1]) * _UNITS[span[2]])
    try:
        found = float(text)
    except ValueError:
        try:
            when = datetime.fromisoformat(text.strip())
            found = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            found = float("nan")
    if not 0.0 <= found <= 1e11:
        raise UsageError(f"{what} is {shortened(repr(text))}, expected a time as 24h, 7d, 2026-01-31T12:00 or seconds since 1970")
    return found


class ReportDesk:
    """`history` is the folder of hours that left the state store, where this process has it. `idle_pins` are given by whoever knows."""

    def __init__(self, state: StateStore, clock: Clock, settings: ReportSettings, history: Path | None = None) -> None:
        self._state = state
        self._clock = clock
        self._settings = settings
        self._history = history
        self._effects = EffectReader(state)
        self._guard = threading.Lock()
        self._read: tuple[float, range | None, Found] | None = None
        #: By what was asked: until when it stands, and the answer.
        self._answers: dict[tuple[str | None, str | None, str | None, int], tuple[float, Report]] = {}

    def report(self, since: str | None = None, until: str | None = None, by: str | None = None, most: int = 1000) -> Report:
        """The report of all nodes over a window; without `since`, or with 0, since the installation.

        Raises:
            UsageError: no such time, or nothing that a report is broken down by.
            UnavailableError: the state store does not answer.
            InputError: a file of the history is none.
        """
        question = self._question(since, until, by, most)
        asked, began_s = (since, until, by, most), self._real_s()
        with self._guard:
            made = self._answers.get(asked)
            if made is not None and began_s < made[0]:
                return made[1]
        report = self._build(question)
        now_s = self._real_s()
        with self._guard:
            self._answers = {of: each for of, each in self._answers.items() if now_s < each[0]}
            if len(self._answers) < _MOST_ANSWERS:
                self._answers[asked] = (now_s + min(max(_FRESH_S, _SHARE * (now_s - began_s)), _LONGEST_S), report)
        return report

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed

    def _build(self, question: Question) -> Report:
        hours = hours_of(question.since_s, question.until_s) if question.since_s is not None else None
        found = self._nodes(hours)
        besides = Besides(found.missing, self.idle_pins(), read_shadows(self._state, [each.node for each in found.nodes]))
        effect = self._effects.read(self._clock.now_s(), question.since_s, question.until_s)
        return msgspec.structs.replace(build_report(found.nodes, question, besides), effect=effect)

    def _question(self, since: str | None, until: str | None, by: str | None, most: int = 1000) -> Question:
        if by is not None and by not in BY:
            raise UsageError(f"a report is broken down by {', '.join(BY)}, not by {shortened(repr(by))}")
        now_s = self._clock.now_s()
        until_s = now_s if until is None else time_of(until, now_s, "until")
        since_s = None if since is None else time_of(since, now_s, "since") or None
        if since_s is not None and since_s >= until_s:
            raise UsageError(f"since ({shortened(str(since))}) must lie before until ({shortened(until or 'now')})")
        return Question(until_s, since_s, by, most, self._settings.slo_under_s, self._settings.slo_target_ratio)

    def _nodes(self, hours: range | None) -> Found:
        with self._guard:
            real_s = self._real_s()
            if self._read is not None and self._read[1] == hours and real_s - self._read[0] < _FRESH_S:
                return self._read[2]
            found = read_nodes(self._state, self._history, hours, self._clock.now_s())
            self._read = (real_s, hours, found)
            return found

    def cold_start(self, model: str, since: str | None = None, until: str | None = None) -> ColdStart:
        """How long each stage of a cold start of `model` took, by node.

        Raises:
            ModelNotFoundError: no node told of it in that time.
            UsageError, UnavailableError: as `report`.
        """
        question = self._question(since, until, None)
        hours = hours_of(question.since_s, question.until_s) if question.since_s is not None else None
        stages = stages_of(self._nodes(hours).nodes, model, hours)
        if not stages:
            raise ModelNotFoundError(f"no node told of {shortened(repr(model))} in that time", model=model)
        return ColdStart(model, question.since_s, question.until_s, tuple(stages), RESOLUTION_RATIO)

    def sums(self, since: str | None = None, until: str | None = None) -> list[dict[str, Any]]:
        """The sums behind a report, one for each node, part of an hour and key; what is held now is in the part `held`. Raises as
        `report`."""
        question = self._question(since, until, None)
        hours = hours_of(question.since_s, question.until_s) if question.since_s is not None else None
        rows = []
        for each in self._nodes(hours).nodes:
            for key, totals in each.by_key(hours).items():
                rows.append({"node": each.node, "key": list(key), "totals": _plain(totals)})
        return rows

    def idle_pins(self) -> Sequence[IdlePin]:
        """Weights that are kept and earn less than they cost, as the controller told last."""
        from prefetcher.controller.idle_pins import read_idle_pins

        return read_idle_pins(self._state)


def _plain(totals: Totals) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(totals, str_keys=True)
    return plain

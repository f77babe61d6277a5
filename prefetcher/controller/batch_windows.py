"""Batch schedules as the controller plans by them: read with every plan, and what they need at each node.

For the controller's thread. Covers neither how they are set (`api.jobs`) nor which windows are open (`core.schedules`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import tzinfo
from zoneinfo import ZoneInfo

from prefetcher.controller import records
from prefetcher.controller.remembered import Remembered
from prefetcher.core.hints import Expected
from prefetcher.core.schedules import Need, Needs, Schedule, needs, next_window
from prefetcher.core.types import Cause, NodeName
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["BatchWindows"]

#: A plan a tick carries out what a window needs; of a long tick no more than this is added to the lead.
_MOST_TICK_S = 60.0
#: Loads of a window begin a few loads and a tick before it.
_PLACED_AHEAD_S = 900.0


class BatchWindows:
    """What schedules need. A node gives batch `ratio` of its memory at most."""

    def __init__(self, state: StateStore, ratio: float, tick_s: float) -> None:
        self._state = state
        self._remembered = Remembered(state)
        self._ratio = ratio
        self._tick_s = tick_s
        self._schedules: list[Schedule] = []
        self._needs: dict[NodeName, Needs] = {}
        self._said = ""

    @property
    def due_s(self) -> float:
        """When the needs of a node change next."""
        return min((found.next_s for found in self._needs.values()), default=math.inf)

    def look(self) -> None:
        """Reads the schedules; while they can't be read, the last ones stand. What each node needs is worked out anew with its plan.

        Raises:
            UnavailableError: the state store does not answer.
        """
        (raw,) = self._remembered.look([records.SCHEDULES], [self._state.read(records.SCHEDULES)])
        self._needs.clear()
        try:
            found = list(records.decode_schedules(raw).values())
            for schedule in found:
                _zone(schedule.tz)
        except (ValueError, OSError, KeyError) as exc:
            if self._said != str(exc):
                log().error("schedules_unreadable", reason=str(exc), then="the last ones stand; set them again")
            self._said = str(exc)
            return
        self._said = ""
        self._schedules = found

    def models_soon(self, now_s: float) -> set[str]:
        """Models of schedules that name no node and are open, or begin soon: where they go is decided together with all others."""
        found: set[str] = set()
        for schedule in self._schedules:
            window = None if schedule.node else next_window(schedule, _zone(schedule.tz), now_s)
            if window is not None and window.start_s - now_s <= max(_PLACED_AHEAD_S, schedule.lead_s or 0.0):
                found |= set(schedule.models)
        return found

    def at(self, node: NodeName, report: records.NodeReport, is_home: Callable[[str], bool], now_s: float) -> Needs:
        """What is needed at `node` now; remembered for `expected`."""
        if not self._schedules:
            return Needs()
        held = [h for h in report.held if h.cause == Cause.BATCH.value and h.leases]
        found = self._needs[node] = needs(
            self._schedules,
            _zone,
            lambda schedule, model: schedule.node == node or (not schedule.node and is_home(model)),
            {k.model: k.bytes for k in report.known},
            {k.model: k.load_s for k in report.known},
            self._ratio * report.memory.budget_bytes,
            report.recent_wait_s + min(self._tick_s, _MOST_TICK_S),
            now_s,
            {h.model: h.bytes for h in held},
        )
        return found

    def expected(self, node: NodeName, hinted: Mapping[str, Expected], now_s: float) -> dict[str, Expected]:
        """What is `hinted`, and what the needs of `node` say as of its last plan: a use is certain."""
        found = dict(hinted)
        for model, need in self._needs.get(node, Needs()).models.items():
            if need.until_s > now_s:
                found[model] = _as_expected(need, hinted.get(model), now_s)
        return found


def _as_expected(need: Need, hint: Expected | None, now_s: float) -> Expected:
    per_s = need.per_s if hint is None else max(need.per_s, hint.per_s)
    at_s = max(now_s, need.at_s)
    return Expected(1.0, at_s, need.until_s, per_s, min(need.until_s, at_s + 1.0 / need.per_s), need.schedule)


def _zone(name: str) -> tzinfo:
    return ZoneInfo(name)

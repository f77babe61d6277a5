"""All nodes that report and what is forecast, as the state store has them, read at most once a second for however many ask.

While the store is away what was read last is used as long as a report would stand. Covers no answer to anybody (`service`, `hints`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.types import NodeName
from prefetcher.errors import UnavailableError
from prefetcher.ports import StateStore

__all__ = ["FORECAST_HORIZONS_S", "Fleet", "View"]

#: Real seconds.
FRESH_S = 1.0
_AWAY_S = 1.0
#: Reports end by themselves; this keeps nodes out that are long gone, and gives clocks of nodes room to differ.
_SEEN_S = 3_600.0
#: What the numbers of `records.Forecasts` are about.
FORECAST_HORIZONS_S = (120.0, 600.0, 3600.0)
_forecasts = msgspec.json.Decoder(records.Forecasts)
_ON_ITS_WAY = ("moving", "pausing", "paused")


@dataclass(frozen=True)
class View:
    """What was read at `read_s` (real seconds of the steady clock). `answers` keeps what was made of it, by what was asked."""

    read_s: float
    reports: Mapping[NodeName, records.NodeReport]
    forecasts: records.Forecasts | None
    answers: dict[object, tuple[bytes, str]] = field(default_factory=dict)

    @cached_property
    def models(self) -> frozenset[str]:
        """Models that some node knows or has."""
        reports = self.reports.values()
        return frozenset(k.model for r in reports for k in r.known) | frozenset(h.model for r in reports for h in r.held)

    @cached_property
    def ready(self) -> frozenset[str]:
        """Models that are in some node's memory."""
        return frozenset(h.model for report in self.reports.values() for h in report.held if h.state == "ready")

    @cached_property
    def moving(self) -> frozenset[str]:
        """Models on their way into some node's memory."""
        return frozenset(h.model for report in self.reports.values() for h in report.held if h.state in _ON_ITS_WAY)

    def probability(self, model: str, within_s: float, now_s: float) -> float | None:
        """P(used within the first horizon that is not shorter than `within_s`); None where nothing is forecast, or not any more."""
        if self.forecasts is None or now_s > self.forecasts.until_s:
            return None
        chances = self.forecasts.models.get(model)
        if chances is None:
            return None
        return next((p for horizon_s, p in zip(FORECAST_HORIZONS_S, chances, strict=False) if horizon_s >= within_s), chances[-1])

    def likely(self, source: str, surface: str, now_s: float) -> tuple[tuple[str, float], ...]:
        """The models that hints of this place without a model led to, those of any place where it is not known; with probabilities. Only
        such as some node knows, once one reports."""
        if self.forecasts is None or now_s > self.forecasts.until_s:
            return ()
        hinted = self.forecasts.hinted
        found = hinted.get(f"{source}\0{surface}", hinted.get("", ()))
        return tuple((model, p) for model, p in found if not self.reports or model in self.models)


class Fleet:
    """Reads views. Safe for threads: one reads, the others have what was read before, if it still stands."""

    def __init__(self, state: StateStore, clock: Clock, own: NodeName | None = None) -> None:
        self._state = state
        self._clock = clock
        self._own = own
        self._view: View | None = None
        self._away_until_s = float("-inf")
        self._why_away = ""
        self._reading = threading.Lock()

    def fresh(self) -> View | None:
        """The last view, if it is not older than a second: asks nobody."""
        view = self._view
        return view if view is not None and self._real_s() - view.read_s < FRESH_S else None

    def view(self) -> View:
        """The view as of now, give or take a second.

        Raises:
            UnavailableError: the store is away, and was not read for longer than a report stands.
        """
        view = self._view
        stands = view is not None and self._real_s() - view.read_s < records.REPORT_EXPIRES_S
        if view is not None and self._real_s() - view.read_s < FRESH_S:
            return view
        if not self._reading.acquire(blocking=not stands):
            assert view is not None
            return view
        try:
            return self.fresh() or self._read(view if stands else None)
        finally:
            self._reading.release()

    def _read(self, before: View | None) -> View:
        if self._real_s() >= self._away_until_s:
            try:
                self._view = self._now()
                return self._view
            except UnavailableError as exc:
                self._away_until_s, self._why_away = self._real_s() + _AWAY_S, str(exc)
        if before is not None:
            return before
        raise UnavailableError(self._why_away)

    def _now(self) -> View:
        since_s = self._clock.now_s() - _SEEN_S * self._clock.speed
        names = [NodeName(name) for name in self._state.members(records.NODES, since_s)]
        if self._own is not None and self._own not in names:
            names.append(self._own)
        read_s = self._real_s()
        *raw, forecasts = self._state.read_many([*(records.node_key(name, "report") for name in names), records.FORECASTS])
        reports = {}
        for name, item in zip(names, raw, strict=True):
            if item is not None:
                # An agent of another version, whose report this one can't read, is as good as silent; the controller says so in its log.
                with contextlib.suppress(ValueError):
                    reports[name] = records.decode_report(item, name)
        found = None
        with contextlib.suppress(ValueError):
            found = None if forecasts is None else records.decode(forecasts, _forecasts)
        return View(read_s, reports, found)

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed

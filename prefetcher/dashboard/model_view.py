"""One model's story: what it is asked for against what was and is forecast, its window, where it is, and its last orders.

Shows, and decides nothing. What is not known is null, with a line in `notes` that says why. Covers no stages of its cold start, which
are the report's (`GET /v1/models/{model}/cold-start`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from prefetcher.api.fleet import FORECAST_HORIZONS_S, View
from prefetcher.api.service import Service
from prefetcher.batch.forecasting import FORECAST, ForecastTable
from prefetcher.controller import records
from prefetcher.controller.windows import WindowView, window_json
from prefetcher.core.types import NodeName
from prefetcher.core.windows import window_in_words
from prefetcher.dashboard.past import Band, band_of
from prefetcher.dashboard.views import expected_uses
from prefetcher.errors import ModelNotFoundError, TemporaryError, shortened
from prefetcher.words import reason

__all__ = ["SPANS_S", "told"]

#: How far back one may look, each with the length of a bin, which is a horizon of the forecasts so that each bin has a forecast of its own.
SPANS_S: dict[float, float] = {3_600.0: 120.0, 10_800.0: 600.0, 21_600.0: 900.0, 86_400.0: 3_600.0}
_ORDERS = 12
#: Real seconds that the next forecasts may be late: what is shown says as of when it is.
_LATE_S = 5.0
#: Orders that are looked through for one model's, of each node that knows it; and nodes that are looked at.
_LOOKED_THROUGH = 2_000
_NODES = 32

_tables = msgspec.json.Decoder(ForecastTable)
_orders = msgspec.json.Decoder(records.OrderRecord)


def told(service: Service, view: View, model: str, span_s: float) -> dict[str, Any]:
    """Everything, as JSON. `span_s`: one of `SPANS_S`.

    Raises:
        ModelNotFoundError: no node that reports knows it, nothing is forecast of it, and no order names it.
        UnavailableError: the state store is away.
    """
    now_s, notes = service.now_s, list[str]()
    here = [name for name, report in sorted(view.reports.items()) if _knows(report, model)]
    orders = orders_of(service, here or list(view.reports), model)
    chances = _chances(service, view, model, now_s, notes)
    if model not in view.models and not orders and not chances:
        raise ModelNotFoundError(f"no node that reports knows {shortened(repr(model))}; search for a part of its name", model=model)
    bin_s = SPANS_S[span_s]
    begin_s = math.floor((now_s - span_s) / bin_s) * bin_s
    requests = _requests(service, model, begin_s, now_s, bin_s, notes)
    return {
        "model": model,
        "now_s": now_s,
        "from_s": begin_s,
        "bin_s": bin_s,
        "requests": requests,
        "forecast": _forecast(service, model, begin_s, now_s, bin_s, chances, notes),
        "chances": chances,
        "where": _where(view, model, here),
        "window": _window(service, view, model, notes),
        "orders": _with_expected(service, orders),
        "notes": notes,
    }


def _knows(report: records.NodeReport, model: str) -> bool:
    return any(known.model == model for known in report.known) or any(held.model == model for held in report.held)


# --- requests and forecast ---


def _requests(service: Service, model: str, begin_s: float, now_s: float, bin_s: float, notes: list[str]) -> dict[str, Any] | None:
    if service.past is None:
        notes.append("requests by minute are not read by this process")
        return None
    rows, whole_from_s = service.past.rows(model, begin_s, now_s)
    bins = [0] * (math.floor((now_s - begin_s) / bin_s) + 1)
    for minute, count in rows.items():
        place = int((60.0 * minute - begin_s) // bin_s)
        if 0 <= place < len(bins):
            bins[place] += count
    if whole_from_s > begin_s + bin_s:
        notes.append("counted_from")
    return {"counts": bins, "whole_from_s": whole_from_s}


def _chances(service: Service, view: View, model: str, now_s: float, notes: list[str]) -> dict[str, Any] | None:
    """P(used within each horizon) of the last table of all horizons, else of the controller's last tick; None where there is neither."""
    with contextlib.suppress(TemporaryError, ValueError):
        table = records.decode(service.jobs.made(FORECAST), _tables)
        found = table.models.get(model)
        if found is not None and now_s <= table.until_s:
            return {
                "at_s": table.at_s,
                "until_s": table.until_s,
                "horizons_s": list(table.horizons_s),
                "probabilities": list(found),
                "predictor": table.predictor,
                "fallback": table.fallback,
            }
    ticked = view.forecasts
    if ticked is not None and now_s <= ticked.until_s + _LATE_S * service.clock.speed and model in ticked.models:
        return {
            "at_s": ticked.at_s,
            "until_s": ticked.until_s,
            "horizons_s": list(FORECAST_HORIZONS_S),
            "probabilities": list(ticked.models[model]),
            "predictor": "",
            "fallback": "",
        }
    notes.append("nothing is forecast of it: it was not asked for yet, or no controller leads")
    return None


def _forecast(
    service: Service, model: str, begin_s: float, now_s: float, bin_s: float, chances: dict[str, Any] | None, notes: list[str]
) -> dict[str, Any]:
    """Bands behind now, each as it was forecast then, and ahead of now; and the season's, where one is in force."""
    behind: list[Band] | None = None
    season: tuple[list[Band], str] | None = None
    if service.past is not None:
        behind = service.past.forecasts(model, begin_s, now_s, bin_s)
        starts = [begin_s + bin_s * i for i in range(math.ceil((now_s + 4 * bin_s - begin_s) / bin_s))]
        season = service.past.season(model, starts, bin_s)
    if behind is None:
        notes.append("what was forecast before is kept where the scheduler runs, and not by this process")
    ahead: list[Band] = []
    if chances is not None:
        last_s, survived = 0.0, 1.0
        for horizon_s, p in zip(chances["horizons_s"], chances["probabilities"], strict=False):
            left = max(1.0 - p, 1e-4)
            within = 1.0 - min(1.0, left / survived)
            ahead.append(band_of(chances["at_s"] + last_s, horizon_s - last_s, within))
            last_s, survived = horizon_s, min(survived, left)
    return {
        "behind": None if behind is None else [dataclasses.asdict(band) for band in behind],
        "ahead": [dataclasses.asdict(band) for band in ahead],
        "season": None if season is None else [dataclasses.asdict(band) for band in season[0]],
        "season_text": "" if season is None else season[1],
    }


# --- its window, where it is, and its orders ---


def _window(service: Service, view: View, model: str, notes: list[str]) -> dict[str, Any]:
    """The window in force for it, by the segment that holds it."""
    reader = WindowView(service.state, logs=False)
    reader.look()
    if reader.problem:
        notes.append(f"Its window can't be read: {reader.problem}")
    size = next((known.bytes for report in view.reports.values() for known in report.known if known.model == model), 0)
    number = int(reader.book.segment_numbers(reader.facts([(model, float(size))]))[0])
    entry = None if number < 0 else reader.book.entries[number]
    window = reader.book.rest if entry is None else entry.window
    about: dict[str, Any] = {"segment": "", "since_s": None, "why": "", "pinned": False}
    if entry is not None:
        about = {"segment": entry.segment.name, "since_s": entry.since_s, "why": entry.why, "pinned": entry.pinned}
    return about | {"words": window_in_words(window), "version": reader.book.version, **window_json(window)}


def _where(view: View, model: str, here: Sequence[str]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for name in here[:_NODES]:
        report = view.reports[NodeName(name)]
        known = next((known for known in report.known if known.model == model), None)
        copies = [held for held in report.held if held.model == model]
        about = {
            "node": name,
            "load_s": None if known is None else known.load_s,
            "bytes": known.bytes if known else copies[0].bytes,
            "loads": 0 if known is None else known.loads,
            "queue_s": report.recent_wait_s,
            "why_absent": reason(known.absent) if known is not None and known.absent and not copies else "",
        }
        tier = "disk" if known is None else known.tier
        lines += [about | msgspec.to_builtins(held) for held in copies] or [about | {"tier": tier, "state": "absent"}]
    return lines


def orders_of(service: Service, names: Sequence[str], model: str) -> list[records.OrderRecord]:
    """The model's last orders on these nodes, newest first; each as it stands."""
    marks = (b'"model":' + msgspec.json.encode(model),)
    found: dict[str, records.OrderRecord] = {}
    for name in names[:_NODES]:
        for raw in service.state.tail(records.node_key(NodeName(name), "orders"), _LOOKED_THROUGH):
            # Most are of other models, and need not be decoded.
            if not any(mark in raw for mark in marks):
                continue
            with contextlib.suppress(ValueError):
                order = records.decode(raw, _orders)
                if order.model == model:
                    found[order.decision_id] = order
    return sorted(found.values(), key=lambda order: -order.issued_s)[:_ORDERS]


def _with_expected(service: Service, orders: list[records.OrderRecord]) -> list[dict[str, Any]]:
    planned = expected_uses(service.state, [order.node for order in orders if order.outcome == "open"])
    lines = []
    for order in orders:
        line: dict[str, Any] = msgspec.to_builtins(order)
        line["outcome"] = order.outcome
        line["why"] = reason(order.reason) if order.reason else ""
        if order.outcome == "open" and (order.node, order.model) in planned:
            line["expected_use_s"], line["hold_s"] = planned[order.node, order.model]
        lines.append(line)
    return lines

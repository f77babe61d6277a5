"""`prefetcher explain MODEL`: when a model is busy, how likely it is used soon, and what its last prefetches were made for.

Shows, and decides nothing. Its season is read from the artifacts; what is forecast and ordered is asked of a running endpoint; what is
away is said to be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from zoneinfo import ZoneInfo

from prefetcher.api.client import get
from prefetcher.clock import SystemClock
from prefetcher.config import Settings, artifacts_place
from prefetcher.errors import ArtifactError, PrefetcherError
from prefetcher.words import reason, span
from prefetcher_connectors.artifact_store import ArtifactStore

__all__ = ["explanation_of", "lines_of"]

_ORDERS = 5


def explanation_of(settings: Settings, url: str, model: str, now_s: float | None = None) -> dict[str, Any]:
    """What is known of `model` as JSON; null where nothing is. `problems` says what could not be asked, a line each."""
    from prefetcher_models.seasonal_artifact import SEASONAL, seasons_of

    at_s = SystemClock().now_s() if now_s is None else now_s
    problems: list[str] = []

    def asked(path: str) -> Any:
        try:
            return get(url, path)
        except PrefetcherError as exc:
            if str(exc) not in problems:
                problems.append(str(exc))
            return None

    season = None
    place = artifacts_place(settings)
    try:
        season = dataclasses.asdict(ArtifactStore(place).load(SEASONAL, seasons_of).value.explain(model, at_s))
    except ArtifactError as exc:
        known = str(exc) if exc.refused else f"none was fitted, as far as {place} tells"
        problems.append(f"no season: {known}; `prefetcher jobs run seasonal-refit` fits them, --state-dir names another folder")
    except PrefetcherError as exc:
        problems.append(f"no season: {exc}")
    name = quote(model, safe="")
    return {
        "model": model,
        "now_s": at_s,
        "season": season,
        "residency": asked(f"/v1/residency?model={name}"),
        "forecast": asked(f"/v1/forecast/{name}"),
        "orders": asked(f"/v1/orders?model={name}&count={_ORDERS}&node=*"),
        "problems": problems,
    }


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """For people: a line for each thing that is known."""
    told = [str(found["model"])]
    season, forecast = found["season"], found["forecast"]
    for held in found["residency"] or ():
        why = f" for {held['cause']}" if held.get("cause") else ""
        absent = f": {reason(held['reason'])}" if held.get("reason") else ""
        told.append(f"  on {held['node']}: {held['state']} in {held['tier']}{why}{', pinned' if held.get('pinned') else ''}{absent}")
    if found["residency"] == []:
        told.append("  no node has it or could load it")
    if season is not None:
        told.append(f"  season: {season['text']}")
        if season["next_peak_s"] is not None:
            at = datetime.fromtimestamp(season["next_peak_s"], ZoneInfo(season["tz"]))
            told.append(f"  next busy: {at:%a %Y-%m-%d %H:%M} {season['tz']}")
    if forecast is not None:
        chances = ", ".join(f"{p:.0%} within {span(float(horizon))}" for horizon, p in forecast["probabilities"].items())
        told.append(f"  used soon: {chances}")
    for order in found["orders"] or ():
        at = datetime.fromtimestamp(order["issued_s"], UTC)
        # An order whose cause is all that led to it says it already.
        parts = ", ".join(f"{name} {share:.2f}" for name, share in order.get("contributions", ()) if name != order["cause"])
        told.append(
            f"  {at:%Y-%m-%d %H:%M:%S} UTC, {order['cause']} on {order['node']}: {order.get('outcome') or 'open'}"
            + (f" ({parts})" if parts else "")
        )
    if found["orders"] == []:
        told.append("  never prefetched, as far as orders are kept")
    return told

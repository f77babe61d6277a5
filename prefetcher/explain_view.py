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
from prefetcher.errors import PrefetcherError
from prefetcher.words import span
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
            problems.append(str(exc))
            return None

    season = None
    try:
        season = dataclasses.asdict(ArtifactStore(artifacts_place(settings)).load(SEASONAL, seasons_of).value.explain(model, at_s))
    except PrefetcherError as exc:
        problems.append(f"no season: {exc}")
    name = quote(model, safe="")
    forecast = asked(f"/v1/forecast/{name}")
    # One that is away was named once.
    orders = None if forecast is None else asked(f"/v1/orders?model={name}&count={_ORDERS}&node=*")
    return {"model": model, "now_s": at_s, "season": season, "forecast": forecast, "orders": orders, "problems": problems}


def lines_of(found: Mapping[str, Any]) -> list[str]:
    """For people: a line for each thing that is known."""
    told = [str(found["model"])]
    season, forecast = found["season"], found["forecast"]
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
        parts = ", ".join(f"{name} {share:.2f}" for name, share in order.get("contributions", ()))
        told.append(
            f"  {at:%Y-%m-%d %H:%M:%S} UTC, {order['cause']} on {order['node']}: {order.get('outcome') or 'open'}"
            + (f" ({parts})" if parts else "")
        )
    if found["orders"] == []:
        told.append("  never prefetched, as far as orders are kept")
    return told

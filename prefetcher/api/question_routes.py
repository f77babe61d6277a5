"""Routes that answer: what is resident where, what is forecast, what the last prefetches were, and how a node is. Reports are
`report_routes`."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from prefetcher.api.fleet import FORECAST_HORIZONS_S, View
from prefetcher.api.keys import Access
from prefetcher.api.messages import ForecastAnswer, ResidencyEntry, StatusAnswer
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.service import Service
from prefetcher.controller.records import HeldWeights, NodeReport
from prefetcher.core.types import NodeName
from prefetcher.errors import ModelNotFoundError, UnavailableError, shortened

__all__ = ["add_questions"]

#: How routers may keep an answer: as long as reports are apart.
_CACHE_CONTROL = "max-age=1"
Node = Annotated[str | None, Query(description="a node's name, or * for all; this process's own where absent", examples=["node-0"])]


_ORDER = {
    "decision_id": "3f0c5b1a9d2e4c77",
    "node": "node-0",
    "model": "llama-8b",
    "version": "3585571e93f0",
    "tier": "host",
    "cause": "forecast",
    "arm": "treated",
    "issued_s": 1767225600.25,
    "begin_s": 1767225600.26,
    "ready_s": 1767225600.48,
    "first_use_s": 1767225631.0,
    "outcome": "timely",
    "bytes": 39994128,
    "contributions": [["hazard", 0.8]],
}


def _example(value: Any) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {"application/json": {"example": value}}}}


def _ready_in_s(report: NodeReport, held: HeldWeights) -> float | None:
    if held.state == "ready":
        return 0.0
    if held.state in ("cancelling", "evicting"):
        return None
    return round(max(0, held.bytes - held.bytes_done) / max(1.0, report.link_bytes_per_s), 3)


def _entries(view: View, model: str | None) -> list[dict[str, Any]]:
    """What every node holds; of one model also the nodes that could load it."""
    found: list[dict[str, Any]] = []
    for node, report in sorted(view.reports.items()):
        held = [h for h in report.held if model is None or h.model == model]
        found += [msgspec.to_builtins(h) | {"node": node, "ready_in_s": _ready_in_s(report, h)} for h in held]
        if model is not None and not held:
            found += [
                {"node": node, "model": k.model, "version": k.version, "tier": k.tier, "state": "absent", "bytes": k.bytes, "bytes_done": 0}
                | {"ready_in_s": round(k.load_s, 3), "reason": k.absent}
                for k in report.known
                if k.model == model
            ]
    return found


def _residency(view: View, model: str | None) -> tuple[bytes, str]:
    """Body and entity tag, made once for each view."""
    if not view.reports:
        raise UnavailableError("every node has not reported for 5 s; look after the agents", retry_after_s=1.0)
    if model is not None and model not in view.models:
        raise ModelNotFoundError(f"no model is called {shortened(repr(model))} on any node that reports", model=model)
    answer = view.answers.get(model)
    if answer is None:
        body = msgspec.json.encode(_entries(view, model))
        answer = view.answers[model] = (body, f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')
    return answer


def _matches(header: str | None, tag: str) -> bool:
    return header is not None and any(each.strip().removeprefix("W/") in (tag, "*") for each in header.split(","))


def add_questions(app: FastAPI, service: Service, access: Access) -> None:
    async def view() -> View:
        found = service.fleet.fresh()
        return await run_in_threadpool(service.fleet.view) if found is None else found

    may_read = [Depends(access.needs("operator", "ingest"))]

    @app.get(
        "/v1/residency",
        response_model=list[ResidencyEntry],
        responses=PROBLEMS | {304: {"description": "as the ETag in If-None-Match says"}},
        dependencies=may_read,
        summary="What is in memory or on its way, on every node that reports, and why",
    )
    async def residency(
        request: Request,
        model: Annotated[str | None, Query(description="only this model, also where it is only on disk", examples=["llama-8b"])] = None,
    ) -> Response:
        body, tag = _residency(await view(), model)
        headers = {"Cache-Control": _CACHE_CONTROL, "ETag": tag}
        if _matches(request.headers.get("if-none-match"), tag):
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="application/json", headers=headers)

    @app.get(
        "/v1/forecast/{model:path}",
        response_model=ForecastAnswer,
        responses=PROBLEMS,
        dependencies=may_read,
        summary="How likely a model is used soon",
    )
    async def forecast(model: Annotated[str, Path(examples=["llama-8b"])]) -> ForecastAnswer:
        now = await view()
        told, now_s = now.forecasts, service.now_s
        if told is None or now_s > told.until_s:
            since = "" if told is None else f"; the last is of {now_s - told.at_s:.0f} s ago"
            raise UnavailableError(f"nothing is forecast just now{since}; a controller forecasts every tick", retry_after_s=5.0)
        chances = told.models.get(model)
        if chances is None:
            unasked = f"it was not asked for before the last forecast, {max(0.0, now_s - told.at_s):.0f} s ago"
            why = unasked if model in now.models else "no node knows it"
            raise ModelNotFoundError(f"nothing is forecast for {shortened(repr(model))}: {why}", model=model)
        return ForecastAnswer(
            model=model,
            issued_at_s=told.at_s,
            valid_until_s=told.until_s,
            probabilities={f"{horizon_s:.0f}": p for horizon_s, p in zip(FORECAST_HORIZONS_S, chances, strict=False)},
        )

    @app.get(
        "/v1/orders",
        responses=PROBLEMS | _example([_ORDER]),
        dependencies=may_read,
        summary="The last prefetches, newest first, with outcomes and contributions",
    )
    def orders(
        count: Annotated[int, Query(ge=1, le=10_000)] = 100,
        model: Annotated[str | None, Query(examples=["llama-8b"])] = None,
        node: Node = None,
    ) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(order) for order in service.orders(count, model, node)]

    @app.get(
        "/v1/status",
        response_model=StatusAnswer,
        responses=PROBLEMS,
        dependencies=may_read,
        summary="Everything that `prefetcher status` shows",
    )
    def status(node: Annotated[str | None, Query(description="a node's name; this process's own where absent")] = None) -> StatusAnswer:
        found = service.report(node)
        mode = service.by_hand.mode(NodeName(found.node))
        return StatusAnswer(
            node=msgspec.to_builtins(found),
            nodes=sorted(service.fleet.view().reports),
            totals=service.totals(found.node),
            decides=service.decides(found.node),
            hints=service.hint_sources(),
            orders=[msgspec.to_builtins(order) for order in service.orders(20, node=found.node)],
            idle_pins=[msgspec.to_builtins(pin) for pin in service.reports.idle_pins()],
            prefetching=mode != "off",
            mode=mode,
            observe=found.observe or mode == "observe",
            now_s=service.now_s,
            problems=[*service.problems(), *filter(None, [service.note()])],
        )

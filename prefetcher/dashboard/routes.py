"""Routes of the dashboard: the page at `/` and its files, for everybody; and what it asks for, guarded as every other question.

The page holds nothing of the installation, so it needs no key; where keys are set it asks for one. Covers no making of answers (`overview`,
`views`, `findings`, `model_view`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from prefetcher.api.keys import Access
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.service import Service
from prefetcher.dashboard.assets import PAGE_HEADERS, asset
from prefetcher.dashboard.events import Events
from prefetcher.dashboard.model_view import SPANS_S, told
from prefetcher.dashboard.overview import Desk
from prefetcher.dashboard.views import NodeSort, NodeState, expected_uses, matching, moves, nodes
from prefetcher.errors import UsageError

__all__ = ["add_dashboard"]

#: Looked at again at each visit, and not sent again where it is the same: a new version of the program is seen at once.
_CACHE_CONTROL = "no-cache"
_MOST = 200
_T = 1767225600.25
_NODE = {
    "node": "gpu-1",
    "group": "",
    "at_s": _T,
    "mode": "on",
    "tiers": {"host": {"budget_bytes": 100000000, "taken_bytes": 40000080, "states": {"used": 40000080, "early": 0}}},
    "disk": {"models": 12, "bytes": 1500000000},
    "busy_ratio": 0.02,
    "moving": 0,
    "problems": [],
}
_MOVE = {
    "node": "gpu-1",
    "model": "llama-8b",
    "tier": "host",
    "state": "moving",
    "bytes": 40000080,
    "bytes_done": 20000000,
    "cause": "forecast",
    "ready_in_s": 0.04,
    "expected_use_s": _T + 60,
}
_MODEL = {"model": "llama-8b", "bytes": 40000080, "nodes": 1, "ready_on": 1, "moving_on": 0, "pinned": False, "last_use_s": _T}
_FINDING = {
    "kind": "wasteful",
    "severity": "warn",
    "what": "llama-8b: 5 of its last 6 prefetches went unused",
    "detail": "0.2 GB·h were held for nothing",
    "command": "prefetcher explain llama-8b",
    "then": "says what it was prefetched for",
    "model": "llama-8b",
}

Offset = Annotated[int, Query(ge=0, le=1_000_000)]
Limit = Annotated[int, Query(ge=1, le=_MOST)]
Matches = Annotated[str, Query(max_length=200, description="a part of the name, in any case")]


def _example(value: Any) -> dict[int | str, dict[str, Any]]:
    return PROBLEMS | {200: {"content": {"application/json": {"example": value}}}}


def add_dashboard(app: FastAPI, service: Service, access: Access) -> None:
    """Adds them to `app`; `app.state.events` has the open streams."""
    desk = Desk(service)
    app.state.events = Events(desk.overview)
    _add_files(app)
    _add_stream(app, access)
    _add_questions(app, desk, access)


def _add_files(app: FastAPI) -> None:
    def serve(request: Request, name: str, headers: dict[str, str]) -> Response:
        try:
            found = asset(name)
        except FileNotFoundError:
            raise HTTPException(404) from None
        headers = headers | {"Cache-Control": _CACHE_CONTROL, "ETag": found.tag, "Vary": "Accept-Encoding"}
        known = request.headers.get("if-none-match", "")
        if any(each.strip().removeprefix("W/") in (found.tag, "*") for each in known.split(",")):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(found.gzipped, media_type=found.kind, headers=headers | {"Content-Encoding": "gzip"})
        return Response(found.plain, media_type=found.kind, headers=headers)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def page(request: Request) -> Response:
        return serve(request, "page.html", PAGE_HEADERS)

    @app.api_route("/dashboard/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    def page_file(request: Request, name: str) -> Response:
        return serve(request, "" if name == "page.html" else name, {"X-Content-Type-Options": "nosniff"})


def _may_act(request: Request) -> dict[str, Any]:
    caller = request.state.caller
    return {"caller": caller.name, "may_act": "operator" in caller.roles}


def _add_stream(app: FastAPI, access: Access) -> None:
    @app.get("/v1/events", include_in_schema=False, dependencies=[Depends(access.needs("operator", "ingest"))])
    async def events(request: Request) -> StreamingResponse:
        stream = app.state.events.stream(_may_act(request))
        # A proxy that waits for the whole answer would never show it.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _add_questions(app: FastAPI, desk: Desk, access: Access) -> None:
    may_read = [Depends(access.needs("operator", "ingest"))]

    @app.get(
        "/v1/overview",
        responses=_example({"now_s": _T, "mode": "on", "nodes": {"reporting": 2}, "moving": 1, "findings": {"in_all": 0}}),
        dependencies=may_read,
        summary="The dashboard at a glance: nodes, loads, what is wrong, jobs, and whether who asks may act",
    )
    def overview(request: Request) -> dict[str, Any]:
        return desk.overview() | _may_act(request)

    @app.get(
        "/v1/nodes",
        responses=_example({"total": 1, "matched": 1, "nodes": [_NODE], "sums": {"budget_bytes": 100000000, "taken_bytes": 40000080}}),
        dependencies=may_read,
        summary="Nodes, a page of them: memory by tier and state, worst first",
    )
    def list_nodes(
        sort: NodeSort = "worst", matches: Matches = "", state: NodeState = "all", offset: Offset = 0, limit: Limit = 25
    ) -> dict[str, Any]:
        away = desk.away()
        found = nodes(desk.view(), sort, matches, state, offset, limit)
        return found | {"now_s": desk.service.now_s, "away": away[:_MOST], "away_in_all": len(away)}

    @app.get(
        "/v1/moves",
        responses=_example({"total": 1, "bytes_left": 20000080, "moves": [_MOVE]}),
        dependencies=may_read,
        summary="Weights on their way into memory: how far, why, and when they are expected to be used",
    )
    def list_moves(offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        found = moves(desk.view(), offset, limit)
        planned = expected_uses(desk.service.state, [move["node"] for move in found["moves"] if move["decision_id"]])
        for move in found["moves"]:
            expected = planned.get((move["node"], move["model"]))
            move["expected_use_s"] = None if expected is None else expected[0]
        return found | {"now_s": desk.service.now_s}

    @app.get(
        "/v1/models",
        responses=_example({"total": 76, "matched": 1, "models": [_MODEL]}),
        dependencies=may_read,
        summary="Models by a part of their name, used last first: where they are, and how large",
    )
    def list_models(matches: Matches = "", offset: Offset = 0, limit: Limit = 25) -> dict[str, Any]:
        return matching(desk.models(), matches, offset, limit)

    @app.get(
        "/v1/findings",
        responses=_example({"in_all": 1, "findings": [_FINDING]}),
        dependencies=may_read,
        summary="What is wrong, worst first, each with the command that comes next",
    )
    def list_findings(offset: Offset = 0, limit: Limit = 50) -> dict[str, Any]:
        found = desk.findings()
        page = [msgspec.to_builtins(one) for one in found[offset : offset + limit]]
        return {"now_s": desk.service.now_s, "in_all": len(found), "findings": page}

    @app.get(
        "/v1/explain/{model:path}",
        responses=_example({"model": "llama-8b", "now_s": _T, "bin_s": 600.0, "requests": {"counts": [3, 0, 5]}, "orders": []}),
        dependencies=may_read,
        summary="One model: its requests against what was and is forecast, where it is, and its last orders",
    )
    def explain(
        model: Annotated[str, Path(examples=["llama-8b"])],
        span_s: Annotated[float, Query(description="how far back: 3600, 10800, 21600 or 86400 s")] = 10_800.0,
    ) -> dict[str, Any]:
        if span_s not in SPANS_S:
            raise UsageError(f"span_s is one of {', '.join(f'{s:.0f}' for s in SPANS_S)}, got {span_s:g}")
        return told(desk.service, desk.view(), model, span_s)

"""Routes of the report: totals of a node since it began, the report of all nodes over a window, the sums behind it, and how long the stages
of cold starts took."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Response

from prefetcher.api.keys import Access
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.service import Service
from prefetcher.report.messages import BY, ColdStart, Report

__all__ = ["add_reports", "report_schemas"]

_REFS = "#/components/schemas/{name}"
_TOTALS = {"rows": 12, "cold_starts": 2, "cold_seconds": 3.5, "outcomes": {"timely": 1}, "accuracy": 1.0, "idle_byte_seconds": 1.2e12}
_SUM = {
    "node": "node-0",
    "key": ["llama-8b", "demand", "treated", 490896, "", "", "", "chat"],
    "totals": {"rows": 12, "found": {"absent": 2}, "wait_s": 3.5, "waits": {"-81": 10, "7": 2}},
}
Node = Annotated[
    str | None, Query(description="without a window: a node's name, or * for all; this process's own where absent", examples=["node-0"])
]
Since = Annotated[
    str | None,
    Query(description="from when on: 24h or 7d ago, seconds since 1970, or ISO 8601; 0 is since the installation", examples=["24h"]),
]
Until = Annotated[str | None, Query(description="until when, in the same way; now where absent", examples=["2026-01-31T12:00"])]


def report_schemas() -> dict[str, Any]:
    """Schemas of the messages by name, for the description of the endpoint."""
    return msgspec.json.schema_components([Report, ColdStart], ref_template=_REFS)[1]


def _answer(kind: str, *, more: dict[str, Any] | None = None) -> dict[int | str, dict[str, Any]]:
    schema: dict[str, Any] = {"$ref": _REFS.format(name=kind)}
    if more is not None:
        schema = {"anyOf": [schema, {"type": "object"}]}
    content: dict[str, Any] = {"schema": schema}
    if more is not None:
        content["examples"] = {"totals": {"summary": "without a window: of one node, since it began", "value": more}}
    return {**PROBLEMS, 200: {"content": {"application/json": content}}}


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


def add_reports(app: FastAPI, service: Service, access: Access) -> None:
    may_read = [Depends(access.needs("operator", "ingest"))]

    @app.get(
        "/v1/report",
        responses=_answer("Report", more=_TOTALS),
        dependencies=may_read,
        summary="What prefetches earned and wasted: of all nodes over a window, or of one node since it began",
        response_class=Response,
    )
    def report(
        node: Node = None,
        since: Since = None,
        until: Until = None,
        by: Annotated[str | None, Query(description=f"broken down by one of {', '.join(BY)}", examples=["model"])] = None,
        most: Annotated[int, Query(ge=1, le=100_000, description="most groups")] = 1000,
    ) -> Response:
        if since is None and until is None and by is None:
            return _json(service.totals(node))
        return _json(service.reports.report(since, until, by, most))

    @app.get(
        "/v1/report/sums",
        responses=PROBLEMS | {200: {"content": {"application/json": {"example": [_SUM]}}}},
        dependencies=may_read,
        summary="The sums that a report is made of, by node, hour and everything that is told apart",
        response_class=Response,
    )
    def sums(since: Since = None, until: Until = None) -> Response:
        return _json(service.reports.sums(since, until))

    @app.get(
        "/v1/models/{model:path}/cold-start",
        responses=_answer("ColdStart"),
        dependencies=may_read,
        summary="How long each stage of a model's cold start took, by node",
        response_class=Response,
    )
    def cold_start(model: Annotated[str, Path(examples=["llama-8b"])], since: Since = None, until: Until = None) -> Response:
        return _json(service.reports.cold_start(model, since, until))

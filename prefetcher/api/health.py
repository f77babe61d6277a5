"""The endpoint of a process that answers no questions about models: health and metrics alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from prefetcher.telemetry.metrics import Metrics

__all__ = ["make_health_endpoint"]


def make_health_endpoint(metrics: Metrics, problems: Callable[[], Sequence[str]]) -> Starlette:
    """`/healthz` and `/readyz`: 200, or 503 with problem details that name every one of `problems`. `/metrics` for Prometheus."""

    def health(request: Request) -> Response:
        found = problems()
        if not found:
            return JSONResponse({"status": "ok"})
        body = {"type": "about:blank", "title": "Service Unavailable", "status": 503, "detail": "; ".join(found)}
        return JSONResponse(body, status_code=503, media_type="application/problem+json", headers={"Retry-After": "1"})

    def exposition(request: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(routes=[Route("/healthz", health), Route("/readyz", health), Route("/metrics", exposition)])

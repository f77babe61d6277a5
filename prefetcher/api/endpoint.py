"""The HTTP endpoint: all routes over `api.service`, with keys, cross-origin pages, a limit on bodies, problem details, metrics and health.

Each kind of route has a module of its own (`intake_routes`, `question_routes`, `act_routes`); this one puts them together. It covers
neither what answers mean (`service`, `hints`, `by_hand`) nor the server's life (`app`).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi

from prefetcher import __version__
from prefetcher.api.act_routes import add_acts
from prefetcher.api.cors import CrossOrigin
from prefetcher.api.intake_routes import add_hints, add_requests
from prefetcher.api.job_routes import add_jobs
from prefetcher.api.keys import Access
from prefetcher.api.messages import HealthAnswer, Problem
from prefetcher.api.node_routes import add_nodes
from prefetcher.api.page_routes import add_pages
from prefetcher.api.problems import PROBLEMS, BodyLimit, explain_errors, problem
from prefetcher.api.question_routes import add_questions
from prefetcher.api.report_routes import add_reports, report_schemas
from prefetcher.api.route_routes import add_routing
from prefetcher.api.service import Service
from prefetcher.api.window_routes import add_windows
from prefetcher.dashboard.routes import add_dashboard

__all__ = ["make_endpoint"]


def make_endpoint(service: Service, body_limit_bytes: int, access: Access | None = None) -> FastAPI:
    """The ASGI application over `service`. Without `access` nobody is asked for a key."""
    access = access or Access(service.clock)
    app = FastAPI(
        title="prefetcher",
        version=__version__,
        description="Takes request rows and hints in, and says what is resident, coming, why, and what it earned and wasted.",
        redoc_url=None,
    )
    app.add_middleware(BodyLimit, limit_bytes=body_limit_bytes)
    # The last one is the outermost: also a body that is refused may be read by its page.
    app.add_middleware(CrossOrigin, access=access)
    explain_errors(app)
    add_requests(app, service, access)
    add_hints(app, service, access)
    add_questions(app, service, access)
    add_reports(app, service, access)
    add_acts(app, service, access)
    add_pages(app)
    add_routing(app, service, access)
    add_jobs(app, service, access)
    add_windows(app, service, access)
    add_nodes(app, service, access)
    add_dashboard(app, service, access)
    _add_health(app, service)
    _describe(app)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    def health(*more: str) -> Any:
        problems = [*service.problems(), *filter(None, more)]
        return problem(503, "; ".join(problems), retry_after_s=1.0) if problems else {"status": "ok"}

    @app.get("/healthz", response_model=HealthAnswer, responses=PROBLEMS, summary="Whether node, controller and state store answer")
    def healthz() -> Any:
        return health()

    @app.get("/readyz", response_model=HealthAnswer, responses=PROBLEMS, summary="Whether requests are taken in and weights handed out")
    def readyz() -> Any:
        return health(service.check_log())

    @app.get(
        "/metrics",
        summary="Metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": "prefetcher_prefetching 1.0\n"}}}},
    )
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _describe(app: FastAPI) -> None:
    """The schema: keys in headers, and every error as a problem, also those of fields that FastAPI has a schema of its own for."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            parts = made.setdefault("components", {}).setdefault("schemas", {})
            of_problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            parts |= of_problem.pop("$defs", {}) | {"Problem": of_problem} | report_schemas()
            made["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            }
            made["security"] = [{"bearer": []}, {"header": []}, {}]
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]

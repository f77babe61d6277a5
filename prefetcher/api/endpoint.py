"""The HTTP endpoint: routes over `api.service`, errors as problem details (RFC 9457), a limit on bodies, metrics and health.

Handlers are plain functions that run in the server's threads. It covers
neither what answers mean (`api.service`) nor the server's life (`app`).
"""

from __future__ import annotations

import http
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from prefetcher import __version__
from prefetcher.api.acts import in_words
from prefetcher.api.messages import AcceptedAnswer, ActAnswer, FieldProblem, Problem, RequestRecord, StatusAnswer
from prefetcher.api.service import ACTS, Service
from prefetcher.errors import ModelNotFoundError, PrefetcherError, TemporaryError, UsageError, shortened

__all__ = ["make_endpoint"]

#: Rows in one post: ten thousand rows of 300 bytes are 3 MB, under the default limit of bodies.
_MOST_RECORDS = 10_000
#: Clocks of gateways may be this far ahead of ours.
_AHEAD_S = 60.0
_ERRORS_SHOWN = 20
#: A body of up to this many limits is read to its end before it is refused.
_DRAINED = 8

_records = TypeAdapter(list[RequestRecord])
_Message = MutableMapping[str, Any]
_ASGI = Callable[[_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]]

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem, "description": http.HTTPStatus(code).phrase} for code in (400, 404, 409, 413, 503)
}


def _problem(
    status: int, detail: str, errors: list[FieldProblem] | None = None, retry_after_s: float | None = None
) -> Response:
    phrase = http.HTTPStatus(status).phrase
    body = Problem(type="about:blank", title=phrase, status=status, detail=detail, errors=errors or [])
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    return JSONResponse(
        body.model_dump(exclude_defaults=True),
        status_code=status,
        media_type="application/problem+json",
        headers=headers,
    )


def _status_of(error: PrefetcherError) -> int:
    if isinstance(error, ModelNotFoundError):
        return 404
    if isinstance(error, TemporaryError):
        return 503
    return 400 if isinstance(error, UsageError) else 500


class _BodyLimit:
    """Refuses bodies above a limit with 413, by their announced length or as they come."""

    def __init__(self, app: _ASGI, limit_bytes: int) -> None:
        self._app = app
        self._limit = limit_bytes

    async def __call__(
        self, scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        announced = int(lengths[0]) if lengths and lengths[0].isdigit() else 0
        if announced > self._limit:
            # A client that still sends would see its connection break instead of the answer.
            left = announced if announced <= _DRAINED * self._limit else 0
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    break
            await _problem(413, self._too_large())(scope, receive, send)
            return
        taken = 0

        async def limited() -> _Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise HTTPException(413, self._too_large())
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> str:
        return f"a body may have {self._limit} bytes; send fewer records at once"


async def _raw_body(request: Request) -> bytes:
    return await request.body()


def _read_records(raw: bytes, now_s: float) -> list[RequestRecord] | Response:
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError as exc:
        return _problem(400, f"the body is not JSON: {exc}")
    except RecursionError:
        return _problem(400, "the body is nested too deeply; a record has no inner records")
    single = isinstance(found, dict)
    items = [found] if single else found
    if not isinstance(items, list):
        return _problem(400, "the body must be one record or a list of records")
    if not items:
        return _problem(400, "the list of records is empty")
    if len(items) > _MOST_RECORDS:
        return _problem(413, f"at most {_MOST_RECORDS} records in one post, found {len(items)}")
    errors: list[FieldProblem] = []
    rows: list[RequestRecord] = []
    try:
        rows = _records.validate_python(items)
        errors = [
            FieldProblem(field=_name(single, i, ("ts",)), reason=f"{row.ts} lies in the future, it is {now_s:.0f}")
            for i, row in enumerate(rows)
            if row.ts is not None and row.ts > now_s + _AHEAD_S
        ]
    except ValidationError as exc:
        errors = [
            FieldProblem(field=_name(single, int(e["loc"][0]), tuple(e["loc"][1:])), reason=str(e["msg"]).removeprefix("Value error, "))
            for e in exc.errors()
        ]
    if errors:
        several = f"{len(errors)} fields were" if len(errors) > 1 else "1 field was"
        return _problem(400, f"{several} refused; nothing was taken in", errors[:_ERRORS_SHOWN])
    return rows


def _name(single: bool, number: int, path: tuple[int | str, ...]) -> str:
    inner = ".".join(str(part) for part in path)
    if single:
        return inner or "body"
    return f"[{number}]" + (f".{inner}" if inner else "")


def make_endpoint(service: Service, body_limit_bytes: int) -> FastAPI:
    """The ASGI application over `service`."""
    app = FastAPI(
        title="prefetcher",
        version=__version__,
        description="Takes request rows in, and says what is resident, coming, why, and what it earned and wasted.",
        redoc_url=None,
    )
    app.add_middleware(_BodyLimit, limit_bytes=body_limit_bytes)

    @app.exception_handler(PrefetcherError)
    def own_error(request: Request, error: PrefetcherError) -> Response:
        retry_after_s = error.retry_after_s if isinstance(error, TemporaryError) else None
        return _problem(_status_of(error), str(error), retry_after_s=retry_after_s)

    @app.exception_handler(RequestValidationError)
    def bad_field(request: Request, error: RequestValidationError) -> Response:
        errors = [FieldProblem(field=".".join(map(str, e["loc"])), reason=str(e["msg"])) for e in error.errors()]
        return _problem(400, "the request was refused", errors[:_ERRORS_SHOWN])

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail))

    _add_intake(app, service)
    _add_questions(app, service)
    _add_acts(app, service)
    _add_health(app, service)
    return app


def _add_intake(app: FastAPI, service: Service) -> None:
    one = RequestRecord.model_json_schema()
    schema = {"anyOf": [one, {"type": "array", "items": one, "maxItems": _MOST_RECORDS}]}
    examples = {
        "one": {"value": {"model": "llama-8b"}},
        "several": {"value": [{"model": "llama-8b", "user": "u-17"}, {"model": "whisper", "ts": 1767225600.25}]},
    }

    @app.post(
        "/v1/requests",
        status_code=202,
        response_model=AcceptedAnswer,
        responses=_PROBLEMS,
        summary="Takes one request row, or a list of them; answers once they are durable",
        openapi_extra={
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema, "examples": examples}}}
        },
    )
    def post_requests(raw: Annotated[bytes, Depends(_raw_body)]) -> Any:
        rows = _read_records(raw, service.now_s)
        if isinstance(rows, Response):
            service.metrics.bad_requests.labels(source="http", reason="refused").inc()
            return rows
        now_s = service.now_s
        service.take([row.to_request(now_s) for row in rows], "http")
        return AcceptedAnswer(accepted=len(rows))


def _add_questions(app: FastAPI, service: Service) -> None:
    @app.get("/v1/residency", responses=_PROBLEMS, summary="What is in memory or on its way, and why")
    def residency(
        model: Annotated[str | None, Query(description="only this model", examples=["llama-8b"])] = None,
    ) -> list[dict[str, Any]]:
        report = service.report()
        if model is not None and model not in {k.model for k in report.known}:
            raise ModelNotFoundError(f"no model is called {shortened(repr(model))} on node {report.node}", model=model)
        return [
            msgspec.to_builtins(held) | {"node": report.node}
            for held in report.held
            if model is None or held.model == model
        ]

    @app.get(
        "/v1/orders", responses=_PROBLEMS, summary="The last prefetches, newest first, with outcomes and contributions"
    )
    def orders(
        count: Annotated[int, Query(ge=1, le=10_000)] = 100, model: Annotated[str | None, Query()] = None
    ) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(order) for order in service.orders(count, model)]

    @app.get("/v1/report", responses=_PROBLEMS, summary="What prefetches earned and wasted on this node, in total")
    def report() -> dict[str, Any]:
        return service.totals()

    @app.get(
        "/v1/status",
        response_model=StatusAnswer,
        responses=_PROBLEMS,
        summary="Everything that `prefetcher status` shows",
    )
    def status() -> StatusAnswer:
        report = service.report()
        return StatusAnswer(
            node=msgspec.to_builtins(report),
            totals=service.totals(),
            decides=service.decides(),
            orders=[msgspec.to_builtins(order) for order in service.orders(20)],
            prefetching=service.switched_on(),
            observe=report.observe,
            now_s=service.now_s,
            problems=service.problems(),
        )


def _add_acts(app: FastAPI, service: Service) -> None:
    def add(act: str) -> None:
        @app.post(
            f"/v1/models/{{model:path}}:{act}",
            response_model=ActAnswer,
            responses=_PROBLEMS,
            summary=f"{act} a model by hand",
            name=act,
        )
        def do(model: str) -> Any:
            acted = service.act(act, model)
            answer = ActAnswer(model=model, act=act, ok=acted.ok, reason=acted.reason)
            return answer if acted.ok else _problem(409, f"{act} {shortened(model)}: {in_words(act, acted.reason)}")

    for act in ACTS:
        add(act)

    @app.post("/v1/off", responses=_PROBLEMS, summary="Demand loading only, at once")
    def off() -> dict[str, bool]:
        service.switch(False, "http")
        return {"prefetching": False}

    @app.post("/v1/on", responses=_PROBLEMS, summary="Prefetching again")
    def on() -> dict[str, bool]:
        service.switch(True, "http")
        return {"prefetching": True}


def _add_health(app: FastAPI, service: Service) -> None:
    def health() -> Any:
        problems = service.problems()
        return _problem(503, "; ".join(problems), retry_after_s=1.0) if problems else {"status": "ok"}

    @app.get("/healthz", responses=_PROBLEMS, summary="Whether node, controller and state store answer")
    def healthz() -> Any:
        return health()

    @app.get("/readyz", responses=_PROBLEMS, summary="Whether requests are taken in and weights handed out")
    def readyz() -> Any:
        return health()

    @app.get("/metrics", summary="Metrics for Prometheus")
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

"""Errors as problem details (RFC 9457), for every route, also those that don't exist; and the limit on bodies, refused the same way.

Covers which error is which status, and no route.
"""

from __future__ import annotations

import http
import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from prefetcher.api.messages import FieldProblem, Problem
from prefetcher.errors import ModelNotFoundError, PrefetcherError, RateLimitedError, TemporaryError, UsageError

__all__ = ["ASGI", "PROBLEMS", "BodyLimit", "FieldsRefused", "Message", "explain_errors", "problem"]

_ERRORS_SHOWN = 20
#: A body of up to this many limits is read to its end before it is refused.
_DRAINED = 8

Message = MutableMapping[str, Any]
ASGI = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

#: The errors of every route, for the schema.
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {
        "description": http.HTTPStatus(code).phrase,
        "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for code in (400, 401, 403, 404, 409, 413, 422, 429, 503)
}


class FieldsRefused(Exception):
    """Fields of a body were refused, and nothing of it was taken in."""

    def __init__(self, errors: Sequence[FieldProblem], status: int = 400) -> None:
        several = f"{len(errors)} fields were" if len(errors) > 1 else "1 field was"
        super().__init__(f"{several} refused; nothing was taken in")
        self.errors = list(errors)
        self.status = status


def problem(
    status: int,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    retry_after_s: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One answer; of many `errors` the first are shown."""
    body = Problem(
        type="about:blank", title=http.HTTPStatus(status).phrase, status=status, detail=detail, errors=list(errors)[:_ERRORS_SHOWN]
    )
    more = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return JSONResponse(
        body.model_dump(exclude_defaults=True),
        status_code=status,
        media_type="application/problem+json",
        headers=dict(headers or {}) | more,
    )


def _status_of(error: PrefetcherError) -> int:
    if isinstance(error, ModelNotFoundError):
        return 404
    if isinstance(error, RateLimitedError):
        return 429
    if isinstance(error, TemporaryError):
        return 503
    return 400 if isinstance(error, UsageError) else 500


def explain_errors(app: FastAPI) -> None:
    """Every error that a route of `app` raises, or that is raised before one is found, is answered as a problem."""

    @app.exception_handler(PrefetcherError)
    async def own_error(request: Request, error: PrefetcherError) -> Response:
        retry_after_s = error.retry_after_s if isinstance(error, TemporaryError) else None
        return problem(_status_of(error), str(error), retry_after_s=retry_after_s)

    @app.exception_handler(FieldsRefused)
    async def refused(request: Request, error: FieldsRefused) -> Response:
        return problem(error.status, str(error), error.errors)

    @app.exception_handler(RequestValidationError)
    async def bad_field(request: Request, error: RequestValidationError) -> Response:
        errors = [FieldProblem(field=".".join(map(str, e["loc"])), reason=str(e["msg"])) for e in error.errors()]
        return problem(400, "the request was refused", errors)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if error.status_code == 404 and detail == "Not Found":
            detail = "no such address here; /openapi.json lists all"
        elif error.status_code == 405:
            detail = f"{request.method} is not for this address; see Allow"
        return problem(error.status_code, detail, headers=error.headers)

    @app.exception_handler(Exception)
    async def not_foreseen(request: Request, error: Exception) -> Response:
        return problem(500, "this should not happen; the log of the server has more")


class BodyLimit:
    """Refuses bodies above a limit with 413, by their announced length or as they come."""

    def __init__(self, app: ASGI, limit_bytes: int) -> None:
        self._app = app
        self._limit = limit_bytes

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
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
            await problem(413, self._too_large())(scope, receive, send)
            return
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise HTTPException(413, self._too_large())
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> str:
        return f"a body may have {self._limit} bytes; send fewer records at once"

"""Routes that take something in: request rows and hints. Refused bodies are refused whole; 202 comes only once everything is durable."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Request, Response
from pydantic import BaseModel, TypeAdapter
from starlette.exceptions import HTTPException

from prefetcher.api.bodies import field_name, read_list
from prefetcher.api.hints import OtherBodyError, UnknownModelsError
from prefetcher.api.keys import Access, Caller, require
from prefetcher.api.limits import TokenBuckets
from prefetcher.api.messages import AcceptedAnswer, FieldProblem, HintRecord, HintsAnswer, RequestRecord
from prefetcher.api.problems import PROBLEMS, FieldsRefused, problem
from prefetcher.api.service import Service
from prefetcher.clock import SystemClock
from prefetcher.errors import RateLimitedError, TemporaryError
from prefetcher.wire import AHEAD_S

__all__ = ["add_hints", "add_requests"]

#: Rows in one post: ten thousand rows of 300 bytes are 3 MB, under the default limit of bodies.
_MOST_RECORDS = 10_000
_MOST_HINTS = 100
#: A hint with long names in all its fields has 3 kB.
_MOST_BYTES = 400_000
#: An idempotency key is somebody's id of a post, no text.
_MOST_KEY = 200

_clock = SystemClock()
_records = TypeAdapter(list[RequestRecord])
_hints = TypeAdapter(list[HintRecord])


async def _arrival() -> float:
    """When a post came, by the machine's clock: before it waits for a thread."""
    return _clock.steady_s()


async def _raw_body(request: Request) -> bytes:
    return await request.body()


def _body(kind: type[BaseModel], most: int, types: tuple[str, ...], examples: dict[str, Any]) -> dict[str, Any]:
    one = kind.model_json_schema()
    schema = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": most}]}
    return {"requestBody": {"required": True, "content": {name: {"schema": schema, "examples": examples} for name in types}}}


def add_requests(app: FastAPI, service: Service, access: Access) -> None:
    examples = {
        "one": {"value": {"model": "llama-8b"}},
        "several": {"value": [{"model": "llama-8b", "user": "u-17"}, {"model": "whisper", "ts": 1767225600.25}]},
    }

    @app.post(
        "/v1/requests",
        status_code=202,
        response_model=AcceptedAnswer,
        responses=PROBLEMS,
        dependencies=[Depends(access.needs("ingest"))],
        summary="Takes one request row, or a list of them; answers once they are durable",
        openapi_extra=_body(RequestRecord, _MOST_RECORDS, ("application/json",), examples),
    )
    def post_requests(request: Request, raw: Annotated[bytes, Depends(_raw_body)], arrived_s: Annotated[float, Depends(_arrival)]) -> Any:
        now_s = service.now_s
        try:
            rows, single = read_list(raw, _records, _MOST_RECORDS, "record")
            ahead = [
                FieldProblem(field=field_name(single, i, "ts"), reason=f"{row.ts} lies in the future, it is {now_s:.0f}")
                for i, row in enumerate(rows)
                if row.ts is not None and row.ts > now_s + AHEAD_S
            ]
            if ahead:
                raise FieldsRefused(ahead)
        except (FieldsRefused, HTTPException):
            service.metrics.bad_requests.labels(source="http", reason="refused").inc()
            raise
        tenant = request.state.caller.name or None
        service.take([row.to_request(now_s, tenant) for row in rows], "http", _clock.steady_s() - arrived_s)
        return AcceptedAnswer(accepted=len(rows))


def add_hints(app: FastAPI, service: Service, access: Access) -> None:
    examples = {
        "one": {"value": {"model": "llama-8b", "in_s": 5, "session": "s-1"}},
        "several": {"value": [{"model": "llama-8b", "hint_id": "9b2e"}, {"model": "whisper", "ttl_s": 30}]},
    }
    extra = _body(HintRecord, _MOST_HINTS, ("application/json", "text/plain"), examples) | {
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "schema": {"type": "string", "minLength": 1, "maxLength": _MOST_KEY},
                "description": "the same key within ten minutes gives the same answer and is taken in once",
                "example": "5f1c7a",
            }
        ]
    }
    sessions = TokenBuckets(service.clock)
    settings, counted = service.settings, service.metrics.hint_posts

    def admit(request: Request, hints: list[HintRecord], single: bool) -> Caller:
        keys = {hint.key for hint in hints if hint.key is not None}
        if len(keys) > 1:
            raise FieldsRefused([FieldProblem(field=field_name(single, 0, "key"), reason="one post has one key; here are several")])
        caller = access.caller(request.headers, keys.pop() if keys else None)
        require(caller, "hint")
        of_session: dict[str, int] = {}
        for hint in hints:
            if hint.session is not None:
                name = f"{caller.name}/{hint.session}"
                of_session[name] = of_session.get(name, 0) + 1
        for name, count in of_session.items():
            wait_s = sessions.take(name, count, settings.session_rate_per_s, settings.session_burst)
            if wait_s > 0.0:
                raise RateLimitedError(f"a session has {settings.session_rate_per_s:g} hints a second; send fewer", retry_after_s=wait_s)
        access.charge(caller, len(hints))
        return caller

    async def take(request: Request) -> list[Any]:
        if "key" in request.query_params:
            raise HTTPException(400, "a key in an address ends up in logs; send it as a header or in the body, and replace this one")
        key = request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MOST_KEY:
            raise HTTPException(400, f"an idempotency key has 1 to {_MOST_KEY} characters")
        if access.named(request.headers):
            require(access.caller(request.headers), "hint")  # a body is not read for whoever may not send it
        raw = await request.body()
        if len(raw) > _MOST_BYTES:
            raise HTTPException(413, f"a post of hints may have {_MOST_BYTES} bytes; send fewer at once")
        hints, single = read_list(raw, _hints, _MOST_HINTS, "hint")
        caller = admit(request, hints, single)
        try:
            return list(await service.hints.take(hints, caller.name or None, key, raw))
        except UnknownModelsError as exc:
            reason = "no node knows a model of this name"
            unknown = [i for i, hint in enumerate(hints) if hint.model in exc.models]
            raise FieldsRefused([FieldProblem(field=field_name(single, i, "model"), reason=reason) for i in unknown], 404) from exc

    @app.post(
        "/v1/hints",
        status_code=202,
        response_model=HintsAnswer,
        responses=PROBLEMS,
        summary="Takes one hint that a model will be used soon, or a list of them; answers once they are durable",
        openapi_extra=extra,
    )
    async def post_hints(request: Request) -> Response:
        result = "refused"
        try:
            answers = await take(request)
            result = "taken"
        except OtherBodyError:
            return problem(422, "this idempotency key came with another body; a new post takes a new key")
        except HTTPException as exc:
            result = "not_allowed" if exc.status_code in (401, 403) else "refused"
            raise
        except TemporaryError as exc:
            result = "limited" if isinstance(exc, RateLimitedError) else "overloaded"
            raise
        finally:
            counted.labels(result=result).inc()
        return Response(msgspec.json.encode({"hints": answers}), 202, media_type="application/json")

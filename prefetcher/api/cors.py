"""Requests of pages: preflights, the headers without which a page may not read an answer, and names that only seem to be this endpoint's.

A preflight carries no key, so it is answered for every origin that some key names; the request itself is then held against its own key's
(`keys`). A hint sent as text/plain needs no preflight.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from prefetcher.api.keys import Access
from prefetcher.api.problems import ASGI, Message, problem

__all__ = ["CrossOrigin"]

_METHODS = "GET, POST"
_HEADERS = "Authorization, Content-Type, Idempotency-Key, If-None-Match, X-Api-Key"
_EXPOSED = "ETag, Retry-After"
#: Keys change with a restart; ten minutes is what the strictest browser keeps.
_MAX_AGE_S = 600
_NOT_OURS = (
    "the Host of this request is no name of this endpoint; ask localhost or its number, or set PREFETCHER_API__KEYS_FILE or "
    "PREFETCHER_API__OPEN=true where it has other names"
)


class CrossOrigin:
    """Wraps an application."""

    def __init__(self, app: ASGI, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if not self._access.is_called(headers.get("host", "")):
            await problem(403, _NOT_OURS)(scope, receive, send)
            return
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        allowed = self._access.may_come_from(origin, headers.get("host", ""))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            answer = Response(status_code=204) if allowed else problem(403, "no key names this origin")
            answer.headers["Vary"] = "Origin"
            if allowed:
                answer.headers["Access-Control-Allow-Origin"] = origin
                answer.headers["Access-Control-Allow-Methods"] = _METHODS
                answer.headers["Access-Control-Allow-Headers"] = _HEADERS
                answer.headers["Access-Control-Max-Age"] = str(_MAX_AGE_S)
            await answer(scope, receive, send)
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out.add_vary_header("Origin")
                if allowed:
                    out["Access-Control-Allow-Origin"] = origin
                    out["Access-Control-Expose-Headers"] = _EXPOSED
            await send(message)

        await self._app(scope, receive, named)

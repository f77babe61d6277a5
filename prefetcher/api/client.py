"""What the command line asks of a running endpoint: JSON over HTTP with the standard library, errors as the program's own.

Servers take `prefetcher.client`, which tells refusals as this does.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from prefetcher.core.types import NAME_LIMIT_BYTES
from prefetcher.errors import ModelNotFoundError, PrefetcherError, RateLimitedError, UnavailableError, UsageError, shortened
from prefetcher.secrets import problem_of_address, without_secrets

__all__ = ["act", "check_address", "delete", "detail_of", "get", "key_of_environment", "post", "refusal"]

_TIMEOUT_S = 15.0
_KEY_VARIABLE = "PREFETCHER_KEY"


def get(url: str, path: str) -> Any:
    """The answer of a GET. `path` is quoted already. Raises as `post`."""
    return _ask(url, path, "GET")


def delete(url: str, path: str) -> None:
    """A DELETE. `path` is quoted already. Raises as `post`."""
    _ask(url, path, "DELETE")


def post(url: str, path: str, body: Any = None) -> Any:
    """The answer of a POST, with `body` as JSON where there is one. `path` is quoted already.

    Raises:
        UsageError: the address or the key is none, or the address asks for a key.
        UnavailableError: nobody answers there, or not now.
        ModelNotFoundError: no such model there.
        PrefetcherError: refused, with the reason.
    """
    return _ask(url, path, "POST", body)


def act(url: str, act: str, model: str, wish: Mapping[str, Any] | None = None, node: str | None = None) -> Any:
    """The answer to an act by hand on a model, whatever characters its name has, on `node`, else on the endpoint's own. `wish` is the body:
    why, and until when. Raises as `post`."""
    name = model.encode(errors="surrogateescape")
    unknown = f"no model is called {shortened(repr(model))} there; `prefetcher status` lists them"
    if len(name) > NAME_LIMIT_BYTES:
        raise ModelNotFoundError(unknown, model=model)
    try:
        where = "" if node is None else f"?node={urllib.parse.quote(node, safe='')}"
        return post(url, f"/v1/models/{urllib.parse.quote(name, safe='')}:{act}{where}", dict(wish) if wish else None)
    except ModelNotFoundError as exc:
        # A name that no route takes, as one with a line's end.
        raise ModelNotFoundError(unknown if str(exc).startswith("no such address") else str(exc), model=model) from exc


def _ask(url: str, path: str, method: str, body: Any = None) -> Any:
    check_address(url)
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url.rstrip("/") + path, data=sent, method=method)
    if sent is not None:
        request.add_header("Content-Type", "application/json")
    key = key_of_environment()
    if key:
        request.add_header("X-Api-Key", key)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer) if answer.status != 204 else None
    except urllib.error.HTTPError as exc:
        with exc:
            detail = detail_of(exc.read(), f"{exc.code} {exc.reason}")
        raise refusal(exc.code, detail, exc.headers.get("Retry-After")) from exc
    except (OSError, ValueError, http.client.HTTPException) as exc:
        reason = getattr(exc, "reason", exc)
        raise UnavailableError(f"nobody answers at {without_secrets(url)} ({reason}); start `prefetcher up`, or give --url") from exc


def check_address(url: str) -> None:
    """Raises UsageError, which shows no password of the address."""
    shown = shortened(repr(without_secrets(url)))
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{shown} is no address; write http://host:port")
    problem = problem_of_address(url)
    if problem:
        raise UsageError(f"what --url or PREFETCHER_URL gives is no address: {problem}; write http://host:port")
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise UsageError(f"{shown} has a name or password, which no endpoint takes; write http://host:port, and a key in {_KEY_VARIABLE}")
    if not parts.hostname or not url.isascii() or not url.isprintable() or " " in url or parts.query or parts.fragment:
        raise UsageError(f"{shown} is no address; write http://host:port")


def key_of_environment() -> str:
    """The key of whoever asks. Raises UsageError, which doesn't show it."""
    key = os.environ.get(_KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"{_KEY_VARIABLE} holds a line end or another character that no header takes; set it to the key alone")
    return key


def refusal(status: int, detail: str, retry_after: str | None) -> PrefetcherError:
    """The program's own error for what an endpoint refused, or could not do now."""
    wait_s = float(retry_after) if retry_after is not None and retry_after.isdigit() else 1.0
    if status in (400, 413, 422):
        return UsageError(detail)
    if status == 401:
        return UsageError(f"{detail}; set {_KEY_VARIABLE} to a key whose role allows it")
    if status == 404:
        return ModelNotFoundError(detail)
    if status == 429:
        return RateLimitedError(detail, retry_after_s=wait_s)
    if status == 503:
        return UnavailableError(detail, retry_after_s=wait_s)
    return PrefetcherError(detail)


def detail_of(raw: bytes, otherwise: str) -> str:
    """What problem details say, field by field where fields were refused; `otherwise` where there are none."""
    try:
        found = json.loads(raw)
        fields = "; ".join(f"{one['field']}: {one['reason']}" for one in found.get("errors", []))
        return f"{found['detail']}: {fields}" if fields else str(found["detail"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return otherwise

"""What the command line asks of a running endpoint: JSON over HTTP with the standard library, errors as the program's own."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from prefetcher.errors import ModelNotFoundError, PrefetcherError, UnavailableError, UsageError

__all__ = ["get", "post"]

_TIMEOUT_S = 15.0


def get(url: str, path: str) -> Any:
    """The answer of a GET. Raises as `post`."""
    return _ask(url, path, "GET")


def post(url: str, path: str) -> Any:
    """The answer of a POST without a body.

    Raises:
        UsageError: the address is none.
        UnavailableError: nobody answers there, or not now.
        ModelNotFoundError: no such model there.
        PrefetcherError: refused, with the reason.
    """
    return _ask(url, path, "POST")


def _ask(url: str, path: str, method: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"{url!r} is no address; write http://host:port")
    request = urllib.request.Request(url.rstrip("/") + urllib.parse.quote(path, safe="/:?=&"), method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as exc:
        with exc:
            detail = _detail(exc)
        if exc.code == 404:
            raise ModelNotFoundError(detail) from exc
        if exc.code == 503:
            raise UnavailableError(detail) from exc
        raise PrefetcherError(detail) from exc
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "reason", exc)
        raise UnavailableError(f"nobody answers at {url} ({reason}); start `prefetcher up`, or give --url") from exc


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"

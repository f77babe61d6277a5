"""What the command line asks of a running endpoint: JSON over HTTP with the standard library, errors as the program's own."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from prefetcher.core.types import NAME_LIMIT_BYTES
from prefetcher.errors import ModelNotFoundError, PrefetcherError, UnavailableError, UsageError, shortened

__all__ = ["act", "get", "post"]

_TIMEOUT_S = 15.0
_KEY_VARIABLE = "PREFETCHER_KEY"


def get(url: str, path: str) -> Any:
    """The answer of a GET. `path` is quoted already. Raises as `post`."""
    return _ask(url, path, "GET")


def post(url: str, path: str) -> Any:
    """The answer of a POST without a body. `path` is quoted already.

    Raises:
        UsageError: the address is none, or asks for a key.
        UnavailableError: nobody answers there, or not now.
        ModelNotFoundError: no such model there.
        PrefetcherError: refused, with the reason.
    """
    return _ask(url, path, "POST")


def act(url: str, act: str, model: str) -> Any:
    """The answer to an act by hand on a model, whatever characters its name has. Raises as `post`."""
    name = model.encode(errors="surrogateescape")
    unknown = f"no model is called {shortened(repr(model))} there; `prefetcher status` lists them"
    if len(name) > NAME_LIMIT_BYTES:
        raise ModelNotFoundError(unknown, model=model)
    try:
        return post(url, f"/v1/models/{urllib.parse.quote(name, safe='')}:{act}")
    except ModelNotFoundError as exc:
        # A name that no route takes, as one with a line's end.
        raise ModelNotFoundError(unknown if str(exc).startswith("no such address") else str(exc), model=model) from exc


def _ask(url: str, path: str, method: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"{url!r} is no address; write http://host:port")
    request = urllib.request.Request(url.rstrip("/") + path, method=method)
    key = os.environ.get(_KEY_VARIABLE)
    if key:
        request.add_header("X-Api-Key", key)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as exc:
        with exc:
            detail = _detail(exc)
        if exc.code == 401:
            raise UsageError(f"{detail}; set {_KEY_VARIABLE} to a key with role operator") from exc
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

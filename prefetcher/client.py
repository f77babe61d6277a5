"""What a server asks of an endpoint: hints, request rows, where a model is, how soon it is expected; typed.

    from prefetcher.client import Client

    with Client("http://127.0.0.1:8371", key="sk_…") as client:
        client.hint("llama-8b", in_s=5, session="s-1")

Every call ends within `timeout_s`, retries included. What takes something in is sent again under the same ids, which the endpoint counts
once. A client may be used by many threads; connections are kept open. Covers no acts by hand (`prefetcher.api.client`) and no weights
(`prefetcher.open`).
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import msgspec

from prefetcher.api.client import check_address, detail_of, key_of_environment, refusal
from prefetcher.clock import SystemClock
from prefetcher.errors import PrefetcherError, TemporaryError, UnavailableError, UsageError
from prefetcher.secrets import without_secrets

__all__ = ["Client", "Forecast", "Hint", "HintTaken", "LikelyModel", "Request", "Residency", "Route"]

#: Real seconds: an endpoint answers within one, or not.
_TIMEOUT_S = 3.0
#: The first wait before another try, doubled each time; what an endpoint asks for is honoured where time is left.
_BACK_OFF_S = 0.05
#: Idle connections that are kept.
_MOST_IDLE = 8
#: Rows and hints in one post, as the endpoint takes them.
_MOST_ROWS = 10_000
_MOST_HINTS = 100
_MOST_ROUTES = 100

_clock = SystemClock()
_never = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A model will be used soon: `in_s` seconds from now, at most `ttl_s` later. Without `model`, something at `surface` will.

    `kind`: `load` (bring it), or `intent` (somebody may be about to use it). `source` is only heard where the endpoint has no keys.
    """

    model: str | None = None
    in_s: float = 0.0
    ttl_s: float = 120.0
    session: str | None = None
    user: str | None = None
    surface: str = ""
    kind: Literal["load", "intent"] = "load"
    source: str = ""
    hint_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that was served; `ts` in seconds since 1970 UTC, None for now."""

    model: str
    ts: float | None = None
    user: str | None = None
    node: str | None = None
    version: str | None = None
    count: int = 1
    request_id: str | None = None


class LikelyModel(msgspec.Struct, frozen=True):
    """A model that hints like this one led to, and the probability that it is meant."""

    model: str
    probability: float


class HintTaken(msgspec.Struct, frozen=True):
    """A hint is durable and will be planned for. `state`: `resident`, `moving`, `likely` or `unlikely`, as `docs/http.md` tells them."""

    id: str
    model: str | None
    state: str
    probability: float | None = None
    likely: tuple[LikelyModel, ...] = ()


class Residency(msgspec.Struct, frozen=True):
    """A model on a node. `tier` host, device, or disk where it is not in memory; `ready_in_s` is 0 where it is ready."""

    node: str
    model: str
    version: str
    tier: str
    state: str
    bytes: int
    bytes_done: int
    ready_in_s: float | None = None
    cause: str = ""
    pinned: bool = False
    leases: int = 0


class Forecast(msgspec.Struct, frozen=True):
    """P(used within so many seconds), by seconds; from `issued_at_s` to `valid_until_s` (since 1970 UTC)."""

    model: str
    issued_at_s: float
    valid_until_s: float
    probabilities: dict[int, float]


class Route(msgspec.Struct, frozen=True):
    """Where to send requests for a model: its node, what the weights are there (`ready`, `moving`, `placed`), and how long a request is
    expected to wait for them. `cached` is False where it fits nowhere and is served from the tier below."""

    model: str
    node: str
    state: str
    wait_s: float
    cached: bool = True


class _Routes(msgspec.Struct):
    routes: list[Route]


class _Hints(msgspec.Struct):
    hints: list[HintTaken]


class _Accepted(msgspec.Struct):
    accepted: int


_T = TypeVar("_T")


class Client:
    """One endpoint. `key` is sent with every call; None takes PREFETCHER_KEY, '' none. `retries` is how often a call is tried again.

    All calls raise:
        UsageError: the address, the key or what was sent can't be.
        ModelNotFoundError: no node knows the model, or nothing is forecast for it.
        RateLimitedError: too many for this key or session.
        UnavailableError: nobody answered in time. What was sent may still have been taken in, once.
        PrefetcherError: refused, with the reason.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8371", *, key: str | None = None, timeout_s: float = _TIMEOUT_S, retries: int = 2
    ) -> None:
        check_address(url)
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None
        self._url = url
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        key = key_of_environment() if key is None else key
        if not (key.isascii() and key.isprintable()):
            raise UsageError("this key holds a line end or another character that no header takes; give the key alone")
        self._headers = {"X-Api-Key": key} if key else {}
        self._idle: list[http.client.HTTPConnection] = []
        self._guard = threading.Lock()
        self._closed = False

    def hint(
        self,
        model: str | None = None,
        *,
        in_s: float = 0.0,
        ttl_s: float = 120.0,
        session: str | None = None,
        user: str | None = None,
        surface: str = "",
        kind: Literal["load", "intent"] = "load",
        source: str = "",
        hint_id: str | None = None,
    ) -> HintTaken:
        """One hint; fields as `Hint` tells them."""
        one = Hint(
            model=model, in_s=in_s, ttl_s=ttl_s, session=session, user=user, surface=surface, kind=kind, source=source, hint_id=hint_id
        )
        return self.hints([one])[0]

    def hints(self, hints: Iterable[Hint]) -> list[HintTaken]:
        """Up to 100 hints, all taken in or none; one answer each, in their order."""
        given = list(hints)
        if not 0 < len(given) <= _MOST_HINTS:
            raise UsageError(f"a post has 1 to {_MOST_HINTS} hints, these are {len(given)}")
        # The post has one id for all its tries.
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        return self._post("/v1/hints", [_fields(hint, Hint()) for hint in given], _Hints, headers).hints

    def requests(self, rows: Iterable[Request]) -> int:
        """Up to 10,000 request rows, all taken in or none; how many. A row without an id gets one, so that none counts twice."""
        given = list(rows)
        if not 0 < len(given) <= _MOST_ROWS:
            raise UsageError(f"a post has 1 to {_MOST_ROWS:,} rows, these are {len(given):,}")
        empty = Request(model="")
        bodies = [{"request_id": uuid.uuid4().hex} | _fields(row, empty) for row in given]
        return self._post("/v1/requests", bodies, _Accepted, {}).accepted

    def residency(self, model: str | None = None) -> list[Residency]:
        """What is in memory or on its way, on every node; of one model also the nodes that have it on disk only."""
        query = "" if model is None else f"?model={urllib.parse.quote(model, safe='')}"
        return self._read(f"/v1/residency{query}", list[Residency])

    def route(self, model: str) -> Route:
        """The node to send a request for the model to, now. Loads nothing: the request does."""
        return self._read(f"/v1/route/{urllib.parse.quote(model, safe='')}", Route)

    def routes(self, models: Iterable[str]) -> list[Route]:
        """The same for up to 100 models that are called at once, decided together; in their order."""
        given = list(models)
        if not 0 < len(given) <= _MOST_ROUTES:
            raise UsageError(f"a question is about 1 to {_MOST_ROUTES} models, these are {len(given)}")
        return self._post("/v1/route", {"models": given}, _Routes, {}).routes

    def forecast(self, model: str) -> Forecast:
        """How likely the model is used within the next minutes."""
        return self._read(f"/v1/forecast/{urllib.parse.quote(model, safe='')}", Forecast)

    def close(self) -> None:
        """Closes idle connections; those in use close when they are done."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- a call and its tries ---

    def _post(self, path: str, body: Sequence[Mapping[str, Any]] | Mapping[str, Any], kind: type[_T], headers: Mapping[str, str]) -> _T:
        return self._call("POST", path, json.dumps(body).encode(), kind, {"Content-Type": "application/json", **headers})

    def _read(self, path: str, kind: type[_T]) -> _T:
        return self._call("GET", path, None, kind, {})

    def _call(self, method: str, path: str, body: bytes | None, kind: type[_T], headers: Mapping[str, str]) -> _T:
        deadline_s = _clock.steady_s() + self._timeout_s
        back_off_s, tries = _BACK_OFF_S, 0
        while True:
            try:
                raw = self._try(method, path, body, headers, deadline_s)
            except TemporaryError as exc:
                wait_s = max(back_off_s, exc.retry_after_s if exc.__cause__ is None else 0.0)
                if tries >= self._retries or _clock.steady_s() + wait_s >= deadline_s:
                    raise
                _clock.wait(_never, wait_s)
                back_off_s, tries = 2.0 * back_off_s, tries + 1
                continue
            try:
                return msgspec.json.decode(raw, type=kind)
            except msgspec.MsgspecError as exc:
                raise PrefetcherError(f"what {without_secrets(self._url)} answers is none of its answers ({exc}); look at --url") from exc

    def _try(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], deadline_s: float) -> bytes:
        left_s = deadline_s - _clock.steady_s()
        if left_s <= 0.0:
            raise UnavailableError(f"{without_secrets(self._url)} did not answer within {self._timeout_s:g} s")
        connection, is_kept = self._connection(left_s)
        try:
            connection.request(method, self._prefix + path, body, {**self._headers, **headers})
            answer = connection.getresponse()
            raw = answer.read()
        except (OSError, http.client.HTTPException) as exc:
            connection.close()
            if is_kept and not isinstance(exc, TimeoutError):
                # It was closed meanwhile; what the endpoint had taken in all the same, it counts once.
                return self._try(method, path, body, headers, deadline_s)
            raise self._nobody(exc) from exc
        if answer.will_close:
            connection.close()
        else:
            self._keep(connection)
        if answer.status >= 300:
            raise refusal(answer.status, detail_of(raw, f"{answer.status} {answer.reason}"), answer.headers.get("Retry-After"))
        return raw

    def _nobody(self, reason: Exception) -> UnavailableError:
        return UnavailableError(f"nobody answers at {without_secrets(self._url)} ({reason}); start `prefetcher up`, or name another")

    def _connection(self, timeout_s: float) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before."""
        with self._guard:
            kept = self._idle.pop() if self._idle else None
        if kept is not None and kept.sock is not None:
            kept.sock.settimeout(timeout_s)
            return kept, True
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        made = kind(self._host, self._port, timeout=timeout_s)
        try:
            made.connect()
            made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as exc:
            made.close()
            raise self._nobody(exc) from exc
        return made, False

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._guard:
            keeps = not self._closed and len(self._idle) < _MOST_IDLE
            if keeps:
                self._idle.append(connection)
        if not keeps:
            connection.close()


def _fields(given: Hint | Request, empty: Hint | Request) -> dict[str, Any]:
    """What differs from the default: an endpoint that knows fewer fields takes what says nothing more."""
    found = {name: getattr(given, name) for name in given.__slots__}
    return {name: value for name, value in found.items() if value is not None and (name == "model" or value != getattr(empty, name))}

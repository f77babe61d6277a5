"""Who may do what: keys from a file, the origins that each is bound to, their rates; and the refusal to be open to others by accident.

Keys are kept as digests and compared in constant time; they are never logged. A key whose only role is `hint` is publishable: pages carry
it, it may stand in a body, and what protects it is its origins and its rate. Covers no CORS headers (`cors`) and no hints (`hints`).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from fastapi import Request
from starlette.exceptions import HTTPException

from prefetcher.api.limits import TokenBuckets
from prefetcher.clock import Clock
from prefetcher.config import ApiSettings
from prefetcher.errors import RateLimitedError, SettingsError

__all__ = ["ANYBODY", "Access", "Caller", "Role"]

Role = Literal["hint", "operator", "ingest"]
#: 16 characters of base64 are 96 bits.
_LEAST_KEY = 16
_MOST_NAME = 64
_WHERE = "send it as `Authorization: Bearer KEY` or `X-Api-Key: KEY`"


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    name: str
    roles: list[Role]
    origins: list[str] = []
    rate_per_s: float | None = None
    burst: float | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a key belongs to. Without keys everybody is `ANYBODY`. `rate_per_s` None: as much as he likes."""

    name: str
    roles: frozenset[str]
    origins: frozenset[str] = frozenset()
    rate_per_s: float | None = None
    burst: float = 1.0

    @property
    def publishable(self) -> bool:
        return self.roles == {"hint"}


ANYBODY = Caller("", frozenset({"hint", "operator", "ingest"}))


class Access:
    """All keys. Without any, whoever reaches the address may do everything, but for pages of other machines' origins.

    `names` are what the endpoint may be called without keys, beside loopback names and numbers; None: anything.
    """

    def __init__(self, clock: Clock, callers: Sequence[tuple[bytes, Caller]] = (), names: Iterable[str] | None = None) -> None:
        self._callers = list(callers)
        self._names = None if names is None else frozenset(name.lower() for name in names)
        self._buckets = TokenBuckets(clock)

    @classmethod
    def of(cls, settings: ApiSettings, clock: Clock) -> Access:
        """As the settings say.

        Raises:
            SettingsError: the file can't be read or is no list of keys, or there is none and others would reach the address.
        """
        if settings.keys_file is not None:
            return cls(clock, read_keys(settings.keys_file.expanduser()))
        if not settings.open and not is_loopback(settings.host):
            raise SettingsError(
                f"{settings.host} is an address that others reach, and nobody would be asked for a key; name a file of keys with "
                "PREFETCHER_API__KEYS_FILE, bind to 127.0.0.1, or set PREFETCHER_API__OPEN=true where only your own machines reach it"
            )
        return cls(clock, names=None if settings.open else (settings.host, socket.gethostname()))

    @property
    def has_keys(self) -> bool:
        return bool(self._callers)

    def caller(self, headers: Mapping[str, str], in_body: str | None = None) -> Caller:
        """Whose key it is, in the headers or, for publishable ones, in the body; `ANYBODY` where there are no keys.

        Raises:
            HTTPException: 401 for a missing or wrong key, 403 for an origin that is not the key's.
        """
        origin = headers.get("origin")
        if not self._callers:
            if origin is not None and not _is_near(origin, headers.get("host", "")):
                raise HTTPException(403, f"{_cut(origin)} is another machine's page; pages need a key that names their origin")
            return ANYBODY
        given = _in_headers(headers)
        found = self._find(given if given is not None else in_body)
        if found is None or (given is None and not found.publishable):
            text = "this needs a key" if given is None and in_body is None else "this key is not known"
            if found is not None:
                text = "only a key whose one role is hint may stand in a body"
            raise HTTPException(401, f"{text}; {_WHERE}", headers={"WWW-Authenticate": "Bearer"})
        if origin is not None and not found.origins & {origin, "*"} and not self._is_own_page(found, origin, headers.get("host", "")):
            raise HTTPException(403, f"{_cut(origin)} is none of the origins of key {found.name!r}; add it in the file of keys")
        return found

    @staticmethod
    def _is_own_page(caller: Caller, origin: str, host: str) -> bool:
        """Whether it is the endpoint's own page, the dashboard, whose reader gave a key. Pages of others can't know such a key, and one
        that may stand in a page is bound to its origins."""
        return not caller.publishable and bool(host) and _origin_of(origin) == origin and urlsplit(origin).netloc == host

    def is_called(self, host: str) -> bool:
        """Whether `host`, as in the header, may be meant for this endpoint. A page whose name was made to lead here (DNS rebinding) is of
        the same origin for its browser, so a question of it has no `Origin`; but it says that name. Numbers can't be made to lead here, and
        only what is no browser says none."""
        if self._callers or self._names is None or not host:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._names or is_loopback(name) or _is_number(name)

    def named(self, headers: Mapping[str, str]) -> bool:
        """Whether who calls is known, rightly or not, before his body is read."""
        return not self._callers or _in_headers(headers) is not None

    def _find(self, key: str | None) -> Caller | None:
        if key is None:
            return None
        digest, found = _digest(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found

    def charge(self, caller: Caller, count: int = 1) -> None:
        """Raises RateLimitedError where the key came too often."""
        if caller.rate_per_s is None:
            return
        wait_s = self._buckets.take(caller.name, count, caller.rate_per_s, caller.burst)
        if wait_s > 0.0:
            raise RateLimitedError(f"key {caller.name!r} has {caller.rate_per_s:g} a second; send fewer", retry_after_s=wait_s)

    def needs(self, *roles: Role) -> Callable[[Request], Awaitable[None]]:
        """A dependency of routes that take one of `roles`; it leaves who calls as `request.state.caller`."""

        async def check(request: Request) -> None:
            caller = self.caller(request.headers)
            require(caller, *roles)
            self.charge(caller)
            request.state.caller = caller

        return check

    def may_come_from(self, origin: str, host: str) -> bool:
        """Whether a page of `origin` may ask at all: it is some key's, or, without keys, of this machine."""
        if not self._callers:
            return _is_near(origin, host)
        return any(caller.origins & {origin, "*"} for _, caller in self._callers)


def require(caller: Caller, *roles: Role) -> None:
    """Raises HTTPException, 403, where the caller has none of `roles`."""
    if not caller.roles & set(roles):
        raise HTTPException(403, f"key {caller.name!r} may not do this; it takes one with role {' or '.join(roles)}")


def read_keys(path: Path) -> list[tuple[bytes, Caller]]:
    """Digest and owner of every key in a file. Raises SettingsError, which never says a key."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_KeyEntry])
    except OSError as exc:
        raise SettingsError(f"the file of keys {path} can't be read: {exc.strerror}") from exc
    except msgspec.MsgspecError as exc:
        raise SettingsError(f"the file of keys {path} is no list of keys: {exc}; the HTTP reference shows one") from exc
    if not entries:
        raise SettingsError(f"the file of keys {path} names none; write one, or leave the setting out")
    found: dict[bytes, Caller] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries):
        where = f"key {number} of {path}"
        if len(entry.key) < _LEAST_KEY:
            raise SettingsError(f"{where} has fewer than {_LEAST_KEY} characters; make one with `openssl rand -base64 24`")
        if not entry.name or len(entry.name) > _MOST_NAME or entry.name in names:
            raise SettingsError(f"{where}: the name {entry.name[:_MOST_NAME]!r} is empty, longer than {_MOST_NAME}, or another key's")
        if not entry.roles:
            raise SettingsError(f"{where} has no roles; there are hint, operator and ingest")
        rate, burst = entry.rate_per_s, entry.burst
        if (rate is not None and not rate > 0.0) or (burst is not None and not burst >= 1.0):
            raise SettingsError(f"{where}: rate_per_s must be positive, and burst at least 1")
        if _digest(entry.key) in found:
            raise SettingsError(f"{where} is there twice")
        for origin in entry.origins:
            if origin != "*" and origin != _origin_of(origin):
                raise SettingsError(
                    f"{where}: {_cut(origin)} is no origin; write scheme and host, and the port if it has one: https://a.example"
                )
        names.add(entry.name)
        found[_digest(entry.key)] = Caller(
            entry.name, frozenset(entry.roles), frozenset(entry.origins), rate, max(1.0, rate or 1.0) if burst is None else burst
        )
    return list(found.items())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host.lower() == "localhost" or host.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _in_headers(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def _origin_of(text: str) -> str:
    parts = urlsplit(text)
    return f"{parts.scheme}://{parts.netloc}" if parts.scheme in ("http", "https") and parts.netloc else ""


def _is_near(origin: str, host: str) -> bool:
    """Whether a page is of this machine, or of this endpoint itself where that is named by its number: a name may be made to lead here by
    anybody (DNS rebinding)."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or (_is_number(name) and parts.netloc == host)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _cut(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")

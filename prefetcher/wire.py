"""What travels in the streams: request, hint, outcome and dead-letter messages, as JSON with a schema version.

`docs/messages.md` describes every field, and a test holds it against this module. A reader takes every version up to its own: what a newer
version added is ignored, what an older one lacks has its default, and only a message of a version that says that it cannot be read so
(`MOST_VERSION`) is refused. Covers no transport and no foreign formats (`replay.maps`).
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from prefetcher.core.types import NAME_LIMIT_BYTES, ModelName, ModelVersion, NodeName, RequestSeen

__all__ = [
    "AHEAD_S",
    "EARLIEST_S",
    "HINT_KINDS",
    "MOST_COUNT",
    "MOST_VERSION",
    "VERSION",
    "DeadLetter",
    "HintMessage",
    "OutcomeMessage",
    "RequestMapping",
    "RequestMessage",
    "decode_hint",
    "decode_outcome",
    "decode_request",
    "encode",
    "read_request",
    "request_records",
]

#: The version that this program writes, and the newest that it reads: a version above it changed the meaning of a field.
VERSION = 1
MOST_VERSION = 1
#: 2000-01-01: an earlier time is a unit that was mistaken.
EARLIEST_S = 946_684_800.0
#: What a hint may say of itself: the model is to be loaded, or somebody may mean to use it.
HINT_KINDS = ("load", "intent")
#: Arrivals that one row stands for.
MOST_COUNT = 1_000_000_000
#: Clocks of those who write may be this far ahead of a reader's; what is dated later is refused.
AHEAD_S = 60.0


class RequestMessage(msgspec.Struct, omit_defaults=True):
    """One request that a gateway saw; key: the model."""

    ts: float
    model: str
    count: int = 1
    user: str | None = None
    node: str | None = None
    version: str | None = None
    request_id: str | None = None
    tenant: str | None = None
    v: int = 1

    @classmethod
    def of(cls, request: RequestSeen) -> RequestMessage:
        return cls(
            request.ts, request.model, request.count, request.user, request.node, request.version, request.request_id, request.tenant
        )

    def to_request(self) -> RequestSeen:
        return RequestSeen(
            ts=self.ts,
            model=ModelName(self.model),
            count=self.count,
            user=self.user,
            node=None if self.node is None else NodeName(self.node),
            version=None if self.version is None else ModelVersion(self.version),
            request_id=self.request_id,
            tenant=self.tenant,
        )


class HintMessage(msgspec.Struct, omit_defaults=True):
    """Somebody expects a model to be used soon; key: the model, or the source where no model is named."""

    hint_id: str
    ts: float
    model: str | None = None
    source: str = ""
    session: str | None = None
    user: str | None = None
    in_s: float = 0.0
    ttl_s: float = 120.0
    surface: str = ""
    kind: str = "load"
    v: int = 1


class OutcomeMessage(msgspec.Struct, omit_defaults=True):
    """What became of a prefetch, or of a node's memory and rows since the last message; key: the node.

    `kind` is `order` (with `order`, an order record as it stands), `totals` (with `totals`, the node's ledger totals) or `ledger` (with
    `ledger`, a part of its sums by hour, `report.sums.LedgerPart`).
    """

    kind: str
    node: str
    ts: float
    seq: int
    order: dict[str, Any] | None = None
    totals: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None
    v: int = 1


class DeadLetter(msgspec.Struct, omit_defaults=True):
    """A record that could not be taken in, where it was, and why. `value` is base64 of its first bytes; key: topic and partition."""

    topic: str
    partition: int
    offset: int
    reason: str
    detail: str
    value: str
    size_bytes: int
    ts: float
    v: int = 1

    def raw(self) -> bytes:
        return base64.b64decode(self.value)


_T = TypeVar("_T")
_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(RequestMessage)
_hints = msgspec.json.Decoder(HintMessage)
_outcomes = msgspec.json.Decoder(OutcomeMessage)


def encode(message: RequestMessage | HintMessage | OutcomeMessage | DeadLetter) -> bytes:
    """Compact JSON without line ends."""
    return _encoder.encode(message)


def decode_request(value: bytes) -> RequestMessage:
    """Raises ValueError, with a reason that begins with a word of its own, for what is no request (`reasons` in `docs/messages.md`)."""
    message = _decode(_requests, value)
    problem = problem_of_request(message)
    if problem:
        raise ValueError(problem)
    return message


def problem_of_request(message: RequestMessage) -> str:
    """'' or what is wrong with a request whose fields have the right types: `reason: detail`."""
    if message.v > MOST_VERSION:
        return f"too_new: version {message.v}, this program reads up to {MOST_VERSION}"
    if not message.model:
        return "empty_name: model is empty"
    if not message.ts >= EARLIEST_S or math.isinf(message.ts):
        return f"bad_time: ts is {message.ts}, expected seconds since 1970"
    if not 1 <= message.count <= MOST_COUNT:
        return f"bad_count: count is {message.count}"
    for name in (message.model, message.user, message.node, message.version, message.request_id, message.tenant):
        # A character has at most four bytes.
        if name is not None and len(name) * 4 > NAME_LIMIT_BYTES and len(name.encode("utf-8", "replace")) > NAME_LIMIT_BYTES:
            return f"long_name: a name of more than {NAME_LIMIT_BYTES} bytes, {name[:40]!r}…"
    return ""


def decode_hint(value: bytes) -> HintMessage:
    """Raises ValueError as `decode_request`."""
    message = _decode(_hints, value)
    if message.v > MOST_VERSION:
        raise ValueError(f"too_new: version {message.v}, this program reads up to {MOST_VERSION}")
    if message.model == "" or not message.hint_id:
        raise ValueError("empty_name: model or hint_id is empty")
    if message.kind not in HINT_KINDS:
        raise ValueError(f"bad_field: kind is {message.kind[:40]!r}, expected {' or '.join(HINT_KINDS)}")
    for name in (message.model, message.hint_id, message.source, message.session, message.user, message.surface):
        if name is not None and len(name.encode("utf-8", "replace")) > NAME_LIMIT_BYTES:
            raise ValueError(f"long_name: a name of more than {NAME_LIMIT_BYTES} bytes, {name[:40]!r}…")
    if not message.ts >= EARLIEST_S or math.isinf(message.ts):
        raise ValueError(f"bad_time: ts is {message.ts}, expected seconds since 1970")
    if not (0.0 <= message.in_s <= 86_400.0 and 0.0 < message.ttl_s <= 86_400.0):
        raise ValueError("bad_time: in_s and ttl_s must lie within a day")
    return message


def decode_outcome(value: bytes) -> OutcomeMessage:
    """Raises ValueError as `decode_request`."""
    message = _decode(_outcomes, value)
    if message.v > MOST_VERSION:
        raise ValueError(f"too_new: version {message.v}, this program reads up to {MOST_VERSION}")
    return message


def _decode(decoder: msgspec.json.Decoder[_T], value: bytes) -> _T:
    try:
        return decoder.decode(value)
    except msgspec.ValidationError as exc:
        raise ValueError(f"bad_field: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"not_json: {exc}") from exc
    except RecursionError as exc:
        raise ValueError("not_json: nested too deeply") from exc


#: From a record's bytes to a row; raises ValueError as `decode_request` does.
RequestMapping = Callable[[bytes], RequestSeen]


def read_request(value: bytes) -> RequestSeen:
    """The row in a message of our own format."""
    return decode_request(value).to_request()


def request_records(requests: Iterable[RequestSeen]) -> list[tuple[str, bytes]]:
    """Rows as (key, value) pairs of the requests topic."""
    return [(request.model, encode(RequestMessage.of(request))) for request in requests]

"""Requests in a topic that a gateway writes already, by a field map (`replay.maps`): any JSON object a record.

What the endpoint and agents write into the same topic is in our own format, which is told by its `ts` where the map finds no time.

Times are numbers of seconds, milliseconds, microseconds or nanoseconds since 1970, told apart by their size, or ISO 8601; without a zone
they are UTC.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from prefetcher.core.types import RequestSeen
from prefetcher.replay.maps import FieldMap, first_value, parse_map
from prefetcher.wire import RequestMapping, RequestMessage, problem_of_request, read_request

__all__ = ["mapped_requests"]

#: Above these, a number can't be seconds (the year 5138), milliseconds, or microseconds.
_MOST_S, _MOST_MS, _MOST_US = 1e11, 1e14, 1e17

_decode = msgspec.json.Decoder().decode


def mapped_requests(fields: str) -> RequestMapping:
    """Reads records by the field map `fields`, as `prefetcher replay --map` takes it.

    Raises:
        SettingsError: there is no such map.
    """
    paths = parse_map(fields)
    return lambda value: _read(value, paths)


def _read(value: bytes, paths: FieldMap) -> RequestSeen:
    try:
        record = _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError(f"not_json: {exc}") from exc
    if not isinstance(record, dict):
        raise ValueError(f"bad_field: an object was expected, found {type(record).__name__}")
    found = {column: first_value(record, of) for column, of in paths.items()}
    if found["ts"] is None and "ts" in record:
        return read_request(value)
    if not isinstance(found["model"], str):
        raise ValueError(f"bad_field: no model at {' or '.join(paths['model'])}")
    count = found["count"]
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise ValueError(f"bad_field: count is {str(count)[:40]!r}")
    message = RequestMessage(
        ts=_seconds(found["ts"], paths),
        model=found["model"],
        count=1 if count is None else count,
        user=_text(found["user"]),
        node=_text(found["node"]),
        version=_text(found["version"]),
        request_id=_text(found["request_id"]),
    )
    problem = problem_of_request(message)
    if problem:
        raise ValueError(problem)
    return message.to_request()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _seconds(value: Any, paths: FieldMap) -> float:
    if isinstance(value, str):
        try:
            at = datetime.fromisoformat(value)
        except ValueError as exc:
            raise ValueError(f"bad_time: {value[:40]!r} is no time") from exc
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"bad_time: no time at {' or '.join(paths['ts'])}")
    for most, unit in ((_MOST_S, 1.0), (_MOST_MS, 1e3), (_MOST_US, 1e6)):
        if value < most:
            return value / unit
    return value / 1e9

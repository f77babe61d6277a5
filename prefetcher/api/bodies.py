"""A body of one record or of a list of records, whatever content type it says it has: read whole or refused whole, field by field.

Covers no meaning of records beyond their schema.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from prefetcher.api.messages import FieldProblem
from prefetcher.api.problems import FieldsRefused

__all__ = ["field_name", "read_json", "read_list", "read_object"]

_T = TypeVar("_T", bound=BaseModel)
#: Half of a character beyond 16 bits, which msgspec calls truncated input where the string ends after it: no other string ends so.
_HALF = re.compile(rb'(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}"')


def read_json(raw: bytes) -> Any:
    """What the body holds. Raises HTTPException, 400, where it is no JSON."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError) as exc:
        if "surrogate" in str(exc) or _HALF.search(raw):
            raise HTTPException(400, "the body holds half a character, a \\uD800 to \\uDFFF alone; send both halves") from exc
        raise HTTPException(400, f"the body is not JSON: {exc}") from exc
    except RecursionError as exc:
        raise HTTPException(400, "the body is nested too deeply; a record has no inner records") from exc


def read_list(raw: bytes, adapter: TypeAdapter[list[_T]], most: int, noun: str) -> tuple[list[_T], bool]:
    """The records, and whether there was one alone, outside a list.

    Raises:
        FieldsRefused: fields of records.
        HTTPException: 400 where it is no such list, 413 where it has more than `most`.
    """
    found = read_json(raw)
    single = isinstance(found, dict)
    items = [found] if single else found
    if not isinstance(items, list):
        raise HTTPException(400, f"the body must be one {noun} or a list of {noun}s")
    if not items:
        raise HTTPException(400, f"the list of {noun}s is empty")
    if len(items) > most:
        raise HTTPException(413, f"at most {most} {noun}s in one post, found {len(items)}")
    try:
        return adapter.validate_python(items), single
    except ValidationError as exc:
        raise FieldsRefused(
            [
                FieldProblem(field=field_name(single, int(e["loc"][0]), *e["loc"][1:]), reason=_reason(e["msg"]))
                for e in exc.errors(include_url=False, include_context=False, include_input=False)
            ]
        ) from exc


def read_object(raw: bytes, kind: type[_T]) -> _T:
    """One object; an empty body has every field's default. Raises as `read_list`."""
    found = read_json(raw) if raw.strip() else {}
    if not isinstance(found, dict):
        raise HTTPException(400, "the body must be an object, or empty")
    try:
        return kind.model_validate(found)
    except ValidationError as exc:
        raise FieldsRefused(
            [
                FieldProblem(field=".".join(map(str, e["loc"])) or "body", reason=_reason(e["msg"]))
                for e in exc.errors(include_url=False, include_context=False, include_input=False)
            ]
        ) from exc


def field_name(single: bool, number: int, *path: int | str) -> str:
    """`ts`, or `[3].ts` in a list."""
    inner = ".".join(str(part) for part in path)
    if single:
        return inner or "body"
    return f"[{number}]" + (f".{inner}" if inner else "")


def _reason(message: str) -> str:
    return message.removeprefix("Value error, ")

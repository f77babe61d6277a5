"""Field maps: where a gateway's log keeps what replay needs.

A map gives, for each of replay's columns, one or more dotted paths into a record, the first that holds something being
taken. It covers names only; formats are `formats`, times `times`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefetcher.errors import SettingsError

__all__ = ["COLUMNS", "SHIPPED", "FieldMap", "first_value", "parse_map"]

#: The columns that replay reads; `ts` and `model` are required.
COLUMNS: tuple[str, ...] = ("ts", "model", "count", "user", "node", "version", "request_id")

#: Column -> the paths that are tried for it, in this order.
FieldMap = dict[str, tuple[str, ...]]

#: Maps that are shipped, by name. None sets `node`: what these logs name is an upstream's address, which changes with
#: every restart of a pod and would split the capacity over as many nodes; whoever has stable addresses adds
#: `node=upstream_host`.
SHIPPED: dict[str, FieldMap] = {
    # Rows of the LiteLLM proxy's table of spend logs, as exported from the database or read from its API. `model_group`
    # is the name that callers use, `model` the deployment behind it; times have no zone and are UTC.
    "litellm": {
        "ts": ("startTime", "starttime", "start_time"),
        "model": ("model_group", "model"),
        "user": ("end_user", "user"),
        "request_id": ("request_id",),
    },
    # Envoy's JSON access log has the keys that its operator chose; these are the common ones: START_TIME as
    # `start_time`, the model from a request header (Envoy AI Gateway: `x-ai-eg-model`) or from the `gen_ai.*` names.
    "envoy": {
        "ts": ("start_time", "startTime", "timestamp", "time"),
        "model": (
            "x-ai-eg-model",
            "x_ai_eg_model",
            "genai_model_name",
            "gen_ai.request.model",
            "genai_request_model",
            "request_model",
            "model",
            "x-model",
            "x_model",
        ),
        "user": ("x-user-id", "x_user_id", "user_id", "user"),
        "request_id": ("request_id", "x-request-id", "x_request_id"),
    },
    # Proxies that write the bodies of the OpenAI API: the request's model is what was asked for, the response's may be
    # a dated alias.
    "openai": {
        "ts": ("timestamp", "ts", "time", "created_at", "created", "response.created", "response.created_at"),
        "model": ("request.model", "body.model", "request.body.model", "model", "response.model"),
        "user": ("request.user", "body.user", "request.body.user", "user"),
        "request_id": ("request_id", "id", "response.id"),
    },
}


def parse_map(text: str | Mapping[str, str] | FieldMap | None) -> FieldMap:
    """The map that `text` means: shipped names and `column=path` pairs, separated by commas; `|` separates paths of one
    column.

    Later parts win, so `litellm,node=api_base` is the shipped map with one column more. Columns that are not named keep
    their own name. Raises SettingsError for a name or a column that does not exist.
    """
    result: FieldMap = {column: (column,) for column in COLUMNS}
    if text is None:
        return result
    if not isinstance(text, str):
        for column, paths in text.items():
            _check_column(column)
            result[column] = tuple(paths.split("|")) if isinstance(paths, str) else tuple(paths)
        return result
    for raw in text.split(","):
        part = raw.strip()
        if not part:
            continue
        column, equals, path = part.partition("=")
        column = column.strip()
        if not equals:
            if column not in SHIPPED:
                raise SettingsError(
                    f"no shipped field map is called {column!r}; there are {', '.join(sorted(SHIPPED))}; "
                    "or name fields yourself, as in ts=startTime,model=request.model"
                )
            result.update(SHIPPED[column])
            continue
        _check_column(column)
        paths = tuple(p.strip() for p in path.split("|") if p.strip())
        if not paths:
            raise SettingsError(f"the field map names no field for {column!r}; write {column}=FIELD")
        result[column] = paths
    return result


def first_value(record: dict[str, Any], paths: tuple[str, ...]) -> Any:
    """What the first path that leads to something leads to; a name with dots may also be one key."""
    for path in paths:
        if record.get(path) is not None:
            return record[path]
        value: Any = record
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    return None


def _check_column(column: str) -> None:
    if column not in COLUMNS:
        raise SettingsError(f"the field map names an unknown column {column!r}; replay reads {', '.join(COLUMNS)}")

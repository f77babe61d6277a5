"""Sums and orders as parquet: the history that outlives the state store, and what `prefetcher report --parquet` writes.

The history is `date=YYYY-MM-DD/hour=HH.parquet`, one row for each node, part of the hour and key; a file is whole and synced when it takes
its place. A row that is written again replaces the one before, so whoever writes it twice changes nothing. Covers no deciding which hours
are settled (`report.history`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from prefetcher.core.totals import HOUR_S, Totals, TotalsKey
from prefetcher.core.types import Arm, Cause, ModelName
from prefetcher.errors import InputError

__all__ = ["ORDERS", "SUMS", "Cell", "hour_file", "orders_table", "read_hours", "read_sums", "sums_table"]

#: Where a sum belongs: node, part of its hour, key.
Cell = tuple[str, int, TotalsKey]
_KEY = ("model", "cause", "arm", "tier", "predictor", "source", "tenant")


def _column(kind: Any) -> pa.DataType:
    if kind in (int, float):
        return pa.int64() if kind is int else pa.float64()
    name, count = kind.__args__
    return pa.map_(pa.int32() if name is int else pa.string(), pa.int64() if count is int else pa.float64())


_FIELDS = {name: get_type_hints(Totals)[name] for name in Totals.__struct_fields__}
SUMS: Any = pa.schema(
    [
        ("node", pa.string()),
        ("hour_s", pa.int64()),
        ("part", pa.int32()),
        *((name, pa.string()) for name in _KEY),
        *((name, _column(kind)) for name, kind in _FIELDS.items()),
    ]
)
ORDERS: Any = pa.schema(
    [
        *((name, pa.string()) for name in ("decision_id", "node", "model", "version", "tier", "cause", "source", "arm")),
        *((name, pa.float64()) for name in ("issued_s", "begin_s", "ready_s", "first_use_s", "end_s")),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("bytes", pa.int64()),
        ("premature", pa.bool_()),
        ("redundant", pa.bool_()),
        ("contributions", pa.map_(pa.string(), pa.float64())),
    ]
)


def sums_table(sums: Mapping[Cell, Totals]) -> Any:
    """Sums as an Arrow table of `SUMS`, in the order of node, hour, key and part."""
    cells = sorted(sums.items(), key=lambda item: (item[0][0], item[0][2].hour, item[0][2], item[0][1]))
    columns: dict[str, list[Any]] = {
        "node": [node for (node, _, _), _ in cells],
        "hour_s": [key.hour * int(HOUR_S) for (_, _, key), _ in cells],
        "part": [part for (_, part, _), _ in cells],
    }
    for name in _KEY:
        columns[name] = [str(getattr(key, name)) for (_, _, key), _ in cells]
    for name, kind in _FIELDS.items():
        values = [getattr(totals, name) for _, totals in cells]
        columns[name] = values if kind in (int, float) else [list(value.items()) for value in values]
    return pa.table([pa.array(columns[field.name], field.type) for field in SUMS], schema=SUMS)


def read_sums(table: Any) -> dict[Cell, Totals]:
    """The sums of a table that `sums_table` made, also of an older program's, which lacked columns."""
    found: dict[Cell, Totals] = {}
    for row in table.to_pylist():
        named = {name: row.get(name) or "" for name in _KEY}
        key = TotalsKey(
            ModelName(named["model"]),
            Cause(named["cause"]),
            Arm(named["arm"]),
            int(row["hour_s"]) // int(HOUR_S),
            named["tier"],
            named["predictor"],
            named["source"],
            named["tenant"],
        )
        amounts = {name: row[name] for name in _FIELDS if row.get(name) is not None}
        plain = {name: dict(value) if isinstance(value, list) else value for name, value in amounts.items()}
        found[row["node"], row["part"], key] = msgspec.convert(plain, Totals)
    return found


def orders_table(orders: Iterable[Mapping[str, Any]]) -> Any:
    """Order records, as `GET /v1/orders` gives them, as an Arrow table of `ORDERS`, in the order of their issue."""
    rows = sorted(orders, key=lambda order: (order["issued_s"], order["decision_id"]))
    defaults = {"outcome": "open", "reason": "", "bytes": 0, "source": "", "contributions": ()}
    columns = {name: [row.get(name, defaults.get(name)) for row in rows] for name in ORDERS.names}
    columns["contributions"] = [[tuple(pair) for pair in value] for value in columns["contributions"]]
    return pa.table([pa.array(columns[field.name], field.type) for field in ORDERS], schema=ORDERS)


def hour_file(folder: Path, hour: int) -> Path:
    """Where an hour (since 1970, UTC) of the history lies."""
    when = datetime.fromtimestamp(hour * HOUR_S, UTC)
    return folder / f"date={when:%Y-%m-%d}" / f"hour={when:%H}.parquet"


def read_hours(folder: Path, hours: Sequence[int] | None = None) -> dict[Cell, Totals]:
    """What the history holds of `hours` (None: of all).

    Raises:
        InputError: a file there is no such table.
    """
    if hours is None:
        paths = sorted(folder.glob("date=*/hour=*.parquet"))
    else:
        wanted = {hour_file(folder, hour) for hour in hours} if len(hours) < 10_000 else None
        paths = sorted(path for path in folder.glob("date=*/hour=*.parquet") if wanted is None or path in wanted)
    found: dict[Cell, Totals] = {}
    for path in paths:
        try:
            with path.open("rb") as file:
                found |= read_sums(pq.read_table(file))
        except FileNotFoundError:
            continue
        except (pa.ArrowException, KeyError, ValueError, msgspec.ValidationError) as exc:
            raise InputError(f"is no hour of a ledger: {str(exc).splitlines()[0]}; move it away", path=str(path)) from exc
    return found

"""Closed hours as parquet: `partition=P/date=YYYY-MM-DD/hour=HH.parquet`, rows by minute and model.

An hour may be written any number of times: counts of a closed minute only ever were incomplete, never too high, so a file takes the larger
of what it holds and what is written. A crash between the file and the deletion of the minutes elsewhere changes nothing. Covers no deciding
which hours are closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["MINUTES_AN_HOUR", "hour_path", "read_hour", "read_hours", "write_hour"]

MINUTES_AN_HOUR = 60
_SCHEMA = pa.schema([("minute", pa.int32()), ("model", pa.string()), ("rows", pa.int64())])

#: Minute since 1970 -> model -> rows.
MinuteRows = Mapping[int, Mapping[str, int]]


def hour_path(folder: Path, partition: int, hour: int) -> Path:
    """Where an hour (since 1970, UTC) of a partition lies."""
    when = datetime.fromtimestamp(hour * 3600, UTC)
    return folder / f"partition={partition}" / f"date={when:%Y-%m-%d}" / f"hour={when:%H}.parquet"


def write_hour(folder: Path, partition: int, hour: int, counts: MinuteRows) -> Path:
    """Merges `counts` into the hour's file; they are on the disk when this returns.

    Raises:
        OSError: the folder can't be written, or the disk is full; the file is as before.
    """
    path = hour_path(folder, partition, hour)
    # Whoever else wrote this hour had its file in place before it deleted what `counts` may lack: the file is read after them.
    merged = {minute: dict(models) for minute, models in counts.items()}
    if path.exists():
        for minute, models in read_hour(path).items():
            ours = merged.setdefault(minute, {})
            for model, rows in models.items():
                ours[model] = max(rows, ours.get(model, 0))
    cells = sorted((minute, model, rows) for minute, models in merged.items() for model, rows in models.items())
    columns = [[cell[i] for cell in cells] for i in range(3)]
    table = pa.table([pa.array(column, kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Two processes may write one hour while a partition moves.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return path


def read_hour(path: Path) -> dict[int, dict[str, int]]:
    """Rows by minute and model of one file."""
    found: dict[int, dict[str, int]] = {}
    with path.open("rb") as file:
        table = pq.read_table(file)
    for minute, model, rows in zip(*(table[name].to_pylist() for name in _SCHEMA.names), strict=True):
        found.setdefault(minute, {})[model] = rows
    return found


def read_hours(folder: Path) -> Iterator[tuple[int, int, dict[str, int]]]:
    """(partition, minute, rows by model) of everything that is kept."""
    for path in sorted(folder.glob("partition=*/date=*/hour=*.parquet")):
        partition = int(path.parts[-3].removeprefix("partition="))
        for minute, models in read_hour(path).items():
            yield partition, minute, models

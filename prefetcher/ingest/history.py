"""Closed hours as parquet: `partition=P/date=YYYY-MM-DD/hour=HH.parquet`, rows by minute and model; of days that are over `day.parquet`.

An hour may be written any number of times: counts of a closed minute only ever were incomplete, never too high, so a file takes the larger
of what it holds and what is written. A crash between the file and the deletion of the minutes elsewhere changes nothing. Covers no deciding
which hours are closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prefetcher.parquet_files import write_table

__all__ = ["MINUTES_AN_HOUR", "compact_day", "hour_path", "read_hour", "read_hours", "read_model", "write_hour"]

MINUTES_AN_HOUR = 60
_SCHEMA = pa.schema([("minute", pa.int32()), ("model", pa.string()), ("rows", pa.int64())])

_DAY = "day.parquet"

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
        _merge(merged, read_hour(path))
    _write(path, merged)
    return path


def compact_day(folder: Path) -> int:
    """Puts the hours of a day's `folder` into its one file, by the same rule as hours are merged, and removes them; how many there were.

    A crash in between leaves both, which says the same. Raises OSError as `write_hour`.
    """
    hours = {path: path.stat() for path in sorted(folder.glob("hour=*.parquet"))}
    if not hours:
        return 0
    _write(folder / _DAY, _read_day(folder))
    for path, before in hours.items():
        now = path.stat()
        # One that somebody wrote anew meanwhile stays for the next time.
        if (now.st_ino, now.st_mtime_ns) == (before.st_ino, before.st_mtime_ns):
            path.unlink()
    return len(hours)


def _read_day(folder: Path, model: str | None = None) -> dict[int, dict[str, int]]:
    """Everything that is kept of a day, or of one model in it: of what stands in two files, the larger counts."""
    while True:
        found: dict[int, dict[str, int]] = {}
        try:
            for path in [*sorted(folder.glob("hour=*.parquet")), *folder.glob(_DAY)]:
                _merge(found, read_hour(path, model))
        except FileNotFoundError:
            # Put into the day's file or removed since it was listed: what is there now has all that is kept.
            continue
        return found


def _merge(into: dict[int, dict[str, int]], counts: MinuteRows) -> None:
    for minute, models in counts.items():
        ours = into.setdefault(minute, {})
        for model, rows in models.items():
            ours[model] = max(rows, ours.get(model, 0))


def _write(path: Path, merged: MinuteRows) -> None:
    """Writes a file; it is on the disk, whole, when this returns."""
    cells = sorted((minute, model, rows) for minute, models in merged.items() for model, rows in models.items())
    columns = [[cell[i] for cell in cells] for i in range(3)]
    table = pa.table([pa.array(column, kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA)
    # Two processes may write one hour while a partition moves.
    write_table(path, table)


def read_hour(path: Path, model: str | None = None) -> dict[int, dict[str, int]]:
    """Rows by minute and model of one file; of one model alone where it is named."""
    found: dict[int, dict[str, int]] = {}
    with path.open("rb") as file:
        table = pq.read_table(file, filters=None if model is None else [("model", "=", model)])
    for minute, model, rows in zip(*(table[name].to_pylist() for name in _SCHEMA.names), strict=True):
        found.setdefault(minute, {})[model] = rows
    return found


def read_hours(folder: Path) -> Iterator[tuple[int, int, dict[str, int]]]:
    """(partition, minute, rows by model) of everything that is kept."""
    for day in sorted(folder.glob("partition=*/date=*")):
        partition = int(day.parts[-2].removeprefix("partition="))
        for minute, models in sorted(_read_day(day).items()):
            yield partition, minute, models


def read_model(folder: Path, model: str, first: int, last: int) -> Counter[int]:
    """Rows of one model by minute from `first` to `last`, inclusive, as far as they are kept.

    Raises OSError or pyarrow.ArrowException for a file that can't be read.
    """
    days = [f"date={datetime.fromtimestamp(minute * 60, UTC):%Y-%m-%d}" for minute in (first, last)]
    found: Counter[int] = Counter()
    for day in folder.glob("partition=*/date=*"):
        if days[0] <= day.name <= days[1]:
            for minute, models in _read_day(day, model).items():
                if first <= minute <= last:
                    found[minute] += models[model]
    return found

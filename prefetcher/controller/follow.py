"""Follows a gateway's log file: whole lines become rows of the request log, together with how far was read.

JSON lines or CSV (by its name), through the same field maps and times as replay. A file that is rotated or cut is followed on, through
every file that it was rotated to meanwhile (`rotation`); the place is kept in the stream's own marks, so each line is taken once, also
across a crash. Bad lines are counted and named, and never in the way; a log of which nothing can be read is a problem of the process.
"""

from __future__ import annotations

import csv
import math
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pyarrow as pa

from prefetcher.clock import Clock
from prefetcher.controller.rotation import Place, files_after, find_file
from prefetcher.core.types import NAME_LIMIT_BYTES, ModelName, ModelVersion, NodeName, RequestSeen
from prefetcher.errors import NoRoomError, SettingsError, UnavailableError, shortened
from prefetcher.ports import Streams, Topic
from prefetcher.replay.maps import first_value, parse_map
from prefetcher.replay.times import TimeReader
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics
from prefetcher.wire import AHEAD_S, MOST_COUNT, request_records

__all__ = ["Follower"]

_CHUNK_BYTES = 1 << 20
_IDLE_S = 0.2
#: Bad lines that are named; the others are counted, and summed up after so many real seconds.
_NAMED = 20
_SUMMARY_S = 60.0
#: Columns that a message names.
_COLUMNS_NAMED = 12
#: How parquet, gzip, zstd, bzip2, xz and lz4 files begin.
_OTHER_FORMATS = (b"PAR1", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"\x04\x22\x4d\x18")
_MAGIC_BYTES = 6
_OTHER_SUFFIXES = frozenset({".parquet", ".gz", ".zst", ".bz2", ".xz", ".lz4"})
_TAKES = "follow takes JSON lines or CSV"


class Follower:
    """Follows `path` into the requests topic. `run` is for a thread of its own.

    Raises:
        SettingsError: the field map or the time zone does not exist, or the file is parquet or compressed.
    """

    def __init__(
        self,
        path: Path,
        streams: Streams,
        clock: Clock,
        metrics: Metrics,
        fields: str | None = None,
        tz: str = "UTC",
    ) -> None:
        self._path = path
        self._streams = streams
        self._writer = streams.writer()
        self._clock = clock
        self._metrics = metrics
        self._fields = parse_map(fields)
        self._times = TimeReader(tz)
        self._csv = ".csv" in path.suffixes
        self._header: list[str] = []
        self._file: BinaryIO | None = None
        self._inode = 0
        self._offset = 0
        self._line = 0
        self._named = 0
        self._rows_read = 0
        #: Bad lines by reason: all, and those that no line of the log has told of yet.
        self._bad_lines: Counter[str] = Counter()
        self._untold: Counter[str] = Counter()
        self._told_s = self._real_s()
        self._columns_seen: list[str] = []
        #: Why there is no file to read, '' where there is one.
        self._no_file = ""
        #: Whether rows were read, in this process or by an earlier one.
        self._was_read = False
        #: '' or why nothing at all could be read of what is there, with what to do.
        self.unreadable = ""
        if path.suffix in _OTHER_SUFFIXES or (path.is_file() and _is_other_format(path)):
            raise SettingsError(_refusal(path))
        #: Rows that were read and not appended yet, with their mark: the disk is full.
        self._unsaved: tuple[list[RequestSeen], str] | None = None

    @property
    def problem(self) -> str:
        """'' or why nothing is read: for people; what `unreadable` says as well."""
        return self._no_file or self.unreadable

    def _why_unreadable(self) -> str:
        bad = sum(self._bad_lines.values())
        if self._was_read or bad == 0:
            return ""
        reasons = ", ".join(f"{why}: {count:,}" for why, count in self._bad_lines.most_common(3))
        said = f"nothing of {self._path} could be read, lines refused so far: {bad:,} ({reasons})"
        if not self._columns_seen:
            return f"{said}; {_TAKES}, and CSV is told by a name with .csv"
        named = ", ".join(shortened(name, 40) for name in self._columns_seen[:_COLUMNS_NAMED])
        more = ", …" if len(self._columns_seen) > _COLUMNS_NAMED else ""
        return f"{said}; its columns are {named}{more}: say which are time and model with --map, as --map ts=COLUMN,model=COLUMN"

    def run(self, stop: threading.Event) -> None:
        """Reads what is there and what comes, until `stop`."""
        try:
            while not stop.is_set():
                try:
                    if not self.step():
                        stop.wait(_IDLE_S)
                except (OSError, NoRoomError, UnavailableError) as exc:
                    log().warning("follow_failed", path=str(self._path), reason=str(exc))
                    stop.wait(1.0)
        finally:
            if self._file is not None:
                self._file.close()

    def step(self) -> bool:
        """Takes one chunk of whole lines in; whether there was one."""
        try:
            return self._step()
        finally:
            self.unreadable = self._why_unreadable()
            self._sum_up()

    def _step(self) -> bool:
        if self._unsaved is not None:
            self._save(self._unsaved)
            return True
        if self._file is None and not self._open_first():
            return False
        assert self._file is not None
        self._file.seek(self._offset)
        chunk = self._file.read(_CHUNK_BYTES)
        end = chunk.rfind(b"\n") + 1
        if end == 0 and len(chunk) == _CHUNK_BYTES:
            self._bad("a line of more than 1 MB")
            end = len(chunk)
        if end == 0:
            return self._next_file(chunk)
        self._take(chunk[:end])
        return True

    def _open_first(self) -> bool:
        """Opens the file where reading stopped, wherever it was rotated to, or what came after it; False while there is none."""
        place = Place.from_mark(self._streams.last_mark(Topic.REQUESTS))
        self._was_read = self._was_read or place is not None
        if place is None:
            return self._open(self._path, 0)
        found = find_file(self._path, place.inode)
        if found is not None:
            if found.size < place.offset:
                self._warn_lost(f"{found.path} was cut before byte {place.offset}, where reading stopped: what came after that byte")
                return self._open(found.path, 0)
            return self._open(found.path, place.offset)
        newer = files_after(self._path, place)
        if not self._open(newer[0].path if newer else self._path, 0):
            return False
        self._warn_lost(
            f"the file that was read up to byte {place.offset} (inode {place.inode}) is gone or compressed: what came after that byte"
        )
        return True

    def _warn_lost(self, what: str) -> None:
        log().warning(
            "follow_lost_rows", path=str(self._path), lost=what, then="reading on; keep rotated files, uncompressed, while this is down"
        )

    def _open(self, path: Path, offset: int) -> bool:
        """Goes on in `path` from `offset`; False when there is no such file."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            self._wait_for(f"{path} is not there yet; it is followed once it is")
            return False
        start = file.read(_MAGIC_BYTES)
        file.seek(0)
        if start.startswith(_OTHER_FORMATS):
            file.close()
            self._wait_for(_refusal(path))
            return False
        self._no_file = ""
        self._file, self._inode, self._offset, self._line = file, os.fstat(file.fileno()).st_ino, offset, 0
        if self._csv:
            header = file.readline()
            self._header = self._columns(header)
            self._offset = max(self._offset, len(header)) if header.endswith(b"\n") else 0
        file.seek(0)
        left = self._offset
        while left > 0:
            part = file.read(min(left, _CHUNK_BYTES))
            self._line += part.count(b"\n")
            left -= max(1, len(part))
        log().info("following", path=str(path), offset=self._offset)
        return True

    def _wait_for(self, why: str) -> None:
        if why != self._no_file:
            log().warning("follow_waits", path=str(self._path), reason=why)
        self._no_file = why

    def _columns(self, header: bytes) -> list[str]:
        """The names in a CSV header; none when it is no header, so that no row is taken by a column that it isn't."""
        try:
            names = next(csv.reader([header.decode("utf-8", "replace")]), [])
        except csv.Error as exc:
            self._bad(f"not a header: {exc}")
            return []
        for name in (path for paths in self._fields.values() for path in paths):
            if names.count(name) > 1:
                self._bad(f"not a header: it has the column {shortened(repr(name))} {names.count(name)} times")
                return []
        self._columns_seen = names
        return names

    def _next_file(self, rest: bytes) -> bool:
        """At the end: goes on with the file that was begun after this one, or from the start of one that was cut."""
        assert self._file is not None
        found = os.fstat(self._file.fileno())
        place = Place(self._inode, self._offset, found.st_mtime_ns)
        newer = files_after(self._path, place)
        if not newer and found.st_size >= self._offset:
            return False
        if newer and rest:
            self._take(rest + b"\n", len(rest))
        if not newer:
            log().info("followed_log_was_cut", path=str(self._path), then="reading it from its start")
        following = newer[0].path if newer else self._path
        self._file.close()
        self._file = None
        return self._open(following, 0)

    def _take(self, chunk: bytes, length: int | None = None) -> None:
        assert self._file is not None
        rows = self._rows(chunk.split(b"\n")[:-1])
        self._offset += len(chunk) if length is None else length
        if rows:
            place = Place(self._inode, self._offset, os.fstat(self._file.fileno()).st_mtime_ns)
            self._unsaved = rows, place.mark()
            self._save(self._unsaved)

    def _save(self, unsaved: tuple[list[RequestSeen], str]) -> None:
        """Appends rows to the requests topic; where that fails they stay for the next step."""
        rows, mark = unsaved
        self._writer.append(Topic.REQUESTS, request_records(rows), mark=mark)
        self._unsaved = None
        self._rows_read += len(rows)
        self._was_read = True
        self._metrics.requests.labels(source="file").inc(len(rows))

    def _rows(self, lines: list[bytes]) -> list[RequestSeen]:
        found: list[tuple[int, dict[str, Any]]] = []
        for line in lines:
            self._line += 1
            if not line.strip():
                continue
            try:
                record = self._record(line)
            except (ValueError, csv.Error, RecursionError) as exc:
                self._bad(f"not a record: {exc}")
                continue
            if not self._columns_seen:
                self._columns_seen = _names(record)
            found.append((self._line, {column: first_value(record, paths) for column, paths in self._fields.items()}))
        times = self._seconds([values["ts"] for _, values in found])
        now_s = self._clock.now_s()
        rows: list[RequestSeen] = []
        for (number, values), ts in zip(found, times, strict=True):
            model = values["model"]
            if ts is None:
                self._bad(f"ts is no time: {shortened(repr(values['ts']))}", number)
            elif ts > now_s + AHEAD_S:
                self._bad(f"ts lies in the future: {shortened(repr(values['ts']))}", number)
            elif not isinstance(model, str) or not model:
                self._bad(f"model is no name: {shortened(repr(model))}", number)
            elif len(model.encode(errors="replace")) > NAME_LIMIT_BYTES:
                self._bad(f"model is longer than {NAME_LIMIT_BYTES} bytes: {shortened(repr(model))}", number)
            else:
                rows.append(_request(ts, model, values))
        return rows

    def _record(self, line: bytes) -> dict[str, Any]:
        if self._csv:
            values = next(csv.reader([line.decode()]))
            if len(values) != len(self._header):
                raise ValueError(f"{len(values)} fields, the header has {len(self._header)}")
            return {name: value for name, value in zip(self._header, values, strict=True) if value != ""}
        record = msgspec.json.decode(line)
        if not isinstance(record, dict):
            raise ValueError("not an object")
        return record

    def _seconds(self, values: list[Any]) -> list[float | None]:
        """Seconds of times of any kind, by the reader that replay uses; None for what is no time."""
        out: list[float | None] = [None] * len(values)
        for kind, arrow in (((int, float), pa.float64()), (str, pa.string())):
            where = [i for i, v in enumerate(values) if isinstance(v, kind) and not isinstance(v, bool)]
            if where:
                parsed = self._times.parse(pa.array([_plain(values[i]) for i in where], arrow)).ts
                for i, ts in zip(where, parsed.tolist(), strict=True):
                    out[i] = ts if ts == ts else None
        return out

    def _bad(self, reason: str, line: int | None = None) -> None:
        short = reason.split(":")[0]
        self._metrics.bad_requests.labels(source="file", reason=short).inc()
        self._bad_lines[short] += 1
        self._named += 1
        if self._named > _NAMED:
            self._untold[short] += 1
        else:
            log().warning("line_skipped", path=str(self._path), line=self._line if line is None else line, reason=reason)


    def _sum_up(self) -> None:
        """Tells of bad lines that were not named, at most once a minute."""
        now_s = self._real_s()
        if not self._untold or now_s - self._told_s < _SUMMARY_S:
            return
        log().warning(
            "lines_skipped",
            path=str(self._path),
            lines=sum(self._untold.values()),
            reasons=dict(self._untold),
            rows_read=self._rows_read,
            problem=self.unreadable,
        )
        self._told_s = now_s
        self._untold.clear()

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed


def _is_other_format(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(_MAGIC_BYTES).startswith(_OTHER_FORMATS)


def _refusal(path: Path) -> str:
    return f"{path} is parquet or compressed; {_TAKES}, as they are written; `prefetcher replay` reads it"


def _names(record: dict[str, Any]) -> list[str]:
    """A record's fields as a map names them: those of objects in it with a dot."""
    names = []
    for name, value in record.items():
        names += [f"{name}.{inner}" for inner in value] if isinstance(value, dict) and value else [name]
    return names


def _plain(value: float | str) -> float | str:
    """Whole numbers as floats, which is close enough for nanoseconds; one that is too large for any is no time."""
    if isinstance(value, str):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _request(ts: float, model: str, values: dict[str, Any]) -> RequestSeen:
    def text(column: str) -> str | None:
        return None if values[column] is None else str(values[column])

    node, version = text("node"), text("version")
    try:
        count = min(max(1, int(values["count"] or 1)), MOST_COUNT)
    except (TypeError, ValueError, OverflowError):
        count = 1
    return RequestSeen(
        ts=ts,
        model=ModelName(model),
        count=count,
        user=text("user"),
        node=None if node is None else NodeName(node),
        version=None if version is None else ModelVersion(version),
        request_id=text("request_id"),
    )

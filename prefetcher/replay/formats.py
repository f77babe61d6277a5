"""Request logs of any shape -> batches of raw columns: parquet, CSV and JSON lines, plain or compressed.

The format is told by content, not by the file's name. Text is read in blocks that Arrow parses; only a block that it
refuses, or whose rows are not its lines, is read again line by line, which is what names malformed lines. What values
mean is `trace`'s matter.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.parquet as pq

from prefetcher.errors import InputError
from prefetcher.replay.catalog import first_few, refuse_repeated
from prefetcher.replay.maps import FieldMap

__all__ = ["RawRows", "read_rows"]

_OBJECTS = msgspec.json.Decoder(dict[str, Any])

#: Bytes of text that are parsed at once: large enough to keep Arrow busy, small enough that a bad line costs little.
_BLOCK_BYTES = 4 << 20
#: A longer line is no record of a request, and would have to be held whole.
_LINE_LIMIT_BYTES = 64 << 20
#: Records of the first block from which the types of JSON fields are taken.
_SAMPLE_LINES = 500
_BATCH_ROWS = 1 << 18

#: (bytes of the file read, bytes of the file) -> nothing
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RawRows:
    """One batch. `columns` hold what the map found, `lines` int64[n] the 1-based line (or record) of each row."""

    columns: dict[str, Any]
    lines: npt.NDArray[np.int64]
    malformed: list[tuple[int, str]] = field(default_factory=list)


def read_rows(path: str | Path, field_map: FieldMap, progress: Progress | None = None) -> Iterator[RawRows]:
    """The rows of the log at `path`, in file order.

    Raises InputError for what is no log: a folder, a binary file, an unknown or broken format, a required column that
    is not there.
    """
    where = str(path)
    file = Path(path)
    if file.is_dir():
        raise InputError("is a folder; name one log file (parquet, CSV or JSON lines)", path=where)
    try:
        total = file.stat().st_size
        with open(file, "rb") as raw:
            yield from _read_open(where, raw, total, field_map, progress)
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"the compressed file is damaged or ends early ({error}); fetch it again", path=where) from error
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", path=where) from error


def _read_open(where: str, raw: IO[bytes], total: int, field_map: FieldMap, progress: Progress | None) -> Iterator[RawRows]:
    if total == 0:
        raise InputError("is empty; a log needs at least one request", path=where)
    stream = _decompressed(raw)
    head = _peek(stream, 1 << 16)
    if head.content.startswith(b"PAR1"):
        source: Any = raw if stream is raw else io.BytesIO(head.read())
        raw.seek(0) if stream is raw else None
        batches = _parquet(where, source, field_map)
    else:
        start = head.content.removeprefix(b"\xef\xbb\xbf").lstrip()
        if not start:
            raise InputError("holds no rows, only white space", path=where)
        if head.content[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise InputError("is UTF-16 text; save it as UTF-8", path=where)
        if b"\0" in head.content:
            raise InputError("is a binary file of no known kind; a log is parquet, CSV or JSON lines", path=where)
        if start[:1] == b"[":
            batches = _json_list(where, head, field_map)
        elif start[:1] == b"{":
            batches = _json_lines(where, head, field_map)
        else:
            batches = _csv(where, head, field_map)
    for batch in batches:
        yield batch
        if progress is not None:
            progress(min(raw.tell(), total), total)
    if progress is not None:
        progress(total, total)


def _decompressed(raw: IO[bytes]) -> Any:
    magic = raw.read(6)
    raw.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=raw)
    if magic.startswith(b"BZh"):
        return bz2.BZ2File(raw)
    if magic == b"\xfd7zXZ\0":
        return lzma.LZMAFile(raw)
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    if magic.startswith(b"\x04\x22\x4d\x18"):
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "lz4")
    return raw


@dataclass(slots=True)
class _Peeked:
    """A stream whose first bytes were looked at and are read again."""

    content: bytes
    stream: Any

    def read(self, size: int = -1) -> bytes:
        if self.content:
            first, self.content = self.content, b""
            return first if 0 <= size <= len(first) else first + bytes(self.stream.read(*([size - len(first)] if size > 0 else [])))
        return bytes(self.stream.read(size) if size > 0 else self.stream.read())


def _peek(stream: Any, size: int) -> _Peeked:
    return _Peeked(bytes(stream.read(size)), stream)


def _blocks(where: str, source: _Peeked, quoted: bool) -> Iterator[bytes]:
    """Blocks that end with a line's end; with `quoted`, where possible with one outside quotes."""
    carry = b""
    first = True
    while True:
        chunk = source.read(_BLOCK_BYTES)
        if first:
            chunk = chunk.removeprefix(b"\xef\xbb\xbf")
            first = False
        if not chunk:
            break
        block = carry + chunk
        cut = block.rfind(b"\n") + 1
        if quoted and cut and b'"' in block:
            cut = _cut_outside_quotes(block) or cut
        if not cut and len(block) > _LINE_LIMIT_BYTES:
            raise InputError("has a line of over 64 MiB; a log has one request a line", path=where)
        carry = block[cut:]
        if cut:
            yield block[:cut]
    if carry:
        yield carry + b"\n"


def _cut_outside_quotes(block: bytes) -> int:
    content = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero(content == ord("\n"))
    quotes = np.flatnonzero(content == ord('"'))
    outside = np.searchsorted(quotes, ends) % 2 == 0
    return int(ends[outside][-1]) + 1 if outside.any() else 0


# --- parquet ---


def _parquet(where: str, source: Any, field_map: FieldMap) -> Iterator[RawRows]:
    try:
        file = pq.ParquetFile(source)
        schema = file.schema_arrow
        refuse_repeated(where, list(schema.names), (p.partition(".")[0] for paths in field_map.values() for p in paths))
        found = {c: [p for p in paths if _type_at(schema, p) is not None] for c, paths in field_map.items()}
        _require(where, found, field_map, list(schema.names))
        wanted = list(dict.fromkeys(p for paths in found.values() for p in paths))
        line = 1
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
            columns = {c: _first_of([_at(batch, p) for p in paths]) for c, paths in found.items() if paths}
            yield RawRows(columns, np.arange(line, line + batch.num_rows, dtype=np.int64))
            line += batch.num_rows
    except pa.ArrowException as error:
        raise InputError(f"is not readable parquet: {str(error).splitlines()[0]}; write it again", path=where) from error


def _type_at(schema: Any, path: str) -> Any:
    if path in schema.names:
        return schema.field(path).type
    head, _, rest = path.partition(".")
    if not rest or head not in schema.names:
        return None
    kind = schema.field(head).type
    for part in rest.split("."):
        if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
            return None
        kind = kind.field(part).type
    return kind


def _at(batch: Any, path: str) -> Any:
    if path in batch.schema.names:
        return batch.column(path)
    head, _, rest = path.partition(".")
    # Indices, because names may hold dots and struct_field takes either.
    column = batch.column(head)
    for part in rest.split("."):
        column = pc.struct_field(column, [column.type.get_field_index(part)])
    return column


def _first_of(arrays: list[Any]) -> Any:
    """The first of several columns that holds something, row by row."""
    if len(arrays) == 1:
        return arrays[0]
    if len({str(a.type) for a in arrays}) > 1:
        arrays = [a.cast(pa.string()) for a in arrays]
    if pa.types.is_string(arrays[0].type) or pa.types.is_large_string(arrays[0].type):
        arrays = [pc.if_else(pc.equal(pc.utf8_trim_whitespace(a), ""), pa.scalar(None, a.type), a) for a in arrays]
    return pc.coalesce(*arrays)


def _require(where: str, found: dict[str, list[str]], field_map: FieldMap, names: list[str]) -> None:
    for column in ("ts", "model"):
        if not found[column]:
            looked = " or ".join(field_map[column])
            raise InputError(
                f"has no column {looked}; it has {first_few(names, 12) or 'none'}; name the right one with --map {column}=COLUMN",
                path=where,
            )


# --- CSV ---


def _csv(where: str, source: _Peeked, field_map: FieldMap) -> Iterator[RawRows]:
    names: list[str] = []
    delimiter = ","
    picked: dict[str, list[int]] = {}
    line = 1
    for block in _blocks(where, source, quoted=True):
        if not names:
            header, _, block = block.partition(b"\n")
            delimiter, names = _header(where, header)
            found = {c: [p for p in paths if p in names] for c, paths in field_map.items()}
            _require(where, found, field_map, names)
            refuse_repeated(where, names, (p for paths in found.values() for p in paths))
            picked = {c: [names.index(p) for p in paths] for c, paths in found.items() if paths}
            line = 2
        if block:
            yield _csv_block(block, len(names), delimiter, picked, line)
            line += block.count(b"\n")


def _header(where: str, header: bytes) -> tuple[str, list[str]]:
    try:
        text = header.decode().rstrip("\r")
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text; a log is parquet, CSV or JSON lines", path=where, line=1) from error
    delimiter = max(",\t;|", key=text.count)
    try:
        return delimiter, [name.strip() for name in next(csv.reader([text], delimiter=delimiter), [])]
    except csv.Error as error:
        raise InputError(f"has a first line that is no CSV header ({error})", path=where, line=1) from error


def _csv_block(block: bytes, width: int, delimiter: str, picked: dict[str, list[int]], line: int) -> RawRows:
    wanted = sorted({i for indices in picked.values() for i in indices})
    try:
        table = pacsv.read_csv(
            pa.BufferReader(block),
            read_options=pacsv.ReadOptions(column_names=[str(i) for i in range(width)], block_size=len(block) + 1),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, ignore_empty_lines=False, newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(
                column_types={str(i): pa.string() for i in wanted},
                include_columns=[str(i) for i in wanted],
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        if table.num_rows == block.count(b"\n"):
            by_index = {i: table.column(str(i)).combine_chunks() for i in wanted}
            lines = np.arange(line, line + table.num_rows, dtype=np.int64)
            return RawRows({c: _first_of([by_index[i] for i in indices]) for c, indices in picked.items()}, lines)
    except (pa.ArrowInvalid, UnicodeDecodeError):
        pass  # some line is not what the header promised: find it
    return _csv_block_by_line(block, width, delimiter, picked, line)


def _csv_block_by_line(block: bytes, width: int, delimiter: str, picked: dict[str, list[int]], line: int) -> RawRows:
    values: dict[str, list[str | None]] = {c: [] for c in picked}
    lines: list[int] = []
    malformed: list[tuple[int, str]] = []
    parts = block.split(b"\n")[:-1]
    i = 0
    while i < len(parts):
        row, used, why = _csv_record(parts, i, width, delimiter)
        if row is not None:
            for column, indices in picked.items():
                values[column].append(next((row[j] for j in indices if row[j].strip()), None))
            lines.append(line + i)
        elif why:
            malformed.append((line + i, why))
        i += used
    return RawRows({c: pa.array(v, pa.string()) for c, v in values.items()}, np.array(lines, dtype=np.int64), malformed)


def _csv_record(parts: list[bytes], i: int, width: int, delimiter: str) -> tuple[list[str] | None, int, str]:
    """The record that starts at line `i`: (fields or None, lines that it takes, why there is none)."""
    if not parts[i].strip():
        return None, 1, ""
    used = 1
    if parts[i].count(b'"') % 2:
        quotes = parts[i].count(b'"')
        while quotes % 2 and i + used < len(parts) and used < 1000:
            quotes += parts[i + used].count(b'"')
            used += 1
    for count in sorted({used, 1}, reverse=True):
        try:
            text = b"\n".join(parts[i : i + count]).decode()
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
        except UnicodeDecodeError:
            why = "is not UTF-8"
            continue
        except csv.Error as error:
            why = f"is not CSV: {error}"
            continue
        if len(rows) == 1 and len(rows[0]) == width:
            return rows[0], count, ""
        why = f"has {len(rows[0]) if rows else 0} of {width} columns"
    return None, 1, why


# --- JSON ---


def _json_lines(where: str, source: _Peeked, field_map: FieldMap) -> Iterator[RawRows]:
    schema: Any = None
    seen: set[str] = set()
    known = False
    line = 1
    for block in _blocks(where, source, quoted=False):
        if not known:
            sample = [r for r in map(_record, block.split(b"\n")[:_SAMPLE_LINES]) if isinstance(r, dict)]
            _require_in(where, sample, field_map)
            schema = _json_schema(sample, field_map)
            known = True
        rows = _json_block(block, schema, field_map, line) if schema is not None else None
        if rows is None:
            rows = _json_block_by_line(block, field_map, line, seen)
        yield rows
        line += block.count(b"\n")


def _json_block(block: bytes, schema: Any, field_map: FieldMap, line: int) -> RawRows | None:
    """The block as Arrow reads it; None where that fails or where its records are not its lines.

    Arrow's reader has crashed on text that is no JSON, so it sees only blocks whose every line is an object.
    """
    try:
        if len(_OBJECTS.decode_lines(block)) != block.count(b"\n"):
            return None
    except (msgspec.DecodeError, RecursionError):
        return None
    try:
        table = pajson.read_json(
            pa.BufferReader(block),
            # One block is one task: threads would win nothing, and a failed threaded read has been seen to crash.
            read_options=pajson.ReadOptions(block_size=len(block) + 1, use_threads=False),
            parse_options=pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
        if table.num_rows != block.count(b"\n"):
            return None
        table.validate(full=True)
        batch = table.combine_chunks().to_batches()[0]
    except (pa.ArrowInvalid, UnicodeDecodeError, IndexError):
        return None
    columns = {}
    for column, paths in field_map.items():
        arrays = [_at(batch, p) for p in paths if _type_at(batch.schema, p) is not None]
        if arrays:
            columns[column] = _first_of(arrays)
    return RawRows(columns, np.arange(line, line + batch.num_rows, dtype=np.int64))


def _require_in(where: str, sample: list[dict[str, Any]], field_map: FieldMap) -> None:
    if sample:
        found = {column: [p for p in paths if any(_lookup(r, p) is not None for r in sample)] for column, paths in field_map.items()}
        _require(where, found, field_map, list(dict.fromkeys(path for record in sample for path in _paths(record))))


def _paths(record: dict[str, Any], above: str = "") -> Iterator[str]:
    """Its fields as a map would name them, those of nested records by their way from the top."""
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{above}{key}.")
        else:
            yield above + key


def _json_schema(records: list[dict[str, Any]], field_map: FieldMap) -> Any:
    """Types of the mapped fields, from a sample; None when they have several types each, so that every line is read on
    its own.
    """
    tree: dict[str, Any] = {}
    for column, paths in field_map.items():
        for path in paths:
            kinds = {type(v) for r in records if (v := _lookup(r, path)) is not None}
            if kinds <= {int, float} and kinds:
                kind = pa.float64() if column == "ts" or float in kinds else pa.int64()
            elif kinds <= {str}:
                kind = pa.float64() if column in ("ts", "count") and not kinds else pa.string()
            else:
                return None
            literal = "." not in path or any(path in r for r in records)
            at = tree
            parts = [path] if literal else path.split(".")
            for part in parts[:-1]:
                at = at.setdefault(part, {})
                if not isinstance(at, dict):
                    return None
            if at.setdefault(parts[-1], kind) != kind:
                return None
    return pa.schema(list(_struct(tree)))


def _struct(tree: dict[str, Any]) -> Any:
    return pa.struct([(name, _struct(kind) if isinstance(kind, dict) else kind) for name, kind in tree.items()])


def _record(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _lookup(record: Any, path: str) -> Any:
    """The value at a dotted path; a key that has dots itself comes first."""
    if path in record:
        return record[path]
    for part in path.split("."):
        if not isinstance(record, dict):
            return None
        record = record.get(part)
    return record


def _json_block_by_line(block: bytes, field_map: FieldMap, line: int, seen: set[str]) -> RawRows:
    parts = block.split(b"\n")
    numbered = ((line + i, part) for i, part in enumerate(parts) if part.strip())
    return _json_records(((n, _record(part)) for n, part in numbered), field_map)


def _json_records(records: Iterator[tuple[int, Any]], field_map: FieldMap) -> RawRows:
    values: dict[str, list[str | None]] = {c: [] for c in field_map}
    lines: list[int] = []
    malformed: list[tuple[int, str]] = []
    for number, record in records:
        if not isinstance(record, dict):
            malformed.append((number, "is not a JSON object"))
            continue
        for column, paths in field_map.items():
            values[column].append(next((text for p in paths if (text := _text(_lookup(record, p)))), None))
        lines.append(number)
    return RawRows({c: pa.array(v, pa.string()) for c, v in values.items()}, np.array(lines, dtype=np.int64), malformed)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        # A lone surrogate is no text that could be written down again.
        return value.strip() if value.isascii() else value.strip().encode(errors="replace").decode()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return str(value) if abs(value) < 1e300 else None


def _json_list(where: str, source: _Peeked, field_map: FieldMap) -> Iterator[RawRows]:
    """A file that is one JSON list of records, as an API answers: read whole, lines are numbers of entries."""
    try:
        entries = json.loads(source.read())
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise InputError("is neither a JSON list nor JSON lines; write one record a line", path=where, line=line) from error
    _require_in(where, [r for r in entries[:_SAMPLE_LINES] if isinstance(r, dict)], field_map)
    yield _json_records(enumerate(entries, 1), field_map)

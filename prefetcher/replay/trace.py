"""A request log as arrays: what replay runs over.

Covers checking, counting and naming what is wrong with a log, interning names, sorting, and giving every model its
size. How files are read is `formats`, how times are read `times`, where sizes come from `catalog`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefetcher.errors import InputError, SettingsError, shortened
from prefetcher.replay.catalog import first_few, read_catalog, sizes_of_folder
from prefetcher.replay.formats import Progress, RawRows, read_rows
from prefetcher.replay.maps import FieldMap, parse_map
from prefetcher.replay.times import TimeReader

__all__ = ["PROBLEM_KINDS", "Problem", "Problems", "Trace", "read_trace"]

#: Of each kind of problem, so many are named with their line.
_NAMED = 5

#: A log that is silent for longer is two logs, or has rows with a wrong time: nothing that was learned before holds after it.
_LONGEST_SILENCE_S = 30 * 86400.0

#: What each kind of problem means, and what is done about it.
PROBLEM_KINDS: dict[str, str] = {
    "malformed": "lines that are no record, left out",
    "bad_ts": "rows whose time is missing or unreadable, left out",
    "missing_model": "rows without a model, left out",
    "bad_count": "rows whose count is no whole number of at least 1, taken as 1",
    "duplicate": "rows that repeat an earlier row's request id, left out",
    "late": "rows earlier than a row before them, sorted into place",
    "apart": "rows that a silence of over 30 days parts from most others, left out (replay them on their own)",
    "unknown_model": "models without a size, given the default",
    "ambiguous_ts": "local times that a change of clocks repeats, taken as the first",
    "skipped_ts": "local times that a change of clocks skips, taken as the moment of the change",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: its kind, the line (1-based; for parquet and JSON lists the record; 0 for none) and what
    was found.
    """

    kind: str
    line: int
    what: str


@dataclass(frozen=True, slots=True)
class Problems:
    """What is wrong with a log: how many of each kind (kinds that occur, in a fixed order), and the first few of each
    by name.
    """

    counts: dict[str, int]
    named: tuple[Problem, ...]

    def __bool__(self) -> bool:
        return bool(self.counts)

    def lines(self) -> list[str]:
        """One sentence a kind, for people."""
        result = []
        for kind, count in self.counts.items():
            named = [f"line {p.line}: {p.what}" if p.line else p.what for p in self.named if p.kind == kind]
            more = ", …" if count > len(named) else ""
            result.append(f"{PROBLEM_KINDS[kind]}: {count:,}" + (f" ({'; '.join(named)}{more})" if named else ""))
        return result


@dataclass(frozen=True, slots=True)
class Trace:
    """A request log, sorted stably by time; ties keep file order. N rows, n models.

    `models` are all of the catalog's and the log's, sorted by name; `model`, `user`, `node`, `version` are indices, -1
    for none (version 0 is ''). `ts` is seconds since 1970-01-01 UTC. `rows_read` counts rows before any was left out;
    `zoneless` those whose time had no zone and was read in `tz`.
    """

    path: str
    ts: npt.NDArray[np.float64]
    model: npt.NDArray[np.int32]
    models: list[str]
    bytes_: npt.NDArray[np.int64]
    user: npt.NDArray[np.int32]
    users: int
    node: npt.NDArray[np.int32]
    node_names: list[str]
    version: npt.NDArray[np.int32]
    version_names: list[str]
    count: npt.NDArray[np.int32]
    problems: Problems
    rows_read: int
    tz: str
    zoneless: int = 0
    user_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ts)

    @property
    def t0(self) -> float:
        return float(self.ts[0])

    @property
    def t1(self) -> float:
        return float(self.ts[-1])

    def scored_from_s(self, warmup_ratio: float) -> float:
        """The time from which rows are scored: t0 + R·(t1 − t0)."""
        return self.t0 + warmup_ratio * (self.t1 - self.t0)


def read_trace(
    path: str | Path,
    *,
    catalog: str | Path | Mapping[str, int] | None = None,
    models_dir: str | Path | None = None,
    default_bytes: int | None = None,
    field_map: str | Mapping[str, str] | FieldMap | None = None,
    tz: str | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Trace:
    """Read the request log at `path`; sizes come from `catalog` (a file or a mapping), a folder of models, or
    `default_bytes`.

    With several, the catalog wins over the folder and both over the default. Raises InputError for a log that cannot be
    read, has no usable row, or names models of unknown size, and with `strict` for any problem at all; SettingsError
    for a wrong map, zone or default.
    """
    sizes = _sizes(catalog, models_dir, default_bytes)
    reader = _Reader(str(path), TimeReader(tz))
    for rows in read_rows(path, parse_map(field_map), progress):
        reader.add(rows)
    return reader.finish(sizes, default_bytes, strict)


def _sizes(catalog: str | Path | Mapping[str, int] | None, models_dir: str | Path | None, default_bytes: int | None) -> dict[str, int]:
    if default_bytes is not None and default_bytes < 1:
        raise SettingsError(f"the default size of a model must be at least 1 byte, got {default_bytes}")
    if catalog is None and models_dir is None and default_bytes is None:
        raise SettingsError("how large are the models? name a --catalog, a --models, or one size for all with --default-bytes")
    sizes = sizes_of_folder(models_dir) if models_dir is not None else {}
    if catalog is not None:
        sizes |= dict(catalog) if isinstance(catalog, Mapping) else read_catalog(catalog)
    return sizes


class _Names:
    """Names -> indices in order of first sight."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def encode(self, column: Any, rows: int) -> npt.NDArray[np.int32]:
        """int32[rows]: the index of each value, -1 for null and blank."""
        if column is None:
            return np.full(rows, -1, dtype=np.int32)
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        names = column.dictionary.cast(pa.string()).to_pylist()
        known = [name.strip() if name is not None else "" for name in names]
        codes = np.array([self.index.setdefault(n, len(self.index)) if n else -1 for n in known] + [-1], dtype=np.int32)
        indices = column.indices.cast(pa.int32()).fill_null(len(known)).to_numpy(zero_copy_only=False)
        coded: npt.NDArray[np.int32] = codes[indices]
        return coded


@dataclass(slots=True)
class _Reader:
    """Gathers batches into compact columns, counting what is wrong."""

    path: str
    times: TimeReader
    counts: dict[str, int] = field(default_factory=dict)
    named: list[Problem] = field(default_factory=list)
    parts: dict[str, list[npt.NDArray[Any]]] = field(default_factory=dict)
    names: dict[str, _Names] = field(default_factory=lambda: {c: _Names() for c in ("model", "user", "node", "version")})
    ids: list[Any] = field(default_factory=list)
    rows_read: int = 0
    zoneless: int = 0

    def note(self, kind: str, count: int, named: Sequence[tuple[int, str]]) -> None:
        if count:
            room = max(0, _NAMED - sum(p.kind == kind for p in self.named))
            self.counts[kind] = self.counts.get(kind, 0) + count
            self.named += [Problem(kind, line, what) for line, what in named[:room]]

    def add(self, rows: RawRows) -> None:
        n = len(rows.lines)
        self.rows_read += n + len(rows.malformed)
        self.note("malformed", len(rows.malformed), rows.malformed)
        if n == 0:
            return
        columns = {name: _plain(column) for name, column in rows.columns.items()}
        raw_ts = columns.get("ts")
        parsed = self.times.parse(raw_ts if raw_ts is not None else pa.nulls(n))
        self.zoneless += parsed.zoneless
        self.note("ambiguous_ts", parsed.ambiguous, ())
        self.note("skipped_ts", parsed.skipped, ())
        bad_ts = np.isnan(parsed.ts)
        self._note_rows("bad_ts", bad_ts, rows.lines, raw_ts, "ts")
        model = self.names["model"].encode(_text(columns.get("model")), n)
        nameless = (model < 0) & ~bad_ts
        self._note_rows("missing_model", nameless, rows.lines, None, "model")
        keep = ~bad_ts & (model >= 0)
        count, bad_count = _counts(columns.get("count"), n)
        self._note_rows("bad_count", bad_count & keep, rows.lines, columns.get("count"), "count")
        found: dict[str, npt.NDArray[Any]] = {"ts": parsed.ts, "model": model, "count": count, "lines": rows.lines}
        for name in ("user", "node", "version"):
            found[name] = self.names[name].encode(_text(columns.get(name)), n)
        for name, values in found.items():
            self.parts.setdefault(name, []).append(values if keep.all() else values[keep])
        ids = _text(columns.get("request_id"))
        ids = pa.nulls(n, pa.string()) if ids is None else pc.utf8_trim_whitespace(ids.cast(pa.string()))
        ids = pc.if_else(pc.equal(ids, ""), pa.scalar(None, pa.string()), ids)  # a blank id names no request
        self.ids.append(ids if keep.all() else ids.filter(pa.array(keep)))

    def _note_rows(self, kind: str, bad: npt.NDArray[np.bool_], lines: npt.NDArray[np.int64], column: Any, name: str) -> None:
        where = np.flatnonzero(bad)[:_NAMED].tolist()
        if where:
            values = [None if column is None else column[i].as_py() for i in where]
            said = [f"{name} is missing" if v in (None, "") else f"{name} is {str(v)[:40]!r}" for v in values]
            self.note(kind, int(bad.sum()), list(zip(lines[where].tolist(), said, strict=True)))

    def finish(self, sizes: dict[str, int], default_bytes: int | None, strict: bool) -> Trace:
        if not any(len(part) for part in self.parts.get("ts", [])):
            raise InputError(f"has no usable row of {self.rows_read:,}: {self._first() or 'it holds none'}", path=self.path)
        columns = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        self.parts.clear()
        columns = self._without_duplicates(columns)
        ts, lines = columns["ts"], columns["lines"]
        late = np.flatnonzero(ts < np.maximum.accumulate(ts))
        if len(late):
            self.note("late", len(late), [(int(lines[i]), f"ts {ts[i]:.3f}") for i in late[:_NAMED]])
            order = np.argsort(ts, kind="stable")
            columns = {name: values[order] for name, values in columns.items()}
        columns = self._longest_stretch(columns)
        models, bytes_ = self._models(sizes, default_bytes, columns["model"])
        if strict and self.counts:
            first = min((p for p in self.named if p.line), key=lambda p: p.line, default=None)
            total = sum(self.counts.values())
            raise InputError(
                f"{total:,} problem{'s' if total > 1 else ''} under --strict: {self._first()}",
                path=self.path,
                line=first.line if first else None,
            )
        at = {model: i for i, model in enumerate(models)}
        remap = np.array([at.get(name, -1) for name in self.names["model"].index], dtype=np.int32)
        versions = ["", *(name for name in self.names["version"].index)]
        kinds = {kind: self.counts[kind] for kind in PROBLEM_KINDS if kind in self.counts}
        return Trace(
            path=self.path,
            ts=columns["ts"],
            model=remap[columns["model"]],
            models=models,
            bytes_=bytes_,
            user=columns["user"],
            users=len(self.names["user"].index),
            node=columns["node"],
            node_names=list(self.names["node"].index),
            version=columns["version"] + np.int32(1),
            version_names=versions,
            count=columns["count"],
            problems=Problems(kinds, tuple(self.named)),
            rows_read=self.rows_read,
            tz=self.times.tz,
            zoneless=self.zoneless,
            user_names=tuple(self.names["user"].index),
        )

    def _first(self) -> str:
        """The kinds of problems with their counts and the first of each, in one line."""
        return "; ".join(Problems({k: self.counts[k]}, tuple(self.named)).lines()[0] for k in PROBLEM_KINDS if k in self.counts)

    def _without_duplicates(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        ids = pa.chunked_array(self.ids, pa.string())
        self.ids.clear()
        if ids.null_count == len(ids):
            return columns
        codes = ids.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy(zero_copy_only=False)
        _, first = np.unique(codes, return_index=True)
        keep = codes < 0
        keep[first] = True
        if keep.all():
            return columns
        again = np.flatnonzero(~keep)
        lines = columns["lines"]
        self.note(
            "duplicate",
            len(again),
            [(int(lines[i]), f"request_id {ids[i].as_py()[:40]!r}") for i in again[:_NAMED].tolist()],
        )
        return {name: values[keep] for name, values in columns.items()}

    def _longest_stretch(self, columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Of sorted rows, the stretch with the most of them that holds no silence of over 30 days; the last of several."""
        ts, lines = columns["ts"], columns["lines"]
        edges = np.concatenate([[0], np.flatnonzero(np.diff(ts) > _LONGEST_SILENCE_S) + 1, [len(ts)]])
        if len(edges) == 2:
            return columns
        rows = np.diff(edges)
        longest = len(rows) - 1 - int(np.argmax(rows[::-1]))
        first, last = int(edges[longest]), int(edges[longest + 1])
        named = [(int(lines[i]), f"{(ts[first] - ts[i]) / 86400.0:,.0f} days before the others") for i in range(min(first, _NAMED))]
        after = range(last, min(len(ts), last + _NAMED))
        named += [(int(lines[i]), f"{(ts[i] - ts[last - 1]) / 86400.0:,.0f} days after the others") for i in after]
        self.note("apart", len(ts) - (last - first), named)
        return {name: values[first:last] for name, values in columns.items()}

    def _models(
        self, sizes: dict[str, int], default_bytes: int | None, used: npt.NDArray[np.int32]
    ) -> tuple[list[str], npt.NDArray[np.int64]]:
        present = np.zeros(len(self.names["model"].index), dtype=np.bool_)
        present[used] = True
        logged = [name for name, is_used in zip(self.names["model"].index, present, strict=True) if is_used]
        unknown = sorted(name for name in logged if name not in sizes)
        if unknown and default_bytes is None:
            raise InputError(
                f"{len(unknown)} of its {len(logged)} models have no size: {first_few(unknown)}; "
                "add them to the catalog or give --default-bytes",
                path=self.path,
            )
        if unknown and sizes:
            self.note("unknown_model", len(unknown), [(0, shortened(name)) for name in unknown[:_NAMED]])
        models = sorted({*logged, *sizes})
        return models, np.array([sizes.get(name, default_bytes or 0) for name in models], dtype=np.int64)


def _plain(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _text(column: Any) -> Any:
    """The column as text; None where it is of a kind that is no name."""
    if column is None or pa.types.is_dictionary(column.type):
        return column
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return column
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return column.cast(pa.string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_string_view(kind):
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            return None
    return None


def _counts(column: Any, rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """(int32[rows], bool[rows]): the counts, 1 where there is none, and where they are unreadable."""
    if column is None or column.null_count == rows:
        return np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.bool_)
    valid = np.asarray(pc.is_valid(column).to_numpy(zero_copy_only=False), dtype=np.bool_)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        text = pc.utf8_trim_whitespace(column)
        number = pc.match_substring_regex(text, r"^\d{1,10}(\.0*)?$")
        column = pc.if_else(number, text, None).cast(pa.float64())
    elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        column = pa.nulls(rows, pa.float64())
    values = np.asarray(column.cast(pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False))
    with np.errstate(invalid="ignore"):
        good = (values >= 1) & (values <= np.iinfo(np.int32).max) & (values == np.floor(values))
    return np.where(good, values, 1).astype(np.int32), valid & ~good

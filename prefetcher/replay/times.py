"""Times as logs write them -> seconds since 1970-01-01 UTC, vectorised.

Covers epoch numbers in s, ms, µs and ns (told apart by magnitude, value by value), ISO 8601 with or without a zone, and
Arrow's own timestamps. Times without a zone are read in a named zone, UTC unless told otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefetcher.errors import SettingsError

__all__ = ["ParsedTimes", "TimeReader"]

#: Below 1e11 a number is seconds (until the year 5138), below 1e14 ms (from 1973 on), below 1e17 µs, else ns.
_UNIT_BOUNDS = np.array([1e11, 1e14, 1e17])
_UNIT_SCALES = np.array([1.0, 1e3, 1e6, 1e9])

#: The last second of the year 9999: what lies beyond is no time of a request.
_LATEST_S = 253402300799.0

_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"
_ISO = r"^\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?"
_ZONE = r"(Z|[+-]\d{2}:?\d{2})$"


@dataclass(frozen=True, slots=True)
class ParsedTimes:
    """`ts` float64[n], NaN where the text is no time; `zoneless`, `ambiguous`, `skipped`: how many of each the zone's
    rule decided.
    """

    ts: npt.NDArray[np.float64]
    zoneless: int = 0
    ambiguous: int = 0
    skipped: int = 0


class TimeReader:
    """Turns one column of times into seconds. `tz` is an IANA zone for times without one.

    A local time that a change of clocks repeats is taken as its first occurrence, one that it skips as the moment of
    the change; both are counted. Raises SettingsError for a zone that does not exist.
    """

    def __init__(self, tz: str | None = None) -> None:
        self.tz = tz or "UTC"
        try:
            pc.assume_timezone(pa.array([0], pa.timestamp("us")), self.tz)
        except (pa.ArrowException, ValueError) as error:
            raise SettingsError(
                f"no time zone is called {self.tz!r}; use an IANA name such as Europe/Berlin (and install the system's tzdata)"
            ) from error

    def parse(self, column: pa.Array | pa.ChunkedArray) -> ParsedTimes:
        """Seconds of every value of `column`, whatever its type."""
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        kind = column.type
        if pa.types.is_dictionary(kind):
            column = column.dictionary_decode()
            kind = column.type
        if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
            if pa.types.is_date(kind):
                column = column.cast(pa.timestamp("ms"))
            return self._instants(column)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return ParsedTimes(_from_numbers(_to_float(column)))
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return self._strings(column)
        return ParsedTimes(np.full(len(column), np.nan))

    def _instants(self, column: pa.Array) -> ParsedTimes:
        zoneless = ambiguous = skipped = 0
        if column.type.tz is None:
            zoneless = len(column) - column.null_count
            if self.tz != "UTC":
                column, ambiguous, skipped = self._localise(column)
        per_s = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}[column.type.unit]
        return ParsedTimes(_bounded(_to_float(column.cast(pa.int64())) / per_s), zoneless, ambiguous, skipped)

    def _localise(self, column: pa.Array) -> tuple[pa.Array, int, int]:
        def assume(ambiguous: str, skipped: str) -> pa.Array:
            return pc.assume_timezone(column, self.tz, ambiguous=ambiguous, nonexistent=skipped)

        first = assume("earliest", "latest")
        repeated = int(pc.sum(pc.not_equal(first, assume("latest", "latest"))).as_py() or 0)
        gone = int(pc.sum(pc.not_equal(first, assume("earliest", "earliest"))).as_py() or 0)
        return first, repeated, gone

    def _strings(self, column: pa.Array) -> ParsedTimes:
        text = pc.utf8_trim_whitespace(column)
        ts = np.full(len(text), np.nan)
        numeric = _mask(pc.match_substring_regex(text, _NUMBER))
        if numeric.any():
            ts[numeric] = _from_numbers(_to_float(_take(text, numeric).cast(pa.float64())))
            if numeric.all():
                return ParsedTimes(ts)
        zoned = ~numeric & _mask(pc.match_substring_regex(text, _ISO + _ZONE))
        bare = ~numeric & ~zoned & _mask(pc.match_substring_regex(text, _ISO + "$"))
        odd = ~(numeric | zoned | bare) & _mask(pc.is_valid(text))
        zoneless = ambiguous = skipped = 0
        if zoned.any():
            try:
                ts[zoned] = _to_float(_take(text, zoned).cast(pa.timestamp("us", "UTC")).cast(pa.int64())) / 1e6
            except pa.ArrowInvalid:
                odd |= zoned
        if bare.any():
            try:
                part = self._instants(_take(text, bare).cast(pa.timestamp("us")))
                ts[bare] = part.ts
                zoneless, ambiguous, skipped = part.zoneless, part.ambiguous, part.skipped
            except pa.ArrowInvalid:
                odd |= bare
        if odd.any():
            where = np.flatnonzero(odd)
            slow, bare_us = _from_iso_slowly(_take(text, odd).to_pylist())
            ts[where] = slow
            local = np.flatnonzero([value is not None for value in bare_us])
            if len(local):
                part = self._instants(pa.array([bare_us[i] for i in local], pa.timestamp("us")))
                ts[where[local]] = part.ts
                zoneless, ambiguous, skipped = (
                    zoneless + part.zoneless,
                    ambiguous + part.ambiguous,
                    skipped + part.skipped,
                )
        return ParsedTimes(_bounded(ts), zoneless, ambiguous, skipped)


def _from_iso_slowly(texts: list[str]) -> tuple[npt.NDArray[np.float64], list[int | None]]:
    """Seconds of texts with a zone, and microseconds of local time of those without, by the standard library's ISO 8601
    parser.
    """
    ts = np.full(len(texts), np.nan)
    bare: list[int | None] = [None] * len(texts)
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    for i, text in enumerate(texts):
        try:
            when = datetime.fromisoformat(text.upper())
        except ValueError:
            continue
        if when.tzinfo is None:
            delta = when.replace(tzinfo=UTC) - epoch
            bare[i] = (delta.days * 86400 + delta.seconds) * 1_000_000 + delta.microseconds
        else:
            ts[i] = (when - epoch).total_seconds()
    return ts, bare


def _from_numbers(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    scale = _UNIT_SCALES[np.searchsorted(_UNIT_BOUNDS, np.abs(np.nan_to_num(values)), side="right")]
    return _bounded(values / scale)


def _bounded(ts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(invalid="ignore"):
        return np.where((ts >= 0) & (ts <= _LATEST_S), ts, np.nan)


def _to_float(column: Any) -> npt.NDArray[np.float64]:
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)


def _mask(column: Any) -> npt.NDArray[np.bool_]:
    return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _take(column: Any, mask: npt.NDArray[np.bool_]) -> Any:
    return column if mask.all() else column.filter(pa.array(mask))

"""What one model was asked for, and what had been forecast of it: from the ingest's tables, closed hours and kept tables of forecasts.

The tables are in the state store; closed hours and kept forecasts are files of the process that counts and the one that forecasts, so
another process may not have them: then they are said to be missing. Covers no learning, and no forecast of what comes (`model_view`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import redis

from prefetcher.batch.forecasting import tables_between
from prefetcher.errors import PrefetcherError, UnavailableError
from prefetcher.ingest.tables import TablesReader, why
from prefetcher.telemetry.logs import log

if TYPE_CHECKING:
    from prefetcher_models.seasonal_artifact import NamedSeasons

__all__ = ["Band", "Past", "band_of", "count_band"]

#: What a band leaves out on either side.
_TAIL = 0.1
#: Counts above this have the band of a normal distribution.
_MANY = 200.0
_Z = 1.2816


@dataclass(frozen=True, slots=True)
class Band:
    """Requests that are expected in [at_s, at_s + for_s): the mean, and the counts that eight of ten such times lie between."""

    at_s: float
    for_s: float
    mean: float
    low: float
    high: float


def count_band(mean: float) -> tuple[float, float]:
    """The counts below which, and above which, a Poisson count of that mean lies one time in ten at most."""
    if mean <= 0.0:
        return 0.0, 0.0
    if mean > _MANY:
        return max(0.0, mean - _Z * math.sqrt(mean)), mean + _Z * math.sqrt(mean)
    term = total = math.exp(-mean)
    low = count = 0
    while total < _TAIL:
        count += 1
        term *= mean / count
        total += term
        low = count
    while total < 1.0 - _TAIL:
        count += 1
        term *= mean / count
        total += term
    return float(low), float(count)


def band_of(at_s: float, for_s: float, probability: float) -> Band:
    """What a chance of at least one request within `for_s` says of their number, were they to come one by one."""
    mean = -math.log1p(-min(max(probability, 0.0), 0.9999))
    low, high = count_band(mean)
    return Band(at_s, for_s, mean, low, high)


class Past:
    """Safe for threads. `history` and `forecasts` are folders that may not be there; `seasons` reads what is in force."""

    def __init__(
        self, tables: TablesReader, history: Path | None, forecasts: Path | None, seasons: Callable[[], NamedSeasons | None]
    ) -> None:
        self._tables = tables
        self._history = history
        self._forecasts = forecasts
        self._seasons = seasons

    def rows(self, model: str, from_s: float, until_s: float) -> tuple[Counter[int], float]:
        """Rows by minute since 1970, and from when on they are whole as far as this process knows.

        Raises UnavailableError where the state server does not answer.
        """
        first, last = int(from_s // 60.0), int(until_s // 60.0)
        try:
            found, kept_from = self._tables.minutes_of(model, first, last)
        except redis.RedisError as exc:
            raise UnavailableError(f"the tables of requests can't be read: {why(exc)}", retry_after_s=2.0) from exc
        if kept_from is None or kept_from <= first:
            return found, from_s
        older = self._closed_hours(model, first, kept_from - 1)
        if not older:
            return found, 60.0 * kept_from
        for minute, rows in older.items():
            found.setdefault(minute, rows)
        return found, from_s

    def _closed_hours(self, model: str, first: int, last: int) -> Counter[int]:
        """From the files of hours that are over; nothing where there are none here, or one of them can't be read."""
        import pyarrow as pa

        from prefetcher.ingest.history import read_model

        if self._history is None:
            return Counter()
        try:
            return read_model(self._history, model, first, last)
        except (OSError, pa.ArrowException) as exc:
            log().warning("history_unreadable", reason=str(exc), then="requests are shown since the state server counts them")
            return Counter()

    def forecasts(self, model: str, from_s: float, until_s: float, for_s: float) -> list[Band] | None:
        """What was forecast for times of `for_s` seconds, each as of its beginning; None where no forecasts are kept here."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._forecasts is None or not self._forecasts.is_dir():
            return None
        column, found = f"p_{for_s:g}s", []
        for at_s, path in tables_between(self._forecasts, from_s - for_s, until_s):
            try:
                table = pq.read_table(path, columns=[column], filters=[("model", "=", model)])
            except (OSError, ValueError, pa.ArrowException):
                continue
            if table.num_rows:
                found.append(band_of(at_s, for_s, float(table[column][0].as_py())))
        return found

    def season(self, model: str, starts_s: Sequence[float], for_s: float) -> tuple[list[Band], str] | None:
        """What the model's season expects for times of `for_s` seconds each, and in words; None where it has no season in force."""
        import numpy as np

        from prefetcher_models.seasonal_calendar import Calendar
        from prefetcher_models.seasonal_profile import Seasons

        try:
            named = self._seasons()
        except PrefetcherError:
            return None
        if named is None or model not in named.by_name or not named.by_name[model].used:
            return None
        season = named.by_name[model]
        rates = Seasons(Calendar(named.tz, named.country), {0: season}).rates(0, np.asarray(starts_s) + for_s / 2.0)
        bands = []
        for at_s, rate in zip(starts_s, rates, strict=True):
            mean = float(rate) * for_s / 3600.0
            # Rows come in bursts: their number is what is uncertain.
            low, high = count_band(mean * season.burst)
            bands.append(Band(at_s, for_s, mean, low / max(season.burst, 1e-6), high / max(season.burst, 1e-6)))
        return bands, named.explain(model, starts_s[-1]).text

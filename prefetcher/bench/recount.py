"""What the ingest's tables must say, counted from the topic one row after another in the plainest way.

Shares no code with `ingest.counting`: benchmarks and tests hold the tables against it.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prefetcher.core.traffic_state import GAP_BINS, LATE_S
from prefetcher.ingest.tables import TablesReader
from prefetcher.wire import decode_request

__all__ = ["Recount", "differences"]

_GAP_ENDS_S = [2.0 ** (b / 2.0) for b in range(1, GAP_BINS)]


class Recount:
    """The tables of one partition. Records that are no requests are left out; future ones are not known."""

    def __init__(self) -> None:
        self._newest_s = -math.inf
        self.rows: Counter[str] = Counter()
        self.late: Counter[str] = Counter()
        self.first_s: dict[str, float] = {}
        self.last_s: dict[str, float] = {}
        self.gaps: dict[str, list[int]] = {}
        self.minutes: dict[int, Counter[str]] = {}

    def take(self, values: Iterable[bytes]) -> None:
        """Counts records in the order of their offsets."""
        for value in values:
            try:
                row = decode_request(value)
            except ValueError:
                continue
            model, ts = row.model, row.ts
            if ts < self._newest_s - LATE_S:
                self.late[model] += 1
                continue
            self._newest_s = max(ts, self._newest_s)
            gaps = self.gaps.setdefault(model, [0] * GAP_BINS)
            if model in self.last_s:
                gaps[bisect.bisect_right(_GAP_ENDS_S, max(0.0, ts - self.last_s[model]))] += 1
            self.rows[model] += 1
            self.first_s[model] = min(ts, self.first_s.get(model, ts))
            self.last_s[model] = max(ts, self.last_s.get(model, ts))
            self.minutes.setdefault(int(ts // 60), Counter())[model] += 1


def differences(reader: TablesReader, counts: Sequence[Recount], history: Iterable[tuple[int, Mapping[str, int]]] = ()) -> list[str]:
    """Every cell of the tables that is not as in `counts`, one of them for each partition. `history`: (minute, rows by model) of files."""
    found: list[str] = []
    tables = reader.models()
    for model in tables.keys() | {m for c in counts for m in c.rows | c.late}:
        having = [c for c in counts if c.rows[model]]
        expected = (
            sum(c.rows[model] for c in counts),
            sum(c.late[model] for c in counts),
            min((c.first_s[model] for c in having), default=None),
            max((c.last_s[model] for c in having), default=None),
            [sum(column) for column in zip(*(c.gaps[model] for c in having), strict=True)] or [0] * GAP_BINS,
        )
        table = tables.get(model)
        stored = None if table is None else (table.rows, table.late, table.first_s, table.last_s, table.gaps)
        if stored != expected:
            found.append(f"{model}: {stored}, expected {expected}")
    minutes: dict[int, Counter[str]] = {}
    for count in counts:
        for minute, models in count.minutes.items():
            minutes.setdefault(minute, Counter()).update(models)
    kept = reader.minutes(0, 1 << 40)
    for minute, rows in history:
        kept.setdefault(minute, Counter()).update(rows)
    for minute in minutes.keys() | kept.keys():
        a, b = minutes.get(minute, Counter()), kept.get(minute, Counter())
        found += [f"minute {minute}, {model}: {b[model]}, expected {a[model]}" for model in a.keys() | b.keys() if a[model] != b[model]]
    return found

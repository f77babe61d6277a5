"""The demo's traffic as a request log with a catalog, for whoever has no log at hand yet. Synthetic, and it says so in its folder."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path

from prefetcher.demo.models import MODELS
from prefetcher.demo.traffic import make_traffic

__all__ = ["LOG_DAYS", "write_request_log"]

LOG_DAYS = 14
#: 2026-01-05, a Monday, 00:00 UTC.
_FIRST_S = 1_767_571_200.0
#: The demo's models are a hundredth of what they stand for, to fit a laptop.
_BYTES_PER_MEGABYTE = 100_000_000
_READ_ME = """Made traffic, {days} days of it: {rows:,} requests for {models} models, as `prefetcher demo` serves it.
Sizes are 100 times those of the demo.

    prefetcher replay requests.csv --catalog catalog.json --capacity-ratio 0.4 --out replay-out
"""


def write_request_log(folder: Path, days: int = LOG_DAYS, seed: int = 0) -> tuple[Path, Path]:
    """Writes `requests.csv` (`ts` in ISO 8601, `model`), `catalog.json` and a README into `folder`; returns the paths of the first two."""
    folder.mkdir(parents=True, exist_ok=True)
    log, catalog = folder / "requests.csv", folder / "catalog.json"
    arrivals = make_traffic(days, seed)
    with log.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("ts", "model"))
        rows.writerows((datetime.fromtimestamp(_FIRST_S + a.at_s, UTC).isoformat(timespec="milliseconds"), a.model) for a in arrivals)
    sizes = [{"model": name, "bytes": megabytes * _BYTES_PER_MEGABYTE} for name, megabytes in MODELS]
    catalog.write_text(json.dumps(sizes, indent=1) + "\n", encoding="utf-8")
    (folder / "README").write_text(_READ_ME.format(days=days, rows=len(arrivals), models=len(MODELS)), encoding="utf-8")
    return log, catalog

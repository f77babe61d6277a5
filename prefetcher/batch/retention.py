"""Jobs that let go of what was kept long enough: users nobody heard of, hours of history."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

from redis.exceptions import RedisError

from prefetcher.clock import Clock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.tables import TablesReader

__all__ = ["forget_idle_users", "remove_old_history"]


def forget_idle_users(tables: TablesReader, clock: Clock, keep_s: float) -> str:
    """Forgets users whose last request is older than `keep_s`; says how many.

    Raises:
        UnavailableError: the state server does not answer.
    """
    try:
        count = tables.forget_idle(clock.now_s() - keep_s)
    except RedisError as exc:
        raise UnavailableError(f"the state server does not answer: {exc}") from exc
    return f"{count} users forgotten" if count else ""


def remove_old_history(folder: Path, clock: Clock, keep_s: float) -> str:
    """Removes days of history that ended longer ago than `keep_s`; says how many files."""
    last = datetime.fromtimestamp(clock.now_s() - keep_s, UTC).date()
    count = 0
    for day in folder.glob("partition=*/date=*"):
        try:
            old = date.fromisoformat(day.name.removeprefix("date=")) < last
        except ValueError:
            continue
        if old:
            for file in day.glob("*.parquet"):
                file.unlink(missing_ok=True)
                count += 1
            if not any(day.iterdir()):
                day.rmdir()
    return f"{count} hours of history removed" if count else ""

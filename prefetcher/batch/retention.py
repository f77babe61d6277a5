"""Jobs that look after what is kept: hours of history put together by day, those of ledgers copied there, and what was kept long enough let
go."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

from redis.exceptions import RedisError

from prefetcher.batch.scheduler import Did, Run
from prefetcher.clock import Clock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.history import compact_day
from prefetcher.ingest.tables import TablesReader
from prefetcher.ports import StateStore
from prefetcher.report.history import copy_hours

__all__ = ["compact_history", "copy_ledgers", "forget_idle_users", "remove_old_history"]

#: A day that ended less than this ago may still get hours: the ingest writes them some three hours after their time.
_SETTLED_S = 6 * 3600.0


def forget_idle_users(tables: TablesReader, clock: Clock, keep_s: float) -> Did:
    """Forgets users whose last request is older than `keep_s`; says how many.

    Raises:
        UnavailableError: the state server does not answer.
    """
    try:
        count = tables.forget_idle(clock.now_s() - keep_s)
    except RedisError as exc:
        raise UnavailableError(f"the state server does not answer: {exc}") from exc
    return Did(count, f"{count} users forgotten" if count else "")


def copy_ledgers(run: Run, state: StateStore, folder: Path, clock: Clock) -> Did:
    """Copies settled hours of nodes' ledgers into the history; says how many.

    Raises:
        UnavailableError: the state server does not answer.
    """
    count = copy_hours(state, folder, clock.now_s(), lambda at, of: run.at(at, of, "hour"))
    return Did(count, f"{count} hours of nodes copied" if count else "")


def remove_old_history(folder: Path, clock: Clock, keep_s: float) -> Did:
    """Removes days of history, of requests or of ledgers, that ended longer ago than `keep_s`; says how many files."""
    last = datetime.fromtimestamp(clock.now_s() - keep_s, UTC).date()
    count = 0
    for day in [*folder.glob("partition=*/date=*"), *folder.glob("date=*")]:
        when = _date_of(day)
        if when is not None and when < last:
            for file in day.glob("*.parquet"):
                file.unlink(missing_ok=True)
                count += 1
            if not any(day.iterdir()):
                day.rmdir()
    return Did(count, f"{count} files of history removed" if count else "")


def compact_history(run: Run, folder: Path, clock: Clock) -> Did:
    """Puts the hours of days that are over into one file each; says how many hours."""
    settled = datetime.fromtimestamp(clock.now_s() - _SETTLED_S, UTC).date()
    days = [day for day in sorted(folder.glob("partition=*/date=*")) if (when := _date_of(day)) is not None and when < settled]
    hours = 0
    for number, day in enumerate(days):
        run.at(number, len(days), day.name)
        hours += compact_day(day)
    return Did(hours, f"{hours} hours of history put together" if hours else "")


def _date_of(day: Path) -> date | None:
    try:
        return date.fromisoformat(day.name.removeprefix("date="))
    except ValueError:
        return None

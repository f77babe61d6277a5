"""What is kept of history: hours put together by day, old days removed, and rows for training from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefetcher.batch.retention import compact_history, remove_old_history
from prefetcher.batch.scheduler import Run
from prefetcher.batch.training import rows_of_history
from prefetcher.clock import VirtualClock
from prefetcher.ingest import history
from prefetcher.ingest.history import compact_day, hour_path, read_hours, write_hour

DAY_S = 86_400.0
NOON = 20_000 * 24 + 12


def a_run() -> Run:
    return Run(1, 0.0, lambda items: True)


@pytest.mark.parametrize(("days", "left"), [(5, 3), (1, 2), (0, 1)])
def test_old_history_goes_by_whole_days(tmp_path: Path, days: int, left: int) -> None:
    for back in (0, 24, 72):
        write_hour(tmp_path, 0, NOON - back, {(NOON - back) * 60: {"m": 1}})
    did = remove_old_history(tmp_path, VirtualClock(NOON * 3600.0), days * DAY_S)
    assert sum(hour_path(tmp_path, 0, NOON - back).exists() for back in (0, 24, 72)) == left
    assert did.said == (f"{3 - left} files of history removed" if left < 3 else "")
    assert remove_old_history(tmp_path / "none", VirtualClock(0.0), DAY_S).rows == 0


def test_hours_of_days_that_are_over_become_one_file_that_says_the_same(tmp_path: Path) -> None:
    for partition in (0, 1):
        for back in (0, 20, 21, 22, 44):
            write_hour(tmp_path, partition, NOON - back, {(NOON - back) * 60 + m: {"a": m + 1, "b": 2} for m in (0, 7)})
    before = list(read_hours(tmp_path))
    clock = VirtualClock(NOON * 3600.0)
    did = compact_history(a_run(), tmp_path, clock)
    assert (did.rows, did.said) == (8, "8 hours of history put together")
    assert list(read_hours(tmp_path)) == before
    assert sorted(path.name for path in tmp_path.rglob("*.parquet")) == ["day.parquet"] * 4 + ["hour=12.parquet"] * 2
    assert compact_history(a_run(), tmp_path, clock).said == ""


def test_an_hour_that_is_counted_again_after_that_only_adds(tmp_path: Path) -> None:
    minute = (NOON - 24) * 60
    write_hour(tmp_path, 0, NOON - 24, {minute: {"a": 5, "b": 1}})
    clock = VirtualClock(NOON * 3600.0)
    compact_history(a_run(), tmp_path, clock)
    write_hour(tmp_path, 0, NOON - 24, {minute: {"a": 3, "b": 4, "c": 1}})
    expected = [(0, minute, {"a": 5, "b": 4, "c": 1})]
    assert list(read_hours(tmp_path)) == expected
    assert compact_history(a_run(), tmp_path, clock).rows == 1
    assert list(read_hours(tmp_path)) == expected


def test_rows_of_history_come_in_order_hour_by_hour_and_add_up(tmp_path: Path) -> None:
    counts = {NOON * 60 + 59: {"a": 25, "b": 1}, (NOON + 1) * 60: {"a": 2}}
    write_hour(tmp_path, 0, NOON, {m: rows for m, rows in counts.items() if m // 60 == NOON})
    write_hour(tmp_path, 1, NOON, {NOON * 60 + 59: {"b": 2}})
    write_hour(tmp_path, 0, NOON + 1, {m: rows for m, rows in counts.items() if m // 60 > NOON})
    write_hour(tmp_path, 0, NOON - 48, {(NOON - 48) * 60: {"old": 1}})
    hours = list(rows_of_history(tmp_path, NOON * 3600.0))
    assert [sorted({row.model for row in hour}) for hour in hours] == [["a", "b"], ["a"]]
    rows = [row for hour in hours for row in hour]
    assert [row.ts for row in rows] == sorted(row.ts for row in rows)
    assert sum(row.count for row in rows if row.model == "a") == 27
    assert sum(row.count for row in rows if row.model == "b") == 3
    assert all((NOON * 60 + 59) * 60.0 <= row.ts < (NOON + 1) * 3600.0 for row in hours[0])


def test_who_reads_a_day_while_its_hours_are_put_together_reads_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for back in (0, 1, 2):
        path = write_hour(tmp_path, 0, NOON - back, {(NOON - back) * 60: {"a": back + 1}})
    before = list(read_hours(tmp_path))
    real, done = history.read_hour, []

    def read_hour(of: Path, model: str | None = None) -> dict[int, dict[str, int]]:
        if len(done) == 1:
            done.append(of)
            assert compact_day(path.parent) == 3
        done.append(of)
        return real(of, model)

    monkeypatch.setattr(history, "read_hour", read_hour)
    assert list(read_hours(tmp_path)) == before
    assert not path.exists()

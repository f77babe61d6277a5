"""Jobs: one process runs each, a failing one comes again, and what is kept long enough goes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from prefetcher.batch.retention import remove_old_history
from prefetcher.batch.scheduler import Job, Scheduler
from prefetcher.clock import SystemClock, VirtualClock
from prefetcher.errors import UnavailableError
from prefetcher.ingest.history import hour_path, write_hour
from prefetcher.telemetry.metrics import Metrics
from prefetcher_connectors.memory import MemoryState

DAY_S = 86_400.0


def scheduler(state: MemoryState, name: str, jobs: list[Job]) -> tuple[Scheduler, Metrics]:
    metrics = Metrics()
    return Scheduler(state, VirtualClock(), metrics, name, jobs), metrics


def counted(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("prefetcher_jobs_total", {"job": "j", "result": result}) or 0.0


def test_one_process_runs_a_job_and_another_takes_over() -> None:
    clock = VirtualClock()
    state, ran = MemoryState(clock), []
    job = Job("j", 100.0, lambda: ran.append(None) or "")  # type: ignore[func-returns-value]
    (one, _), (two, elsewhere) = scheduler(state, "one", [job]), scheduler(state, "two", [job])
    one.run_once(job)
    two.run_once(job)
    assert (len(ran), counted(elsewhere, "elsewhere")) == (1, 1)
    clock.advance(100.0)
    two.run_once(job)
    assert len(ran) == 2


def test_a_job_that_fails_is_counted_and_comes_again() -> None:
    tries: list[int] = []
    done = threading.Event()

    def fails() -> str:
        tries.append(1)
        if len(tries) == 1:
            raise UnavailableError("away")
        done.set()
        return "did it"

    metrics = Metrics()
    made = Scheduler(MemoryState(), SystemClock(), metrics, "one", [Job("j", 0.05, fails)])
    stop = threading.Event()
    thread = threading.Thread(target=made.run, args=(stop,))
    thread.start()
    assert done.wait(20.0)
    stop.set()
    thread.join()
    assert counted(metrics, "failed") == 1
    assert counted(metrics, "done") >= 1


@pytest.mark.parametrize(("days", "left"), [(5, 3), (1, 2), (0, 1)])
def test_old_history_goes_by_whole_days(tmp_path: Path, days: int, left: int) -> None:
    now_hour = 20_000 * 24 + 12
    for back in (0, 24, 72):
        write_hour(tmp_path, 0, now_hour - back, {(now_hour - back) * 60: {"m": 1}})
    said = remove_old_history(tmp_path, VirtualClock(now_hour * 3600.0), days * DAY_S)
    assert sum(hour_path(tmp_path, 0, now_hour - back).exists() for back in (0, 24, 72)) == left
    assert said == (f"{3 - left} hours of history removed" if left < 3 else "")
    assert remove_old_history(tmp_path / "none", VirtualClock(0.0), DAY_S) == ""

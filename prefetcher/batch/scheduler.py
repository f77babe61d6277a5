"""The scheduler role: jobs at their time, each by one process however many run.

APScheduler says when; a lease in the state store says who. A job that fails is logged and counted, and comes again at its next time.
Covers no jobs themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC

from apscheduler.events import EVENT_JOB_ERROR, JobExecutionEvent
from apscheduler.schedulers.background import BackgroundScheduler

from prefetcher.clock import Clock
from prefetcher.errors import PrefetcherError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["Job", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Job:
    """`run()` every `every_s` real seconds; it says what it did, '' when nothing. It must be right to run it twice."""

    name: str
    every_s: float
    run: Callable[[], str]


class Scheduler:
    """Runs `jobs`. `holder` is this process's name in the store."""

    def __init__(self, state: StateStore, clock: Clock, metrics: Metrics, holder: str, jobs: list[Job]) -> None:
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._holder = holder
        self._jobs = jobs

    def run(self, stop: threading.Event) -> None:
        """Until `stop`."""
        timetable = BackgroundScheduler(timezone=UTC)
        timetable.add_listener(self._failed, EVENT_JOB_ERROR)
        for job in self._jobs:
            # Late is better than never, and once is enough.
            timetable.add_job(self.run_once, "interval", [job], seconds=job.every_s, id=job.name, coalesce=True, misfire_grace_time=None)
        timetable.start()
        try:
            stop.wait()
        finally:
            timetable.shutdown(wait=True)

    def run_once(self, job: Job) -> None:
        """Runs a job unless another process did so within its time."""
        key = f"prefetcher:{{scheduler}}:job/{job.name}"
        try:
            # A little less than its time, so that the same process has it again at the next one.
            if not self._state.take_lease(key, self._holder, 0.9 * job.every_s):
                self._metrics.jobs.labels(job=job.name, result="elsewhere").inc()
                return
            did = job.run()
        except PrefetcherError as exc:
            self._metrics.jobs.labels(job=job.name, result="failed").inc()
            log().warning("job_failed", job=job.name, reason=str(exc), then="it comes again at its next time")
            return
        self._metrics.jobs.labels(job=job.name, result="done").inc()
        if did:
            log().info("job_done", job=job.name, did=did)

    def _failed(self, event: JobExecutionEvent) -> None:
        self._metrics.jobs.labels(job=event.job_id, result="failed").inc()
        log().error("job_failed", job=event.job_id, reason=repr(event.exception), then="it comes again at its next time")

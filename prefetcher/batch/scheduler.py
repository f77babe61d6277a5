"""The scheduler role: jobs at their time, each run by one process however many there are, and each run on record.

APScheduler says when; a lease in the state store says who, and every run's number is its fence: a run that lost its lease is told to stop,
and nothing that it writes under its number counts any more. A run whose process was killed is found by whoever looks next, is recorded as
lost, and its time is tried once more. What was missed while nobody ran is made up for by one run, or skipped, as the job says. Covers no
jobs themselves (`jobs`), and not how runs are read (`runs`).
"""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

from prefetcher.batch.runs import JobAbout, JobRecord, JobRun, record_of, wanted_of
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.errors import PrefetcherError, UnavailableError
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log
from prefetcher.telemetry.metrics import Metrics

__all__ = ["LEASE_S", "Did", "Job", "Run", "RunEnded", "Scheduler", "Timing"]

#: A run whose process is gone is taken over after this long. Three renewals may fail before: a store that restarts takes a second or two.
LEASE_S = 15.0
#: Runs of one time that may be lost before it is given up: what kills its process twice would kill the next one too.
_MOST_TRIES = 2
#: A run is given up, and others may begin, after this many times its time.
_GIVEN_UP_AFTER = 2.0
#: A job that skips what it missed runs all the same when it is not later than this share of the time between two runs.
_LATE_SHARE = 0.1
#: Jobs that run at one moment in one process, and the runs that hang beside them.
_THREADS = 8
#: A run that is told to stop has this long.
_STOP_S = 5.0
#: Real seconds between looks at a run.
_STEP_S = 0.25


class RunEnded(PrefetcherError):
    """Raised in a run that is to stop: its lease is lost, it was given up, or its process stops."""


@dataclass(frozen=True, slots=True)
class Did:
    """What a run did: rows (or models, users, files) and a line for people, '' when there was nothing to do."""

    rows: int = 0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Job:
    """`run(run)` at the times of `about`. It must be right to run it twice."""

    about: JobAbout
    run: Callable[[Run], Did]


@dataclass(frozen=True, slots=True)
class Timing:
    """Real seconds: between looks for work, of a lease, and between its renewals."""

    look_s: float = 1.0
    lease_s: float = LEASE_S
    renew_s: float = LEASE_S / 4.0
    stop_s: float = _STOP_S


class Run:
    """What a job's function has of its run. For the thread of the run; `stop` is set from another."""

    def __init__(self, number: int, now_s: float, write: Callable[[Mapping[str, bytes]], bool]) -> None:
        self.number = number
        self.now_s = now_s
        self.stop = threading.Event()
        self.share: float | None = None
        self.step = ""
        self._write = write

    def at(self, done: float, whole: float, step: str = "") -> None:
        """Says how far it is. Raises RunEnded where it is to stop."""
        self.share = min(1.0, done / whole) if whole > 0 else None
        self.step = step or self.step
        self.check()

    def check(self) -> None:
        """Raises RunEnded where it is to stop: to be asked now and then, and right before what others see."""
        if self.stop.is_set():
            raise RunEnded("the run is to stop")

    def write(self, items: Mapping[str, bytes]) -> None:
        """Writes all items to the state store, unless a later run of the job began.

        `items` are keys of the job (`records.job_key`). Raises RunEnded where they were refused, UnavailableError where the store is away.
        """
        self.check()
        if not self._write(items):
            self.stop.set()
            raise RunEnded("a later run of the job began; what this one made is dropped")


class _Times(BaseTrigger):  # type: ignore[misc]
    """The times of a job for APScheduler, which counts in the machine's time."""

    def __init__(self, about: JobAbout, clock: Clock) -> None:
        self._about = about
        self._clock = clock

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        return now + timedelta(seconds=max(0.0, self._about.next_due(self._clock.now_s()) - self._clock.now_s()))


#: The period of a job that runs at a time of day.
_DAILY_S = 86_400.0


class Scheduler:
    """Runs `jobs`. `holder` is this process's name in the store."""

    def __init__(
        self, state: StateStore, clock: Clock, metrics: Metrics, holder: str, jobs: Sequence[Job], timing: Timing | None = None
    ) -> None:
        self._state = state
        self._clock = clock
        self._metrics = metrics
        self._holder = holder
        self._jobs = {job.about.name: job for job in jobs}
        self._timing = timing or Timing()
        self._stop = threading.Event()
        self._look_now = threading.Event()
        self._at_work: set[str] = set()
        self._guard = threading.Lock()
        self._success_s: dict[str, float] = {}
        for name in self._jobs:
            metrics.job_age.labels(job=name).set_function(partial(self._age_s, name))
            metrics.jobs_overdue.labels(job=name).set(0.0)
            metrics.job_period.labels(job=name).set(self._jobs[name].about.every_s or _DAILY_S)

    def _age_s(self, name: str) -> float:
        return self._clock.now_s() - self._success_s.get(name, math.nan)

    def run(self, stop: threading.Event) -> None:
        """Until `stop`. A store that is away is waited out."""
        timetable = BackgroundScheduler(timezone=UTC, executors={"default": ThreadPoolExecutor(_THREADS)})
        for job in self._jobs.values():
            # Late is better than never, and once is enough: what a time that was missed is worth is decided under the lease.
            timetable.add_job(
                self.look_at,
                _Times(job.about, self._clock),
                [job],
                id=job.about.name,
                coalesce=True,
                misfire_grace_time=None,
                max_instances=3,
            )
        timetable.start()
        calls = threading.Thread(target=self._hear, args=(stop,), name="job calls", daemon=True)
        calls.start()
        away = False
        try:
            while not stop.is_set():
                self._look_now.clear()
                try:
                    for job in self._look():
                        timetable.add_job(self.look_at, args=[job], misfire_grace_time=None, max_instances=3)
                    away = False
                except UnavailableError as exc:
                    if not away:
                        log().warning("scheduler_waits", reason=str(exc), then="it goes on by itself")
                    away = True
                self._wait(stop)
        finally:
            self._stop.set()
            timetable.shutdown(wait=True)
            calls.join()

    def _wait(self, stop: threading.Event) -> None:
        """Until the next look: when somebody wants a run, at once."""
        for _ in range(10):
            if stop.wait(self._timing.look_s / 10.0) or self._look_now.is_set():
                return

    def _hear(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._state.listen([records.JOB_CALLS], lambda channel, job: self._look_now.set(), stop)
            stop.wait(self._timing.look_s)

    def _look(self) -> list[Job]:
        """The jobs that something may have to be done for here: their time has come, somebody wants a run, or a run was lost."""
        now_s = self._clock.now_s()
        self._state.see(records.SCHEDULERS, self._holder, now_s)
        about = records.encode([job.about for job in self._jobs.values()])
        keys = [records.job_key(name, what) for name in self._jobs for what in ("record", "wanted", "lease")]
        said, *raw = self._state.read_many([records.JOBS, *keys])
        if said != about:
            self._state.write({records.JOBS: about})
        found = []
        for number, (name, job) in enumerate(self._jobs.items()):
            record, wanted, lease = record_of(raw[3 * number]), raw[3 * number + 1], raw[3 * number + 2]
            if record.last_success_s is not None:
                self._success_s[name] = record.last_success_s
            due = record.due_s is None or job.about.last_due(now_s) > record.due_s
            if lease is None and name not in self._at_work and (due or wanted is not None or record.running is not None):
                found.append(job)
        return found

    def look_at(self, job: Job) -> None:
        """Runs a job if there is reason to, unless another run of it goes on."""
        name = job.about.name
        with self._guard:
            if name in self._at_work:
                return
            self._at_work.add(name)
        try:
            self._under_lease(job)
        except PrefetcherError as exc:
            log().warning("job_not_begun", job=name, reason=str(exc), then="it is tried again")
        finally:
            with self._guard:
                self._at_work.discard(name)

    def _under_lease(self, job: Job) -> None:
        name = job.about.name
        token = f"{self._holder}#{uuid.uuid4().hex[:12]}"
        lease = records.job_key(name, "lease")
        if not self._state.take_lease(lease, token, self._timing.lease_s):
            self._metrics.jobs.labels(job=name, result="elsewhere").inc()
            return
        try:
            more = True
            while more and not self._stop.is_set():
                more = self._next_run(job, token)
        finally:
            # One that is lost is another's; one that hangs must not keep the next from beginning.
            try:
                self._state.drop_lease(lease, token)
            except UnavailableError as exc:
                log().warning("lease_not_dropped", job=name, reason=str(exc), then=f"it ends by itself in {self._timing.lease_s:.0f} s")

    def _next_run(self, job: Job, token: str) -> bool:
        """One run, if there is reason to; whether to look again: somebody may have asked meanwhile."""
        about, now_s = job.about, self._clock.now_s()
        raw, wish = self._state.read_many([records.job_key(about.name, "record"), records.job_key(about.name, "wanted")])
        record, wanted = record_of(raw), wanted_of(wish)
        due_s = about.last_due(now_s)
        if wish is None and record.running is None and record.due_s == due_s:
            return False
        fence = self._new_number(about.name)
        if record.running is not None:
            record = self._was_lost(record, record.running, now_s)
        if record.due_s is None or record.due_s > now_s:
            # Nothing was missed before it was there; and a clock that was set back must not put off what is due by the new time.
            record = msgspec.structs.replace(record, due_s=due_s)
        elif record.due_s < due_s and wanted is None:
            record, runs = self._due(about, record, due_s, now_s, fence)
            if runs:
                return self._carry_out(job, token, fence, record, JobRun(_new_id(), about.name, fence, now_s, self._holder, due_s=due_s))
        if wanted is not None:
            if not self._write(about.name, fence, record):
                return False
            self._state.delete([records.job_key(about.name, "wanted")])
            run = JobRun(wanted.run_id, about.name, fence, now_s, self._holder, by_hand=True, by=wanted.by)
            return self._carry_out(job, token, fence, record, run)
        if wish is not None:
            self._state.delete([records.job_key(about.name, "wanted")])
        self._write(about.name, fence, record)
        return False

    def _due(self, about: JobAbout, record: JobRecord, due_s: float, now_s: float, fence: int) -> tuple[JobRecord, bool]:
        """The record for the time `due_s`, and whether there is to be a run; else it says why not."""
        late_s, between_s = now_s - due_s, about.next_due(now_s) - due_s
        why = ""
        if record.tries >= _MOST_TRIES:
            why = f"{record.tries} runs for this time were lost; it comes again at its next time"
        elif about.missed == "skip" and late_s > max(_LATE_SHARE * between_s, 2.0 * self._timing.look_s):
            why = f"missed {late_s:.0f} s ago; the job skips what it missed"
        if not why:
            return record, True
        skipped = JobRun(_new_id(), about.name, fence, now_s, self._holder, due_s=due_s, result="skipped", ended_s=now_s, error=why)
        self._count(skipped)
        return msgspec.structs.replace(record.ended(skipped), due_s=due_s, tries=0), False

    def _was_lost(self, record: JobRecord, run: JobRun, now_s: float) -> JobRecord:
        """Whoever ran it has its lease no more."""
        result = "hung" if run.overdue else "lost"
        error = run.error or f"{run.where} ended in the middle of it, or was away from the state server"
        lost = msgspec.structs.replace(run, result=result, ended_s=now_s, error=error, step="", share=None)
        self._count(lost)
        log().error("job_lost", job=run.job, run=run.run_id, where=run.where, by_hand=run.by_hand)
        return msgspec.structs.replace(record.ended(lost), tries=record.tries + (not run.by_hand))

    def _new_number(self, name: str) -> int:
        """Above every number that a run of the job had."""
        key = records.job_key(name, "number")
        number = self._state.next_number(key)
        held = int(self._state.read(records.job_key(name, "fence")) or 0)
        if number <= held:
            # The store forgot the one and not the other.
            self._state.replace(key, str(number).encode(), str(held).encode())
            number = self._state.next_number(key)
        return number

    def _write(self, name: str, fence: int, record: JobRecord) -> bool:
        items = {records.job_key(name, "record"): records.encode(record)}
        return self._state.write_fenced(records.job_key(name, "fence"), fence, items)

    # --- one run ---

    def _carry_out(self, job: Job, token: str, fence: int, record: JobRecord, first: JobRun) -> bool:
        """Runs the job and records it; whether this process still has the lease."""
        name, timing = job.about.name, self._timing
        started_s = asked_s = renewed_s = self._real_s()
        run = Run(fence, first.began_s, lambda items: self._state.write_fenced(records.job_key(name, "fence"), fence, items))
        if not self._write(name, fence, msgspec.structs.replace(record, running=first)):
            return False
        outcome: list[Did | Exception] = []
        over = threading.Event()

        def work() -> None:
            try:
                outcome.append(job.run(run))
            except Exception as exc:  # noqa: BLE001 - whatever it is, it is on record
                outcome.append(exc)
            finally:
                over.set()

        # A thread of its own, which ends with the process: one that hangs keeps nobody from stopping.
        threading.Thread(target=work, name=f"job {name}", daemon=True).start()
        now, reason = first, ""
        while not reason and not over.wait(min(timing.renew_s, _STEP_S)):
            took_s = self._real_s() - started_s
            if took_s > job.about.most_s and not now.overdue:
                now = msgspec.structs.replace(now, overdue=True)
                self._metrics.jobs_overdue.labels(job=name).set(1.0)
                log().error("job_overdue", job=name, run=now.run_id, after_s=round(took_s), step=run.step, most_s=job.about.most_s)
            if took_s > _GIVEN_UP_AFTER * job.about.most_s:
                reason = "hung"
            elif self._stop.is_set():
                reason = "stopped"
            elif self._real_s() - asked_s >= timing.renew_s:
                asked_s = self._real_s()
                now = msgspec.structs.replace(now, share=run.share, step=run.step)
                try:
                    held = self._state.take_lease(records.job_key(name, "lease"), token, timing.lease_s)
                    if not held or not self._write(name, fence, msgspec.structs.replace(record, running=now)):
                        reason = "lost"
                    renewed_s = self._real_s()
                except UnavailableError:
                    # Others may run it by now.
                    if self._real_s() - renewed_s > timing.lease_s:
                        reason = "lost"
        if reason:
            run.stop.set()
            over.wait(0.0 if reason == "hung" else timing.stop_s)
        self._metrics.jobs_overdue.labels(job=name).set(0.0)
        return self._record(job, fence, record, now, outcome, reason)

    def _record(self, job: Job, fence: int, record: JobRecord, run: JobRun, outcome: Sequence[Did | Exception], reason: str) -> bool:
        """Writes what became of a run."""
        found = outcome[0] if outcome else None
        change: dict[str, object]
        if isinstance(found, Did) and reason != "lost":
            change = {"result": "done", "rows": found.rows, "did": found.said}
        elif isinstance(found, RunEnded) or found is None or reason == "lost":
            words = {
                "hung": f"longer than {_GIVEN_UP_AFTER:g} times its {job.about.most_s:g} s, last at: {run.step or 'its beginning'}",
                "stopped": "its process was stopped",
            }
            change = {"result": reason or "lost", "error": words.get(reason, "its lease was lost; what it made is dropped")}
        else:
            said = str(found) if isinstance(found, PrefetcherError) else repr(found)
            change = {"result": "failed", "error": said[:500]}
        ended = msgspec.structs.replace(run, ended_s=self._clock.now_s(), share=None, step="", **change)
        after = record.ended(ended)
        if ended.due_s is not None:
            # A run that was stopped is made up for by the next process, one that failed comes again at its next time.
            made_up = ended.result in ("stopped", "lost")
            after = msgspec.structs.replace(after, due_s=record.due_s if made_up else ended.due_s, tries=record.tries if made_up else 0)
        self._count(ended)
        self._tell(ended)
        if reason == "lost":
            # Whoever has the lease by now recorded it.
            return False
        if not self._write(job.about.name, fence, after):
            log().error("job_result_dropped", job=ended.job, run=ended.run_id, reason="a later run began")
            return False
        if after.last_success_s is not None:
            self._success_s[ended.job] = after.last_success_s
        return ended.result in ("done", "failed")

    def _count(self, run: JobRun) -> None:
        self._metrics.jobs.labels(job=run.job, result=run.result).inc()
        if run.ended_s is not None and run.result in ("done", "failed"):
            self._metrics.job_time.labels(job=run.job).observe(run.ended_s - run.began_s)

    def _tell(self, run: JobRun) -> None:
        told = {"job": run.job, "run": run.run_id, "by_hand": run.by_hand}
        if run.result == "done":
            if run.did:
                log().info("job_done", did=run.did, rows=run.rows, **told)
        else:
            log().error(f"job_{run.result}", reason=run.error, **told)

    def _real_s(self) -> float:
        return self._clock.steady_s() / self._clock.speed


def _new_id() -> str:
    return uuid.uuid4().hex[:16]

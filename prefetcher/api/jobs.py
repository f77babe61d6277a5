"""Jobs and batch schedules as an endpoint sees them: what runs and ran, a run that somebody wants, and which models a job needs when.

Reads and writes the state store; who runs jobs is `batch.scheduler`, who stages weights the controller.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from prefetcher.api.fleet import Fleet
from prefetcher.api.messages import FieldProblem
from prefetcher.api.problems import FieldsRefused
from prefetcher.batch.runs import JobAbout, JobRecord, Wanted, known_jobs, record_of, schedulers_seen, shown, wanted_of
from prefetcher.clock import Clock
from prefetcher.controller import records
from prefetcher.core.schedules import Schedule, next_window
from prefetcher.core.types import Cause
from prefetcher.errors import ModelNotFoundError, TemporaryError, UnavailableError, UsageError, shortened
from prefetcher.ports import StateStore
from prefetcher.telemetry.logs import log

__all__ = ["JobDesk", "ScheduleDesk"]

#: A run that somebody wants is forgotten when no scheduler took it for this long.
_WANTED_S = 600.0
_CHANGE_TRIES = 50
_MOST_SCHEDULES = 1_000


class JobDesk:
    """Safe for threads. `clock` is the schedulers' own: the machine's."""

    def __init__(self, state: StateStore, clock: Clock) -> None:
        self._state = state
        self._clock = clock

    @property
    def now_s(self) -> float:
        """The schedulers' time."""
        return self._clock.now_s()

    def jobs(self) -> list[dict[str, Any]]:
        """Every job: when, by which rule, what runs, and the last run."""
        known = known_jobs(self._state)
        raw = self._state.read_many([records.job_key(job.name, what) for job in known for what in ("record", "wanted")])
        return [self._job(job, record_of(raw[2 * i]), wanted_of(raw[2 * i + 1])) for i, job in enumerate(known)]

    def _job(self, job: JobAbout, record: JobRecord, wanted: Wanted | None) -> dict[str, Any]:
        now_s = self._clock.now_s()
        return {
            "name": job.name,
            "what": job.what,
            "times": job.times,
            "next_s": job.next_due(now_s),
            "missed": job.missed,
            "most_s": job.most_s,
            "wanted": wanted is not None,
            "running": None if record.running is None else shown(record.running),
            "last": shown(record.runs[-1]) if record.runs else None,
            "last_success_s": record.last_success_s,
        }

    def runs(self, name: str, count: int) -> list[Mapping[str, object]]:
        """The last runs of a job, newest first, with the one that goes on. Raises ModelNotFoundError where no job is called so."""
        self._known(name)
        record = record_of(self._state.read(records.job_key(name, "record")))
        found = [*record.runs, *([] if record.running is None else [record.running])]
        return [shown(run) for run in reversed(found)][:count]

    def run(self, name: str, run_id: str) -> Mapping[str, object]:
        """One run; `result` is `wanted` before a scheduler took it. Raises ModelNotFoundError where there is none."""
        wanted = wanted_of(self._state.read(records.job_key(name, "wanted")))
        if wanted is not None and wanted.run_id == run_id:
            return {"run_id": run_id, "job": name, "result": "wanted", "by": wanted.by, "by_hand": True}
        found = next((run for run in self.runs(name, 1_000) if run["run_id"] == run_id), None)
        if found is None:
            raise ModelNotFoundError(f"no run {shortened(repr(run_id))} of job {name} is kept; `prefetcher jobs runs {name}` lists them")
        return found

    def want(self, name: str, by: str) -> str:
        """Wants a run now; its id. One that is wanted already is the same.

        Raises:
            ModelNotFoundError: no job is called so.
            UnavailableError: no scheduler runs.
        """
        self._known(name)
        if not schedulers_seen(self._state, self._clock.now_s()):
            text = "no scheduler that does it was heard of for ten seconds; start `prefetcher scheduler`, or try again if one is busy"
            raise UnavailableError(text, retry_after_s=5.0)
        wanted = Wanted(uuid.uuid4().hex[:16], self._clock.now_s(), by)
        key = records.job_key(name, "wanted")
        before = wanted_of(self._state.claim({key: records.encode(wanted)}, _WANTED_S)[0])
        self._state.publish(records.JOB_CALLS, name.encode())
        log().info("job_wanted", job=name, by=by)
        return wanted.run_id if before is None else before.run_id

    def made(self, name: str) -> bytes:
        """What the last run of a job made. Raises UnavailableError before there is anything."""
        raw = self._state.read(records.job_key(name, "made"))
        if raw is None:
            raise UnavailableError(f"nothing was made yet; `prefetcher jobs run {name}` makes it", retry_after_s=5.0)
        return raw

    def _known(self, name: str) -> None:
        known = [job.name for job in known_jobs(self._state)]
        if not known:
            raise UnavailableError("no scheduler ever ran here; start `prefetcher scheduler`", retry_after_s=5.0)
        if name not in known:
            raise ModelNotFoundError(f"no job is called {shortened(repr(name))}; there are {', '.join(known)}")


class ScheduleDesk:
    """Safe for threads. `wake(reason)` tells the controller."""

    def __init__(self, state: StateStore, fleet: Fleet, clock: Clock, wake: Callable[[str], None]) -> None:
        self._state = state
        self._fleet = fleet
        self._clock = clock
        self._wake = wake

    def schedules(self) -> list[dict[str, Any]]:
        """All of them by name: as they were set, the window that is open or comes next, and what is in memory for batch."""
        return [self.shown(schedule) for _, schedule in sorted(self._read()[1].items())]

    def shown(self, schedule: Schedule) -> dict[str, Any]:
        now_s = self._clock.now_s()
        window = next_window(schedule, ZoneInfo(schedule.tz), now_s)
        return {
            **msgspec.to_builtins(schedule),
            "next_start_s": None if window is None else window.start_s,
            "next_end_s": None if window is None else window.end_s,
            "open": window is not None and window.start_s <= now_s,
            "staged": self._staged(schedule),
        }

    def _staged(self, schedule: Schedule) -> list[str]:
        try:
            reports = self._fleet.view().reports
        except TemporaryError:
            return []
        held = {h.model for r in reports.values() for h in r.held if h.cause == Cause.BATCH.value and h.state == "ready"}
        return [model for model in schedule.models if model in held]

    def add(self, schedule: Schedule, *, replaces: bool = False) -> bool:
        """Sets a schedule; whether it is new.

        Raises:
            FieldsRefused: models or a node that nobody knows, or a model larger than the quota.
            UsageError: another schedule has the name and this one does not replace it, or there are too many.
            UnavailableError: the store is away.
        """
        self._check(schedule)
        for _ in range(_CHANGE_TRIES):
            raw, found = self._read()
            before = found.get(schedule.name)
            if before is not None and not replaces:
                raise UsageError(f"a schedule is called {schedule.name} already; remove it, or say that this one replaces it")
            if before is None and len(found) >= _MOST_SCHEDULES:
                raise UsageError(f"there are {_MOST_SCHEDULES} schedules already; remove one")
            after = dict(sorted((found | {schedule.name: schedule}).items()))
            if self._state.replace(records.SCHEDULES, raw, records.encode(after)):
                log().info("schedule_set", schedule=schedule.name, models=len(schedule.models), by=schedule.by)
                self._wake("schedule")
                return before is None
        raise UnavailableError("other endpoints keep changing the schedules; ask again")

    def remove(self, name: str, by: str) -> None:
        """Takes a schedule away; what is staged for it is released.

        Raises:
            ModelNotFoundError: no schedule is called so.
            UnavailableError: the store is away.
        """
        for _ in range(_CHANGE_TRIES):
            raw, found = self._read()
            if name not in found:
                raise ModelNotFoundError(f"no schedule is called {shortened(repr(name))}; `prefetcher schedule list` lists them")
            after = {other: schedule for other, schedule in found.items() if other != name}
            if self._state.replace(records.SCHEDULES, raw, records.encode(after)):
                log().info("schedule_removed", schedule=name, by=by)
                self._wake("schedule")
                return
        raise UnavailableError("other endpoints keep changing the schedules; ask again")

    def _read(self) -> tuple[bytes | None, dict[str, Schedule]]:
        raw = self._state.read(records.SCHEDULES)
        try:
            return raw, records.decode_schedules(raw)
        except ValueError as exc:
            raise UnavailableError(f"the schedules can't be read ({exc}); look after what writes to the state server") from exc

    def _check(self, schedule: Schedule) -> None:
        try:
            view = self._fleet.view()
        except TemporaryError:
            return
        if not view.reports:
            return
        wrong: list[FieldProblem] = []
        if schedule.node and schedule.node not in view.reports:
            wrong.append(
                FieldProblem(field="node", reason=f"no node that reports is called so; there are {', '.join(sorted(view.reports))}")
            )
        nodes = [report for name, report in view.reports.items() if schedule.node in ("", name)]
        known = {k.model: k.bytes for report in nodes for k in report.known}
        if known:
            wrong += self._check_models(schedule, known)
        if wrong:
            raise FieldsRefused(wrong)

    def _check_models(self, schedule: Schedule, known: Mapping[str, int]) -> Sequence[FieldProblem]:
        wrong = []
        for i, model in enumerate(schedule.models):
            size = known.get(model)
            if size is None:
                wrong.append(FieldProblem(field=f"models.{i}", reason="no node that reports can load it"))
            elif schedule.quota_bytes is not None and size > schedule.quota_bytes:
                wrong.append(
                    FieldProblem(field=f"models.{i}", reason=f"it has {size} bytes, more than the quota of {schedule.quota_bytes}")
                )
        return wrong

"""Runs of jobs as the state store has them: one record a job, with what runs at this moment and the last runs; and how they are read.

A record changes only under the number of a run that is not older than the last one that wrote it. Covers no running (`scheduler`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, tzinfo
from zoneinfo import ZoneInfo

import msgspec

from prefetcher.controller import records
from prefetcher.core.schedules import DAYS, last_interval, local_times
from prefetcher.ports import StateStore

__all__ = ["RUNS_KEPT", "JobAbout", "JobRecord", "JobRun", "Wanted", "known_jobs", "record_of", "schedulers_seen", "shown", "wanted_of"]

#: Runs of each job that are kept; a day of one every half an hour.
RUNS_KEPT = 50
#: Seconds after which a scheduler that looked last is taken to be gone.
SCHEDULER_SEEN_S = 10.0
_EVERY_DAY = tuple(range(len(DAYS)))
_DAY_S = 86_400.0


class JobAbout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job as its scheduler knows it: every `every_s` seconds, or daily at `at_s` after midnight in `tz`.

    `missed`: `once`, what was missed is made up for by one run, or `skip`. A run that takes longer than `most_s` hangs.
    """

    name: str
    what: str
    every_s: float | None = None
    at_s: int | None = None
    tz: str = "UTC"
    missed: str = "once"
    most_s: float = 600.0

    def last_due(self, now_s: float) -> float:
        """The last time up to `now_s` that the job was due."""
        if self.every_s is not None:
            return last_interval(self.every_s, now_s)
        return local_times(self.at_s or 0, _EVERY_DAY, self._zone(), now_s - 2 * _DAY_S, now_s)[-1]

    def next_due(self, now_s: float) -> float:
        """The first time after `now_s` that the job is due."""
        if self.every_s is not None:
            return last_interval(self.every_s, now_s) + self.every_s
        found = local_times(self.at_s or 0, _EVERY_DAY, self._zone(), now_s, now_s + 2 * _DAY_S)
        return next(at_s for at_s in found if at_s > now_s)

    def _zone(self) -> tzinfo:
        return UTC if self.tz == "UTC" else ZoneInfo(self.tz)

    @property
    def times(self) -> str:
        """When, in words."""
        if self.every_s is None:
            at_s = self.at_s or 0
            return f"daily at {at_s // 3600:02d}:{at_s // 60 % 60:02d} {self.tz}"
        if self.every_s == 3600.0:
            return "every hour"
        return f"every {self.every_s / 60:g} min" if self.every_s >= 60.0 else f"every {self.every_s:g} s"


class JobRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run. `by`: who asked for it by hand, '' for a scheduled one, whose time was `due_s`. `where`: the process.

    `result`: `running`, `done`, `failed` (`error` says why), `lost` (its process ended, or its lease), `hung` (longer than its time, given
    up), `stopped` (its process was stopped), or `skipped` (missed). While it runs: `share` of the work that is done, `step`, what it is at.
    """

    run_id: str
    job: str
    number: int
    began_s: float
    where: str
    by_hand: bool = False
    by: str = ""
    due_s: float | None = None
    result: str = "running"
    ended_s: float | None = None
    rows: int = 0
    did: str = ""
    error: str = ""
    share: float | None = None
    step: str = ""
    overdue: bool = False


class JobRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a job. `due_s`: the last time that was dealt with; `tries`: runs for the one after it that were lost. `runs`: oldest
    first."""

    due_s: float | None = None
    tries: int = 0
    running: JobRun | None = None
    runs: tuple[JobRun, ...] = ()
    last_success_s: float | None = None

    def ended(self, run: JobRun) -> JobRecord:
        """With `run` over and nothing running."""
        at_s = run.ended_s if run.result == "done" else self.last_success_s
        return msgspec.structs.replace(self, running=None, runs=(*self.runs, run)[-RUNS_KEPT:], last_success_s=at_s)


class Wanted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Somebody wants a run now."""

    run_id: str
    at_s: float
    by: str = ""


_records = msgspec.json.Decoder(JobRecord)
_known = msgspec.json.Decoder(list[JobAbout])
_wanted = msgspec.json.Decoder(Wanted)


def record_of(raw: bytes | None) -> JobRecord:
    """The record, an empty one for None and for what is none: the next run writes it anew."""
    try:
        return JobRecord() if raw is None else records.decode(raw, _records)
    except ValueError:
        return JobRecord()


def wanted_of(raw: bytes | None) -> Wanted | None:
    """The wish, None where there is none that can be read."""
    try:
        return None if raw is None else records.decode(raw, _wanted)
    except ValueError:
        return None


def known_jobs(state: StateStore) -> list[JobAbout]:
    """The jobs of the schedulers; empty before the first one ran. Raises UnavailableError."""
    raw = state.read(records.JOBS)
    try:
        return [] if raw is None else records.decode(raw, _known)
    except ValueError:
        return []


def schedulers_seen(state: StateStore, now_s: float) -> Sequence[str]:
    """The schedulers that looked for work just now. Raises UnavailableError."""
    return state.members(records.SCHEDULERS, now_s - SCHEDULER_SEEN_S)


def shown(run: JobRun) -> Mapping[str, object]:
    """A run as JSON shows it, every field."""
    return msgspec.structs.asdict(run) | {"took_s": None if run.ended_s is None else round(run.ended_s - run.began_s, 3)}

"""Routes of jobs and of batch schedules."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, field_validator
from starlette.concurrency import run_in_threadpool

from prefetcher.api.bodies import read_object
from prefetcher.api.jobs import ScheduleDesk
from prefetcher.api.keys import Access
from prefetcher.api.messages import Name, Seconds
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.service import Service
from prefetcher.batch.runs import RUNS_KEPT
from prefetcher.core.schedules import DAYS, MOST_WINDOW_S, Schedule

__all__ = ["ScheduleBody", "add_jobs"]

_T = 1767225600.25
_GROUPS = {"daily": DAYS, "weekdays": DAYS[:5], "weekends": DAYS[5:]}
_AT = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?$")
_RUN = {
    "run_id": "5f0c5b1a9d2e4c77",
    "job": "forecast-all",
    "number": 41,
    "began_s": _T,
    "where": "host-a/712",
    "by_hand": False,
    "by": "",
    "due_s": _T,
    "result": "done",
    "ended_s": _T + 0.4,
    "took_s": 0.4,
    "rows": 76,
    "did": "76 models forecast",
    "error": "",
    "share": None,
    "step": "",
    "overdue": False,
}


_TABLE = {
    "at_s": _T,
    "until_s": _T + 900,
    "learned_s": _T - 4,
    "predictor": "hazard",
    "horizons_s": [60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 21600.0],
    "models": {"llama-8b": [0.02, 0.04, 0.1, 0.17, 0.25, 0.41, 0.61, 0.9]},
    "fallback": "",
    "calibrated_s": _T - 1800,
}


def _seconds_of(text: Any) -> int:
    found = _AT.match(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError("a local time is needed, as 02:00")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds


def _days_of(given: Any) -> tuple[int, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not names:
        raise ValueError("daily, weekdays, weekends, or days as mon,wed are needed")
    found: set[str] = set()
    for name in names:
        day = name.strip().lower()[:3] if isinstance(name, str) else ""
        group = _GROUPS.get(name.strip().lower(), ()) if isinstance(name, str) else ()
        if not group and day not in DAYS:
            raise ValueError(f"{str(name)[:40]!r} is no day; write daily, weekdays, weekends, or days as mon,wed")
        found |= set(group) or {day}
    return tuple(i for i, day in enumerate(DAYS) if day in found)


def _zone_of(name: str) -> str:
    try:
        ZoneInfo(name)
    except (OSError, ValueError, KeyError) as exc:
        raise ValueError(f"{name[:40]!r} is no time zone that this machine knows; write one as Europe/Berlin, or UTC") from exc
    return name


At = Annotated[int, BeforeValidator(_seconds_of)]
Days = Annotated[tuple[int, ...], BeforeValidator(_days_of)]
Zone = Annotated[str, StringConstraints(max_length=64), AfterValidator(_zone_of)]


class ScheduleBody(BaseModel):
    """A batch job needs models from a local time on, on some days."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"name": "nightly", "models": ["llama-8b", "whisper"], "at": "02:00", "for_s": 1800, "days": "weekdays", "tz": "UTC"}
            ]
        },
    )

    name: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,128}$")] = Field(description="its name: letters, digits, _, . and -")
    models: Annotated[list[Name], Field(min_length=1, max_length=100)] = Field(
        description="the models, in the order that the job needs them"
    )
    at: At = Field(description="local time that it begins at, as 02:00", json_schema_extra={"type": "string"})
    for_s: Seconds = Field(gt=0.0, le=MOST_WINDOW_S, allow_inf_nan=False, description="how long it takes")
    days: Days = Field(
        default=tuple(range(7)), description="daily, weekdays, weekends, or days as mon,wed", json_schema_extra={"type": "string"}
    )
    tz: Zone = Field(default="UTC", description="time zone of `at`")
    lead_s: Seconds | None = Field(
        default=None, ge=0.0, le=MOST_WINDOW_S, allow_inf_nan=False, description="staged so long before; without it as long as loads take"
    )
    quota_bytes: Annotated[int, Field(gt=0, le=10**15)] | None = Field(
        default=None, description="the most that its models take on a node at a time; never more than what nodes give to batch"
    )
    node: Annotated[str, StringConstraints(max_length=128)] = Field(default="", description="only on this node")
    replace: bool = Field(default=False, description="takes the place of a schedule of the same name")

    @field_validator("models")
    @classmethod
    def _once(cls, models: list[str]) -> list[str]:
        if len(set(models)) < len(models):
            raise ValueError("a model is named twice")
        return models

    def to_schedule(self, by: str, now_s: float) -> Schedule:
        return Schedule(
            self.name,
            tuple(self.models),
            self.at,
            self.for_s,
            self.days,
            self.tz,
            self.lead_s,
            self.quota_bytes,
            self.node,
            by,
            now_s,
        )


class JobAnswer(BaseModel):
    """A job: when it is due, by which rule, and how it went."""

    name: str = Field(examples=["forecast-all"])
    what: str = Field(description="what it does", examples=["how likely each model is used soon, up to six hours ahead"])
    times: str = Field(examples=["every 5 min"])
    next_s: float = Field(description="when it is due next", examples=[_T + 300])
    missed: Literal["once", "skip"] = Field(description="what was missed is made up for by one run, or skipped")
    most_s: float = Field(description="a run that takes longer hangs", examples=[300.0])
    wanted: bool = Field(description="somebody wants a run, and no scheduler took it yet")
    running: dict[str, Any] | None = Field(description="the run that goes on", examples=[None])
    last: dict[str, Any] | None = Field(description="the last run that ended", examples=[_RUN])
    last_success_s: float | None = Field(examples=[_T])


class WantedAnswer(BaseModel):
    """A run is wanted; `follow` says what became of it."""

    job: str = Field(examples=["compact-history"])
    run_id: str = Field(examples=["5f0c5b1a9d2e4c77"])
    follow: str = Field(examples=["/v1/jobs/compact-history/runs/5f0c5b1a9d2e4c77"])


class ScheduleAnswer(BaseModel):
    """A schedule, and when it is open."""

    name: str = Field(examples=["nightly"])
    models: list[str] = Field(examples=[["embed", "rerank"]])
    at: str = Field(examples=["02:00"])
    for_s: float = Field(examples=[1800.0])
    days: list[str] = Field(examples=[["mon", "tue", "wed", "thu", "fri"]])
    tz: str = Field(examples=["Europe/Berlin"])
    lead_s: float | None = None
    quota_bytes: int | None = None
    node: str = ""
    by: str = Field(default="", description="who set it: the name of a key, '' without keys")
    set_s: float = Field(description="when it was set", examples=[_T])
    next_start_s: float | None = Field(description="of the window that is open or comes next", examples=[_T + 3600])
    next_end_s: float | None = Field(examples=[_T + 5400])
    open: bool
    staged: list[str] = Field(description="its models that are in memory for batch now", examples=[["embed"]])


class RemovedAnswer(BaseModel):
    """A schedule is gone."""

    removed: str = Field(examples=["nightly"])


def _shown(found: dict[str, Any]) -> ScheduleAnswer:
    at_s = int(found.pop("at_s"))
    hours, minutes, seconds = at_s // 3600, at_s // 60 % 60, at_s % 60
    at = f"{hours:02d}:{minutes:02d}" + (f":{seconds:02d}" if seconds else "")
    return ScheduleAnswer(**found | {"at": at, "days": [DAYS[day] for day in found["days"]]})


def add_jobs(app: FastAPI, service: Service, access: Access) -> None:
    """Adds them to `app`."""
    may_read = [Depends(access.needs("operator", "ingest"))]
    may_act = [Depends(access.needs("operator"))]
    jobs = service.jobs

    @app.get("/v1/jobs", response_model=list[JobAnswer], responses=PROBLEMS, dependencies=may_read, summary="The jobs, and how they went")
    def list_jobs() -> list[dict[str, Any]]:
        return jobs.jobs()

    @app.get(
        "/v1/jobs/{name}/runs",
        responses=PROBLEMS | {200: {"content": {"application/json": {"example": [_RUN]}}}},
        dependencies=may_read,
        summary="The last runs of a job, newest first",
    )
    def job_runs(
        name: Annotated[str, Path(examples=["forecast-all"])], count: Annotated[int, Query(ge=1, le=RUNS_KEPT + 1)] = 20
    ) -> list[dict[str, Any]]:
        return [dict(run) for run in jobs.runs(name, count)]

    @app.get(
        "/v1/jobs/{name}/runs/{run_id}",
        responses=PROBLEMS | {200: {"content": {"application/json": {"example": _RUN}}}},
        dependencies=may_read,
        summary="One run: wanted, running with how far it is, or what became of it",
    )
    def job_run(
        name: Annotated[str, Path(examples=["forecast-all"])], run_id: Annotated[str, Path(examples=["5f0c5b1a9d2e4c77"])]
    ) -> dict[str, Any]:
        return dict(jobs.run(name, run_id))

    @app.post(
        "/v1/jobs/{name}:run",
        response_model=WantedAnswer,
        status_code=202,
        responses=PROBLEMS,
        dependencies=may_act,
        summary="Runs a job now; the answer says where to follow it",
    )
    def run_job(request: Request, response: Response, name: Annotated[str, Path(examples=["compact-history"])]) -> WantedAnswer:
        run_id = jobs.want(name, request.state.caller.name)
        follow = f"/v1/jobs/{name}/runs/{run_id}"
        response.headers["Location"] = follow
        return WantedAnswer(job=name, run_id=run_id, follow=follow)

    @app.get(
        "/v1/forecasts",
        responses=PROBLEMS | {200: {"content": {"application/json": {"example": _TABLE}}}},
        dependencies=may_read,
        summary="The last table of forecasts: every model, every horizon",
    )
    def forecasts() -> Response:
        return Response(jobs.made("forecast-all"), media_type="application/json")

    _add_schedules(app, service.schedules, service, access)


def _add_schedules(app: FastAPI, desk: ScheduleDesk, service: Service, access: Access) -> None:
    may_act = [Depends(access.needs("operator"))]
    schema = ScheduleBody.model_json_schema()
    examples = {f"example {number}": {"value": value} for number, value in enumerate(schema.get("examples", []), start=1)}
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "examples": examples}}}}

    @app.get(
        "/v1/schedules",
        response_model=list[ScheduleAnswer],
        responses=PROBLEMS,
        dependencies=[Depends(access.needs("operator", "ingest"))],
        summary="Which models batch jobs need when",
    )
    def list_schedules() -> list[ScheduleAnswer]:
        return [_shown(found) for found in desk.schedules()]

    @app.post(
        "/v1/schedules",
        response_model=ScheduleAnswer,
        status_code=201,
        responses=PROBLEMS,
        dependencies=may_act,
        summary="A batch job needs models at a time: they are staged before it, and released when it ends",
        openapi_extra=body,
    )
    async def add_schedule(request: Request) -> ScheduleAnswer:
        wanted = read_object(await request.body(), ScheduleBody)
        schedule = wanted.to_schedule(request.state.caller.name, service.now_s)

        def add() -> ScheduleAnswer:
            desk.add(schedule, replaces=wanted.replace)
            return _shown(desk.shown(schedule))

        return await run_in_threadpool(add)

    @app.delete(
        "/v1/schedules/{name}",
        response_model=RemovedAnswer,
        responses=PROBLEMS,
        dependencies=may_act,
        summary="Takes a schedule away; what is staged for it is released",
    )
    def remove_schedule(request: Request, name: Annotated[str, Path(examples=["nightly"])]) -> RemovedAnswer:
        desk.remove(name, request.state.caller.name)
        return RemovedAnswer(removed=name)

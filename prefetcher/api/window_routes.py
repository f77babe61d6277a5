"""Routes of windows and of what prefetching saves: what is in force and since when, who or what changed it, pins, and the way back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from prefetcher.api.bodies import read_object
from prefetcher.api.keys import Access
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.service import Service
from prefetcher.controller.effects import EffectReader
from prefetcher.controller.windows import EVENTS_KEPT, WindowEvent, WindowShelf, window_json
from prefetcher.core.types import Window
from prefetcher.core.windows import NO_LEAD_LIMIT_S, WINDOW_HORIZONS_S, WindowBook, window_in_words

__all__ = ["WindowPinBody", "add_windows"]

_T = 1767225600.25
_SEGMENT = "small, hourly, regular"
_HORIZONS = ", ".join(f"{horizon:g}" for horizon in WINDOW_HORIZONS_S)


class WindowPinBody(BaseModel):
    """A segment keeps its window. What is not given stays as it is."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"segment": _SEGMENT, "lead_s": 300, "horizon_s": 900, "hold_s": 600}]}
    )

    segment: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="the segment's name, as /v1/windows has it")
    lead_s: Annotated[float, Field(ge=0.0, le=NO_LEAD_LIMIT_S, allow_inf_nan=False)] | None = Field(
        default=None,
        description=f"how long before the expected use, beyond the load, it may start; {NO_LEAD_LIMIT_S:g}: at any time",
    )
    horizon_s: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = Field(
        default=None, description=f"how far ahead the forecast looks: one of {_HORIZONS}; 0: as the deciding expert"
    )
    hold_s: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = Field(
        default=None, description="how long a prefetch stays unused"
    )


class WindowUnpinBody(BaseModel):
    """The tuner may change the segment again."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"segment": _SEGMENT}]})

    segment: Annotated[str, Field(min_length=1, max_length=200)] = Field(description="the segment's name, as /v1/windows has it")


class WindowRollbackBody(BaseModel):
    """The windows of an earlier version are in force again."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"version": 1}]})

    version: Annotated[int, Field(ge=0, lt=2**53)] | None = Field(
        default=None, description="the version; without it, the last one that was different"
    )


class WindowPart(BaseModel):
    """A window, in seconds."""

    lead_s: float = Field(examples=[300.0])
    horizon_s: float = Field(examples=[900.0])
    hold_s: float = Field(examples=[600.0])


class SegmentPart(BaseModel):
    """A segment of models, and its window."""

    name: str = Field(examples=[_SEGMENT])
    rule: dict[str, list[float | None]] = Field(description="facts: [at least, below]", examples=[{"rows_per_day": [24.0, None]}])
    window: WindowPart
    words: str = Field(examples=["lead 5 min, horizon 15 min, hold 10 min"])
    since_s: float = Field(examples=[_T])
    why: str = ""
    pinned: bool


class WindowEventPart(BaseModel):
    """What happened: tuned, segments, pinned, unpinned, rolled_back, or undone (by the watch)."""

    at_s: float = Field(examples=[_T])
    act: str = Field(examples=["tuned"])
    by: str = Field(description="the name of a key, or of the job; '' without keys", examples=["tune-windows"])
    version: int
    segment: str = ""
    old: WindowPart | None = None
    new: WindowPart | None = None
    why: str = ""
    evidence: dict[str, Any] | None = Field(default=None, description="costs before and after, of the alternatives, rows and time range")


class WindowsAnswer(BaseModel):
    """The windows in force."""

    version: int
    rest: WindowPart = Field(description="of models that are in no segment")
    rest_words: str = Field(examples=["at any time, the expert's horizon, hold 10 min"])
    segments: list[SegmentPart]
    watched_from_s: float | None = Field(description="since when the last change is being watched; null where none is", examples=[_T])
    versions: list[int] = Field(description="earlier ones that can be gone back to")
    events: list[WindowEventPart] = Field(description="newest first")


_EFFECT = {
    "basis": "control",
    "saving_ratio": 0.19,
    "low": 0.13,
    "high": 0.25,
    "saved_s_per_h": 310.5,
    "found": True,
    "running": True,
    "control_blocks": 269,
    "blocks": 5376,
    "words": "19 % less waiting than the control group (95 %: 13 to 25 %, 310 s an hour); 269 control blocks of 5376 on 16 nodes, 14 days",
}


def _event(event: WindowEvent) -> WindowEventPart:
    old, new = (None if each is None else WindowPart(**each) for each in (event.old, event.new))
    return WindowEventPart(
        at_s=event.at_s, act=event.act, by=event.by, version=event.version, segment=event.segment, old=old, new=new, why=event.why,
        evidence=event.evidence,
    )  # fmt: skip


def _answer(shelf: WindowShelf, count: int) -> WindowsAnswer:
    book, record = shelf.read()
    said = book.to_json()
    segments = [
        SegmentPart(**part | {"window": WindowPart(**part["window"]), "words": window_in_words(entry.window)})
        for part, entry in zip(said["segments"], book.entries, strict=True)
    ]
    return WindowsAnswer(
        version=book.version,
        rest=WindowPart(**window_json(book.rest)),
        rest_words=window_in_words(book.rest),
        segments=segments,
        watched_from_s=record.watched_from_s,
        versions=[int(each["version"]) for each in record.before],
        events=[_event(event) for event in shelf.events(count)],
    )


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    examples = {f"example {number}": {"value": value} for number, value in enumerate(schema.get("examples", []), start=1)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "examples": examples}}}}


def add_windows(app: FastAPI, service: Service, access: Access) -> None:
    """Adds them to `app`."""
    may_read = [Depends(access.needs("operator", "ingest"))]
    may_act = [Depends(access.needs("operator"))]
    shelf, effects = WindowShelf(service.state), EffectReader(service.state)

    @app.get(
        "/v1/windows",
        response_model=WindowsAnswer,
        responses=PROBLEMS,
        dependencies=may_read,
        summary="The windows in force by segment of models, and how they came about",
    )
    def windows(count: Annotated[int, Query(ge=0, le=EVENTS_KEPT, description="so many events at most")] = 50) -> WindowsAnswer:
        return _answer(shelf, count)

    async def act(request: Request, kind: type[Any], do: Any) -> WindowsAnswer:
        body, by = read_object(await request.body(), kind), request.state.caller.name

        def change() -> WindowsAnswer:
            do(body, by)
            return _answer(shelf, 1)

        return await run_in_threadpool(change)

    @app.post(
        "/v1/windows:pin",
        response_model=WindowsAnswer,
        responses=PROBLEMS,
        dependencies=may_act,
        summary="A segment keeps its window, or gets another and keeps that",
        openapi_extra=_body(WindowPinBody),
    )
    async def pin(request: Request) -> WindowsAnswer:
        def do(body: WindowPinBody, by: str) -> None:
            shelf.pin(body.segment, _window_of(shelf.read()[0], body), by, service.now_s)

        return await act(request, WindowPinBody, do)

    @app.post(
        "/v1/windows:unpin",
        response_model=WindowsAnswer,
        responses=PROBLEMS,
        dependencies=may_act,
        summary="The tuner may change a segment's window again",
        openapi_extra=_body(WindowUnpinBody),
    )
    async def unpin(request: Request) -> WindowsAnswer:
        return await act(request, WindowUnpinBody, lambda body, by: shelf.unpin(body.segment, by, service.now_s))

    @app.post(
        "/v1/windows:rollback",
        response_model=WindowsAnswer,
        responses=PROBLEMS,
        dependencies=may_act,
        summary="The windows of an earlier version are in force again",
        openapi_extra=_body(WindowRollbackBody),
    )
    async def rollback(request: Request) -> WindowsAnswer:
        return await act(request, WindowRollbackBody, lambda body, by: shelf.roll_back(body.version, by, service.now_s))

    @app.get(
        "/v1/effect",
        responses=PROBLEMS | {200: {"content": {"application/json": {"example": _EFFECT}}}},
        dependencies=may_read,
        summary="What prefetching saves by the control group, with its interval, or why that is not known",
    )
    def effect() -> dict[str, Any]:
        return effects.read(service.now_s)


def _window_of(book: WindowBook, body: WindowPinBody) -> Window | None:
    """The window that is asked for; None for the one that is there."""
    if body.lead_s is None and body.horizon_s is None and body.hold_s is None:
        return None
    old = next((entry.window for entry in book.entries if entry.segment.name == body.segment), book.rest)
    return Window(
        old.lead_s if body.lead_s is None else body.lead_s,
        old.horizon_s if body.horizon_s is None else body.horizon_s,
        old.hold_s if body.hold_s is None else body.hold_s,
    )

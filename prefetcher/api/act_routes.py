"""Routes of people: acts on models, the switch, and the list of who did what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Depends, FastAPI, Path, Query, Request

from prefetcher.api.acts import in_words
from prefetcher.api.bodies import read_object
from prefetcher.api.by_hand import ACTS, MODES, Mode, Wish
from prefetcher.api.keys import Access
from prefetcher.api.messages import ActAnswer, ByHandEntry, SwitchAnswer, SwitchBody, WishBody
from prefetcher.api.problems import PROBLEMS, problem
from prefetcher.api.service import Service
from prefetcher.controller import records
from prefetcher.errors import UsageError, shortened

__all__ = ["add_acts"]

_SUMMARY: dict[Mode, str] = {
    "off": "Demand loading only, at once, on all nodes, a group, or one",
    "on": "Prefetching again",
    "observe": "Decides and records, and loads nothing ahead",
}


def _wished(kind: type[WishBody]) -> Callable[[Request], Awaitable[bytes]]:
    """A dependency: the body, or else what the query says of its fields, as JSON."""

    async def raw(request: Request) -> bytes:
        body = await request.body()
        given = {name: request.query_params[name] for name in kind.model_fields if name in request.query_params}
        return body if body.strip() or not given else msgspec.json.encode(given)

    return raw


# Names that FastAPI finds when it reads the annotations of routes.
_act_body = _wished(WishBody)
_switch_body = _wished(SwitchBody)


def _body(kind: type[WishBody]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    examples = {f"example {number}": {"value": value} for number, value in enumerate(schema.get("examples", []), start=1)}
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": part, "description": part.get("description", "")}
        for name, part in schema["properties"].items()
    ]
    content = {"application/json": {"schema": schema, "examples": examples}}
    return {"requestBody": {"required": False, "content": content}, "parameters": in_query}


def _entry(record: records.ByHand) -> ByHandEntry:
    return ByHandEntry(**msgspec.structs.asdict(record))


def add_acts(app: FastAPI, service: Service, access: Access) -> None:
    may_act = [Depends(access.needs("operator"))]

    def wish(request: Request, body: WishBody) -> Wish:
        now_s = service.now_s
        until_s = body.until_s
        if until_s is not None and body.for_s is not None:
            raise UsageError("give until_s or for_s, not both")
        if body.for_s is not None:
            until_s = now_s + body.for_s
        elif until_s is not None and until_s <= now_s:
            raise UsageError(f"until_s is {until_s:.0f}, and it is {now_s:.0f} already")
        node, group = (body.node or "", body.group or "") if isinstance(body, SwitchBody) else ("", "")
        return Wish(request.state.caller.name, body.reason, until_s, node, group, body.allow_release)

    def add(act: str) -> None:
        @app.post(
            f"/v1/models/{{model:path}}:{act}",
            response_model=ActAnswer,
            responses=PROBLEMS,
            dependencies=may_act,
            summary=f"{act} a model by hand",
            name=act,
            openapi_extra=_body(WishBody),
        )
        def do(
            request: Request,
            model: Annotated[str, Path(examples=["llama-8b"])],
            raw: Annotated[bytes, Depends(_act_body)],
            node: Annotated[str | None, Query(description="the node to do it on; this process's own where absent")] = None,
        ) -> Any:
            wanted = wish(request, read_object(raw, WishBody))
            acted, record = service.by_hand.act(act, model, wanted, service.report(node))
            if not acted.ok:
                return problem(409, f"{act} {shortened(model)}: {in_words(act, acted.reason)}")
            return ActAnswer(model=model, act=act, ok=True, reason=acted.reason, record=_entry(record))

    for act in ACTS:
        add(act)

    def add_mode(mode: Mode) -> None:
        @app.post(
            f"/v1/{mode}",
            response_model=SwitchAnswer,
            responses=PROBLEMS,
            dependencies=may_act,
            summary=_SUMMARY[mode],
            name=mode,
            openapi_extra=_body(SwitchBody),
        )
        def switch(request: Request, raw: Annotated[bytes, Depends(_switch_body)]) -> SwitchAnswer:
            wanted = wish(request, read_object(raw, SwitchBody))
            record = service.by_hand.switch(mode, wanted)
            return SwitchAnswer(prefetching=mode == "on", mode=mode, record=_entry(record))

    for mode in MODES:
        add_mode(mode)

    @app.get(
        "/v1/by-hand",
        response_model=list[ByHandEntry],
        responses=PROBLEMS,
        dependencies=may_act,
        summary="What people did, newest first: who, when, until when, and why",
    )
    def by_hand(count: Annotated[int, Query(ge=1, le=records.BY_HAND_KEPT)] = 100) -> list[ByHandEntry]:
        return [_entry(record) for record in service.by_hand.done(count)]

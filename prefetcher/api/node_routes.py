"""Routes of nodes as the store knows them: when each was heard last, and the forgetting of one that is gone."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from prefetcher.api.keys import Access
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.service import Service
from prefetcher.report.gone import JOB

__all__ = ["add_nodes"]

_T = 1767225600.25


class HeardNode(BaseModel):
    """A node that is not forgotten."""

    node: str = Field(examples=["gpu-1"])
    reports: bool = Field(description="whether it reports now")
    last_heard_s: float = Field(description="when it was heard last; to half a minute where it does not report", examples=[_T])
    to_forget: bool = Field(description="somebody wants it forgotten, and the job has not looked yet")


class ForgettingAnswer(BaseModel):
    """A node is to be forgotten; `follow` says what became of it."""

    node: str = Field(examples=["gpu-1"])
    run_id: str = Field(examples=["5f0c5b1a9d2e4c77"])
    follow: str = Field(examples=[f"/v1/jobs/{JOB}/runs/5f0c5b1a9d2e4c77"])


def add_nodes(app: FastAPI, service: Service, access: Access) -> None:
    """Adds them to `app`."""

    @app.get(
        "/v1/nodes/heard",
        response_model=list[HeardNode],
        responses=PROBLEMS,
        dependencies=[Depends(access.needs("operator", "ingest"))],
        summary="Every node that is not forgotten, and when it was heard last",
    )
    def heard() -> list[dict[str, Any]]:
        return service.nodes.listed(service.fleet.view())

    @app.post(
        "/v1/nodes/{node}:forget",
        response_model=ForgettingAnswer,
        status_code=202,
        responses=PROBLEMS,
        dependencies=[Depends(access.needs("operator"))],
        summary="Forgets a node that is gone; its figures stay in reports",
    )
    def forget(request: Request, response: Response, node: Annotated[str, Path(examples=["gpu-1"])]) -> ForgettingAnswer:
        why = service.nodes.why_stays(node)
        if why:
            raise HTTPException(409, why)
        run_id = service.nodes.forget(node, request.state.caller.name)
        follow = f"/v1/jobs/{JOB}/runs/{run_id}"
        response.headers["Location"] = follow
        return ForgettingAnswer(node=node, run_id=run_id, follow=follow)

"""Routes of routers: where to send the requests of a model, or of several that are called at once."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from prefetcher.api.bodies import read_object
from prefetcher.api.keys import Access
from prefetcher.api.messages import Name
from prefetcher.api.problems import PROBLEMS
from prefetcher.api.routing import Routed
from prefetcher.api.service import Service

__all__ = ["RouteAnswer", "RoutesAnswer", "RoutesBody", "add_routing"]

_MOST_MODELS = 100


async def _body(request: Request) -> bytes:
    # A name that FastAPI finds when it reads the annotations of routes.
    raw: bytes = await request.body()
    return raw


class RouteAnswer(BaseModel):
    """Where to send requests for a model now."""

    model: str = Field(examples=["llama-8b"])
    node: str = Field(examples=["gpu-3"])
    state: str = Field(
        description="what the weights are there: ready; moving, or waiting for the link; placed: this answer is the reason to load them",
        examples=["placed"],
    )
    wait_s: float = Field(description="how long a request is expected to wait for them there", examples=[4.2])
    cached: bool = Field(default=True, description="false where it fits nowhere, and is served from the tier below")

    @classmethod
    def of(cls, routed: Routed) -> RouteAnswer:
        return cls(model=routed.model, node=routed.node, state=routed.state, wait_s=routed.wait_s, cached=routed.cached)


class RoutesBody(BaseModel):
    """Models that are called at once; one that is named twice has two requests."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"models": ["llama-8b", "whisper"]}]})

    models: list[Name] = Field(min_length=1, max_length=_MOST_MODELS)


class RoutesAnswer(BaseModel):
    """An answer for each model."""

    routes: list[RouteAnswer] = Field(description="in the order of the question")


def add_routing(app: FastAPI, service: Service, access: Access) -> None:
    # Not a key that stands in pages: an answer tells nodes, and where others are sent.
    may_ask = [Depends(access.needs("ingest", "operator"))]
    # An answer is for one burst; the next may differ.
    headers = {"Cache-Control": "no-store"}

    @app.get(
        "/v1/route/{model:path}",
        response_model=RouteAnswer,
        responses=PROBLEMS,
        dependencies=may_ask,
        summary="The node to send a request for this model to, what the weights are there, and how long it will wait",
    )
    def route(response: Response, model: Annotated[str, Path(examples=["llama-8b"])]) -> RouteAnswer:
        response.headers.update(headers)
        return RouteAnswer.of(service.routes.route([model])[0])

    body = {"schema": RoutesBody.model_json_schema(), "examples": {"example 1": {"value": {"models": ["llama-8b", "whisper"]}}}}

    @app.post(
        "/v1/route",
        response_model=RoutesAnswer,
        responses=PROBLEMS,
        dependencies=may_ask,
        summary="The nodes to send requests to for up to 100 models that are called at once, decided together",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": body}}},
    )
    def routes(response: Response, raw: Annotated[bytes, Depends(_body)]) -> RoutesAnswer:
        response.headers.update(headers)
        asked = read_object(raw, RoutesBody)
        return RoutesAnswer(routes=[RouteAnswer.of(routed) for routed in service.routes.route(asked.models)])
